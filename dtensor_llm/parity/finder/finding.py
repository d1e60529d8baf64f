"""What the search for the first divergence comes to, in numbers and in words."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dtensor_llm.parity.report import two_values

PHASES = ("data", "weight", "forward", "loss", "backward", "gradient", "gradient norm", "update")
"""Of a step, in their order: `weight` is what the model holds before it."""

ROUNDING = "rounding"  # in place of a phase: no number differs by more than rounding does


@dataclass(frozen=True)
class Finding:
    """The first number of a run that is not the reference's.

    Args:
        step: counted from 0.
        phase: one of PHASES, or ROUNDING.
        name: the module or parameter to look into; in the backward pass the module whose backward
            made the wrong gradient; for scalars what they are.
        at: whose value differs, as the rank calls it: not always `name`, which in the backward pass
            is the module that made the gradient.
        what: the value: "output", "input", "gradient", "weight", "exp_avg", ...
        microbatch: from 0; None where the value is of the whole batch.
        rank: the first of those on which it differs most.
        coordinates: of that rank, on the axes of more than one rank.
        index: of the worst element in the whole tensor.
        value: what was found there.
        expected: what the reference has there.
        error: relative to the tensor's largest entry; infinite for what is not finite or not there.
        num_names: how many values of that kind differ: for parameters, how many of them.
        neighbours: what is right: before it in the forward pass, after it in the backward pass.
        diagnosis: the class of bug, where the numbers say it; else empty.
        tolerance: the largest error that counts as rounding.
    """

    step: int
    phase: str
    name: str
    at: str = ""
    what: str = ""
    microbatch: int | None = None
    rank: int = 0
    coordinates: Mapping[str, int] | None = None
    index: tuple[int, ...] = ()
    value: float | None = None
    expected: float | None = None
    error: float = 0.0
    num_names: int = 1
    neighbours: tuple[str, ...] = ()
    diagnosis: str = ""
    tolerance: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """All that the finding points at: modules, parameters and their modules, and the phase."""
        is_parameter = self.phase in ("weight", "gradient", "update")
        owners = [name.rpartition(".")[0] for name in (self.name, self.at) if is_parameter]
        taker = ["loss"] if self.name == "labels" else []  # is given them
        found = [self.name, self.at, *owners, *taker, self.phase]
        return tuple(dict.fromkeys(name for name in found if name))

    def points_at(self, pattern: str) -> bool:
        """Whether a module, parameter or phase whose name fits (fnmatch) is what was found."""
        return any(fnmatchcase(name, pattern) for name in self.names)

    def __str__(self) -> str:
        if self.phase == ROUNDING:
            return f"no divergence: {self.diagnosis}"
        lines = [f"first divergence: step {self.step + 1}, {self.place}"]
        if self.value is not None:
            lines.append(f"  {self.numbers}")
        lines += [f"  {line}" for line in (self.context, self.diagnosis) if line]
        return "\n".join(lines)

    @property
    def place(self) -> str:
        """`forward pass: output of blocks.0.mlp, microbatch 1, rank 3 (tp 1)`."""
        phase = f"{self.phase} pass" if self.phase in ("forward", "backward") else self.phase
        parts = [phase if self.name == self.phase else f"{phase}: {self.subject}"]
        if self.microbatch is not None:
            parts.append(f"microbatch {self.microbatch + 1}")
        where = ", ".join(f"{axis} {index}" for axis, index in (self.coordinates or {}).items())
        return ", ".join([*parts, f"rank {self.rank}" + (f" ({where})" if where else "")])

    @property
    def subject(self) -> str:
        value = f"{self.what} of {self.at}" if self.what else self.at
        if self.phase == "backward":
            return f"gradient at the {value}"
        return (
            value if self.phase == "forward" or self.at == self.name else f"{value} ({self.name})"
        )

    @property
    def numbers(self) -> str:
        index = f"at [{', '.join(map(str, self.index))}] " if self.index else ""
        text = f"{index}{two_values(self.value, self.expected)}"
        if self.phase == "data":
            return text
        return (
            f"{text}: error {self.error:.1e}, where rounding gives less than {self.tolerance:.0e}"
        )

    @property
    def context(self) -> str:
        """What is known to be right, and so where the bug must be."""
        near = ", ".join(self.neighbours)
        count = "one parameter" if self.num_names == 1 else f"{self.num_names} parameters"
        if self.phase == "weight":
            cause = "initial weights" if self.step == 0 else "way from the optimizer to the model"
            return f"before the step, the values of {count} are wrong: look into the {cause}"
        if self.phase == "forward":
            known = f"what it is made of is right ({near})" if near else "nothing comes before it"
            return f"{known}: look into {self.name}"
        if self.phase == "loss" and self.what:
            return "logits and labels are right: look into the loss function"
        if self.phase == "backward":
            place = f"between {near} and the {self.subject.removeprefix('gradient at the ')}"
            return (
                "the forward pass is right, and so is every gradient that comes before on the way "
                f"back: look into the backward pass of {self.name}" + f", {place}" * bool(near)
            )
        if self.phase == "gradient":
            return (
                "all activations and their gradients are right, but not the gradients of "
                f"{count}: look into how they are added up or reduced"
            )
        if self.phase == "update" and self.what:
            return f"the gradients are right, but not the {self.what} of {count}"
        return ""
