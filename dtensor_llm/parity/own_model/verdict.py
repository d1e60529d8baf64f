"""The bounds, and from what the ranks found to one row a quantity.

| dtype   | bound                                                                              |
|---------|------------------------------------------------------------------------------------|
| float64 | 1e-12, or 10 x the error of a control where that is more: one device again, every    |
|         | initial weight moved by its last bit, which shows how this training amplifies        |
|         | rounding                                                                             |
| others  | 2 x the largest error of one device in that dtype against one device in float64, over |
|         | 16 trainings: from the given weights and from 15 draws within 1 % of them. Of the loss |
|         | and the norm that is the worst step; of the first gradients and of the last state the  |
|         | worst tensor, and the root mean square over all elements                             |

Why 16 in lower precision, also for tensors: the models that are checked here are small, and how
well a few numbers round is chance.
"""

import copy
import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from dtensor_llm.parity.difference import Difference, Size, relative_errors, rms_error, size_of
from dtensor_llm.parity.expect import NUM_SEEDS
from dtensor_llm.parity.own_model.task import OwnModelError, Task
from dtensor_llm.parity.own_model.training import (
    INITIAL,
    Found,
    OneDevice,
    RankResult,
    only_on_ranks,
    tied_names,
    train_on_one_device,
)
from dtensor_llm.parity.report import Report, Row
from dtensor_llm.parity.run import prepared
from dtensor_llm.parity.verdict import (
    BOUND,
    CONTROL_FACTOR,
    YARDSTICK_FACTOR,
    Comparison,
    compare_runs,
    differing,
    scalar_row,
)
from dtensor_llm.worlds import name_ranks

LARGEST_BOUND = 1e-6  # of float64: beyond, rounding would hide bugs
NEAR = 1e-2  # how far the draws for the scalars' yardstick are from the given weights


def bounds_of(task: Task, exact: Task, reference: OneDevice) -> dict[str, float]:
    """The largest error that passes, of every row of `rows_of`.

    Args:
        task: in the dtype of the check.
        exact: the same in float64, from the same weights.
        reference: of `exact`.

    Raises:
        OwnModelError: in float64, rounding alone may change a number by more than a bug does.
    """
    if task.dtype == torch.float64:
        return float64_bounds(exact, reference)
    largest = errors_of(task, compare_runs(train_on_one_device(task), in_rows(reference)))
    for number in range(1, NUM_SEEDS):
        model = copy.deepcopy(task.model)
        move_weights(model, number, NEAR)
        run = train_on_one_device(task, model)
        right = train_on_one_device(exact, model.to(torch.float64))
        errors = errors_of(task, compare_runs(run, in_rows(right)))
        largest = {name: max(error, errors[name]) for name, error in largest.items()}
    return {name: YARDSTICK_FACTOR * error for name, error in largest.items()}


def float64_bounds(exact: Task, reference: OneDevice) -> dict[str, float]:
    moved = copy.deepcopy(exact.model)
    move_weights(moved, 0, torch.finfo(torch.float64).eps, last_bit=True)
    control = compare_runs(train_on_one_device(exact, moved), reference)
    errors = errors_of(exact, control)
    for quantity, error in errors.items():
        if CONTROL_FACTOR * error > LARGEST_BOUND:
            raise OwnModelError(
                f"this training amplifies rounding: the last bit of the initial weights changes "
                f"the {quantity} by {error:.1e}, and {CONTROL_FACTOR:g} x that as a bound, above "
                f"{LARGEST_BOUND:.0e}, would hide bugs; give fewer batches, a smaller learning "
                "rate, or an optimizer whose update does not jump with a sign"
            )
    return {quantity: max(BOUND, CONTROL_FACTOR * error) for quantity, error in errors.items()}


def errors_of(task: Task, compared: Comparison) -> dict[str, float]:
    return {row.quantity: row.error for row in rows_of(task, compared)}


def in_rows(run: OneDevice) -> OneDevice:
    """With those tensors alone that a row in lower precision is about."""
    last = max(run.tensors_at)
    kept = {step: dict(named) for step, named in run.tensors_at.items() if step in (0, last)}
    for step, named in kept.items():
        for quantity in list(named):
            if step != (0 if quantity in (INITIAL, "gradient") else last):
                del named[quantity]
    return dataclasses.replace(run, tensors_at=kept)


def rows_of(task: Task, compared: Comparison) -> list[Row]:
    """Without bounds: of all steps in float64, else of those that the table above names."""
    rows = [scalar_row(name, *pair, 0.0) for name, pair in compared.scalars.items()]
    for quantity in compared.quantities:
        if task.dtype == torch.float64:
            rows.append(compared.worst(quantity, 0.0))
            continue
        steps = compared.steps_of(quantity)
        step = steps[0] if quantity == "gradient" else steps[-1]
        rows.append(compared.row(quantity, step, 0.0))
        rms = rms_error(compared.differences[step][quantity], compared.sizes[step][quantity])
        rows.append(Row(f"{quantity} rms", "all", rms, 0.0, step))
    return rows


def move_weights(model: nn.Module, seed: int, by: float, *, last_bit: bool = False) -> None:
    """Multiply every weight by 1 + `by` u, u between -1 and 1, or one of the two `last_bit`."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            u = 2 * torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 1
            parameter.copy_(parameter.double() * (1 + by * (u.sign() if last_bit else u)))


def report_of(
    task: Task,
    compared: Comparison,
    bounds: Mapping[str, float],
    untied: Sequence[Sequence[str]] = (),
) -> Report:
    """A row a quantity, and one that fails for each parameter that has become several.

    What one device does not have is held to the bound of weights.
    """
    held_to = defaultdict(lambda: bounds["weight"], bounds)
    rows = [
        dataclasses.replace(row, bound=held_to[row.quantity]) for row in rows_of(task, compared)
    ]
    rows += [Row("tied weights", " = ".join(names), math.inf, 0.0) for names in untied]
    report = Report(tuple(map(without_nan, rows)))
    if report.passed:
        return report
    first = next(differing(compared, held_to), None)
    return dataclasses.replace(report, first=None if first is None else without_nan(first))


def without_nan(row: Row) -> Row:
    """Without an element, where the whole tensor is missing."""
    if row.expected is not None and math.isnan(row.expected):
        return dataclasses.replace(row, index=(), value=None, expected=None)
    return row


def compare_ranks(task: Task, results: Sequence[RankResult], reference: OneDevice) -> Comparison:
    """What all ranks found, each tensor by the rank that is furthest off and named with it."""
    differences: dict[int, dict[str, dict[str, Difference]]] = {}
    sizes: dict[int, dict[str, dict[str, Size]]] = {}
    for step, whole in reference.tensors_at.items():
        differences[step], sizes[step] = {}, {}
        of_ranks = only_on_ranks(results, step)
        for quantity in dict.fromkeys(name for result in results for name in result.found[step]):
            tensors = of_ranks.get(quantity, {}) | whole.get(quantity, {})
            named = found_of(results, step, quantity)
            labels = {name: label(name, found) for name, found in named.items()}
            differences[step][quantity] = {
                labels[name]: together(found) for name, found in named.items()
            }
            sizes[step][quantity] = {
                labels[name]: size_of(prepared(quantity, tensors[name]))
                if name in tensors
                else Size(0.0, 0.0, ())
                for name in named
            }
    scalars = {
        "loss": (losses_of(task, results, reference), reference.losses),
        "gradient norm": (norms_of(task, results, reference), reference.gradient_norms),
    }
    return Comparison(scalars, differences, sizes)


def wrong_names(
    results: Sequence[RankResult], reference: OneDevice, step: int, quantity: str, bound: float
) -> list[str]:
    """Of tensors that are further off than the bound."""
    whole = reference.tensors_at[step][quantity]
    found = {name: together(each) for name, each in found_of(results, step, quantity).items()}
    nothing = dict.fromkeys(found, Size(0.0, 0.0, ()))
    sizes = nothing | {name: size_of(prepared(quantity, x)) for name, x in whole.items()}
    errors = relative_errors(quantity, found, sizes)
    return [name for name, error in errors.items() if error > bound]


def found_of(
    results: Sequence[RankResult], step: int, quantity: str
) -> dict[str, list[tuple[int, Found]]]:
    """{name: [(rank, what it found)]}"""
    named: dict[str, list[tuple[int, Found]]] = {}
    for rank, result in enumerate(results):
        for name, found in result.found[step].get(quantity, {}).items():
            named.setdefault(name, []).append((rank, found))
    return named


def together(found: Iterable[tuple[int, Found]]) -> Difference:
    """The worst rank's difference, with the squares of all parts."""
    each = [one for _, one in found]
    worst = max((one.difference for one in each), key=lambda apart: apart.largest)
    squares = over_parts((one.where, one.difference.squares) for one in each)
    return dataclasses.replace(worst, squares=squares)


def over_parts(parts: Iterable[tuple[object, float]]) -> float:
    """The sum over the parts of a tensor; where replicas of a part differ, the largest counts."""
    largest: dict[object, float] = {}
    for where, value in parts:
        largest[where] = max(largest.get(where, 0.0), value)
    return sum(largest.values())


def label(name: str, found: Sequence[tuple[int, Found]]) -> str:
    """The tensor's name, and which ranks are furthest off where not all are alike."""
    worst = max((one for _, one in found), key=lambda one: one.difference.largest)
    ranks = [rank for rank, one in found if one.difference.largest == worst.difference.largest]
    where = name_ranks(ranks) if len(ranks) < len(found) else ""
    said = ", ".join(filter(None, [worst.note, where]))
    return f"{name} ({said})" if said else name


def losses_of(task: Task, results: Sequence[RankResult], reference: OneDevice) -> list[float]:
    """Of each step, over the parts of the batch; of ranks with one batch those furthest off."""
    losses = []
    for step, expected in enumerate(reference.losses):
        sums = [sum(results[rank].losses[step] for rank in ranks) for ranks in task.peers()]
        values = [total * task.share for total in sums]
        losses.append(max(values, key=lambda value: distance(value, expected)))
    return losses


def norms_of(task: Task, results: Sequence[RankResult], reference: OneDevice) -> list[float]:
    """Of the whole gradients of each step, a tied one counted once."""
    again = {name for names in tied_names(task.model) for name in names[1:]}
    norms = []
    for step in reference.tensors_at:
        named = found_of(results, step, "gradient")
        squares = [
            over_parts((one.where, one.squares) for _, one in found)
            for name, found in named.items()
            if name not in again
        ]
        norms.append(math.sqrt(sum(squares)))
    return norms


def distance(value: float, expected: float) -> float:
    return abs(value - expected) if math.isfinite(value) else math.inf
