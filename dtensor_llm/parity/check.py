"""Holds a trainer's steps to the single-device reference, element by element, on any mesh.

Each rank compares the elements that it holds with the same elements of the reference, so that no
weight is gathered and every copy of one is checked; what travels is five numbers for each tensor.
"""

import dataclasses
from collections.abc import Container, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_llm.parity.difference import (
    NOTHING,
    Difference,
    assert_same_shape,
    combine,
    difference,
)
from dtensor_llm.parity.report import Report
from dtensor_llm.parity.run import QUANTITIES, Run, prepared
from dtensor_llm.parity.verdict import Comparison, Expectation, comparison, judge
from dtensor_llm.plan import Part, local_tensor
from dtensor_llm.train import StepResult, Trainer, Watcher

OPTIMIZER_STATE = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum": "momentum_buffer"}


class ParityCheck(Watcher):
    """Watches a trainer's steps and compares them with the reference's; one on every rank.

    Args:
        trainer: of this rank.
        steps: whose tensors are kept, counted from 0; None keeps those of every step.
    """

    def __init__(self, trainer: Trainer, steps: Container[int] | None = None) -> None:
        self.trainer, self.steps = trainer, steps
        self.results: list[StepResult] = []
        self.kept: dict[int, dict[str, dict[str, Tensor]]] = {}

    def on_gradients(self, result: StepResult) -> None:
        self.results.append(result)
        if self.keeps(result.step):
            gradients = own_gradients(self.trainer)
            self.kept[result.step] = {"gradient": copied(gradients)}

    def on_step(self, result: StepResult) -> None:
        if self.keeps(result.step):
            self.kept[result.step] |= {q: copied(x) for q, x in own_state(self.trainer).items()}

    def keeps(self, step: int) -> bool:
        return self.steps is None or step in self.steps

    def compare(self, expected: Expectation) -> Report:
        """The report against `expected`; every rank calls it and gets the same one.

        Comm: as `measure`.
        """
        measured = self.measure(expected.reference)
        return self.trainer.world.share(lambda: judge(measured, expected))

    def measure(self, reference: Run) -> Comparison:
        """How far every number is from the reference's; every rank calls it, rank 0 gets it whole.

        Comm: for each step kept one gather to rank 0 of five float64 a tensor.
        """
        steps = [step for step in self.kept if step in reference.tensors_at]
        differences = {step: self.differences(step, reference) for step in steps}
        losses = [result.loss for result in self.results]
        norms = [result.gradient_norm for result in self.results]
        return comparison(losses, norms, differences, reference)

    def differences(self, step: int, reference: Run) -> dict[str, dict[str, Difference]]:
        """{quantity: {tensor: difference}} over the elements of all ranks; on rank 0, else {}."""
        own, whole = self.kept[step], reference.tensors_at[step]
        names = [(q, name) for q in QUANTITIES for name in whole.get(q, ())]
        unknown = {(q, name) for q in own for name in own[q] if q in whole} - set(names)
        assert not unknown, f"the reference lacks {sorted(unknown)}"
        tables = self.gather([self.own_difference(own, whole, *place) for place in names])
        if not tables:
            return {}
        result: dict[str, dict[str, Difference]] = {}
        for (quantity, name), *parts in zip(names, *tables, strict=True):
            total = combine(parts)
            assert total.largest >= 0, f"no rank holds the {quantity} of {name}"
            result.setdefault(quantity, {})[name] = total
        return result

    def own_difference(
        self,
        own: Mapping[str, Mapping[str, Tensor]],
        whole: Mapping[str, Mapping[str, Tensor]],
        quantity: str,
        name: str,
    ) -> Difference:
        """Of the elements that this rank holds; their squares only where it is the one to count."""
        a = own.get(quantity, {}).get(name)
        if a is None:
            return NOTHING
        part, b = own_part(self.trainer, quantity, name), whole[quantity][name]
        assert_same_shape(self.trainer.optimizer.weights[name], b)
        expected = b[part.where].to(a.device)
        found = difference(prepared(quantity, a), prepared(quantity, expected), b.shape, part.where)
        counted = self.trainer.counts_here(name, part)
        return found if counted else dataclasses.replace(found, squares=0.0)

    def gather(self, found: Sequence[Difference]) -> list[list[Difference]]:
        """Every rank's differences, on rank 0; none elsewhere."""
        world = self.trainer.world
        rows = [(x.largest, x.squares, x.place, x.value, x.expected) for x in found]
        own = torch.tensor(rows, dtype=torch.float64, device=world.device)
        tables = [own]
        if world.size > 1:
            tables = [torch.empty_like(own) for _ in range(world.size)] * (world.rank == 0)
            dist.gather(own, tables or None)
        return [
            [Difference(row[0], row[1], int(row[2]), row[3], row[4]) for row in table.tolist()]
            for table in tables
        ]


def own_part(trainer: Trainer, quantity: str, name: str) -> Part:
    """What this rank's part of a quantity of the parameter is.

    Of a weight it is all that the rank holds, of gradients and optimizer state what it owns.
    """
    optimizer = trainer.optimizer
    return (optimizer.held if quantity == "weight" else optimizer.owned)[name]


def own_gradients(trainer: Trainer) -> dict[str, Tensor]:
    """This rank's parts, by parameter name."""
    shards = trainer.optimizer.shards
    return {name: shard.grad for name, shard in shards.items() if shard.grad is not None}


def own_state(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    """This rank's parts of weights and optimizer state: {quantity: {parameter name: part}}."""
    optimizer = trainer.optimizer
    weights = {name: local_tensor(weight).detach() for name, weight in optimizer.weights.items()}
    state = {"weight": weights}
    for quantity, key in OPTIMIZER_STATE.items():
        parts = {name: optimizer.state(name).get(key) for name in optimizer.shards}
        state[quantity] = {name: part for name, part in parts.items() if part is not None}
    return {quantity: parts for quantity, parts in state.items() if parts}


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in tensors.items()}
