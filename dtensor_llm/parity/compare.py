"""Compares two records: how far apart they are, and where they part first.

By what the difference is judged:

- both float64: the fixed bound, or with a control what `verdict` says: AdamW may multiply the
  rounding of two right runs beyond it
- float32 without a third record: that bound, scaled by the rounding of the dtype. It is a guess,
  which AdamW breaks where true gradients are zero.
- lower precision with a third record, the same training in float64: the first may be twice as far
  from that one as the second is; one seed is all that is known here
- below float32 the third record must be there: scaled to bfloat16, 1e-12 would allow anything.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from dtensor_llm.parity.difference import Difference, Size
from dtensor_llm.parity.record import Record
from dtensor_llm.parity.report import Report
from dtensor_llm.parity.run import Incomparable, Tensors, check_parameters
from dtensor_llm.parity.verdict import (
    BOUND,
    OF_NORM,
    Comparison,
    Expectation,
    compare_runs,
    error_of,
    judge,
    judged_errors,
    judged_step,
)


def compare_records(
    record: Record,
    other: Record,
    *,
    reference: Record | None = None,
    control: Record | None = None,
    bound: float | None = None,
) -> Report:
    """The report of `record`, held to `other`; over the steps that both have.

    Args:
        record: the one in question.
        other: what is expected; with a `reference`, the yardstick: one device in the same dtype.
        reference: the same training in float64.
        control: `other` again in float64, with its sums in another order: other microbatches.
        bound: of the relative error of each quantity, in place of the one above.

    Raises:
        Incomparable: they do not have the same parameters, or there is no bound for their dtype.
        RecordError: a record cannot be read.
    """
    for one in (reference, control):
        if one is not None:
            check_reference(one, other)
    target = reference or other
    steps = min(len(one.steps) for one in (record, other, target, control or target))
    expected = Cut(target, steps)

    def compared(one: Record) -> Comparison:
        run = Cut(one, steps)
        found = with_gradient_norms(compare_runs(run, expected), run, expected)
        return found if reference else with_norms(found, run, expected)

    def judging(measure: Record) -> Comparison:
        found = compared(measure)
        check_judging(asked, found, measure)
        return found

    asked = compared(record)
    if reference is not None and record.dtype == other.dtype == torch.float64:
        raise Incomparable(
            "both records are in float64, and a reference judges lower precision: leave it out, or "
            "pass a training of other microbatches as the control"
        )
    if reference is not None:
        return judge(asked, Expectation(expected, yardstick=judged_errors(judging(other))))
    fixed = bound or bound_of(record, other)
    if control is None:
        return judge(asked, Expectation(expected, bound=fixed))
    moved = judging(control)  # refused where it lacks something, however near the two are
    check_control(moved, control, other)
    return judge(asked, Expectation(expected, control=lambda: moved, bound=fixed))


LARGEST_OF_ROUNDING = 1e-9
"""In float64, after what AdamW makes of it in the steps that people record."""


def check_reference(reference: Record, other: Record) -> None:
    """Raises Incomparable where it is not in float64, or not the training that it is to judge."""
    if reference.dtype != torch.float64:
        raise Incomparable(
            f"{reference.folder} is in {reference.dtype}: what judges another record is in float64"
        )
    if texts := other_settings(other, reference):
        raise Incomparable(
            f"{reference.folder} is another training than {other.folder}: {'; '.join(texts)}"
        )


def check_judging(compared: Comparison, judging: Comparison, other: Record) -> None:
    """Raises Incomparable where a record lacks what the first is to be judged by."""
    lacking = [name for name in compared.scalars if name not in judging.scalars]
    for quantity in compared.quantities:
        step = judged_step(compared, quantity)
        if quantity not in judging.quantities or judged_step(judging, quantity) != step:
            lacking.append(f"{quantity} of step {step + 1}")
    if lacking:
        raise Incomparable(f"{other.folder} has not recorded {', '.join(lacking)} to judge by")


def check_control(moved: Comparison, control: Record, other: Record) -> None:
    """Raises Incomparable where more than rounding tells it from what it is a control of."""
    names = [*moved.scalars, *moved.quantities]
    worst = max(names, key=lambda name: error_of(moved, name))
    if error_of(moved, worst) > LARGEST_OF_ROUNDING:
        raise Incomparable(
            f"{control.folder} is not {other.folder} again: its {worst} is "
            f"{error_of(moved, worst):.1e} off, and rounding alone makes less than "
            f"{LARGEST_OF_ROUNDING:.0e}; record the same training with another --micro-batch-size"
        )


def not_compared(record: Record, other: Record) -> list[str]:
    """`only A has: weights`, of tensors and norms, for each of the two."""
    quantities = [
        {
            quantity
            for found in (one.norms_at, one.tensors_at)
            for step in found
            for quantity in found[step]
        }
        for one in (record, other)
    ]
    lacking = zip("AB", quantities, reversed(quantities), strict=True)
    return [f"only {x} has: {', '.join(sorted(q - p))}" for x, q, p in lacking if q - p]


def other_settings(record: Record, other: Record) -> list[str]:
    """What differs in the settings that both have recorded, but for dtype and accumulation."""
    texts = []
    for section in ("model", "train"):
        pair = [one.about.get(section) for one in (record, other)]
        own, expected = (x if isinstance(x, dict) else {} for x in pair)
        names = [n for n in own if n in expected and n not in ("dtype", "micro_batch_size")]
        texts += [f"{n} {own[n]} and {expected[n]}" for n in names if own[n] != expected[n]]
    return texts


def bound_of(record: Record, other: Record) -> float:
    """The fixed bound of float64, scaled to the coarser dtype of the two."""
    dtypes = [dtype for dtype in (record.dtype, other.dtype) if dtype is not None]
    coarsest = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
    if coarsest > torch.finfo(torch.float32).eps:
        raise Incomparable(
            "in a dtype below float32 no fixed bound tells rounding from a bug: record the same "
            "training in float64 and pass it as --reference, or say what may differ by --bound"
        )
    return BOUND * max(1.0, coarsest / torch.finfo(torch.float64).eps)


class Cut:
    """The first steps of a record; a `Run`."""

    def __init__(self, record: Record, steps: int) -> None:
        self.record = record
        self.losses = record.losses[:steps]
        self.gradient_norms: list[float] = []  # see with_gradient_norms: some may be missing
        self.norms_at = {i: norms for i, norms in record.norms_at.items() if i < steps}
        self.tensors_at: Mapping[int, Tensors] = record.tensors_until(steps)
        self.steps = steps


def with_gradient_norms(compared: Comparison, run: Cut, expected: Cut) -> Comparison:
    """Where both have the norm of a step; no difference where one has not."""
    pairs = [
        (a, b) if a is not None and b is not None else None
        for a, b in zip(run.record.gradient_norms, expected.record.gradient_norms, strict=False)
    ][: run.steps]
    if not any(pairs):
        return compared
    own, whole = zip(*(pair or (0.0, 0.0) for pair in pairs), strict=True)
    return replace(compared, scalars={**compared.scalars, "gradient norm": (own, whole)})


def with_norms(compared: Comparison, run: Cut, expected: Cut) -> Comparison:
    """Norms take the place of tensors that one of the two has not recorded at a step."""
    differences = {step: dict(found) for step, found in compared.differences.items()}
    sizes = {step: dict(found) for step, found in compared.sizes.items()}
    for step in sorted(run.norms_at.keys() & expected.norms_at.keys()):
        for quantity, whole in expected.norms_at[step].items():
            own = run.norms_at[step].get(quantity)
            if own is None or quantity in differences.get(step, ()):
                continue
            check_parameters(step, quantity, own, whole)
            name_of_row = quantity + OF_NORM
            differences.setdefault(step, {})[name_of_row] = {
                name: norm_difference(own[name], norm) for name, norm in whole.items()
            }
            sizes.setdefault(step, {})[name_of_row] = {
                name: Size(norm, norm**2, ()) for name, norm in whole.items()
            }
    return replace(compared, differences=differences, sizes=sizes)


def norm_difference(own: float, expected: float) -> Difference:
    apart = abs(own - expected)
    return Difference(apart if math.isfinite(apart) else math.inf, apart**2, 0, own, expected)
