"""When a rank has the weights of its pipeline stages whole, where `fully_shard` has cut them.

torch's runtime for several stages gathers the next three stages that have something to do, as soon
as they are among these, and frees all others. GPipe and 1F1B of one stage do nothing of the kind.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dtensor_llm.schedules.actions import Step

MOST_WHOLE = 3
"""Stages that are whole at once, but for the two of a pair where torch looks at both."""


class Moment(NamedTuple):
    """A step of a rank, and what comes right before it."""

    freed: tuple[int, ...]  # stages
    gathered: tuple[int, ...]
    step: Step


def moments(program: Sequence[Step]) -> Iterator[Moment]:
    """What torch frees and gathers before each step of a rank of several stages."""
    whole: list[int] = []
    steps = [step for step in program if step]
    for index, step in enumerate(steps):
        wanted = next_stages(steps[index:])
        freed = tuple(stage for stage in whole if stage not in wanted)
        gathered = tuple(stage for stage in wanted if stage not in whole)
        whole = [stage for stage in whole if stage in wanted] + list(gathered)
        yield Moment(freed, gathered, step)


def next_stages(steps: Sequence[Step]) -> list[int]:
    """The next stages that have something to do, each once."""
    found: list[int] = []
    for step in steps:
        found += [a.stage for a in step if a.stage not in found]
        if len(found) >= MOST_WHOLE:
            break
    return found


def stage_gathers(program: Sequence[Step], stage: int, *, frees: bool) -> tuple[int, int]:
    """How often the blocks of a stage are gathered in a step, and what it has in no block.

    Args:
        program: of the rank, of several stages.
        stage: one of them.
        frees: whether a block is freed after its forward.
    """
    in_block = in_rest = 0
    is_whole = False  # the blocks
    for moment in moments(program):
        is_whole = is_whole and stage not in moment.freed
        if stage in moment.gathered:
            in_block += not is_whole
            in_rest += 1
            is_whole = True
        for action in moment.step:
            if action.stage == stage:
                in_block += not is_whole
                is_whole = not (frees and action.kind == "F")
    return in_block, in_rest
