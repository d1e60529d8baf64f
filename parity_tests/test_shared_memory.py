"""Memory that ranks of one machine share: what goes through it, how little there is of it."""

import gc
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_llm.parity import Report
from dtensor_llm.worlds import World, exchange, processes, shared_memory
from dtensor_llm.worlds.exchange import AllGather, AllReduce, all_gather, reduce_scatter
from dtensor_llm.worlds.shared_memory import MESSAGE, Block, Channel, Line, SharedParts
from parity_tests.harness import (
    SECONDS,
    batches_for,
    reference_for,
    small_config,
    train_and_compare,
)

LARGE = 2**14  # float64 numbers of a part that goes through shared memory


def world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def part_of(rank: int, number: int, size: int = LARGE) -> Tensor:
    return torch.full((1, size), 10.0 * number + rank, dtype=torch.float64)


def is_gathered(whole: Tensor, number: int) -> bool:
    return all(bool(row.eq(10.0 * number + rank).all()) for rank, row in enumerate(whole))


def summed_in_turns(rank: int, numbers: range) -> bool:
    """Two on their way at once, each a little larger than the one before, as DDP's buckets may."""
    group, on_their_way, right = world_group(), list[AllReduce](), True
    for number in numbers:
        whole = part_of(rank, number, 3 * LARGE + 600 * number)
        on_their_way.append(AllReduce(whole, group))
        for earlier in on_their_way[:-1]:
            earlier.advance()
        if len(on_their_way) > 2 or number == numbers[-1]:
            expected = group.size() * 10.0 * numbers[number - len(on_their_way) + 1] + 3
            right = right and bool(on_their_way.pop(0).wait().eq(expected).all())
    for left in on_their_way:
        left.wait()
    return right


def blocks_after_sums(world: World) -> list[int]:
    assert summed_in_turns(world.rank, range(30))
    return [len(channel.blocks) for channel in exchange.channels[world_group()].values()]


def test_few_blocks_serve_many_sums() -> None:
    """Of three at once each rank's part, and the parts of two peers; blocks grow."""
    for gathered, summed in processes.spawn(3, blocks_after_sums, timeout=SECONDS):
        assert gathered <= 4
        assert summed <= 8


def descriptors_after_groups(world: World) -> list[int]:
    """Open files of this process with one group that shares memory, then after that three times."""
    counts = []
    for _ in range(4):
        group = dist.new_group(list(range(world.size)))
        assert isinstance(group, dist.ProcessGroup)
        assert is_gathered(all_gather(part_of(world.rank, 1), 0, group), 1)
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    return counts


def test_nothing_is_left_of_a_group() -> None:
    for first, *later in processes.spawn(2, descriptors_after_groups, timeout=SECONDS):
        assert later == [first] * 3


def blocks_after_many(world: World) -> list[int]:
    group = world_group()
    for number in range(20):
        assert is_gathered(all_gather(part_of(world.rank, number), 0, group), number)
        whole = torch.cat([part_of(world.rank, number)] * world.size)
        assert reduce_scatter(whole, 0, group).eq(world.size * 10.0 * number + 3).all()
    return [len(channel.blocks) for channel in exchange.channels[group].values()]


def test_few_blocks_serve_many_exchanges() -> None:
    """Of each kind one that is read, one that is written to; a reduction has one for each peer."""
    for gathered, summed in processes.spawn(3, blocks_after_many, timeout=SECONDS):
        assert gathered == 2
        assert summed <= 4


def parts_of_all_sizes(world: World) -> int:
    group = world_group()
    for number, size in enumerate([LARGE, 3 * LARGE, LARGE + 1, 10, 2 * LARGE, LARGE] * 2):
        whole = all_gather(part_of(world.rank, number, size), 0, group)
        assert whole.shape == (world.size, size)
        assert is_gathered(whole, number)
    return max(block.memory.nbytes for block in exchange.channels[group][0].blocks)


def test_a_part_of_any_size_finds_a_block() -> None:
    assert processes.spawn(2, parts_of_all_sizes, timeout=SECONDS) == [3 * LARGE * 8] * 2


def changed_once_sent(world: World) -> Tensor:
    group, own = world_group(), part_of(world.rank, 1)
    first = AllGather(own, 0, group)
    own.fill_(-1.0)
    dist.barrier()
    return first.wait()


def test_what_was_sent_may_change() -> None:
    for whole in processes.spawn(2, changed_once_sent, timeout=SECONDS):
        assert is_gathered(whole, 1)


def two_at_once(world: World) -> list[bool]:
    group = world_group()
    both = [AllGather(part_of(world.rank, number), 0, group) for number in (1, 2)]
    dist.barrier()
    return [is_gathered(gather.wait(), number) for number, gather in enumerate(both, start=1)]


def with_one_block(world: World) -> list[bool]:
    """The bug that a block is written to before all have read it."""
    right = Channel.block_of

    def wrong(channel: Channel, num_bytes: int) -> Block:
        return channel.blocks[0] if channel.blocks else right(channel, num_bytes)

    with patch.object(Channel, "block_of", wrong):
        return two_at_once(world)


@pytest.mark.parametrize(
    ("main", "expected"), [(two_at_once, [True, True]), (with_one_block, [False, True])]
)
def test_no_block_is_written_to_before_it_is_read(
    main: Callable[[World], list[bool]], expected: list[bool]
) -> None:
    assert processes.spawn(2, main, timeout=SECONDS) == [expected] * 2


def nothing_is_readable(*_: Any) -> bool:
    return False


def on_other_machines(missing: str, world: World) -> bool:
    """Rank 1 cannot read what the others offer, or its system has no such memory."""
    if world.rank == 1 and missing == "access":
        shared_memory.can_read = nothing_is_readable
    if world.rank == 1 and missing == "system":
        del os.memfd_create
    right = blocks_after_many(world) == []
    return right and exchange.channels[world_group()] == {}


@pytest.mark.parametrize("missing", ["access", "system"])
def test_where_one_rank_cannot_share_all_send_messages(missing: str) -> None:
    main = partial(on_other_machines, missing)
    assert processes.spawn(3, main, timeout=SECONDS) == [True] * 3


def test_number_that_is_another_process_somewhere_else_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "empty").open("w+b") as empty:
        assert not shared_memory.can_read(os.getpid(), empty.fileno(), 0)
    assert not shared_memory.can_read(os.getpid(), -1, 0)
    file, memory = shared_memory.new_memory(shared_memory.PAGE)
    memory[:8].view(torch.int64).fill_(7)
    assert shared_memory.can_read(os.getpid(), file, 7)
    assert not shared_memory.can_read(os.getpid(), file, 8)
    os.close(file)


@pytest.fixture
def far_ends() -> Iterator[list[int]]:
    """What a peer that is this test has of a line: where it reads, where it writes."""
    ends = list[int]()
    yield ends
    for end in ends:
        os.close(end)


def line_to(far_ends: list[int]) -> Line:
    (there, outgoing), (incoming, back) = os.pipe(), os.pipe()
    far_ends[:] = there, back
    return Line(1, os.getpid(), incoming, outgoing)


def test_messages_are_found_in_any_order(far_ends: list[int]) -> None:
    line = line_to(far_ends)
    for number in range(100):  # more than are read at once
        os.write(far_ends[1], MESSAGE.pack(0, number, number, 7, 4096, 0))
        os.write(far_ends[1], MESSAGE.pack(1, number, -number, 7, 4096, 0))
    for number in reversed(range(100)):
        for kind, sign in ((0, 1), (1, -1)):
            assert line.receive(kind, number) == [sign * number, 7, 4096, 0]
    assert not line.arrived


def test_peer_that_has_ended_is_named(far_ends: list[int]) -> None:
    line = line_to(far_ends)
    ended = f"rank 1 of the group, process {os.getpid()}, has ended"
    os.close(far_ends.pop())
    with pytest.raises(RuntimeError, match=ended):
        line.receive(0, 0)
    os.close(far_ends.pop())
    with pytest.raises(RuntimeError, match=ended):
        line.send(0, 0, 1, 2, 3, 4)


def test_line_closes_its_ends(far_ends: list[int]) -> None:
    line = line_to(far_ends)
    own = line.incoming, line.outgoing
    del line
    for end in own:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(end)


def test_block_is_free_once_all_who_were_told_have_read(far_ends: list[int]) -> None:
    others = list[int]()
    channel = Channel(0, {1: line_to(far_ends), 2: line_to(others)})
    part = part_of(0, 1)
    SharedParts(channel, part).send(part, 1, 2)
    (block,) = channel.blocks
    channel.ended_by[1] = 1
    assert not channel.is_free(block)
    channel.ended_by[2] = 1
    assert channel.is_free(block)
    shared_memory.close(*others)


def left_alone(world: World) -> str:
    """Rank 1 closes its ends, as a process that ends does."""
    group = world_group()
    assert is_gathered(all_gather(part_of(world.rank, 0), 0, group), 0)
    if world.rank == 1:
        exchange.channels.clear()
        gc.collect()
        dist.barrier()
        return str(shared_memory.timeout.total_seconds())
    dist.barrier()
    shared_memory.timeout = timedelta(seconds=2)
    with pytest.raises(RuntimeError) as failed:
        all_gather(part_of(world.rank, 1), 0, group)
    return str(failed.value)


def test_peer_that_has_ended_is_told_at_once() -> None:
    """No process holds another's end; and for how long one waits is what the world is told."""
    failed, waits = processes.spawn(2, left_alone, timeout=SECONDS)
    assert "rank 1 of the group" in failed and failed.endswith("has ended")
    assert float(waits) == SECONDS


def test_ends_are_all_opened_or_none() -> None:
    there, back = os.pipe()
    (end,) = shared_memory.open_ends({1: (os.getpid(), back)}).values()
    os.write(end, b"through")
    assert os.read(there, 100) == b"through"
    shared_memory.close(end, there)
    before = list(Path("/proc/self/fd").iterdir())
    assert shared_memory.open_ends({1: (os.getpid(), back), 2: (os.getpid(), -1)}) == {}
    assert list(Path("/proc/self/fd").iterdir()) == before
    os.close(back)


def never_told(world: World) -> str:
    group = world_group()
    assert is_gathered(all_gather(part_of(world.rank, 0), 0, group), 0)
    if world.rank == 1:
        return ""
    shared_memory.timeout = timedelta(seconds=0.5)
    with pytest.raises(RuntimeError) as failed:
        all_gather(part_of(world.rank, 1), 0, group)
    return str(failed.value)


def test_peer_that_says_nothing_is_not_waited_for_for_ever() -> None:
    messages = processes.spawn(2, never_told, timeout=SECONDS)
    assert messages == ["timed out: nothing came from rank 1 for 0.5 s", ""]


def small_parts(world: World) -> bool:
    group = world_group()
    all_gather(part_of(world.rank, 0, size=8), 0, group)
    return group in exchange.channels


def test_small_parts_are_messages() -> None:
    assert processes.spawn(2, small_parts, timeout=SECONDS) == [False, False]


def trained(mesh: str, options: dict[str, Any], world: World, least: int = 1) -> tuple[Report, int]:
    exchange.LEAST_SHARED = least
    config = small_config(mesh, **options)
    report = train_and_compare(config, reference_for(config), batches_for(config), world)
    channels = [c for of_group in exchange.channels.values() for c in of_group.values()]
    return report, sum(channel.begun for channel in channels)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("1x1x2", {"zero": 3, "micro_batch_size": 2, "dropout": 0.1}),
        ("2x1x2", {"zero": 3, "offload": "weights"}),
        ("dp_replicate=2,dp_shard=2", {"zero": 3, "prefetch_depth": 2}),
        ("1x1x3", {"zero": 1, "global_batch_size": 6}),
        ("1x1x2", {"zero": 0, "ddp": True, "ddp_bucket_mb": 0.01}),
        ("1x2x3", {"zero": 0, "ddp": True, "ddp_bucket_view": False, "global_batch_size": 6}),
    ],
)
def test_data_parallelism_through_it_equals_one_device(mesh: str, options: dict[str, Any]) -> None:
    size = small_config(mesh, **options).parallel.mesh.num_ranks
    for report, num_exchanges in processes.spawn(
        size, partial(trained, mesh, options), timeout=SECONDS
    ):
        assert report.passed, report
        assert num_exchanges > 0


@pytest.mark.parametrize("least", [3000, 6000])
@pytest.mark.parametrize("mesh", ["1x1x2", "1x2x2", "dp_replicate=2,dp_shard=2"])
def test_ddp_whose_buckets_go_either_way_equals_one_device(mesh: str, least: int) -> None:
    """Some through shared memory, some as messages, whichever comes last."""
    options = {"zero": 0, "ddp": True, "ddp_bucket_mb": 0.01}
    size = small_config(mesh, **options).parallel.mesh.num_ranks
    main = partial(trained, mesh, options, least=least)
    for report, num_exchanges in processes.spawn(size, main, timeout=SECONDS):
        assert report.passed, report
        assert num_exchanges > 0
