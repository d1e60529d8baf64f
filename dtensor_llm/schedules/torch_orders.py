"""The seven schedules in the order in which torch executes them, from torch's own classes.

GPipe and 1F1B are played with a stage that computes nothing and takes notes: what torch 2.13 lists
as their `pipeline_order` is not what it runs (the last rank's first forward is of microbatch 1
there, and microbatch m is one too many). The others run what they list.

| name                    | stages on ranks           | admits                                |
|-------------------------|---------------------------|---------------------------------------|
| gpipe                   | one each                  | any m                                 |
| 1f1b                    | one each                  | m >= p                                |
| interleaved-1f1b        | v each, in a loop         | m that max(1, m // p) rounds divide   |
| looped-bfs              | v each, in a loop         | any m                                 |
| interleaved-zero-bubble | v each, in a loop         | as interleaved-1f1b                   |
| zbv                     | two each, down and up a V | any m                                 |
| dualpipev               | two each, down and up a V | m >= 2p                               |

m: microbatches, p: ranks, v: stages on each. In a loop rank r has stages r, r + p, r + 2p, ...; in
a V stages r and 2p - 1 - r.
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
NAMES = (*ONE_STAGE, *LOOP, *V_SHAPED)


def default_stages_per_rank(name: str) -> int:
    """1 for the schedules that know no other, else 2."""
    return 1 if name in ONE_STAGE else 2


def refusal(
    name: str, *, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> str | None:
    """Why torch does not run a schedule so: given, rule and cure; None where it does."""
    p, m, v = num_ranks, num_microbatches, stages_per_rank
    fixed = 1 if name in ONE_STAGE else 2
    if name not in LOOP and v != fixed:
        return f"{name} has {fixed} stages per rank, not {v}".replace("1 stages", "1 stage")
    least = {"1f1b": p, "dualpipev": 2 * p}.get(name, 1)
    if m < least:
        return f"{name} with {p} ranks needs at least {least} microbatches, not {m}"
    rounds = max(1, m // p)
    if name in ("interleaved-1f1b", "interleaved-zero-bubble") and m % rounds:
        return (
            f"{name} on {p} ranks runs {m} microbatches in {m} // {p} = {rounds} equal rounds, but "
            f"{m} % {rounds} = {m % rounds}; {m // p * p} or {(m // p + 1) * p} would fit"
        )
    return None


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
