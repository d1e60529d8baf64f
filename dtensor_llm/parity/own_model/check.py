"""Holds any model, however its author parallelizes it, to the same model on one device."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from dtensor_llm.parity.finder.finding import ROUNDING, Finding
from dtensor_llm.parity.own_model.divergence import find, of_row
from dtensor_llm.parity.own_model.task import (
    DTYPES,
    Loss,
    MakeOptimizer,
    OwnModelError,
    Parallelize,
    Task,
    counted,
    make_task,
)
from dtensor_llm.parity.own_model.training import (
    INITIAL,
    OneDevice,
    RankResult,
    train_on_one_device,
    train_on_ranks,
)
from dtensor_llm.parity.own_model.verdict import (
    bounds_of,
    compare_ranks,
    report_of,
    wrong_names,
)
from dtensor_llm.parity.report import Report
from dtensor_llm.parity.verdict import differing

TOLERANCE = 1e-9  # in float64, of the search for what lower precision has shown
SEEN = ("loss", "gradient")  # the quantities whose bounds outputs and their gradients have too
UNTIED = (
    "one parameter before parallelize and several after it, each with a gradient of its own; tie "
    "them again at its end, as in model.head.weight = model.embed.weight"
)
ONLY_ROUNDING = (
    "in float64 the ranks agree with one device: only their rounding is worse, as where something "
    "is summed or kept in a precision that is lower still"
)
ADAMW: MakeOptimizer = partial(torch.optim.AdamW, lr=1e-3)


@dataclass(frozen=True)
class OwnModelReport:
    """What a check came to.

    Args:
        report: a row a quantity.
        finding: what differs first; None if all is well.
        summary: the mesh, the steps, and how many parameters are sharded on it.
    """

    report: Report
    finding: Finding | None
    summary: str

    @property
    def passed(self) -> bool:
        return self.report.passed

    def __str__(self) -> str:
        lines = [self.summary, str(dataclasses.replace(self.report, first=None))]
        return "\n".join(lines if self.finding is None else [*lines, str(self.finding)])


def check_parity(
    build_model: Callable[[], nn.Module],
    parallelize: Parallelize,
    mesh: Mapping[str, int],
    batches: Sequence[Any],
    *,
    loss: Loss,
    batch_axes: Sequence[str] | None = None,
    average: bool = True,
    make_optimizer: MakeOptimizer = ADAMW,
    dtype: torch.dtype = torch.float64,
    timeout: float = 60.0,
) -> OwnModelReport:
    """Train a model on one device and, parallelized, on a mesh of threads; compare every number.

    One step a batch. Compared before the first are the initial weights, and in each step the loss,
    the gradient norm, every gradient, weight, buffer and whatever the optimizer keeps; `verdict`
    has the bounds. Buffers that `parallelize` adds are to be alike on all ranks. One device keeps
    all of it, and each rank has a copy of the model: use a small one of the same architecture.
    Every rank is a thread of this process.

    Args:
        build_model: gives the model with its initial weights; called once, in the calling thread.
        parallelize: what each rank does to its own copy, with the whole DeviceMesh:
            `parallelize_module(model, mesh["tp"], ...)`, `fully_shard(model, mesh=mesh["dp"])`,
            code of your own. It returns the model, or None if it has changed it in place. It is to
            draw no random numbers: all ranks share torch's generator.
        mesh: sizes of the axes by name, the outermost first; each rank is a thread.
        batches: whole batches: a tensor, or tuples, lists and dicts of tensors. Dim 0 of each is
            the batch; tensors without dims go to every rank as they are.
        loss: (model, batch) to one number; a rank gets its part of the batch and calls backward().
        batch_axes: axes that divide the batch; by default those of dp, dp_replicate and dp_shard
            that the mesh has. Parts are in the order of the ranks' coordinates on them.
        average: whether the loss of a batch is the mean over its parts, and its gradient what
            averaging over ranks gives, as DDP and FSDP do; else the sum of both.
        make_optimizer: from parameters, as `model.parameters()` gives them; called on each rank
            after `parallelize`. By default AdamW with lr 1e-3.
        dtype: what the model and floating point batches are cast to: float64 finds the most.
        timeout: seconds without any communication after which a rank counts as hung.

    Raises:
        OwnModelError: a mesh, batch or model that cannot be checked, parameters under other names
            than before, random numbers in the model, ranks that wait for each other, or an
            exception in the caller's own code, which is its cause.
    """
    if dtype not in DTYPES:
        known = ", ".join(str(each).removeprefix("torch.") for each in DTYPES)
        raise OwnModelError(f"dtype {dtype} cannot be trained: one of {known} can")
    if isinstance(build_model, nn.Module):
        raise OwnModelError("build_model is a module; pass a function that gives one")
    given = make_task(
        build_model(),
        mesh,
        batch_axes,
        parallelize=parallelize,
        batches=list(batches),
        loss=loss,
        average=average,
        make_optimizer=make_optimizer,
        timeout=timeout,
    )
    task = given.cast(dtype)
    exact = task.cast(torch.float64)  # the same weights, rounded to dtype
    refuse_other_numbers(task)
    reference = train_on_one_device(exact)
    bounds = bounds_of(task, exact, reference)
    results = train_on_ranks(task, reference)
    compared = compare_ranks(task, results, reference)
    report = report_of(task, compared, bounds, untied_in(results))
    finding = None if report.passed else explain(task, exact, report, results, reference)
    return OwnModelReport(report, finding, summary(task, results[0]))


def refuse_other_numbers(task: Task) -> None:
    """Of the same step on the same device twice."""
    one_step = dataclasses.replace(task, batches=task.batches[:1])
    runs = [train_on_one_device(one_step) for _ in range(2)]
    gradients = [run.tensors_at[0]["gradient"] for run in runs]
    different = [
        name for name, x in gradients[0].items() if not bits_equal(x, gradients[1].get(name))
    ]
    if not math.isfinite(runs[0].losses[0]):
        raise OwnModelError(
            f"one device's loss is {runs[0].losses[0]}: give batches and weights that train"
        )
    if runs[0].losses != runs[1].losses or different:
        names = f" and the gradients of {', '.join(different[:3])}" if different else ""
        raise OwnModelError(
            f"one device twice, the same step: loss {runs[0].losses[0]!r} and "
            f"{runs[1].losses[0]!r}{names} differ. The model or the loss draws random numbers (the "
            "ranks share a generator) or keeps a state between calls: make it a function of its "
            "weights and its input"
        )


def untied_in(results: Sequence[RankResult]) -> list[list[str]]:
    return next((result.untied for result in results if result.untied), [])


def bits_equal(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    return b is not None and torch.equal(a, b)


def explain(
    task: Task,
    exact: Task,
    report: Report,
    results: Sequence[RankResult],
    reference: OneDevice,
) -> Finding:
    """The first difference; in lower precision, as a run of its own in float64 shows it."""
    for row in report.rows:
        if row.quantity == "tied weights":
            return of_row(row, "weight", UNTIED)
        if row.quantity == INITIAL and not row.passed:
            return of_row(row, "weight", "parallelize changed it, or gave a rank the wrong part")
    first, bound = report.first, max(row.bound for row in report.rows if row.quantity in SEEN)
    if task.dtype != torch.float64:
        bound, results = TOLERANCE, train_on_ranks(exact, reference)
        compared = compare_ranks(exact, results, reference)
        first = next(differing(compared, defaultdict(lambda: TOLERANCE)), None)
        if first is None:
            return of_row(report.largest, ROUNDING, ONLY_ROUNDING)
    assert first is not None, "the first of the rows that failed"
    step = first.step or 0
    of_tensors = first.quantity in reference.tensors_at[step]
    quantity = first.quantity if of_tensors else "gradient"
    wrong = wrong_names(results, reference, step, quantity, bound)
    try:
        return find(exact, first, bound, wrong)
    except OwnModelError as error:  # from reading outputs that the check itself does not need
        return of_row(first, first.quantity, f"its modules could not be watched: {error}")


def summary(task: Task, result: RankResult) -> str:
    """`dp=2 x tp=2 = 4 ranks, 3 steps in float64; rank 0 holds a part of 6 of 8 parameters`."""
    steps, dtype = counted(len(task.batches), "step"), str(task.dtype).removeprefix("torch.")
    return (
        f"{task}, {steps} in {dtype}; rank 0 holds a part of {result.num_sharded} of "
        f"{counted(result.num_parameters, 'parameter')}"
    )
