"""Compares a run on a mesh with the single-device reference, element by element.

Each rank compares the elements that it holds with the same elements of the reference, so nothing is
gathered; what travels is one number per tensor. The error of tensor t in quantity Q is

    max|a - b| / max(max|b|, f G),        G the largest |entry| of Q over all tensors,

with f = 1e-3 for gradients and moments and f = 1 for weights, where Adam multiplies rounding by
lr/eps. The floor is for tensors whose true gradient is zero, such as the bias of a key projection.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor

from dtensor_llm.config import Config
from dtensor_llm.data import Batch
from dtensor_llm.plan import local_slice
from dtensor_llm.train import StepResult, Trainer

BOUND = 1e-12  # float64: 3 steps at lr <= 1e-2, or 20 steps at lr <= 1e-3
CONTROL_FACTOR = 10.0  # beyond that: times the error of the control
FLOORS = {"gradient": 1e-3, "weight": 1.0, "exp_avg": 1e-3, "exp_avg_sq": 1e-3, "momentum": 1e-3}


class Run(Protocol):
    """What the reference (or a control) has recorded; tensors are whole."""

    @property
    def losses(self) -> Sequence[float]: ...
    @property
    def gradient_norms(self) -> Sequence[float]: ...
    @property
    def gradients(self) -> Mapping[str, Tensor]:
        """Of the first step, before clipping."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """After the last step, and so the optimizer state."""

    @property
    def exp_avg(self) -> Mapping[str, Tensor]: ...
    @property
    def exp_avg_sq(self) -> Mapping[str, Tensor]: ...
    @property
    def momentum(self) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True)
class Row:
    """The worst error of one quantity."""

    quantity: str
    worst: str  # tensor, or step
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


@dataclass(frozen=True)
class Report:
    """All quantities; a NaN anywhere is an infinite error."""

    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)

    @property
    def largest(self) -> Row:
        return max(self.rows, key=lambda row: row.error)

    def __str__(self) -> str:
        table = tabulate(
            [
                (
                    r.quantity,
                    r.worst,
                    f"{r.error:.2e}",
                    f"{r.bound:.2e}",
                    "ok" if r.passed else "FAIL",
                )
                for r in self.rows
            ],
            headers=("quantity", "worst", "error", "bound", "verdict"),
            disable_numparse=True,
        )
        failed = [f"{row.quantity} of {row.worst}" for row in self.rows if not row.passed]
        verdict = f"DIFFERS from the reference: {', '.join(failed)}" if failed else "equal"
        return (
            f"{table}\nlargest error {self.largest.error:.2e} ({self.largest.quantity}): {verdict}"
        )


class ParityCheck:
    """Watches a trainer's steps and compares them with the reference's; one on every rank."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.results: list[StepResult] = []
        self.gradients: dict[str, Tensor] = {}

    def on_gradients(self, result: StepResult) -> None:
        """To be called between `compute_gradients` and `update`."""
        self.results.append(result)
        if len(self.results) == 1:
            shards = self.trainer.optimizer.shards
            self.gradients = {
                name: shard.grad.clone() for name, shard in shards.items() if shard.grad is not None
            }

    def compare(self, reference: Run, control: Run | None = None) -> Report:
        """Errors against `reference`; bounds from the contract, or from `control` if there is one.

        Every rank calls it and gets the same report. Comm: one all-reduce (MAX) a quantity.
        """
        pairs = {
            "loss": ([r.loss for r in self.results], reference.losses),
            "gradient norm": ([r.gradient_norm for r in self.results], reference.gradient_norms),
        }
        rows = [scalar_row(quantity, *pair) for quantity, pair in pairs.items()]
        own = self.own_tensors()
        for quantity, tensors in whole_tensors(reference).items():
            errors = self.distributed_errors(quantity, own[quantity], tensors)
            rows.append(worst_row(quantity, errors))
        if control is not None:
            bounds = {row.quantity: row.error for row in compare_runs(control, reference)}
            rows = [
                Row(r.quantity, r.worst, r.error, max(BOUND, CONTROL_FACTOR * bounds[r.quantity]))
                for r in rows
            ]
        return Report(tuple(rows))

    def own_tensors(self) -> dict[str, dict[str, Tensor]]:
        optimizer = self.trainer.optimizer
        states = {name: optimizer.state(name) for name in optimizer.shards}
        moments = {
            quantity: {n: _root(quantity, s[key]) for n, s in states.items() if key in s}
            for quantity, key in [
                ("exp_avg", "exp_avg"),
                ("exp_avg_sq", "exp_avg_sq"),
                ("momentum", "momentum_buffer"),
            ]
        }
        weights = {name: shard.detach() for name, shard in optimizer.shards.items()}
        return {"gradient": self.gradients, "weight": weights, **moments}

    def distributed_errors(
        self, quantity: str, own: Mapping[str, Tensor], whole: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """{tensor: error} over the elements of all ranks."""
        device, weights = self.trainer.world.device, self.trainer.optimizer.weights
        unknown = own.keys() - whole.keys()
        assert not unknown, f"the reference lacks the {quantity} of {sorted(unknown)}"
        differences = torch.full((len(whole),), -1.0, dtype=torch.float64, device=device)
        for index, (name, b) in enumerate(whole.items()):
            if name in own:
                assert_same_shape(weights[name], b)
                part = b[local_slice(weights[name])].to(device)
                differences[index] = largest_difference(own[name], part)
        if self.trainer.world.size > 1:
            dist.all_reduce(differences, dist.ReduceOp.MAX)
        found = dict(zip(whole, differences.tolist(), strict=True))
        missing = [name for name, difference in found.items() if difference < 0]
        assert not missing, f"no rank holds the {quantity} of {missing}"
        return relative_errors(quantity, found, whole)


def reference_arguments(
    config: Config, batches: Sequence[Batch], *, reverse: bool = False
) -> dict[str, Any]:
    """Keyword arguments for `reference.training.train`, which shares no types with this library.

    `batches` are whole global batches, one for each step. With `reverse`, the control: as many
    microbatches as sequences, taken from last to first.
    """
    training = dataclasses.asdict(config.train) | {"warmup_steps": config.train.num_warmup_steps}
    return {
        "model": dataclasses.asdict(config.model),
        "training": training,
        "batches": [(batch.tokens, batch.labels) for batch in batches],
        "microbatches": config.train.global_batch_size if reverse else 1,
        "reverse": reverse,
    }


def compare_runs(run: Run, reference: Run) -> list[Row]:
    """The same errors between two whole runs on one device."""
    rows = [
        scalar_row("loss", run.losses, reference.losses),
        scalar_row("gradient norm", run.gradient_norms, reference.gradient_norms),
    ]
    tensors = whole_tensors(run)
    for quantity, whole in whole_tensors(reference).items():
        found = {name: largest_difference(tensors[quantity][name], b) for name, b in whole.items()}
        rows.append(worst_row(quantity, relative_errors(quantity, found, whole)))
    return rows


def whole_tensors(run: Run) -> dict[str, Mapping[str, Tensor]]:
    """The run's tensors by quantity; only those that its optimizer has."""
    quantities = {
        "gradient": run.gradients,
        "weight": run.weights,
        "exp_avg": run.exp_avg,
        "exp_avg_sq": {name: x.sqrt() for name, x in run.exp_avg_sq.items()},
        "momentum": run.momentum,
    }
    return {quantity: tensors for quantity, tensors in quantities.items() if tensors}


def _root(quantity: str, x: Tensor) -> Tensor:
    return x.sqrt() if quantity == "exp_avg_sq" else x


def largest_difference(a: Tensor, b: Tensor) -> float:
    assert_same_shape(a, b)
    difference = (a.double() - b.double()).abs().amax().item() if a.numel() else 0.0
    return difference if math.isfinite(difference) else math.inf


def assert_same_shape(a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape, f"{tuple(a.shape)} against the reference's {tuple(b.shape)}"


def relative_errors(
    quantity: str, differences: Mapping[str, float], whole: Mapping[str, Tensor]
) -> dict[str, float]:
    largest = {name: b.abs().amax().item() for name, b in whole.items()}
    floor = FLOORS[quantity] * max(largest.values())
    return {name: _over(d, max(largest[name], floor)) for name, d in differences.items()}


def scalar_row(quantity: str, a: Sequence[float], b: Sequence[float]) -> Row:
    """The step with the largest error; the steps are the entries of one tensor."""
    assert len(a) == len(b), f"{len(a)} steps against the reference's {len(b)}"
    largest = max(map(abs, b))
    errors = {
        f"step {step}": _over(abs(x - y), largest)
        for step, (x, y) in enumerate(zip(a, b, strict=True), start=1)
    }
    return worst_row(quantity, errors)


def worst_row(quantity: str, errors: Mapping[str, float]) -> Row:
    worst = max(errors, key=lambda name: errors[name])
    return Row(quantity, worst, errors[worst], BOUND)


def _over(difference: float, scale: float) -> float:
    if not math.isfinite(difference):
        return math.inf
    return difference / scale if scale > 0 else (0.0 if difference == 0 else math.inf)
