"""The seven schedules in the order in which torch executes them, from torch's own classes.

GPipe and 1F1B are played with a stage that computes nothing and takes notes: what torch 2.13 lists
as their `pipeline_order` is not what it runs (the last rank's first forward is of microbatch 1
there, and microbatch m is one too many). The others run what they list.
"""

from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from dtensor_llm.schedules.actions import Action, Program, Schedule, parse_step
from dtensor_llm.schedules.kinds import NAMES, default_stages_per_rank, refusal

ONE_STAGE: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
LOOP: dict[str, type[PipelineScheduleMulti]] = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "looped-bfs": ScheduleLoopedBFS,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
}
V_SHAPED: dict[str, type[PipelineScheduleMulti]] = {
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


def make_schedule(
    name: str, *, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None
) -> Schedule:
    """What each rank does, as torch runs it.

    Args:
        name: one of NAMES.
        num_ranks: p, at least 1.
        num_microbatches: m, at least 1.
        stages_per_rank: v; None takes the schedule's own.

    Raises:
        ValueError: see `refusal`.
    """
    if name not in NAMES:
        raise ValueError(f"{name} is not a schedule: choose one of {', '.join(NAMES)}")
    v = default_stages_per_rank(name) if stages_per_rank is None else stages_per_rank
    problem = refusal(
        name, num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=v
    )
    if problem is not None:
        raise ValueError(problem)
    if name in ONE_STAGE:
        played = (_play(ONE_STAGE[name], r, num_ranks, num_microbatches) for r in range(num_ranks))
        return Schedule(tuple(played), late=True)
    stages: Any = [
        SimpleNamespace(num_stages=v * num_ranks, group_size=num_ranks, group_rank=0, submod=None)
        for _ in range(v)
    ]
    planned = {**LOOP, **V_SHAPED}[name](stages, num_microbatches)
    orders = planned.pipeline_order_with_comms  # type: ignore[attr-defined]  # of all five
    return Schedule(
        tuple(
            tuple(parse_step(str(action)) for action in orders[rank] if action.is_compute_op)
            for rank in range(num_ranks)
        )
    )


class _Notes:
    """Stands in for a torch stage: sends and computes nothing, and writes down what it is told."""

    is_last = False  # of the loss nothing is to be computed either

    def __init__(self, stage: int, num_stages: int) -> None:
        self.stage_index, self.num_stages = stage, num_stages
        self.program: list[tuple[Action]] = []

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.program.append((Action(self.stage_index, "F", microbatch),))

    def backward_one_chunk(self, microbatch: int, **_: Any) -> None:
        self.program.append((Action(self.stage_index, "B", microbatch),))

    def nothing(self, *_: Any) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = nothing
    perform_reduce_grad = nothing


def _play(cls: type[PipelineScheduleSingle], stage: int, num_stages: int, m: int) -> Program:
    notes: Any = _Notes(stage, num_stages)
    schedule = cls(notes, m)
    schedule._initialize_stage = notes.nothing  # type: ignore[method-assign]  # no tensors to measure
    schedule._step_microbatches()
    return tuple(notes.program)
