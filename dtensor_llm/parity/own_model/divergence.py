"""Where the ranks part from one device: the first module, or else the first tensor, that differs.

The step in question runs again, in float64, with every module's output and its gradient recorded
on one device and on every rank. A module is to blame if its output differs although what went in
did not; since that is the outputs of earlier modules, it is the first one that differs. One whose
output is put right by a module around it, as a partial sum is, is passed over.
"""

import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from dtensor_llm.parity.difference import FLOOR, Difference, difference, over
from dtensor_llm.parity.finder.diagnosis import Evidence, diagnose
from dtensor_llm.parity.finder.finding import Finding
from dtensor_llm.parity.own_model.recording import Key, record
from dtensor_llm.parity.own_model.task import Slices, Task, counted, part_of_batch
from dtensor_llm.parity.own_model.training import own_parameters
from dtensor_llm.parity.report import Row

SAME = 1e-9  # relative: two losses that agree as far are equal but for rounding
DIMS = {1: ("entry",), 2: ("row", "column"), 3: ("row", "position", "entry")}


@dataclass(frozen=True)
class Apart:
    """What the ranks have of a tensor, and the worst one's difference to the whole."""

    whole: Tensor
    parts: Mapping[int, tuple[Slices, Tensor]]
    rank: int
    difference: Difference
    error: float


def find(task: Task, first: Row, bound: float, wrong: Collection[str]) -> Finding:
    """What is behind the first row that failed.

    Args:
        task: in float64.
        first: the row.
        bound: of outputs and gradients, by the formula of `difference`.
        wrong: names of the tensors of the row's quantity that are wrong in that step; for a loss
            or a norm, those of the parameters whose gradients are.
    """
    step = first.step or 0
    if first.quantity not in ("loss", "gradient", "gradient norm"):
        return replace(of_row(first, "update", ""), num_names=max(1, len(wrong)))
    alone, ranks = record(task, step)
    if first.quantity == "loss":
        apart = compare_all(task, alone.outputs, [each.outputs for each in ranks], "output")
        for key in wrong_outputs(apart, bound):
            return of_output(task, step, apart, key, bound)
        return of_row(first, "loss", why_loss(task, step))
    gradients = [each.gradients for each in ranks]
    apart = compare_all(task, alone.gradients, gradients, "output gradient")
    for key in wrong_output_gradients(task, apart, bound, wrong):
        return of_output_gradient(task, step, apart, key, bound)
    weights = [each.weights for each in ranks]
    apart = compare_all(task, alone.weights, weights, "weight gradient")
    further = [key for key, found in apart.items() if found.error > bound]
    if not further:
        return of_row(first, "gradient", no_gradient(first))
    worst = max(further, key=lambda key: apart[key].error)
    found = numbers(task, apart[worst], bound)
    return Finding(
        step, "gradient", worst[0], worst[0], "gradient", num_names=len(further), **found
    )


def no_gradient(row: Row) -> str:
    """What there is to say of a gradient where those that both sides have agree."""
    if row.quantity != "gradient":
        return "every gradient is right: look into how the norm is made of them"
    return "only one side has a gradient there: see what sets requires_grad, or detaches"


def compare_all(
    task: Task, alone: Mapping[Key, Tensor], ranks: Sequence[Mapping[Key, Tensor]], kind: str
) -> dict[Key, Apart]:
    """Of all that can be compared, in the order in which one device came by it."""
    floor = FLOOR * max((largest_entry(b) for b in alone.values()), default=0.0)
    apart = {}
    for key, b in alone.items():
        own = [found[key] for found in ranks if key in found]
        candidates = comparable(task, b, own, kind) if len(own) == len(ranks) else []
        found = [
            max(
                ((rank, difference(x, b[where], b.shape, where)) for rank, (where, x) in c.items()),
                key=lambda each: each[1].largest,
            )
            for c in candidates
        ]
        if found:
            (rank, worst), parts = min(
                zip(found, candidates, strict=True), key=lambda each: each[0][1].largest
            )
            error = over(worst.largest, max(largest_entry(b), floor))
            apart[key] = Apart(b, parts, rank, worst, error)
    return apart


def comparable(
    task: Task, b: Tensor, own: Sequence[Tensor], kind: str
) -> list[dict[int, tuple[Slices, Tensor]]]:
    """What the ranks' tensors may be: {rank: (place in the whole, tensor)}, one of these.

    Nothing where a rank's shape is no part of the whole one. A tensor without rows of the batch is
    made of no sample, and then the same on every part of it, or a mean over samples, and then
    right when averaged over the parts; a gradient is always the latter.
    """
    of_weights = kind == "weight gradient"
    wheres = [
        task.where(b.shape, x.shape, rank, has_rows=not of_weights) for rank, x in enumerate(own)
    ]
    if any(where is None for where in wheres) or not b.is_floating_point():
        return []
    placed = [(where or (), x) for where, x in zip(wheres, own, strict=True)]
    each = dict(enumerate(placed))
    if of_weights or task.num_parts == 1:
        return [each]
    by_rows = all(x.ndim and x.shape[0] * task.num_parts == b.shape[0] for x in own)
    if by_rows:
        scale = task.share if kind == "output gradient" else 1.0
        return [{rank: (where, x * scale) for rank, (where, x) in each.items()}]
    pooled = {
        ranks[0]: (placed[ranks[0]][0], task.share * sum_of([own[rank] for rank in ranks]))
        for ranks in task.peers()
    }
    return [pooled] if kind == "output gradient" else [each, pooled]


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(dim=0)


def wrong_outputs(apart: Mapping[Key, Apart], bound: float) -> Iterator[Key]:
    """In order, but for those inside a module whose own outputs are right."""
    wrong = {key for key, found in apart.items() if found.error > bound}
    right = {name for name, _ in apart} - {name for name, _ in wrong}
    for key in apart:
        if key in wrong and not any(around in right for around in modules_around(key[0])):
            yield key


def wrong_output_gradients(
    task: Task, apart: Mapping[Key, Apart], bound: float, wrong_gradients: Collection[str]
) -> Iterator[Key]:
    """In order, but for modules whose parameters nevertheless have the right gradients."""
    trained = [name for name, x in own_parameters(task.model).items() if x.requires_grad]
    for key, found in apart.items():
        own = [name for name in trained if name.startswith(f"{key[0]}." if key[0] else "")]
        if found.error > bound and (not own or any(name in wrong_gradients for name in own)):
            yield key


def modules_around(name: str) -> list[str]:
    """From the nearest to the model itself, which is called ""."""
    around = []
    while name:
        name = name.rpartition(".")[0]
        around.append(name)
    return around


def largest_entry(x: Tensor) -> float:
    return x.double().abs().amax().item() if x.numel() else 0.0


def of_output(task: Task, step: int, apart: Mapping[Key, Apart], key: Key, bound: float) -> Finding:
    found = numbers(task, apart[key], bound, key[0])
    before = before_in_order(apart, key)
    if isinstance(task.model.get_submodule(key[0]), _BatchNorm):
        found["diagnosis"] = "it normalizes by the rows of one rank: convert it to SyncBatchNorm"
    return Finding(step, "forward", named(key), named(key), "output", neighbours=before, **found)


def of_output_gradient(
    task: Task, step: int, apart: Mapping[Key, Apart], key: Key, bound: float
) -> Finding:
    """To blame is what made the gradient: the module that had its turn just before."""
    found, before = numbers(task, apart[key], bound), before_in_order(apart, key)
    blamed = before[0] if before else "the loss"
    return Finding(step, "backward", blamed, named(key), "output", neighbours=before, **found)


def before_in_order(apart: Mapping[Key, Apart], key: Key) -> tuple[str, ...]:
    """The name of the one before it that is not around it; none for the first."""
    keys = list(apart)
    before = keys[: keys.index(key)]
    names = [named(other) for other in before if other[0] not in modules_around(key[0])]
    return tuple(names[-1:])


def named(key: Key) -> str:
    name, number = key
    return f"{name or 'the model'}{f' (its tensor {number + 1})' if number else ''}"


def numbers(task: Task, apart: Apart, bound: float, module: str | None = None) -> dict[str, Any]:
    """The fields of a finding that say where, how far, and what it looks like."""
    worst, shape = apart.difference, apart.whole.shape
    index = torch.unravel_index(torch.tensor(worst.place), shape) if shape else ()
    bias = None if module is None else getattr(task.model.get_submodule(module), "bias", None)
    where, part = apart.parts[apart.rank]
    evidence = Evidence(
        part,
        apart.whole,
        where,
        sizes=task.mesh,
        dims=DIMS.get(len(shape), ()),
        peers=peers_by_axis(task, apart),
        bias=bias if isinstance(bias, Tensor) and bias.shape == shape[-1:] else None,
    )
    return {
        "rank": apart.rank,
        "coordinates": task.coordinate(apart.rank),
        "index": tuple(map(int, index)),
        "value": worst.value,
        "expected": worst.expected,
        "error": apart.error,
        "tolerance": bound,
        "diagnosis": diagnose(evidence) or unreduced(task, apart),
    }


def unreduced(task: Task, apart: Apart) -> str:
    """Where the ranks' gradients are what they should be once they are averaged."""
    axes = " x ".join(task.batch_axes)
    for ranks in task.peers():
        parts = [apart.parts[rank] for rank in ranks if rank in apart.parts]
        alike = len(parts) == task.num_parts > 1 and all(p[0] == parts[0][0] for p in parts)
        if alike:
            mean = sum_of([part for _, part in parts]) * task.share
            right = apart.whole[parts[0][0]]
            if largest_entry(mean - right) <= SAME * largest_entry(apart.whole):
                word = "mean" if task.average else "sum"
                return (
                    f"the {word} of what the ranks along {axes} hold is right: nothing reduces "
                    f"this over {axes}"
                )
    return ""


def peers_by_axis(task: Task, apart: Apart) -> dict[str, list[tuple[Slices, Tensor]]]:
    """What the ranks have that differ from the worst one on one axis only."""
    own = task.coordinate(apart.rank)
    return {
        axis: [
            part
            for rank, part in apart.parts.items()
            if task.coordinate(rank) | {axis: own[axis]} == own
        ]
        for axis in task.mesh
    }


def of_row(row: Row, phase: str, diagnosis: str) -> Finding:
    """Without a look into the modules; the row's label says on which ranks, where not on all."""
    named_rank = re.search(r"\branks? (\d+)", row.worst)
    name = row.quantity if row.worst.startswith("step ") else row.worst.partition(" (")[0]
    return Finding(
        row.step or 0,
        phase,
        name,
        name,
        row.quantity,
        rank=int(named_rank[1]) if named_rank else 0,
        index=row.index,
        value=row.value,
        expected=row.expected,
        error=row.error,
        tolerance=row.bound,
        diagnosis=diagnosis,
    )


def why_loss(task: Task, step: int) -> str:
    """No module's output differs, and the loss does."""
    model, batch = copy.deepcopy(task.model), task.batches[step]
    count = task.num_parts
    with torch.no_grad():
        at_once = task.loss(model, batch).item()
        losses = [task.loss(model, part_of_batch(batch, i, count)).item() for i in range(count)]
    parts, word = sum(losses) * task.share, "mean" if task.average else "sum"
    if over(abs(parts - at_once), abs(at_once)) < SAME:
        return "the outputs of all modules are right: what the loss makes of them is not"
    return (
        f"one device alone has this too: its loss of the whole batch is {at_once:.9g}, the {word} "
        f"of its losses of {counted(count, 'part')} is {parts:.9g}. Divide by a number that all "
        "parts share, such as the valid tokens of the whole batch, or see `average`"
    )
