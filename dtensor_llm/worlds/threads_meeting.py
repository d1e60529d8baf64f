"""Where the members of one group meet in memory.

A collective is a slot with a place per member: each rank leaves its call there and goes on, and
the last to arrive computes the result for all. A message is a slot for two, the sender and the
receiver; nothing is copied until both are there.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dtensor_llm.worlds import name_ranks
from dtensor_llm.worlds.threads_collectives import COMPUTE, Call, copy, describe_tensor
from dtensor_llm.worlds.threads_scheduler import Event, Scheduler


class MismatchError(RuntimeError):
    """The ranks of a group made calls that do not fit together."""


@dataclass(slots=True)
class _Slot:
    """One collective, filling up."""

    calls: list[Call | None]
    event: Event
    arrived: int = 0


@dataclass(slots=True)
class Message:
    """One posted send or receive. Ranks are group ranks; source None receives from any.

    `source` of a receive is the sender as soon as there is one.
    """

    tensor: Tensor
    source: int | None
    target: int
    tag: int
    event: Event


@dataclass(slots=True)
class Meeting:
    """The meeting place of one group.

    Args:
        scheduler: of the world; its lock guards this object.
        name: the group's name, the same on all members.
        ranks: the members' ranks in the world, by group rank.
    """

    scheduler: Scheduler
    name: str
    ranks: tuple[int, ...]
    _slots: dict[int, _Slot] = field(default_factory=dict)
    _sends: list[Message] = field(default_factory=list)
    _receives: list[Message] = field(default_factory=list)

    def __str__(self) -> str:
        return f"group {self.name} ({name_ranks(self.ranks)})"

    def join(self, rank: int, number: int, call: Call) -> Event:
        """Take part in a collective, without waiting for the others.

        Args:
            rank: group rank of the caller.
            number: how many collectives the caller has joined before on this group.

        Returns:
            The event that the outputs of all ranks are written.

        Raises:
            MismatchError: the calls of two ranks do not fit together.
        """
        with self.scheduler.lock:
            self.scheduler.check()
            slot = self._slots.get(number)
            if slot is None:
                slot = self._slots[number] = self._open_slot(number)
            self._check_agreement(slot, rank, number, call)
            slot.calls[rank] = call
            slot.arrived += 1
            complete = slot.arrived == len(self.ranks)
            if complete:
                del self._slots[number]
        if complete:
            self._compute(number, [call for call in slot.calls if call is not None])
            slot.calls.clear()  # whoever keeps the event keeps no tensor of another rank
            self.scheduler.fire(slot.event)
        return slot.event

    def unfinished(self) -> list[str]:
        """What was begun here and is not done, in words."""
        collectives = [slot.event.describe() for _, slot in sorted(self._slots.items())]
        waiting = [(message.source or 0, message.event) for message in self._sends]
        waiting += [(message.target, message.event) for message in self._receives]
        return collectives + [
            f"rank {self.ranks[rank]} waits for {event.describe()}" for rank, event in waiting
        ]

    def _open_slot(self, number: int) -> _Slot:
        calls: list[Call | None] = [None] * len(self.ranks)

        def describe() -> str:
            if not calls:
                return f"collective {number} of {self}, which is done"
            here = next(call for call in calls if call is not None)
            missing = [rank for rank, call in zip(self.ranks, calls, strict=True) if call is None]
            return f"{here}, collective {number} of {self}: {name_ranks(missing)} did not come"

        return _Slot(calls, Event(describe))

    def _check_agreement(self, slot: _Slot, rank: int, number: int, call: Call) -> None:
        for other_rank, other in zip(self.ranks, slot.calls, strict=True):
            if other is not None:
                if not call.agrees(other):
                    raise MismatchError(
                        f"collective {number} of {self}: rank {other_rank} called {other}, "
                        f"but rank {self.ranks[rank]} called {call}"
                    )
                return

    def _compute(self, number: int, calls: list[Call]) -> None:
        try:
            with _unseen():
                COMPUTE[calls[0].name](calls)
        except (ValueError, IndexError, RuntimeError) as error:
            ranks_by_call: dict[str, list[int]] = {}
            for rank, call in zip(self.ranks, calls, strict=True):
                ranks_by_call.setdefault(str(call), []).append(rank)
            called = "; ".join(f"{name_ranks(r)}: {call}" for call, r in ranks_by_call.items())
            raise MismatchError(f"collective {number} of {self}: {error} ({called})") from error

    def post(
        self, tensor: Tensor, source: int | None, target: int, tag: int, sending: bool
    ) -> Message:
        """Send or receive, without waiting for the other side.

        Raises:
            MismatchError: the two sides' tensors do not fit.
        """
        peer = target if sending else source
        # Not of the message, which holds the event: its tensor would live in a cycle.
        event = Event(lambda: self._describe_message(tensor, peer, tag, sending))
        mine = Message(tensor, source, target, tag, event)
        with self.scheduler.lock:
            self.scheduler.check()
            other = _take_match(self._receives if sending else self._sends, mine)
            if other is None:
                (self._sends if sending else self._receives).append(mine)
        if other is not None:
            self._deliver(*((mine, other) if sending else (other, mine)))
        return mine

    def _deliver(self, sent: Message, received: Message) -> None:
        try:
            with _unseen():
                copy(received.tensor, sent.tensor)
        except ValueError as error:
            raise MismatchError(
                f"the message with tag {sent.tag} from rank {self.ranks[sent.source or 0]} "
                f"to rank {self.ranks[sent.target]} in {self}: {error}"
            ) from error
        received.source = sent.source
        self.scheduler.fire(sent.event)
        self.scheduler.fire(received.event)

    def _describe_message(self, tensor: Tensor, peer: int | None, tag: int, sending: bool) -> str:
        where = "any rank" if peer is None else f"rank {self.ranks[peer]}"
        return (
            f"{where} to {'receive' if sending else 'send'} "
            f"{describe_tensor(tensor)}, tag {tag}, in {self}"
        )


def _take_match(posted: list[Message], mine: Message) -> Message | None:
    """The first posted message that fits, taken off the list; None if there is none."""
    for index, other in enumerate(posted):
        named = {other.source, mine.source} - {None}
        if other.target == mine.target and other.tag == mine.tag and len(named) == 1:
            return posted.pop(index)
    return None


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Like a network, the copies between ranks are seen by neither autograd nor dispatch modes."""
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        yield
