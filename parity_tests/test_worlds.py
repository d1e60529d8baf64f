"""The threads world: uneven shards are right, the strategies run on it, and it leaves no trace."""

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from dtensor_llm.worlds import World, WorldError, threads


def numbered(*shape: int) -> Tensor:
    """Distinct numbers in a tensor of this shape, so that no two elements can be confused."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


# First of all: what is wrong when ranks share DTensor's caches by mistake.


def test_uneven_vocabulary_comes_back_whole():
    def main(_: World) -> None:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        table = numbered(61, 6)
        model = nn.Sequential(nn.Embedding(61, 6), nn.Linear(6, 61, bias=False)).double()
        for parameter in model.parameters():
            parameter.data.copy_(table)
        plan = {"0": RowwiseParallel(input_layouts=Replicate()), "1": ColwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        for parameter in model.parameters():
            assert torch.equal(parameter.full_tensor(), table)
        local = [16, 16, 16, 13][mesh.get_local_rank("tp")]
        assert model[0].weight.to_local().shape == (local, 6)
        fully_shard(model, mesh=mesh["dp"])
        for parameter in model.parameters():
            assert torch.equal(parameter.full_tensor(), table)

    threads.run(8, main)


@pytest.mark.parametrize("rows", [7, 8, 5])
def test_uneven_shards_stay_each_ranks_own_in_shared_decisions(rows):
    def main(_: World) -> None:
        mesh = init_device_mesh("cpu", (4,))
        whole = numbered(rows, 6)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        ones = torch.ones_like(sharded)
        assert ones.to_local().shape == sharded.to_local().shape
        split = (sharded + ones).view(rows, 2, 3).transpose(1, 2)
        assert torch.equal(split.full_tensor(), (whole + 1).view(rows, 2, 3).transpose(1, 2))
        assert torch.equal(sharded.sum().full_tensor(), whole.sum())

    threads.run(4, main)
    threads.run(4, main)  # again, with the decisions of the first world


def test_a_decision_is_not_shared_between_numbers_that_are_only_equal():
    def decided_dtype(factor: float) -> torch.dtype:
        whole = distribute_tensor(torch.arange(6), init_device_mesh("cpu", (2,)), [Shard(0)])
        return (whole * factor)._spec.tensor_meta.dtype

    assert threads.run(2, lambda _: decided_dtype(2)) == [torch.int64] * 2
    assert threads.run(2, lambda _: decided_dtype(2.0)) == [torch.float32] * 2


def test_meshes_of_two_ranks_are_never_equal_not_even_in_two_worlds():
    def main(_: World) -> DeviceMesh:
        return init_device_mesh("cpu", (4,))

    meshes = threads.run(4, main) + threads.run(4, main)
    assert len(set(meshes)) == 8


def test_the_mask_of_a_row_sharded_embedding_stays_each_ranks_own():
    def main(_: World) -> Placement:
        mesh = init_device_mesh("cpu", (4,))
        table, tokens = numbered(13, 6), torch.tensor([0, 4, 11, 12])
        rows = distribute_tensor(table, mesh, [Shard(0)])
        part = nn.functional.embedding(distribute_tensor(tokens, mesh, [Replicate()]), rows)
        mask = part.placements[0]
        assert mask.is_partial()
        assert torch.equal(part.full_tensor(), table[tokens])
        return mask

    masks = threads.run(4, main) + threads.run(4, main)
    assert len({id(mask) for mask in masks}) == len(masks)


# The strategies, in short.


class Stage(nn.Module):
    """Two layers of a small network; `inner` is what tensor parallelism divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:  # m d -> m d
        return x + self.down(torch.tanh(self.up(x)))


def make_stages() -> list[Stage]:
    stages = [Stage().double() for _ in range(2)]
    for index, parameter in enumerate(p for stage in stages for p in stage.parameters()):
        parameter.data.copy_(torch.sin(numbered(*parameter.shape) + index) / 4)
    return stages


def half_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum() / 2


def gradients_on_one_device(inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    model = nn.Sequential(*make_stages())
    half_square(model(inputs), targets).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def sum_gradients(module: nn.Module) -> None:
    """Make FSDP add gradients, where it would average them."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def train_part(world: World, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """One rank's part of a step on tp 2 x pp 2 x dp 2, and its stage's gradients, whole."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    index, coordinate = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    stage = make_stages()[index]
    parallelize_module(stage, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(stage, mesh=mesh["dp"])
    sum_gradients(stage)
    pipe = PipelineStage(stage, index, 2, world.device, group=mesh.get_group("pp"))
    schedule = Schedule1F1B(pipe, 4, loss_fn=half_square, scale_grads=False)
    mine = slice(coordinate * 8, coordinate * 8 + 8)
    if index == 0:
        schedule.step(inputs[mine])
    else:
        schedule.step(target=targets[mine])
    return {f"{index}.{name}": p.grad.full_tensor() for name, p in stage.named_parameters()}


@pytest.mark.parametrize("runnable", [1, 2])
def test_fsdp_tensor_and_pipeline_parallel_match_one_device(runnable):
    inputs, targets = torch.cos(numbered(16, 8)), torch.sin(numbered(16, 8))
    want = gradients_on_one_device(inputs, targets)
    got = threads.run(8, lambda world: train_part(world, inputs, targets), runnable=runnable)
    assert set().union(*got) == set(want)
    for part in got:
        for name, gradient in part.items():
            torch.testing.assert_close(gradient, want[name], rtol=0, atol=1e-13)


def test_replicate_matches_one_device():
    inputs, targets = torch.cos(numbered(16, 8)), torch.sin(numbered(16, 8))
    want = gradients_on_one_device(inputs, targets)

    def main(world: World) -> None:
        model = nn.Sequential(*make_stages())
        replicate(model, mesh=init_device_mesh("cpu", (4,)))
        sum_gradients(model)
        mine = slice(world.rank * 4, world.rank * 4 + 4)
        half_square(model(inputs[mine]), targets[mine]).backward()
        for name, parameter in model.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            torch.testing.assert_close(parameter.grad.to_local(), want[name], rtol=0, atol=1e-13)

    threads.run(4, main)


def test_64_ranks_are_quick():
    def main(world: World) -> None:
        mesh = init_device_mesh("cpu", (4, 4, 4), mesh_dim_names=("a", "b", "c"))
        for axis in "abc":
            got = torch.full((1,), float(world.rank))
            dist.all_reduce(got, group=mesh.get_group(axis))
            peers = mesh[axis].mesh.tolist()
            assert got.item() == sum(peers)
        table = numbered(61, 3)
        sharded = distribute_tensor(table, mesh["b", "c"], [Shard(0), Shard(0)])
        assert torch.equal(sharded.full_tensor(), table)

    start = time.monotonic()
    threads.run(64, main)
    assert time.monotonic() - start < 20


def test_two_runs_are_bitwise_equal_whatever_the_order_of_arrival():
    parts = [torch.sin(numbered(1000) * (rank + 1)).float() * 10.0**rank for rank in range(6)]
    want = parts[0].clone()
    for part in parts[1:]:
        want += part
    assert not torch.equal(want, torch.stack(parts[::-1]).sum(0)), "the order has to matter"

    def main(delays: list[int]) -> Callable[[World], None]:
        def rank_main(world: World) -> None:
            time.sleep(0.01 * delays[world.rank])
            got = parts[world.rank].clone()
            dist.all_reduce(got)
            assert torch.equal(got, want)
            scattered = torch.empty(1002 // 6)
            padded = torch.cat([parts[world.rank], torch.zeros(2)])
            dist.reduce_scatter_single(scattered, padded)
            whole = torch.empty(1002)
            dist.all_gather_single(whole, scattered)
            assert torch.equal(whole[:1000], want)

        return rank_main

    for delays in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [3, 0, 5, 1, 4, 2]):
        threads.run(6, main(delays), runnable=6)


# What a rank has of its own, and what the ranks share.


def test_gradient_mode_is_each_ranks_own():
    def main(world: World) -> None:
        with torch.set_grad_enabled(world.rank % 2 == 0):
            for _ in range(3):
                dist.barrier()
                assert torch.is_grad_enabled() == (world.rank % 2 == 0)

    threads.run(4, main)


def test_at_most_the_given_number_of_ranks_compute():
    running: set[int] = set()
    most: list[int] = []

    def main(world: World) -> None:
        for _ in range(5):
            running.add(world.rank)
            most.append(len(running))
            time.sleep(0.002)
            running.discard(world.rank)
            dist.barrier()

    for runnable in (1, 3):
        most.clear()
        threads.run(8, main, runnable=runnable)
        assert max(most) == runnable


def test_ranks_compute_with_one_thread_each():
    before = torch.get_num_threads()
    assert threads.run(2, lambda _: torch.get_num_threads()) == [1, 1]
    assert torch.get_num_threads() == before


def test_share_computes_once_and_gives_all_the_same_object():
    calls: list[int] = []

    def main(world: World) -> tuple[object, object]:
        def make() -> list[int]:
            calls.append(world.rank)
            time.sleep(0.05)
            return [1, 2]

        return world.share(make), world.share(object)

    results = threads.run(4, main)
    assert calls == [0]
    assert all(a is results[0][0] and b is results[0][1] for a, b in results)
    assert results[0][0] == [1, 2]


# What is left of a world: nothing.


def test_nothing_of_a_world_is_left_behind():
    originals = (distributed_c10d._world, DeviceMesh._init_one_process_group, device_mesh.threading)
    kept: list[weakref.ref] = []

    def main(world: World) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        sharded = distribute_tensor(numbered(5, 6), mesh, [Shard(0), Shard(1)])
        sharded.redistribute(mesh, [Replicate(), Replicate()]).sum().full_tensor()
        kept.extend([weakref.ref(mesh), weakref.ref(mesh.get_group("tp"))])
        dist.barrier()
        if fail and world.rank == 3:
            raise ValueError("on purpose")

    for fail in (False, True, False):
        with pytest.raises(WorldError) if fail else contextlib.nullcontext():
            threads.run(4, main)
    gc.collect()
    assert len(kept) == 24
    assert [ref for ref in kept if ref() is not None] == []
    now = (distributed_c10d._world, DeviceMesh._init_one_process_group, device_mesh.threading)
    assert now == originals
    assert not [t for t in threading.enumerate() if t.name.startswith("rank ")]

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(got := torch.ones(2))
        mesh = init_device_mesh("cpu", (1,))
        assert torch.equal(distribute_tensor(got, mesh, [Shard(0)]).full_tensor(), torch.ones(2))
        assert dist.get_backend() == "gloo"
        with ThreadPoolExecutor(1) as pool:  # threads see the same groups again
            name = dist.group.WORLD.group_name
            found = pool.submit(distributed_c10d._resolve_process_group, name).result()
        assert found.size() == 1
    finally:
        dist.destroy_process_group()
