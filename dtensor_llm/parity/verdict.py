"""The bounds that a run is held to, and the report that comes of it.

| dtype    | bound                                                                              |
|----------|------------------------------------------------------------------------------------|
| float64  | 1e-12; where that is broken, 10 x the error of a control, if it is more: the        |
|          | reference again, with its microbatches in reverse order                             |
| others   | 2 x what one device of that dtype is away from the float64 reference, in the worst   |
|          | of 16 seeds: as the root mean square over all elements of a quantity, and as the     |
|          | largest error of a tensor or of a scalar                                            |

Why 1e-12 can be broken by rounding alone: after its first step AdamW divides by |gradient| + eps.
Where a gradient element is about eps, its rounding of 1e-18 is multiplied by lr / (4 eps), 1e5 or
more, and so moves a weight of 0.01 by 1e-11 of itself. How often that happens depends on model and
data; the control has the same elements. A bug is further off by orders of magnitude.

Why not tensor by tensor in lower precision: whether one tensor rounds well is chance, the more so
the smaller it is; whether a whole quantity is twice as far off as one device is not.

Why 16 seeds: of gradients the root mean square hardly depends on the seed (within 9 % of its mean;
8 layers of width 64, float32), but of what AdamW makes of them it does. After three steps the ten
worst of 417 000 elements, mostly those whose gradient happens to be next to nothing, are 63 to 95 %
of the squares of the weights' errors, and the root mean square is anywhere from 1.0e-7 to 7.1e-7
(exp_avg: 1.5e-7 to 1.2e-6). By one seed a mesh passes or fails by chance.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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
from dtensor_llm.parity.run import QUANTITIES, Run, check_parameters, prepared

BOUND = 1e-12  # float64
CONTROL_FACTOR = 10.0  # where that is broken: times the error of the control
YARDSTICK_FACTOR = 2.0  # in lower precision: times the error of one device
SCALARS = ("loss", "gradient norm")
OF_RMS = " rms"  # ends the name of a quantity whose error is taken over all its elements
OF_NORM = " (2-norm)"  # ends the name of a quantity of which only the norms are known
ORDER = ("loss", "gradient", "gradient norm", *QUANTITIES[1:])  # in which a step makes them

Differences = Mapping[int, Mapping[str, Mapping[str, Difference]]]
"""{step: {quantity: {tensor: difference}}}"""


@dataclass(frozen=True)
class Expectation:
    """What a run is held to.

    Args:
        reference: one device in float64.
        control: trains the same again in another order of sums, and compares that with the
            reference; only called where a fixed bound is broken.
        yardstick: where the dtype of the run is lower than float64, the `judged_errors` of one
            device in that dtype, over many seeds.
        bound: of float64, below which no control is needed.
    """

    reference: Run
    control: Callable[[], "Comparison"] | None = None
    yardstick: Mapping[str, float] | None = None
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
        errors = relative_errors(quantity.removesuffix(OF_NORM), found, sizes)
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
        """Those of tensors, in the order in which a step makes them."""
        found = dict.fromkeys(quantity for step in self.differences.values() for quantity in step)
        return sorted(found, key=_order)


def compare_runs(run: Run, reference: Run) -> Comparison:
    """Two whole runs on one device; what only one of them has recorded is left out.

    Raises:
        Incomparable: they do not have the same parameters.
    """
    differences: dict[int, dict[str, dict[str, Difference]]] = {}
    for step in sorted(run.tensors_at.keys() & reference.tensors_at.keys()):
        own, whole = run.tensors_at[step], reference.tensors_at[step]
        differences[step] = {}
        for quantity in own.keys() & whole.keys():
            check_parameters(step, quantity, own[quantity], whole[quantity])
            differences[step][quantity] = {
                name: difference(
                    prepared(quantity, own[quantity][name]), prepared(quantity, b), b.shape
                )
                for name, b in whole[quantity].items()
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
    pairs = {"loss": (losses, reference.losses)}
    if gradient_norms and reference.gradient_norms:
        pairs["gradient norm"] = (gradient_norms, reference.gradient_norms)
    return Comparison(pairs, differences, sizes)


def judge(run: Comparison, expected: Expectation) -> Report:
    """The report of a run against what is expected."""
    yardstick = expected.yardstick
    rows = by_bound(run, expected) if yardstick is None else by_yardstick(run, yardstick)
    report = Report(tuple(rows))
    if report.passed:
        return report
    bounds = {row.quantity: row.bound for row in rows}
    return Report(report.rows, next(differing(run, bounds), None))


def by_bound(run: Comparison, expected: Expectation) -> list[Row]:
    """float64: every recorded step, by the fixed bound or else by the control's error."""
    bounds = dict.fromkeys([*run.scalars, *run.quantities], expected.bound)
    rows = rows_within(run, bounds)
    if expected.control is None or all(row.passed for row in rows):
        return rows
    control = expected.control()
    measured = {q: CONTROL_FACTOR * error_of(control, q) for q in bounds}
    return rows_within(run, {q: max(bound, measured[q]) for q, bound in bounds.items()})


def rows_within(run: Comparison, bounds: Mapping[str, float]) -> list[Row]:
    """The worst error of each quantity."""
    rows = [scalar_row(name, *pair, bounds[name]) for name, pair in run.scalars.items()]
    return rows + [run.worst(quantity, bounds[quantity]) for quantity in run.quantities]


def by_yardstick(run: Comparison, yardstick: Mapping[str, float]) -> list[Row]:
    """Lower precision: every judged error against one device's."""
    rows = judged_rows(run)
    return [replace(row, bound=YARDSTICK_FACTOR * yardstick[row.quantity]) for row in rows]


def judged_rows(run: Comparison) -> list[Row]:
    """What is judged in lower precision, without a bound.

    Every loss and norm; the first step's gradients and the last one's state, each as the worst
    tensor and as the root mean square over all elements.
    """
    rows = [scalar_row(name, *pair, 0.0) for name, pair in run.scalars.items()]
    for quantity in run.quantities:
        step = judged_step(run, quantity)
        rms = rms_error(run.differences[step][quantity], run.sizes[step][quantity])
        rows += [run.row(quantity, step, 0.0), Row(quantity + OF_RMS, "all", rms, 0.0, step)]
    return rows


def judged_step(run: Comparison, quantity: str) -> int:
    """In lower precision: the first step's gradients, the last one's state."""
    steps = run.steps_of(quantity)
    return steps[0] if quantity == "gradient" else steps[-1]


def judged_errors(run: Comparison) -> dict[str, float]:
    """{quantity: error} of `judged_rows`"""
    return {row.quantity: row.error for row in judged_rows(run)}


def error_of(run: Comparison, quantity: str) -> float:
    if quantity in run.scalars:
        return scalar_row(quantity, *run.scalars[quantity], 0.0).error
    return run.worst(quantity, 0.0).error


def differing(run: Comparison, bounds: Mapping[str, float]) -> Iterator[Row]:
    """Every error beyond its bound, in the order in which the numbers come about."""
    for step in range(len(run.scalars["loss"][0])):
        for quantity in sorted([*run.scalars, *run.quantities], key=_order):
            if quantity in run.scalars:
                row = scalar_row(quantity, *run.scalars[quantity], bounds[quantity], step)
            elif step in run.steps_of(quantity):
                row = run.row(quantity, step, bounds[quantity])
            else:
                continue
            if not row.passed:
                yield row


def _order(quantity: str) -> tuple[int, str]:
    """What else a record holds comes last."""
    name = quantity.removesuffix(OF_NORM)
    return (ORDER.index(name) if name in ORDER else len(ORDER)), quantity


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
