"""Exchanges between processes: what they compute, and what is seen of them."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from dtensor_llm.worlds import World, exchange, processes, threads
from dtensor_llm.worlds.exchange import AllGather, ReduceScatter, all_gather, reduce_scatter
from dtensor_llm.worlds.observation import Communication, observed_by
from parity_tests.harness import SECONDS

SHAPE = (6, 12, 4)


def tensor_of(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(SHAPE, generator=generator, dtype=torch.float64)


KINDS = {
    "threads": threads.run,
    "processes": processes.spawn,
    "processes, a message for each run of memory": processes.spawn,
    "processes, shared memory": processes.spawn,
}


def travel_as(kind: str) -> None:
    """Called by a rank, which may be a process of its own."""
    if "each run" in kind:
        exchange.LEAST_MESSAGE = 1
    if "shared" in kind:
        exchange.LEAST_SHARED = 1


def own_part(
    kind: str, dim: int, strided: bool, world: World
) -> tuple[torch.Tensor, list[Communication]]:
    """What a rank gets, and what an observer sees."""
    travel_as(kind)
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


@pytest.mark.covering
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("strided", [False, True])
def test_each_rank_gets_its_part_of_the_sum(kind: str, size: int, strided: bool) -> None:
    for dim in (0, 1, 2) if SHAPE[2] % size == 0 else (0, 1):
        total = tensor_of(0)
        for rank in range(1, size):
            total += tensor_of(rank)
        results = KINDS[kind](size, partial(own_part, kind, dim, strided), timeout=SECONDS)
        for (part, seen), expected in zip(results, total.chunk(size, dim), strict=True):
            assert torch.equal(part, expected), "added in the order of the ranks"
            payload = total.nbytes
            assert seen == [Communication("reduce-scatter", tuple(range(size)), payload)] * 2


def gathered(
    kind: str, dim: int, strided: bool, world: World
) -> tuple[torch.Tensor, list[Communication]]:
    """What a rank has of all ranks' parts, and what an observer sees."""
    travel_as(kind)
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


@pytest.mark.covering
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("strided", [False, True])
def test_each_rank_gets_all_parts_in_order(kind: str, size: int, strided: bool) -> None:
    for dim in (0, 1, 2):
        expected = torch.cat([tensor_of(rank) for rank in range(size)], dim)
        seen = [Communication("all-gather", tuple(range(size)), expected.nbytes)]
        main = partial(gathered, kind, dim, strided)
        for result in KINDS[kind](size, main, timeout=SECONDS):
            assert torch.equal(result[0], expected)
            assert result[1] == seen


def begun_then_computed(kind: str, world: World) -> list[torch.Tensor]:
    """The rank's part of a sum, and all ranks' parts, of two exchanges that overlap."""
    travel_as(kind)
    group, x = dist.group.WORLD, tensor_of(world.rank)
    assert group is not None
    whole = torch.zeros_like(x)
    scatter = ReduceScatter(whole, 1, group)
    gather = AllGather(x, 1, group)  # two on their way at once
    for peer in scatter.peers:
        scatter.parts[peer].copy_(x.chunk(world.size, 1)[peer])
        scatter.send(peer)
    scatter.parts[world.rank].copy_(x.chunk(world.size, 1)[world.rank])
    assert torch.equal(gather.places[world.rank], x), "its own part is there at once"
    for peer in gather.arrivals():
        assert torch.equal(gather.places[peer], tensor_of(peer))
    gathered = gather.wait()
    assert gather.wait() is gathered, "it may be asked again"
    return [scatter.wait(), gathered]


@pytest.mark.parametrize("kind", KINDS)
def test_parts_may_be_computed_once_the_exchange_has_begun(kind: str) -> None:
    total = tensor_of(0) + tensor_of(1) + tensor_of(2)
    whole = torch.cat([tensor_of(rank) for rank in range(3)], 1)
    results = KINDS[kind](3, partial(begun_then_computed, kind), timeout=SECONDS)
    for (part, gathered_whole), expected in zip(results, total.chunk(3, 1), strict=True):
        assert torch.equal(part, expected)
        assert torch.equal(gathered_whole, whole)
