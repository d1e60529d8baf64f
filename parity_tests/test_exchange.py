"""Exchanges between processes: what they compute, and what is seen of them."""

from collections.abc import Iterator
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from dtensor_llm.worlds import World, exchange, processes, threads
from dtensor_llm.worlds.exchange import (
    AllGather,
    AllReduce,
    ReduceScatter,
    all_gather,
    reduce_scatter,
)
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


Received = dict[tuple[int, bool], tuple[torch.Tensor, list[Communication]]]
"""By the dim that is shared out, and whether the input is strided: what a rank gets, what is seen
of it."""


def inputs(rank: int) -> Iterator[tuple[int, bool, torch.Tensor]]:
    """(dim, whether it is strided, the rank's tensor)"""
    for dim in range(len(SHAPE)):
        yield dim, False, tensor_of(rank)
        yield dim, True, tensor_of(rank).mT.contiguous().mT


def scattered_sums(kind: str, world: World) -> Received:
    travel_as(kind)
    group, found = dist.group.WORLD, Received()
    assert group is not None
    for dim, strided, x in inputs(world.rank):
        if SHAPE[dim] % world.size == 0:
            seen = list[Communication]()
            with observed_by(seen.append):
                part = reduce_scatter(x, dim, group)
                into = torch.empty_like(part)
                assert reduce_scatter(x, dim, group, out=into) is into
            assert torch.equal(part, into)
            assert torch.equal(x, tensor_of(world.rank)), "the input stays"
            found[dim, strided] = part, seen
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_gets_its_part_of_the_sum(kind: str, size: int) -> None:
    total = sum((tensor_of(rank) for rank in range(1, size)), tensor_of(0))
    seen = [Communication("reduce-scatter", tuple(range(size)), total.nbytes)] * 2
    ranks = KINDS[kind](size, partial(scattered_sums, kind), timeout=SECONDS)
    for rank, found in enumerate(ranks):
        assert len(found) == 2 * sum(length % size == 0 for length in SHAPE)
        for (dim, _), received in found.items():
            expected = total.chunk(size, dim)[rank]
            assert torch.equal(received[0], expected), "added in the order of the ranks"
            assert received[1] == seen


def gathered(kind: str, world: World) -> Received:
    travel_as(kind)
    group, found = dist.group.WORLD, Received()
    assert group is not None
    for dim, strided, x in inputs(world.rank):
        seen = list[Communication]()
        with observed_by(seen.append):
            whole = all_gather(x, dim, group)
        assert torch.equal(x, tensor_of(world.rank)), "the input stays"
        assert whole.is_contiguous()
        found[dim, strided] = whole, seen
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_gets_all_parts_in_order(kind: str, size: int) -> None:
    parts = [tensor_of(rank) for rank in range(size)]
    for found in KINDS[kind](size, partial(gathered, kind), timeout=SECONDS):
        assert len(found) == 2 * len(SHAPE)
        for (dim, _), (whole, seen) in found.items():
            assert torch.equal(whole, torch.cat(parts, dim))
            assert seen == [Communication("all-gather", tuple(range(size)), whole.nbytes)]


def summed(kind: str, world: World) -> tuple[list[torch.Tensor], list[Communication]]:
    """Of sizes that the ranks do not divide, three on their way at once."""
    travel_as(kind)
    group, seen = dist.group.WORLD, list[Communication]()
    assert group is not None
    with observed_by(seen.append):
        on_their_way = list[AllReduce]()
        for length in (288, 287, 100):
            on_their_way.append(AllReduce(tensor_of(world.rank).flatten()[:length].clone(), group))
            for earlier in on_their_way[:-1]:
                earlier.advance()
        return [reduction.wait() for reduction in on_their_way], seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_gets_the_sum(kind: str, size: int) -> None:
    total = sum((tensor_of(rank) for rank in range(1, size)), tensor_of(0)).flatten()
    ranks = KINDS[kind](size, partial(summed, kind), timeout=SECONDS)
    for sums, seen in ranks:
        for found, first in zip(sums, ranks[0][0], strict=True):
            assert torch.equal(found, first), "on all ranks the same, to the last bit"
            torch.testing.assert_close(found, total[: len(found)], rtol=1e-14, atol=1e-15)
        lengths = [len(found) for found in sums]
        ids = tuple(range(size))
        assert seen == [Communication("all-reduce", ids, 8 * length) for length in lengths]


class Spied:
    """What was sent, and whether it was waited for."""

    def __init__(self, work: dist.Work) -> None:
        self.work, self.is_over = work, False

    def wait(self) -> None:
        self.work.wait()
        self.is_over = True


def sent_and_ended(world: World) -> list[bool]:
    group, spies, send = dist.group.WORLD, list[Spied](), exchange._Travels.send
    assert group is not None

    def spied(self: exchange._Travels, part: torch.Tensor, *peers: int) -> None:
        known = len(self.sends)
        send(self, part, *peers)
        self.sends[known:] = [Spied(work) for work in self.sends[known:]]  # type: ignore[misc]
        spies.extend(self.sends[known:])  # type: ignore[arg-type]

    with patch.object(exchange._Travels, "send", spied):
        all_gather(tensor_of(world.rank), 0, group)
        reduce_scatter(tensor_of(world.rank), 0, group)
    return [spy.is_over for spy in spies]


def test_what_was_sent_is_gone_when_an_exchange_ends() -> None:
    """It may be written to then: to end without that works nearly always."""
    assert processes.spawn(3, sent_and_ended, timeout=SECONDS) == [[True] * 4] * 3


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
