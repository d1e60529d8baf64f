"""The bounds that a run is held to, and the report that comes of it.

| dtype    | bound                                                                              |
|----------|------------------------------------------------------------------------------------|
| float64  | 1e-12, for 3 steps at lr <= 1e-2 and for 20 at lr <= 1e-3; beyond, 10 x the error   |
|          | of a control: the reference again, with its microbatches in reverse order            |
| others   | 2 x what one device of that dtype is away from the float64 reference: the largest    |
|          | error of a tensor, the root mean square over all elements of a quantity, and for     |
|          | scalars the largest error over 16 seeds                                             |

Why not tensor by tensor in lower precision: whether one tensor rounds well is chance; whether a
whole quantity is twice as far off as one device is not.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from dtensor_llm.parity.difference import (
    Difference,
    Size,
    difference,
    over,
    relative_errors,
    rms_error,
    size_of,
)
from dtensor_llm.parity.report import Report, Row
from dtensor_llm.parity.run import QUANTITIES, Run, prepared

BOUND = 1e-12  # float64: 3 steps at lr <= 1e-2, or 20 steps at lr <= 1e-3
CONTROL_FACTOR = 10.0  # beyond that: times the error of the control
YARDSTICK_FACTOR = 2.0  # in lower precision: times the error of one device
SCALARS = ("loss", "gradient norm")

Differences = Mapping[int, Mapping[str, Mapping[str, Difference]]]
"""{step: {quantity: {tensor: difference}}}"""


@dataclass(frozen=True)
class Expectation:
    """What a run is held to.

    Args:
        reference: one device in float64.
        control: the same again in another order of sums, where the fixed bound does not hold.
        yardstick: one device in the dtype of the run, where that is lower than float64.
        scalars: with a yardstick, its largest error of loss and gradient norm over many seeds.
        bound: of float64 without a control.
    """

    reference: Run
    control: Run | None = None
    yardstick: Run | None = None
    scalars: Mapping[str, float] | None = None
    bound: float = BOUND


@dataclass(frozen=True)
class Comparison:
    """A run and the reference, number by number."""

    scalars: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    differences: Differences
    sizes: Mapping[int, Mapping[str, Mapping[str, Size]]]

    def steps_of(self, quantity: str) -> list[int]:
        return [step for step, found in sorted(self.differences.items()) if quantity in found]

    def row(self, quantity: str, step: int, bound: float) -> Row:
        """The worst tensor of a quantity at one step."""
        found, sizes = self.differences[step][quantity], self.sizes[step][quantity]
        errors = relative_errors(quantity, found, sizes)
        worst = max(errors, key=lambda name: errors[name])
        shape = sizes[worst].shape
        index = torch.unravel_index(torch.tensor(found[worst].place), shape) if shape else ()
        return Row(
            quantity,
            worst,
            errors[worst],
            bound,
            step,
            tuple(map(int, index)),
            found[worst].value,
            found[worst].expected,
        )

    def worst(self, quantity: str, bound: float) -> Row:
        """The worst tensor of all steps."""
        rows = [self.row(quantity, step, bound) for step in self.steps_of(quantity)]
        return max(rows, key=lambda row: row.error)

    @property
    def quantities(self) -> list[str]:
        """Those of tensors, in their order."""
        return [quantity for quantity in QUANTITIES if self.steps_of(quantity)]


def compare_runs(run: Run, reference: Run) -> Comparison:
    """Two whole runs on one device; steps whose tensors only one of them has are left out."""
    differences: dict[int, dict[str, dict[str, Difference]]] = {}
    for step in sorted(run.tensors_at.keys() & reference.tensors_at.keys()):
        own, whole = run.tensors_at[step], reference.tensors_at[step]
        differences[step] = {
            quantity: {
                name: difference(prepared(quantity, a), prepared(quantity, b), b.shape)
                for name, b in whole[quantity].items()
                for a in [own[quantity][name]]
            }
            for quantity in whole
            if quantity in own
        }
    return comparison(run.losses, run.gradient_norms, differences, reference)


def comparison(
    losses: Sequence[float],
    gradient_norms: Sequence[float],
    differences: Differences,
    reference: Run,
) -> Comparison:
    """From differences that have been taken, wherever the run was."""
    sizes = {
        step: {
            quantity: {
                name: size_of(prepared(quantity, reference.tensors_at[step][quantity][name]))
                for name in names
            }
            for quantity, names in found.items()
        }
        for step, found in differences.items()
    }
    pairs = {
        "loss": (losses, reference.losses),
        "gradient norm": (gradient_norms, reference.gradient_norms),
    }
    return Comparison(pairs, differences, sizes)


def judge(run: Comparison, expected: Expectation) -> Report:
    """The report of a run against what is expected."""
    rows = (
        by_yardstick(run, expected) if expected.yardstick is not None else by_bound(run, expected)
    )
    report = Report(tuple(rows))
    if report.passed:
        return report
    bounds = {row.quantity: row.bound for row in rows}
    return Report(report.rows, next(differing(run, bounds), None))


def by_bound(run: Comparison, expected: Expectation) -> list[Row]:
    """float64: every recorded step, by the fixed bound or by the control's error."""
    bounds = dict.fromkeys([*SCALARS, *run.quantities], expected.bound)
    if expected.control is not None:
        control = compare_runs(expected.control, expected.reference)
        bounds = {q: max(b, CONTROL_FACTOR * error_of(control, q)) for q, b in bounds.items()}
    rows = [scalar_row(name, *run.scalars[name], bounds[name]) for name in SCALARS]
    return rows + [run.worst(quantity, bounds[quantity]) for quantity in run.quantities]


def by_yardstick(run: Comparison, expected: Expectation) -> list[Row]:
    """Lower precision: the first gradients and the last state, against one device's error."""
    assert expected.yardstick is not None
    assert expected.scalars is not None, "a yardstick needs the error of its scalars"
    yardstick = compare_runs(expected.yardstick, expected.reference)
    rows = [
        scalar_row(name, *run.scalars[name], YARDSTICK_FACTOR * expected.scalars[name])
        for name in SCALARS
    ]
    for quantity in run.quantities:
        steps = run.steps_of(quantity)
        step = steps[0] if quantity == "gradient" else steps[-1]
        own = yardstick.row(quantity, step, 0.0)
        worst = run.row(quantity, step, YARDSTICK_FACTOR * own.error)
        rms, own_rms = (
            rms_error(c.differences[step][quantity], c.sizes[step][quantity])
            for c in (run, yardstick)
        )
        rows.append(worst)
        rows.append(Row(f"{quantity} rms", "all", rms, YARDSTICK_FACTOR * own_rms, step))
    return rows


def error_of(run: Comparison, quantity: str) -> float:
    if quantity in run.scalars:
        return scalar_row(quantity, *run.scalars[quantity], 0.0).error
    return run.worst(quantity, 0.0).error


def differing(run: Comparison, bounds: Mapping[str, float]) -> Iterator[Row]:
    """Every error beyond its bound, in the order in which the numbers come about."""
    for step in range(len(run.scalars["loss"][0])):
        for quantity in ("loss", "gradient", "gradient norm", *QUANTITIES[1:]):
            if quantity in run.scalars:
                row = scalar_row(quantity, *run.scalars[quantity], bounds[quantity], step)
            elif step in run.steps_of(quantity):
                row = run.row(quantity, step, bounds[quantity])
            else:
                continue
            if not row.passed:
                yield row


def scalar_row(
    quantity: str, a: Sequence[float], b: Sequence[float], bound: float, step: int | None = None
) -> Row:
    """The error at a step, or else the largest one; the steps are the entries of one tensor."""
    assert len(a) == len(b), f"{len(a)} steps against the reference's {len(b)}"
    largest = max(map(abs, b))
    errors = [over(abs(x - y), largest) for x, y in zip(a, b, strict=True)]
    if step is None:
        step = max(range(len(errors)), key=lambda index: errors[index])
    return Row(quantity, f"step {step + 1}", errors[step], bound, step, (), a[step], b[step])
