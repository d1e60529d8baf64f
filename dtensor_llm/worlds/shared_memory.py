"""Memory that the ranks of one machine share: a part is copied once, and read where it lies.

Through gloo a part goes into the kernel and out of it, by threads that want the cores which
compute. Here the sender copies it into a block of memory that the others have mapped, and a message
of six numbers says where; who gets it copies or adds it from there. The message goes through a
pipe, which wakes the reader itself: by gloo it would take three messages, each by a thread that a
busy core is in no hurry to run.

A block may be written to again once all who were told of it have read it. Nobody reports that by
itself: every message carries how many exchanges its sender has ended, which is one exchange late
and costs nothing. Where no block is free there is a new one, where none is large enough one grows:
a group has a few, for each kind of exchange. What `planner.memory` predicts is without them.

Blocks are anonymous files (Linux, memfd_create): other processes of the same user open them, and
the pipes, through /proc, they are not limited by what is mounted at /dev/shm, and nothing is left
of them when the processes that have them are gone. Where one rank cannot open what another has, on
another machine or in another container, the group's exchanges go as messages.
"""

import mmap
import os
import secrets
import select
import struct
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

PAGE = 4096
MESSAGE = struct.Struct("6q")
"""Kind and number of the exchange; block, its file descriptor, its bytes; exchanges ended."""

timeout = default_pg_timeout
"""How long to wait for a message; `processes_rank.open_world` says what it is for all of them."""


class Line:
    """To one peer and from it: a pipe each way.

    A message is far below what a pipe takes whole, so that none comes in pieces.

    Args:
        peer: its rank in the group.
        pid: its process.
        incoming, outgoing: file descriptors, closed with the line.
    """

    def __init__(self, peer: int, pid: int, incoming: int, outgoing: int) -> None:
        self.peer, self.pid, self.incoming, self.outgoing = peer, pid, incoming, outgoing
        self.poll = select.poll()
        self.poll.register(incoming, select.POLLIN)
        self.arrived: dict[tuple[int, int], list[int]] = {}
        weakref.finalize(self, close, incoming, outgoing)

    def send(self, kind: int, number: int, *where: int) -> None:
        try:
            os.write(self.outgoing, MESSAGE.pack(kind, number, *where))
        except BrokenPipeError:
            raise self.is_gone() from None

    def receive(self, kind: int, number: int) -> list[int]:
        """What the peer says of its part in that exchange, once it does."""
        while (kind, number) not in self.arrived:
            self.read()
        return self.arrived.pop((kind, number))

    def read(self) -> None:
        if not self.poll.poll(timeout.total_seconds() * 1e3):
            seconds = timeout.total_seconds()
            raise RuntimeError(f"timed out: nothing came from rank {self.peer} for {seconds:g} s")
        messages = os.read(self.incoming, 64 * MESSAGE.size)
        if not messages:
            raise self.is_gone()
        for kind, number, *where in MESSAGE.iter_unpack(messages):
            self.arrived[kind, number] = where

    def is_gone(self) -> RuntimeError:
        return RuntimeError(f"rank {self.peer} of the group, process {self.pid}, has ended")


@dataclass
class Block:
    """Memory of this rank that others read.

    Args:
        number: among this rank's blocks of one channel.
        file: its descriptor.
        memory: bytes.
        busy: the exchange that each who was told of it is to have ended before it is free, by rank.
    """

    number: int
    file: int
    memory: Tensor
    busy: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        weakref.finalize(self, close, self.file)


class Channel:
    """What the exchanges of a group share, of one kind: they begin in one order on all ranks.

    Args:
        kind: number of that.
        lines: by peer.
    """

    def __init__(self, kind: int, lines: Mapping[int, Line]) -> None:
        self.kind, self.lines = kind, lines
        self.blocks: list[Block] = []
        self.mapped: dict[tuple[int, int], Tensor] = {}  # by rank and number of the block
        self.ended_by = dict.fromkeys(lines, 0)
        self.begun = 0
        self.not_ended: set[int] = set()

    @property
    def ended(self) -> int:
        """The exchange before which all have ended here."""
        return min(self.not_ended, default=self.begun)

    def begin(self) -> int:
        number, self.begun = self.begun, self.begun + 1
        self.not_ended.add(number)
        return number

    def block_of(self, num_bytes: int) -> Block:
        """The smallest that is large enough and free, or new memory: of a free one, or one more."""
        free = [block for block in self.blocks if self.is_free(block)]
        fits = [block for block in free if block.memory.nbytes >= num_bytes]
        if fits:
            return min(fits, key=lambda block: block.memory.nbytes)
        number = free[0].number if free else len(self.blocks)
        block = Block(number, *new_memory(-(-num_bytes // PAGE) * PAGE))
        self.blocks[number : number + 1] = [block]
        return block

    def is_free(self, block: Block) -> bool:
        return all(self.ended_by[rank] > number for rank, number in block.busy.items())

    def tell(self, peer: int, number: int, block: Block) -> None:
        """`peer` may read `block` in the exchange of that number."""
        where = block.number, block.file, block.memory.nbytes
        self.lines[peer].send(self.kind, number, *where, self.ended)

    def block_of_peer(self, peer: int, number: int) -> Tensor:
        """The memory that `peer` tells of in the exchange of that number."""
        line = self.lines[peer]
        block, file, num_bytes, ended = line.receive(self.kind, number)
        self.ended_by[peer] = max(ended, self.ended_by[peer])
        known = self.mapped.get((peer, block))
        if known is None or known.nbytes != num_bytes:  # a block that has grown is another file
            self.mapped[peer, block] = open_memory(line.pid, file, num_bytes)
        return self.mapped[peer, block]


class SharedParts:
    """The parts of one exchange, in memory that the group's ranks share.

    Args:
        channel: of the group.
        like: what each rank gets from another.
    """

    def __init__(self, channel: Channel, like: Tensor) -> None:
        self.channel, self.number, self.like = channel, channel.begin(), like.detach()

    def send(self, part: Tensor, *peers: int) -> None:
        """Let `peers` read what `part` is now."""
        block = self.channel.block_of(part.nbytes)
        block.busy = dict.fromkeys(peers, self.number)
        place(part, block.memory).copy_(part)
        for peer in peers:
            self.channel.tell(peer, self.number, block)

    def receive(self, peer: int, like: Tensor | None = None) -> Tensor:
        """What `peer` has sent, to be read before the end."""
        memory = self.channel.block_of_peer(peer, self.number)
        return place(self.like if like is None else like, memory)

    def end(self) -> None:
        """What was received has been read."""
        self.channel.not_ended.discard(self.number)


def place(part: Tensor, memory: Tensor) -> Tensor:
    """Of a part like that, at the beginning of a block."""
    return memory[: part.nbytes].view(dtype=part.dtype).unflatten(0, part.shape)


def new_memory(num_bytes: int) -> tuple[int, Tensor]:
    """A file descriptor, and what it is a file of."""
    file = os.memfd_create("dtensor_llm")
    os.ftruncate(file, num_bytes)
    return file, torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)


def open_memory(pid: int, file: int, num_bytes: int) -> Tensor:
    with path_of(pid, file).open("r+b") as opened:
        return torch.frombuffer(mmap.mmap(opened.fileno(), num_bytes), dtype=torch.uint8)


def path_of(pid: int, file: int) -> Path:
    """Of what a process has open."""
    return Path(f"/proc/{pid}/fd/{file}")


def close(*files: int) -> None:
    for file in files:
        os.close(file)


def open_lines(group: dist.ProcessGroup) -> dict[int, Line]:
    """To each peer, where every rank can read every other's memory; else none.

    Comm: an all-gather of 24 bytes of each rank and 8 for each rank, an all-reduce of 8.
    """
    own, ranks, secret = group.rank(), range(group.size()), secrets.randbits(62)
    peers = [rank for rank in ranks if rank != own]
    pipes, files = offer(peers, secret)
    ends = [pipes[rank][1] if rank in pipes else -1 for rank in ranks]
    offered = torch.tensor([os.getpid(), files[0] if files else -1, secret, *ends])
    of_ranks = [torch.empty_like(offered) for _ in ranks]
    group.allgather([of_ranks], [offered]).wait()
    offers = [x.tolist() for x in of_ranks]
    outgoing = {}
    if all(can_read(*offer[:3]) for offer in offers):
        outgoing = open_ends({peer: (offers[peer][0], offers[peer][3 + own]) for peer in peers})
    all_can = torch.tensor([int(len(outgoing) == len(peers))])
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)  # the other is of its values' type
    group.allreduce([all_can], options).wait()
    close(*(end for _, end in pipes.values()), *files)
    if all_can.item():
        return {
            peer: Line(peer, offers[peer][0], incoming, outgoing[peer])
            for peer, (incoming, _) in pipes.items()
        }
    close(*(incoming for incoming, _ in pipes.values()), *outgoing.values())
    return {}


def offer(peers: Sequence[int], secret: int) -> tuple[dict[int, tuple[int, int]], list[int]]:
    """A pipe from each peer and a file that holds `secret`, or nothing where there is no way to."""
    pipes, files = dict[int, tuple[int, int]](), list[int]()
    if not hasattr(os, "memfd_create"):
        return pipes, files
    try:
        for peer in peers:
            pipes[peer] = os.pipe()
        file, memory = new_memory(PAGE)
    except OSError:  # this process may have too many files open
        close(*(end for pipe in pipes.values() for end in pipe))
        return {}, []
    memory[:8].view(torch.int64).fill_(secret)
    return pipes, [file]


def open_ends(places: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """Of pipes, to write, each by its process and file descriptor; none where one cannot be."""
    ends = dict[int, int]()
    try:
        for peer, place_of_end in places.items():
            ends[peer] = os.open(path_of(*place_of_end), os.O_WRONLY)
    except OSError:  # this process may have too many files open
        close(*ends.values())
        return {}
    return ends


def can_read(pid: int, file: int, secret: int) -> bool:
    """Whether that is this machine's process, and its file is open to this one."""
    try:
        found = open_memory(pid, file, PAGE)
    except (OSError, ValueError):  # the number is no process, not ours, or of some other file
        return False
    return found[:8].view(torch.int64).item() == secret
