"""Exchanges between processes: what they compute, and what is seen of them."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from dtensor_llm.worlds import World, processes, threads
from dtensor_llm.worlds.exchange import all_gather, reduce_scatter
from dtensor_llm.worlds.observation import Communication, observed_by
from parity_tests.harness import SECONDS

SHAPE = (6, 12, 5)


def tensor_of(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(SHAPE, generator=generator, dtype=torch.float64)


def own_part(dim: int, strided: bool, world: World) -> tuple[torch.Tensor, list[Communication]]:
    """What a rank gets, and what an observer sees."""
    x = tensor_of(world.rank)
    if strided:
        x = x.mT.contiguous().mT
    group, seen = dist.group.WORLD, list[Communication]()
    assert group is not None
    with observed_by(seen.append):
        part = reduce_scatter(x, dim, group)
        into = torch.empty_like(part)
        assert reduce_scatter(x, dim, group, out=into) is into
    assert torch.equal(part, into)
    assert torch.equal(x, tensor_of(world.rank)), "the input stays"
    return part, seen


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("strided", [False, True])
def test_each_rank_gets_its_part_of_the_sum(kind: str, size: int, strided: bool) -> None:
    run = threads.run if kind == "threads" else processes.spawn
    for dim in (0, 1):
        total = tensor_of(0)
        for rank in range(1, size):
            total += tensor_of(rank)
        results = run(size, partial(own_part, dim, strided), timeout=SECONDS)
        for (part, seen), expected in zip(results, total.chunk(size, dim), strict=True):
            assert torch.equal(part, expected), "added in the order of the ranks"
            payload = total.nbytes
            assert seen == [Communication("reduce-scatter", tuple(range(size)), payload)] * 2


def gathered(dim: int, strided: bool, world: World) -> tuple[torch.Tensor, list[Communication]]:
    """What a rank has of all ranks' parts, and what an observer sees."""
    x = tensor_of(world.rank)
    if strided:
        x = x.mT.contiguous().mT
    group, seen = dist.group.WORLD, list[Communication]()
    assert group is not None
    with observed_by(seen.append):
        whole = all_gather(x, dim, group)
    assert torch.equal(x, tensor_of(world.rank)), "the input stays"
    assert whole.is_contiguous()
    return whole, seen


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("strided", [False, True])
def test_each_rank_gets_all_parts_in_order(kind: str, size: int, strided: bool) -> None:
    run = threads.run if kind == "threads" else processes.spawn
    for dim in (0, 1):
        expected = torch.cat([tensor_of(rank) for rank in range(size)], dim)
        seen = [Communication("all-gather", tuple(range(size)), expected.nbytes)]
        for result in run(size, partial(gathered, dim, strided), timeout=SECONDS):
            assert torch.equal(result[0], expected)
            assert result[1] == seen
