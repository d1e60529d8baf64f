"""What a pipeline schedule is made of, written as torch writes it.

`2F0` is the forward of microbatch 0 on stage 2, `2B0` its whole backward. A split backward is
`2I0`, the gradient of the stage's input, which the stage before waits for, and later `2W0`, those
of its weights, which nobody waits for. A step is what a rank does before it sends anything on: one
action, or DualPipeV's pair of a forward and a backward, `(0F3;7B0)OVERLAP_F_B`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward of the input",
    "W": "backward of the weights",
}
_ACTION = re.compile(r"(\d{1,18})([FBIW])(\d{1,18})")
_PAIR = re.compile(r"\((.+);(.+)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One thing that a stage does with one microbatch; `kind` is F, B, I or W."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Step = tuple[Action, ...]
Program = tuple[Step, ...]


def parse_action(text: str) -> Action:
    """`2F0` as an action.

    Raises:
        ValueError: it is none.
    """
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an action: write the stage, one of F B I W, microbatch")
    stage, kind, microbatch = match.groups()
    return Action(int(stage), kind, int(microbatch))


def parse_step(text: str) -> Step:
    """One cell of a grid: `` (idle), `2F0` or `(0F3;7B0)OVERLAP_F_B`.

    Raises:
        ValueError: it is none of these.
    """
    text = text.strip()
    if not text:
        return ()
    pair = _PAIR.fullmatch(text)
    if pair is None:
        return (parse_action(text),)
    step = tuple(parse_action(part.strip()) for part in pair.groups())
    if [action.kind for action in step] != ["F", "B"]:
        raise ValueError(f"{text!r} must hold an F and then a B")
    return step


def step_text(step: Step) -> str:
    """The inverse of `parse_step`."""
    if len(step) < 2:
        return "".join(map(str, step))
    return f"({';'.join(map(str, step))})OVERLAP_F_B"


@dataclass(frozen=True)
class Schedule:
    """A program for each rank; sound only after `check.sweep` found it so.

    torch's GPipe and 1F1B receive `late`: right before the action that needs it, which then waits
    for the whole transfer. All others, and what is read from a file, receive beside other actions.
    """

    programs: tuple[Program, ...]
    late: bool = field(default=False, compare=False)

    def actions(self, rank: int) -> Iterator[Action]:
        """What a rank does, in its order."""
        for step in self.programs[rank]:
            yield from step

    @cached_property
    def rank_of_stage(self) -> dict[int, int]:
        """The rank that has each stage."""
        return {
            action.stage: rank
            for rank in range(len(self.programs))
            for action in self.actions(rank)
        }

    @property
    def num_ranks(self) -> int:
        return len(self.programs)

    @cached_property
    def num_stages(self) -> int:
        return 1 + max(self.rank_of_stage)

    @property
    def num_microbatches(self) -> int:
        return 1 + max(action.microbatch for action in self.actions(0))

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, in the order of the model."""
        return tuple(
            tuple(sorted(stage for stage, home in self.rank_of_stage.items() if home == rank))
            for rank in range(self.num_ranks)
        )


def needs(action: Action, num_stages: int) -> list[Action]:
    """The outcomes (see `outcome`) that must be there before an action can start."""
    stage, kind, microbatch = action
    if kind == "F":
        return [Action(stage - 1, "F", microbatch)] if stage else []
    if kind == "W":
        return [Action(stage, "B", microbatch)]
    own = Action(stage, "F", microbatch)
    return [own] if stage == num_stages - 1 else [own, Action(stage + 1, "B", microbatch)]


def outcome(action: Action) -> Action:
    """What others may wait for: activations, named by their F; gradients by B, also those of I.

    (And of W, which comes after its I: there it is already.)
    """
    return action if action.kind == "F" else action._replace(kind="B")


def receiver(action: Action, rank_of_stage: Mapping[int, int]) -> int | None:
    """The rank that an action's outcome is sent to; None where it stays on its rank."""
    neighbour = {"F": action.stage + 1, "W": None}.get(action.kind, action.stage - 1)
    rank = rank_of_stage.get(neighbour) if neighbour is not None else None
    return None if rank == rank_of_stage[action.stage] else rank
