"""The process group of the threads world: its members meet in memory.

A collective is a slot with one place per member. A rank that calls it leaves its tensors in its
place and goes on; the last to arrive computes the result for all and wakes those who wait. Point
to point works the same way with two members: no copy is made until both sides are there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_llm.worlds.threads_collectives import COMPUTE, Call, copy, describe_tensor
from dtensor_llm.worlds.threads_scheduler import Event, Scheduler, name_ranks


class CollectiveMismatchError(RuntimeError):
    """The ranks of a group called collectives that do not fit together."""


class ThreadWork(dist.Work):
    """What a collective or a message returns; waiting for it lets other ranks run."""

    def __init__(self, scheduler: Scheduler, rank: int, event: Event, tensors: Any) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._rank = rank
        self._event = event
        self._tensors = tensors
        self.sender: int | None = None

    def wait(self, timeout: object = None) -> bool:  # noqa: ARG002 - c10d's signature
        if not self._event.done:
            self._scheduler.wait(self._rank, self._event)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._event.done

    def is_success(self) -> bool:
        return self._event.done

    def exception(self) -> None:
        return None

    def result(self) -> Any:
        self.wait()
        return self._tensors

    def get_future(self) -> torch.futures.Future:
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._tensors)
        return future

    def _source_rank(self) -> int:
        assert self.sender is not None
        return self.sender

    source_rank = _source_rank


@dataclass(slots=True)
class Slot:
    """One collective of a group, filling up."""

    calls: list[Call | None]
    event: Event
    arrived: int = 0


@dataclass(slots=True)
class Message:
    """One posted send or receive, by group ranks; `source` None receives from any rank."""

    tensor: Tensor
    source: int | None
    target: int
    tag: int
    event: Event
    work: ThreadWork


@dataclass(slots=True)
class Meeting:
    """What the members of one group share.

    Args:
        name: the group's name, the same on all members.
        ranks: the members' ranks in the world, by group rank.
    """

    name: str
    ranks: tuple[int, ...]
    slots: dict[int, Slot] = field(default_factory=dict)
    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)

    def describe(self) -> str:
        return f"group {self.name} of {name_ranks(list(self.ranks))}"


class ThreadGroup(dist.ProcessGroup):
    """One rank's membership in a group."""

    def __init__(self, scheduler: Scheduler, meeting: Meeting, rank: int) -> None:
        self._rank = meeting.ranks.index(rank)
        super().__init__(self._rank, len(meeting.ranks))
        self._scheduler = scheduler
        self._meeting = meeting
        self._world_rank = rank
        self._num_collectives = 0

    # What c10d asks about a group.

    def getBackendName(self) -> str:
        return "threaded"

    @property
    def group_name(self) -> str:
        return self._meeting.name

    @property
    def pg_name(self) -> str:
        return self._meeting.name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def __repr__(self) -> str:
        return f"ThreadGroup(rank {self._rank} in {self._meeting.describe()})"

    # Collectives.

    def _meet(self, call: Call) -> ThreadWork:
        """Leave this rank's part of the group's next collective; the last one computes it."""
        scheduler, meeting = self._scheduler, self._meeting
        number = self._num_collectives
        self._num_collectives += 1
        with scheduler.lock:
            scheduler.check()
            slot = meeting.slots.get(number)
            if slot is None:
                slot = meeting.slots[number] = self._open_slot(number)
            self._check_agreement(slot, call, number)
            slot.calls[self._rank] = call
            slot.arrived += 1
            last = slot.arrived == len(slot.calls)
            if last:
                del meeting.slots[number]
        if last:
            with torch.no_grad():
                COMPUTE[call.name](slot.calls)  # type: ignore[arg-type]  # all have arrived
            scheduler.fire(slot.event)
        return ThreadWork(scheduler, self._world_rank, slot.event, call.outputs)

    def _open_slot(self, number: int) -> Slot:
        meeting = self._meeting
        calls: list[Call | None] = [None] * len(meeting.ranks)

        def describe() -> str:
            here = next(call for call in calls if call is not None)
            missing = [rank for rank, call in zip(meeting.ranks, calls, strict=True) if call is None]
            return (
                f"{here}, collective {number} of {meeting.describe()}: "
                f"{name_ranks(missing)} did not come"
            )

        return Slot(calls, Event(describe))

    def _check_agreement(self, slot: Slot, call: Call, number: int) -> None:
        for rank, other in zip(self._meeting.ranks, slot.calls, strict=True):
            if other is None:
                continue
            if other.name != call.name or other.agree != call.agree:
                raise CollectiveMismatchError(
                    f"collective {number} of {self._meeting.describe()}: rank {rank} called "
                    f"{other}, but rank {self._world_rank} called {call}"
                )
            return

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> ThreadWork:
        return self._meet(
            Call("all_reduce", tensors, tensors, (_reduction(opts), *_metadata(tensors)))
        )

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> ThreadWork:
        agree = (_reduction(opts), f"root {opts.rootRank}", *_metadata(tensors))
        return self._meet(Call("reduce", tensors, tensors, agree))

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> ThreadWork:
        agree = (f"root {opts.rootRank}", *_metadata(tensors))
        return self._meet(Call("broadcast", tensors, tensors, agree))

    def barrier(self, opts: Any = None) -> ThreadWork:  # noqa: ARG002 - c10d's signature
        return self._meet(Call("barrier", (), ()))

    def allgather(self, outputs: Any, inputs: Sequence[Tensor], opts: Any = None) -> ThreadWork:  # noqa: ARG002
        return self._meet(Call("all_gather", outputs[0], inputs, (inputs[0].dtype,)))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> ThreadWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None  # noqa: ARG002
    ) -> ThreadWork:
        return self._meet(Call("all_gather_single", outputs, inputs, _metadata(inputs)))

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Any, opts: Any) -> ThreadWork:
        agree = (_reduction(opts), outputs[0].dtype)
        return self._meet(Call("reduce_scatter", outputs, inputs[0], agree))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> ThreadWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> ThreadWork:
        agree = (_reduction(opts), *_metadata(inputs))
        return self._meet(Call("reduce_scatter_single", outputs, inputs, agree))

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None  # noqa: ARG002
    ) -> ThreadWork:
        return self._meet(Call("all_to_all", outputs, inputs))

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,  # noqa: ARG002
    ) -> ThreadWork:
        splits = (input_splits, output_splits)
        return self._meet(Call("all_to_all_single", [output], [input], (input.dtype,), splits))

    def gather(self, outputs: Any, inputs: Sequence[Tensor], opts: Any) -> ThreadWork:
        agree = (f"root {opts.rootRank}", inputs[0].dtype)
        return self._meet(Call("gather", outputs[0] if outputs else (), inputs, agree))

    def scatter(self, outputs: Sequence[Tensor], inputs: Any, opts: Any) -> ThreadWork:
        agree = (f"root {opts.rootRank}", outputs[0].dtype)
        return self._meet(Call("scatter", outputs, inputs[0] if inputs else (), agree))

    # Point to point.

    def send(self, tensors: Sequence[Tensor], target: int, tag: int) -> ThreadWork:
        return self._post(tensors[0], self._rank, target, tag, sending=True)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> ThreadWork:
        return self._post(tensors[0], source, self._rank, tag, sending=False)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> ThreadWork:
        return self._post(tensors[0], None, self._rank, tag, sending=False)

    def _post(
        self, tensor: Tensor, source: int | None, target: int, tag: int, sending: bool
    ) -> ThreadWork:
        """Match a send with a receive posted earlier, or the other way round, or leave it."""
        scheduler, meeting = self._scheduler, self._meeting

        def describe() -> str:
            peer = target if sending else source
            where = "any rank" if peer is None else f"rank {meeting.ranks[peer]}"
            return (
                f"a {'send to' if sending else 'receive from'} {where} of "
                f"{describe_tensor(tensor)}, tag {tag}, in {meeting.describe()}"
            )

        event = Event(describe)
        work = ThreadWork(scheduler, self._world_rank, event, [tensor])
        mine = Message(tensor, source, target, tag, event, work)
        with scheduler.lock:
            scheduler.check()
            other = _take_match(meeting.receives if sending else meeting.sends, mine)
            if other is None:
                (meeting.sends if sending else meeting.receives).append(mine)
        if other is not None:
            sent, received = (mine, other) if sending else (other, mine)
            with torch.no_grad():
                copy(received.tensor, sent.tensor)
            received.work.sender = sent.source
            scheduler.fire(mine.event)
            scheduler.fire(other.event)
        return work


def _take_match(posted: list[Message], mine: Message) -> Message | None:
    for index, other in enumerate(posted):
        sources = {other.source, mine.source} - {None}
        if other.target == mine.target and other.tag == mine.tag and len(sources) == 1:
            return posted.pop(index)
    return None


def _reduction(opts: Any) -> str:
    return "SUM" if opts is None else opts.reduceOp.op.name


def _metadata(tensors: Sequence[Tensor]) -> tuple[object, ...]:
    return tuple((tensor.dtype, tensor.shape) for tensor in tensors)
