"""Memory that the ranks of one machine share: a part is copied once, and read where it lies.

Through gloo a part goes into the kernel and out of it, by threads that want the cores which
compute. Here the sender copies it into a block of memory that the others have mapped, and a message
of four numbers says where; who gets it copies or adds it from there.

A block may be written to again once all who were told of it have read it. Nobody reports that by
itself: every message carries how many exchanges its sender has ended, which is one exchange late
and costs nothing. Where no block is free there is a new one: a group has a few, for each kind of
exchange. What `planner.memory` predicts is without them.

Blocks are anonymous files (Linux, memfd_create): other processes of the same user open them through
/proc, they are not limited by what is mounted at /dev/shm, and nothing is left of them when the
processes that have them are gone. Where one rank cannot open the block of another, on another
machine or in another container, the group's exchanges go as messages.
"""

import mmap
import os
import secrets
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

PAGE = 4096
FIELDS = 4  # of a message: block, its file descriptor, its bytes, exchanges ended


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
        weakref.finalize(self, os.close, self.file)


class Channel:
    """What the exchanges of a group share, of one kind: they begin in one order on all ranks.

    Args:
        tag: of its messages.
        pids: processes of the group's ranks.
    """

    def __init__(self, tag: int, pids: Sequence[int]) -> None:
        self.tag, self.pids = tag, pids
        self.blocks: list[Block] = []
        self.mapped: dict[tuple[int, int], Tensor] = {}  # by rank and number of the block
        self.ended_by = dict.fromkeys(range(len(pids)), 0)
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
        """The smallest that is large enough and free, or a new one."""
        fits = [
            block
            for block in self.blocks
            if block.memory.nbytes >= num_bytes
            and all(self.ended_by[rank] > number for rank, number in block.busy.items())
        ]
        if fits:
            return min(fits, key=lambda block: block.memory.nbytes)
        file, memory = new_memory(-(-num_bytes // PAGE) * PAGE)
        self.blocks.append(Block(len(self.blocks), file, memory))
        return self.blocks[-1]

    def message(self, block: Block) -> Tensor:
        return torch.tensor([block.number, block.file, block.memory.nbytes, self.ended])

    def block_at(self, rank: int, message: Tensor) -> Tensor:
        """The memory that `rank` tells of."""
        number, file, num_bytes, ended = message.tolist()
        self.ended_by[rank] = ended
        if (rank, number) not in self.mapped:
            self.mapped[rank, number] = open_memory(self.pids[rank], file, num_bytes)
        return self.mapped[rank, number]


class SharedParts:
    """The parts of one exchange, in memory that the group's ranks share.

    Args:
        channel: of the `group`.
        like: what each rank gets from another.
    """

    def __init__(self, channel: Channel, group: dist.ProcessGroup, like: Tensor) -> None:
        self.channel, self.group, self.number = channel, group, channel.begin()
        self.shape, self.dtype, self.nbytes = like.shape, like.dtype, like.nbytes
        self.messages = {
            peer: torch.empty(FIELDS, dtype=torch.int64)
            for peer in range(group.size())
            if peer != group.rank()
        }
        self.receives = {
            peer: group.recv([x], peer, channel.tag) for peer, x in self.messages.items()
        }
        self.sends: list[tuple[dist.Work, Tensor]] = []

    def send(self, part: Tensor, *peers: int) -> None:
        """Let `peers` read what `part` is now."""
        channel = self.channel
        block = channel.block_of(part.nbytes)
        block.busy = dict.fromkeys(peers, self.number)
        self.place(block.memory).copy_(part)
        message = channel.message(block)
        for peer in peers:
            self.sends.append((self.group.send([message], peer, channel.tag), message))

    def receive(self, peer: int) -> Tensor:
        """What `peer` has sent, to be read before the end."""
        self.receives[peer].wait()
        return self.place(self.channel.block_at(peer, self.messages[peer]))

    def end(self) -> None:
        """What was received has been read."""
        for work, _ in self.sends:
            work.wait()
        self.sends = []
        self.channel.not_ended.discard(self.number)

    def place(self, memory: Tensor) -> Tensor:
        """Of a part, at the beginning of a block."""
        return memory[: self.nbytes].view(dtype=self.dtype).unflatten(0, self.shape)


def new_memory(num_bytes: int) -> tuple[int, Tensor]:
    """A file descriptor, and what it is a file of."""
    file = os.memfd_create("dtensor_llm")
    os.ftruncate(file, num_bytes)
    return file, torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)


def open_memory(pid: int, file: int, num_bytes: int) -> Tensor:
    with Path(f"/proc/{pid}/fd/{file}").open("r+b") as opened:
        return torch.frombuffer(mmap.mmap(opened.fileno(), num_bytes), dtype=torch.uint8)


def processes_that_share(group: dist.ProcessGroup) -> list[int]:
    """The process of each rank, where every rank can read every other's memory; else none.

    Comm: an all-gather of 32 bytes of each rank, an all-reduce of 8.
    """
    secret, file, memory = secrets.randbits(62), -1, None
    if hasattr(os, "memfd_create"):
        file, memory = new_memory(PAGE)
        memory[:8].view(torch.int64).fill_(secret)
    own = torch.tensor([os.getpid(), file, secret])
    all_of_them = [torch.empty_like(own) for _ in range(group.size())]
    group.allgather([all_of_them], [own]).wait()
    everyone = [x.tolist() for x in all_of_them]
    readable = torch.tensor([int(all(can_read(*one) for one in everyone))])
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)  # the other is of its values' type
    group.allreduce([readable], options).wait()
    if memory is not None:
        os.close(file)
    return [pid for pid, _, _ in everyone] if readable.item() else []


def can_read(pid: int, file: int, secret: int) -> bool:
    """Whether that is this machine's process, and its file is open to this one."""
    try:
        found = open_memory(pid, file, PAGE)
    except (OSError, ValueError):  # the number is no process, not ours, or of some other file
        return False
    return found[:8].view(torch.int64).item() == secret
