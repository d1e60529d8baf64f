"""Reduce-scatter and all-gather along any dim, and all-reduce, for gloo, between the ranks.

gloo's own reduce-scatter is an all-reduce of the whole tensor, of which each rank then keeps its
part: twice the bytes, and three more copies. Here each rank sends the others their parts and adds
up what it gets, in the order of the ranks. gloo's all-gather goes in a ring and puts the parts one
after another: to have them side by side along a later dim is a copy of the whole, once it is there.
Here a part whose runs of memory are long goes straight to where it belongs, a message for each;
others go as one and are unpacked where they arrive. To a recorder each exchange is one operation.

Ranks of one machine send no large part at all: see `shared_memory`. The all-reduce is for them, and
gloo's own elsewhere.

All have a beginning and an end, and whoever has work that needs nothing of the others does it
between the two: see `overlap`.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

# Private: torch 2.13 has no other way from a name, which is what an operator takes, to its group.
from torch.distributed.distributed_c10d import _resolve_process_group

from dtensor_llm.worlds.shared_memory import Channel, SharedParts, open_lines

GATHERED, SUMMED = 0, 1  # tags: what belongs to exchanges that overlap must not be mixed up

LEAST_SHARED = 2**16
"""Bytes of a part that ranks of one machine read in each other's memory."""

LEAST_MESSAGE = 2**20
"""Bytes of a run of memory that is worth a message of its own.

Below, what travels is packed into one message and unpacked where it arrives: a copy of 1.5 MB takes
less than eight messages of 200 KB do (`bench_step.py`: a step with tp is 7 % slower with those).
"""


def reduce_scatter(
    x: Tensor, dim: int, group: dist.ProcessGroup, out: Tensor | None = None
) -> Tensor:
    """The sum over `group` of this rank's part of `x`, cut along `dim`, which the ranks divide.

    `out`, of the part's size, is where to write it; None takes new memory.

    Comm: one reduce-scatter of `x`.
    """
    scatter = ReduceScatter(x.contiguous(), dim, group, out)
    scatter.send_all()
    return scatter.wait()


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The parts `x` of all ranks of `group`, of equal shapes, one after another along `dim`.

    Comm: one all-gather of the result.
    """
    return AllGather(x, dim, group).wait()


class AllGather:
    """An all-gather on its way.

    Attributes:
        whole: the parts of all ranks; this rank's is there from the beginning.
        places: `whole`, cut into the parts.
    """

    def __init__(
        self, x: Tensor, dim: int, group: dist.ProcessGroup, out: Tensor | None = None
    ) -> None:
        """Begin to gather the parts `x`, of equal shapes, along `dim`; does not wait.

        `out` is where to write the whole, contiguous memory; None takes new memory.

        Comm: one all-gather of `whole`.
        """
        x, size, own = x.contiguous(), group.size(), group.rank()
        shape = [n * size if i == dim else n for i, n in enumerate(x.shape)]
        self.whole = x.new_empty(shape) if out is None else out
        self.places, peers = self.whole.chunk(size, dim), peers_of(group)
        if dist.get_backend(group) == "gloo":
            number = torch.ops.dtensor_llm.begin_all_gather(self.whole, x, dim, group.group_name)
            self._travels = _on_their_way.pop(number)
        else:
            parts = self.whole if dim == 0 else x.new_empty(size * x.shape[0], *x.shape[1:])
            work = dist.all_gather_single(parts, x, group=group, async_op=True)
            self._travels = _Travels(group, dim, GATHERED, list(parts.chunk(size)))
            self._travels.receives = {peer: [work] for peer in peers}
        self._awaited = peers
        if self.places[own].data_ptr() != x.data_ptr():
            self.places[own].copy_(x)  # while the others are on their way

    def arrivals(self) -> Iterator[int]:
        """The peers whose parts are not there yet, one by one, each when it is in its place."""
        while self._awaited:
            peer = self._awaited.pop(0)
            part, place = self._travels.receive(peer), self.places[peer]
            if part.data_ptr() != place.data_ptr():
                place.copy_(part)
            yield peer
        self._travels.end()

    def wait(self) -> Tensor:
        """The whole, once it is there; may be called again."""
        for _ in self.arrivals():
            pass
        return self.whole


class ReduceScatter:
    """A reduce-scatter on its way, of parts that need not be there when it begins.

    Each part is sent as soon as it is computed, and last of all comes the rank's own.

    Attributes:
        parts: what is reduced, cut into the parts of all ranks.
        peers: the other ranks of the group, in the order in which they want their parts.
    """

    def __init__(
        self, whole: Tensor, dim: int, group: dist.ProcessGroup, out: Tensor | None = None
    ) -> None:
        """Begin to receive for this rank's part of `whole`, contiguous memory, cut along `dim`.

        `out`, of the part's size, is where to write the sum; None takes new memory.

        Comm: one reduce-scatter of `whole`.
        """
        self.parts, self.peers = whole.chunk(group.size(), dim), peers_of(group)
        self._whole, self._dim, self._group = whole, dim, group
        self._out = whole.new_empty(self.parts[0].shape) if out is None else out
        self._number: int | None = None
        self._work: dist.Work | None = None
        if dist.get_backend(group) == "gloo":
            begin = torch.ops.dtensor_llm.begin_reduce_scatter
            self._number = begin(self._out, whole, dim, group.group_name)

    def send(self, peer: int) -> None:
        """The part for `peer` is computed: let it go."""
        if self._number is not None:
            torch.ops.dtensor_llm.send_part(self.parts[peer], peer, self._number)

    def send_all(self) -> None:
        """All parts are computed, and none has been let go yet: let them all go."""
        for peer in self.peers:
            self.send(peer)
        if self._number is None:
            self._work = self._begin_at_once()

    def _begin_at_once(self) -> dist.Work:
        """By the backend's own operation, which takes all parts together."""
        self._whole = torch.cat(self.parts) if self._dim else self._whole
        return dist.reduce_scatter_single(self._out, self._whole, group=self._group, async_op=True)

    def wait(self) -> Tensor:
        """This rank's part of the sum, once all are there; its own is computed."""
        if self._number is None:
            (self._work or self._begin_at_once()).wait()
            return self._out
        travels, own = _on_their_way.pop(self._number), self._group.rank()
        terms = [
            part if rank == own else travels.receive(rank) for rank, part in enumerate(self.parts)
        ]
        torch.add(terms[0], terms[1], out=self._out)
        for term in terms[2:]:
            self._out.add_(term)
        travels.end()
        return self._out


class AllReduce:
    """The sum of all ranks' `whole`, in its place, on its way.

    Through shared memory each rank adds up a part, and the others read it there. Both are work of
    this rank, which `advance` and `wait` do: whoever has several on their way advances the earlier
    ones, in the same order on all ranks, when one more begins.

    Attributes:
        work: what the backend does by itself; None where the ranks share memory.
    """

    def __init__(self, whole: Tensor, group: dist.ProcessGroup) -> None:
        """Begin to sum `whole`, contiguous memory.

        Comm: one all-reduce of `whole`.
        """
        self.work: dist.Work | None = None
        self._whole, self._group = whole, group
        self._parts, self._peers = parts_of(whole, group), peers_of(group)
        self._terms: SharedParts | None = None
        self._sums: SharedParts | None = None
        if dist.get_backend(group) == "gloo":
            begun = _all_reduces.pop(
                torch.ops.dtensor_llm.begin_all_reduce(whole, group.group_name)
            )
            if isinstance(begun, SharedParts):
                self._terms = begun
            else:
                self.work = begun
        else:
            self.work = dist.all_reduce(whole, group=group, async_op=True)

    def advance(self) -> None:
        """Add up this rank's part, once its terms are there, and let the others read it."""
        if self._terms is None:
            return
        own, terms, self._terms = self._parts[self._group.rank()], self._terms, None
        for peer in self._peers:
            own.add_(terms.receive(peer))
        terms.end()
        self._sums = SharedParts(channels[self._group][GATHERED], own)
        self._sums.send(own, *self._peers)

    def wait(self) -> Tensor:
        """The sum."""
        if self.work is not None:
            self.work.wait()
        self.advance()
        if self._sums is not None:
            for peer in self._peers:
                self._parts[peer].copy_(self._sums.receive(peer, self._parts[peer]))
            self._sums.end()
            self._sums = None
        return self._whole


def parts_of(whole: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Of contiguous memory, one for each rank, of sizes that differ by one element at most."""
    return whole.detach().flatten().tensor_split(group.size())


def peers_of(group: dist.ProcessGroup) -> list[int]:
    """The other ranks of the group, beginning with the next: so not all want the same one's."""
    own, size = group.rank(), group.size()
    return [(own + offset) % size for offset in range(1, size)]


@dataclass
class _Travels:
    """The messages of one exchange.

    Args:
        group: whose ranks exchange.
        dim: along which what they exchange is cut.
        tag: of the messages.
        incoming: where what comes lies, by rank; its own is not used.
        receives: by rank.
    """

    group: dist.ProcessGroup
    dim: int
    tag: int
    incoming: list[Tensor]
    receives: dict[int, list[dist.Work]] = field(default_factory=dict)
    sends: list[dist.Work] = field(default_factory=list)

    def begin(self) -> None:
        """Begin to receive: what comes then finds its place."""
        for peer in peers_of(self.group):
            parts = runs(self.incoming[peer], self.dim)
            self.receives[peer] = [self.group.recv([run], peer, self.tag) for run in parts]

    def send(self, part: Tensor, *peers: int) -> None:
        for peer in peers:
            for run in runs(part, self.dim):
                self.sends.append(self.group.send([run.contiguous()], peer, self.tag))

    def receive(self, peer: int) -> Tensor:
        """What `peer` has sent."""
        wait_for(self.receives[peer])
        return self.incoming[peer]

    def end(self) -> None:
        """What was sent may be written to again."""
        wait_for(self.sends)
        self.sends = []


_on_their_way: dict[int, _Travels | SharedParts] = {}
_all_reduces: dict[int, SharedParts | dist.Work] = {}
_numbers = itertools.count()

# Operators of their own, so that whoever watches operators sees an exchange whole. What
# `torch.library.custom_op` wraps around one costs a tenth of an exchange of 3 MB.
torch.library.define(
    "dtensor_llm::begin_all_gather",
    "(Tensor(a!) output, Tensor input, int dim, str group_name) -> int",
)
torch.library.define(
    "dtensor_llm::begin_reduce_scatter",
    "(Tensor(a!) output, Tensor input, int dim, str group_name) -> int",
)
torch.library.define("dtensor_llm::send_part", "(Tensor part, int peer, int number) -> ()")
torch.library.define("dtensor_llm::begin_all_reduce", "(Tensor(a!) whole, str group_name) -> int")


@torch.library.impl("dtensor_llm::begin_all_gather", "default")
def begin_all_gather(output: Tensor, input: Tensor, dim: int, group_name: str) -> int:
    """Begin to write all ranks' `input` into `output`, one after another along `dim`."""
    group = _resolve_process_group(group_name)  # type: ignore[arg-type] # a str, at run time
    if channel := channel_of(group, GATHERED, input.nbytes):
        shared = SharedParts(channel, input)
        shared.send(input, *peers_of(group))
        return number_of(shared)
    places = output.chunk(group.size(), dim)
    straight = in_place(places[0], dim)
    incoming = [place if straight else torch.empty_like(input) for place in places]
    travels = _Travels(group, dim, GATHERED, incoming)
    travels.begin()
    travels.send(input, *peers_of(group))
    return number_of(travels)


@torch.library.impl("dtensor_llm::begin_reduce_scatter", "default")
def begin_reduce_scatter(output: Tensor, input: Tensor, dim: int, group_name: str) -> int:
    """Begin to receive this rank's part of all ranks' `input`, cut along `dim`."""
    group = _resolve_process_group(group_name)  # type: ignore[arg-type] # a str, at run time
    assert input.is_contiguous(), "its parts go as they lie"
    if channel := channel_of(group, SUMMED, output.nbytes):
        return number_of(SharedParts(channel, output))
    own = group.rank()
    first = int(own == 0)  # of the others: what it sends may lie where the sum will
    incoming = [
        output if peer in (own, first) else torch.empty_like(output) for peer in range(group.size())
    ]
    travels = _Travels(group, dim, SUMMED, incoming)
    travels.begin()
    return number_of(travels)


@torch.library.impl("dtensor_llm::send_part", "default")
def send_part(part: Tensor, peer: int, number: int) -> None:
    """Send `peer` its part in the exchange of that number."""
    _on_their_way[number].send(part, peer)


@torch.library.impl("dtensor_llm::begin_all_reduce", "default")
def begin_all_reduce(whole: Tensor, group_name: str) -> int:
    """Begin to sum all ranks' `whole`."""
    group, number = _resolve_process_group(group_name), next(_numbers)  # type: ignore[arg-type]
    assert whole.is_contiguous(), "its parts go as they lie"
    if channel := channel_of(group, SUMMED, whole.nbytes // group.size()):
        parts = parts_of(whole, group)
        shared = SharedParts(channel, parts[group.rank()])
        for peer in peers_of(group):
            shared.send(parts[peer], peer)
        _all_reduces[number] = shared
    else:
        _all_reduces[number] = group.allreduce([whole])
    return number


channels: WeakKeyDictionary[dist.ProcessGroup, dict[int, Channel]] = WeakKeyDictionary()


def channel_of(group: dist.ProcessGroup, tag: int, num_bytes: int) -> Channel | None:
    """Where parts of that size go through memory that all ranks of the group share."""
    if num_bytes < LEAST_SHARED:
        return None
    if group not in channels:
        lines = open_lines(group)
        kinds = (GATHERED, SUMMED) if lines else ()
        channels[group] = {kind: Channel(kind, lines) for kind in kinds}
    return channels[group].get(tag)


def number_of(travels: "_Travels | SharedParts") -> int:
    """What an operator can give out in the place of `travels`."""
    number = next(_numbers)
    _on_their_way[number] = travels
    return number


def in_place(part: Tensor, dim: int) -> bool:
    """Whether a part of a tensor cut along `dim` travels from and to where it lies."""
    count = math.prod(part.shape[:dim])
    return count == 1 or part.nbytes >= count * LEAST_MESSAGE


def runs(part: Tensor, dim: int) -> list[Tensor]:
    """The messages for a part of a tensor cut along `dim`: its runs of memory, or it as one."""
    if math.prod(part.shape[:dim]) > 1 and in_place(part, dim):
        return list(part.flatten(0, dim - 1))
    return [part]


def wait_for(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
