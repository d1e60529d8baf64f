"""Buckets of gradients: which rows a rank owns, how a message is laid out, and what is freed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from dtensor_llm.buckets import Bucket, Buckets
from dtensor_llm.plan import Part, part_of
from dtensor_llm.worlds import World, threads
from parity_tests.harness import SECONDS

SHAPES = {"even": (8, 3), "uneven": (5, 2), "few": (2,), "cube": (7, 2, 3), "one": (1, 4)}


def on_ranks(size: int, main: Callable[[World], Any]) -> list[Any]:
    return threads.run(size, main, timeout=SECONDS)


def make(world: World, **options: Any) -> tuple[dict[str, nn.Parameter], Buckets]:
    """Two buckets of weights that count their elements."""
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp_shard",))
    weights = {
        name: nn.Parameter(torch.arange(float(torch.Size(shape).numel())).reshape(shape))
        for name, shape in SHAPES.items()
    }
    names = list(weights)
    groups = [{n: weights[n] for n in group} for group in (names[:3], names[3:])]
    buckets = Buckets([Bucket(group, mesh) for group in groups], axis="dp_shard", **options)
    buckets.watch(weights)
    return weights, buckets


def backward(weights: dict[str, nn.Parameter], factor: float) -> None:
    """Every gradient becomes `factor` times the weight."""
    sum(factor / 2 * w.square().sum() for w in weights.values()).backward()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_rows_are_those_of_torch_chunk(size: int) -> None:
    def main(world: World) -> dict[str, Tensor]:
        weights, buckets = make(world)
        return {name: buckets.rows(name, w.detach()) for name, w in weights.items()}

    for rank, found in enumerate(on_ranks(size, main)):
        for name, shape in SHAPES.items():
            whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
            chunks = whole.chunk(size)
            expected = chunks[rank] if rank < len(chunks) else whole[:0]
            assert found[name].equal(expected), name


@pytest.mark.parametrize("each_microbatch", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_rows_are_summed_over_ranks_and_microbatches(size: int, each_microbatch: bool) -> None:
    def main(world: World) -> None:
        weights, buckets = make(world, microbatches=3, each_microbatch=each_microbatch)
        for _ in range(2):
            buckets.forget()
            for microbatch in range(3):
                backward(weights, 10.0**microbatch * (world.rank + 1))
            found = buckets.take()
            factor = 111.0 * size * (size + 1) / 2
            for name, weight in weights.items():
                assert found[name].equal(factor * buckets.rows(name, weight.detach())), name
                assert weight.grad is None, name

    on_ranks(size, main)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_updated_rows_reach_every_rank(size: int) -> None:
    def main(world: World) -> None:
        weights, buckets = make(world)
        expected = {name: -2.0 * w.detach() for name, w in weights.items()}
        for name, weight in weights.items():
            buckets.rows(name, weight.detach()).mul_(-2.0)
        buckets.gather()
        for name, weight in weights.items():
            assert weight.equal(expected[name]), name

    on_ranks(size, main)


def test_a_message_has_a_line_for_every_rank() -> None:
    """The picture in the lesson of the module."""

    def main(world: World) -> list[list[float]]:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
        a, b = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0]), torch.tensor([10.0, 11.0])
        bucket = Bucket({"a": nn.Parameter(a), "b": nn.Parameter(b)}, mesh)
        bucket.message = torch.full((4, bucket.width), -1.0)
        bucket.pack("a", a)
        bucket.pack("b", b)
        assert bucket.own["a"] == [(0, 2), (2, 2), (4, 1), (5, 0)][world.rank]
        return bucket.message.tolist()

    assert on_ranks(4, main)[0] == [[0, 1, 10], [2, 3, 11], [4, -1, -1], [-1, -1, -1]]


def test_gradients_that_autograd_does_not_add_up_are_told_of() -> None:
    """As a split backward leaves them, beside weights that are in no bucket."""

    def main(world: World) -> None:
        weights, buckets = make(world)
        for weight in weights.values():
            weight.grad = weight.detach().clone()
        buckets.all_arrived(weights | {"other": nn.Parameter(torch.zeros(1))})
        for name, found in buckets.take().items():
            assert found.equal(2.0 * buckets.rows(name, weights[name].detach())), name

    on_ranks(2, main)


def test_a_missing_gradient_is_an_error() -> None:
    def main(world: World) -> None:
        weights, buckets = make(world, microbatches=2)
        backward(weights, 1.0)
        with pytest.raises(AssertionError, match="3 gradients of 6"):
            buckets.take()

    on_ranks(2, main)


def test_without_buckets_nothing_is_shared_out() -> None:
    buckets, x = Buckets(), torch.zeros(3)
    assert buckets.rows("x", x) is x
    assert buckets.owned({"x": part_of(x)}) == buckets.take() == {}
    buckets.gather()
    buckets.forget()


def test_rows_of_a_part() -> None:
    part = Part((slice(6, 12), slice(2, 4)), (20, 4), frozenset({"tp"}))
    rows = part.rows(2, 3, "dp_shard")
    assert rows == Part((slice(8, 11), slice(2, 4)), (20, 4), frozenset({"tp", "dp_shard"}))
    assert (part.numel, rows.numel) == (12, 6)
