"""The process group of the threads world: c10d's interface to a meeting in memory."""

# c10d declares each collective twice, with and without an options object; it calls the first form.
# mypy: disable-error-code="override"

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_llm.worlds import observation
from dtensor_llm.worlds.threads_collectives import Call, metadata
from dtensor_llm.worlds.threads_meeting import Meeting, Message
from dtensor_llm.worlds.threads_scheduler import Event, Scheduler

# DeviceMesh tells the ranks of one process apart under this backend name alone.
BACKEND = observation.THREADS

# What the observers of a rank call each collective, and which of its tensors are the whole one.
_SEEN_AS = {
    "all_reduce": ("all-reduce", "inputs"),
    "all_gather": ("all-gather", "outputs"),
    "all_gather_single": ("all-gather", "outputs"),
    "reduce_scatter": ("reduce-scatter", "inputs"),
    "reduce_scatter_single": ("reduce-scatter", "inputs"),
    "all_to_all": ("all-to-all", "inputs"),
    "all_to_all_single": ("all-to-all", "inputs"),
    "broadcast": ("broadcast", "inputs"),
    "reduce": ("reduce", "inputs"),
    "gather": ("gather", "inputs"),
    "scatter": ("scatter", "outputs"),
    "barrier": ("barrier", "inputs"),
}


class ThreadWork(dist.Work):
    """What a collective or a message returns; waiting for it lets other ranks run."""

    def __init__(self, scheduler: Scheduler, rank: int, event: Event, result: Any) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._rank = rank
        self._event = event
        self._result = result

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002 - a time-out cannot help here
        if not self._event.done:
            self._scheduler.wait(self._rank, self._event)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._event.done

    def is_success(self) -> bool:
        return self._event.done

    def result(self) -> Any:
        self.wait()
        return self._result

    def get_future(self) -> torch.futures.Future:
        """A future that is done: waiting for it elsewhere would keep this rank's token."""
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self.result())
        return future


class MessageWork(ThreadWork):
    """The work of one send or receive."""

    def __init__(self, scheduler: Scheduler, rank: int, message: Message) -> None:
        super().__init__(scheduler, rank, message.event, [message.tensor])
        self._message = message

    def _source_rank(self) -> int:
        self.wait()
        assert self._message.source is not None
        return self._message.source

    source_rank = _source_rank


class ThreadGroup(dist.ProcessGroup):
    """One rank's membership in a group. The method names and arguments are c10d's."""

    def __init__(self, meeting: Meeting, world_rank: int) -> None:
        self._group_rank = meeting.ranks.index(world_rank)
        # The form without a store is not in torch's stubs.
        super().__init__(self._group_rank, len(meeting.ranks))  # type: ignore[call-arg]
        self.meeting = meeting
        self._world_rank = world_rank
        self._num_joined = 0

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return self.meeting.name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def __repr__(self) -> str:
        return f"ThreadGroup(rank {self._world_rank} in {self.meeting})"

    def _join(self, call: Call) -> ThreadWork:
        operation, whole = _SEEN_AS[call.name]
        observation.report(operation, self.meeting.ranks, getattr(call, whole))
        number, self._num_joined = self._num_joined, self._num_joined + 1
        event = self.meeting.join(self._group_rank, number, call)
        return ThreadWork(self.meeting.scheduler, self._world_rank, event, call.outputs)

    def _post(
        self, tensor: Tensor, source: int | None, target: int, tag: int, sending: bool
    ) -> MessageWork:
        observation.report("send" if sending else "recv", self.meeting.ranks, [tensor])
        message = self.meeting.post(tensor, source, target, tag, sending)
        return MessageWork(self.meeting.scheduler, self._world_rank, message)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> ThreadWork:
        reduction = _reduction(opts)
        return self._join(
            Call("all_reduce", tensors, tensors, reduction, tensors=metadata(tensors))
        )

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> ThreadWork:
        reduction = _reduction(opts)
        return self._join(
            Call("reduce", tensors, tensors, reduction, opts.rootRank, metadata(tensors))
        )

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> ThreadWork:
        return self._join(
            Call("broadcast", tensors, tensors, root=opts.rootRank, tensors=metadata(tensors))
        )

    def barrier(self, opts: Any = None) -> ThreadWork:  # noqa: ARG002
        return self._join(Call("barrier"))

    def allgather(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: Any = None,  # noqa: ARG002
    ) -> ThreadWork:
        return self._join(Call("all_gather", outputs[0], inputs))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> ThreadWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any = None,  # noqa: ARG002
    ) -> ThreadWork:
        return self._join(Call("all_gather_single", outputs, inputs, tensors=metadata(inputs)))

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> ThreadWork:
        return self._join(
            Call(
                "reduce_scatter", outputs, inputs[0], _reduction(opts), tensors=metadata(inputs[0])
            )
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> ThreadWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> ThreadWork:
        reduction = _reduction(opts)
        return self._join(
            Call("reduce_scatter_single", outputs, inputs, reduction, tensors=metadata(inputs))
        )

    def alltoall(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any = None,  # noqa: ARG002
    ) -> ThreadWork:
        return self._join(Call("all_to_all", outputs, inputs))

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,  # noqa: ARG002
    ) -> ThreadWork:
        splits = (input_splits, output_splits)
        return self._join(Call("all_to_all_single", [output], [input], splits=splits))

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> ThreadWork:
        return self._join(Call("gather", outputs[0] if outputs else (), inputs, root=opts.rootRank))

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> ThreadWork:
        return self._join(Call("scatter", outputs, inputs[0] if inputs else (), root=opts.rootRank))

    def send(self, tensors: Sequence[Tensor], target: int, tag: int) -> MessageWork:
        return self._post(tensors[0], self._group_rank, target, tag, sending=True)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> MessageWork:
        return self._post(tensors[0], source, self._group_rank, tag, sending=False)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> MessageWork:
        return self._post(tensors[0], None, self._group_rank, tag, sending=False)


def _reduction(opts: Any) -> str:
    return "SUM" if opts is None else opts.reduceOp.op.name
