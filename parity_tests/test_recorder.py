"""The recorder: every operation, in both worlds, by operation, axis, payload and wire bytes."""

from collections.abc import Callable
from fractions import Fraction
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dtensor_llm.config import MeshSizes
from dtensor_llm.mesh import build_mesh, parse_mesh
from dtensor_llm.planner.recorder import CommRecorder
from dtensor_llm.planner.traffic import Traffic, axis_name, merged, traffic
from dtensor_llm.worlds import World, threads
from dtensor_llm.worlds.processes_spawn import spawn
from parity_tests.harness import SECONDS

LINE = parse_mesh("1x1x4", None)

Operation = Callable[[dist.ProcessGroup], object]


def numbers(count: int = 12) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.float64)


def exchange(group: dist.ProcessGroup) -> None:
    """A message to the next rank and one from the rank before."""
    here, size = group.rank(), group.size()
    works = [
        dist.P2POp(dist.isend, numbers(), group=group, group_peer=(here + 1) % size),
        dist.P2POp(dist.irecv, numbers(), group=group, group_peer=(here - 1) % size),
    ]
    for work in dist.batch_isend_irecv(works):
        work.wait()


def backward(group: dist.ProcessGroup) -> None:
    """An all-reduce that only the backward pass makes."""

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(_: object, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(_: object, grad: torch.Tensor) -> torch.Tensor:
            total = grad.clone()
            dist.all_reduce(total, group=group)
            return total

    Identity.apply(numbers().requires_grad_()).sum().backward()


def inside_dtensor(group: dist.ProcessGroup) -> None:
    """An all-reduce that DTensor makes by itself: the relu of a sum needs the whole sum."""
    mesh = DeviceMesh.from_group(group, "cpu")
    rows = DTensor.from_local(numbers().reshape(1, 12), mesh, [Shard(0)], run_check=False)
    rows.sum(0).relu()


# Of four ranks: {name: (what a rank does, what is to be recorded)}; 12 numbers are 96 bytes.
OPERATIONS: dict[str, tuple[Operation, list[tuple[str, int, int]]]] = {
    "all_reduce": (lambda g: dist.all_reduce(numbers(), group=g), [("all-reduce", 96, 144)]),
    "all_reduce, async": (
        lambda g: dist.all_reduce(numbers(), group=g, async_op=True).wait(),
        [("all-reduce", 96, 144)],
    ),
    "all_gather": (
        lambda g: dist.all_gather([numbers() for _ in range(4)], numbers(), group=g),
        [("all-gather", 384, 288)],
    ),
    "all_gather_single": (
        lambda g: dist.all_gather_single(numbers(48), numbers(), group=g),
        [("all-gather", 384, 288)],
    ),
    "reduce_scatter": (
        lambda g: dist.reduce_scatter(numbers(), [numbers() for _ in range(4)], group=g),
        [("reduce-scatter", 384, 288)],
    ),
    "reduce_scatter_single": (
        lambda g: dist.reduce_scatter_single(numbers(), numbers(48), group=g),
        [("reduce-scatter", 384, 288)],
    ),
    "all_to_all_single": (
        lambda g: dist.all_to_all_single(numbers(), numbers(), group=g),
        [("all-to-all", 96, 72)],
    ),
    "broadcast": (
        lambda g: dist.broadcast(numbers(), group=g, group_src=1),
        [("broadcast", 96, 96)],
    ),
    "reduce": (lambda g: dist.reduce(numbers(), group=g, group_dst=1), [("reduce", 96, 96)]),
    "gather": (
        lambda g: dist.gather(
            numbers(), [numbers() for _ in range(4)] if g.rank() == 0 else None, group=g
        ),
        [("gather", 96, 96)],
    ),
    "scatter": (
        lambda g: dist.scatter(
            numbers(), [numbers() for _ in range(4)] if g.rank() == 0 else None, group=g
        ),
        [("scatter", 96, 96)],
    ),
    "barrier": (lambda g: dist.barrier(group=g), [("barrier", 0, 0)]),
    "messages": (exchange, [("send", 96, 96), ("recv", 96, 0)]),
    "in the backward pass": (backward, [("all-reduce", 96, 144)]),
    "inside DTensor": (inside_dtensor, [("all-reduce", 96, 144)]),
    "functional all_reduce": (
        lambda g: functional.all_reduce(numbers(), "sum", g).clone(),
        [("all-reduce", 96, 144)],
    ),
    "functional all_gather": (
        lambda g: functional.all_gather_single(numbers(), 0, g).clone(),
        [("all-gather", 384, 288)],
    ),
    "functional reduce_scatter": (
        lambda g: functional.reduce_scatter_single(numbers(48), "sum", 0, g).clone(),
        [("reduce-scatter", 384, 288)],
    ),
    "functional all_to_all": (
        lambda g: functional.all_to_all_single(numbers(), None, None, g).clone(),
        [("all-to-all", 96, 72)],
    ),
}


def record_operations(_: World) -> dict[str, list[Traffic]]:
    mesh = build_mesh(LINE, "cpu")
    group, recorded = mesh["dp_shard"].get_group(), {}
    for name, (operation, _) in OPERATIONS.items():
        with CommRecorder(mesh) as recorder:
            operation(group)
        recorded[name] = recorder.calls
        dist.barrier()  # outside: not recorded
    return recorded


WORLDS = {
    "threads": partial(threads.run, timeout=SECONDS),
    "processes": partial(spawn, timeout=SECONDS),
}


@pytest.mark.parametrize("world", WORLDS)
def test_every_operation_is_recorded(world: str) -> None:
    for rank, recorded in enumerate(WORLDS[world](4, record_operations)):
        for name, (_, expected) in OPERATIONS.items():
            calls = [Traffic(op, "dp_shard", 1, size, Fraction(w)) for op, size, w in expected]
            assert recorded[name] == calls, f"rank {rank}, {name}"


def record_axes(_: World) -> list[str]:
    """The name of the group of every axis of 2x2x2, and of others."""
    mesh = build_mesh(parse_mesh("dp_replicate=2,dp_shard=2,tp=2", None), "cpu")
    groups = [mesh[axis].get_group() for axis in ("tp", "dp_shard", "dp_replicate")]
    groups += [mesh["dp_replicate", "dp_shard"]._flatten("dp").get_group()]
    groups += [mesh["dp_shard", "tp"]._flatten("both").get_group(), dist.group.WORLD]
    groups += [dist.new_group([0, 1, 2])]
    with CommRecorder(mesh) as recorder:
        for group in groups:
            if isinstance(group, dist.ProcessGroup):
                dist.all_reduce(numbers(), group=group)
    return [call.axis for call in recorder.calls]


@pytest.mark.parametrize("world", WORLDS)
def test_groups_are_named_by_the_axes_they_span(world: str) -> None:
    axes = ["tp", "dp_shard", "dp_replicate", "dp", "dp_shard+tp", "all"]
    for rank, found in enumerate(WORLDS[world](8, record_axes)):
        assert found == axes + ["ranks 0,1,2"] * (rank < 3)


def test_axis_names() -> None:
    sizes = {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 1}
    assert axis_name(["pp"], sizes) == axis_name(["pp", "tp"], sizes) == "pp"
    assert axis_name(sizes, sizes) == "all"
    assert axis_name(["dp_shard", "dp_replicate"], sizes) == "dp"
    assert axis_name(["pp", "dp_shard"], sizes) == "pp+dp_shard"
    assert axis_name(sizes, sizes | {"pp": 1}) == "dp", "whoever divides the batch"


def test_two_recorders_see_the_same_and_a_closed_one_nothing() -> None:
    def main(_: World) -> tuple[int, int]:
        mesh = build_mesh(MeshSizes(tp=2), "cpu")
        with CommRecorder(mesh) as outer:
            with pytest.raises(KeyError), CommRecorder(mesh) as inner:
                dist.all_reduce(numbers())
                raise KeyError
            dist.all_reduce(numbers())
        dist.all_reduce(numbers())
        return len(outer.calls), len(inner.calls)

    assert threads.run(2, main, timeout=SECONDS) == [(2, 1)] * 2


def test_a_rank_alone_communicates_nothing() -> None:
    with CommRecorder(DeviceMesh.__new__(DeviceMesh)) as recorder:
        numbers().add_(1)
    assert recorder.calls == []


def test_merged_adds_up_by_operation_and_axis() -> None:
    one, other = traffic("send", "pp", 4, 10), traffic("all-reduce", "tp", 3, 10)
    assert other.wire == Fraction(40, 3)
    assert merged([one, other, one]) == [other, one.times(2)]
    assert one.times(2) == Traffic("send", "pp", 2, 20, Fraction(20))
