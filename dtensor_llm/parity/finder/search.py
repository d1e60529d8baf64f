"""Compares a recorded step with the reference's, value by value, in the order of causes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from dtensor_llm.parity.check import own_part
from dtensor_llm.parity.difference import FLOOR, FLOOR_OF_WEIGHTS, difference, over, size_of
from dtensor_llm.parity.finder.diagnosis import Where
from dtensor_llm.parity.finder.finding import PHASES
from dtensor_llm.parity.finder.observe import INPUT, Observation, ObservedStep
from dtensor_llm.parity.run import QUANTITIES, Run, prepared
from dtensor_llm.plan import chunk
from dtensor_llm.train import DATA_AXES, Trainer

TOLERANCE = 1e-9  # of the largest entry, in float64, where rounding gives 1e-13: beyond is a bug
NOT_MODULES = ("tokens", "labels", "loss")


class ReferenceRun(Run, Protocol):
    """What `reference.training.train` gives."""

    @property
    def learning_rates(self) -> Sequence[float]:
        """Of each step."""


@dataclass(frozen=True)
class Spot:
    """The address of a value.

    `position` is its place in the order of its phase; `microbatch` -1 is the whole batch.
    """

    step: int
    phase: str
    name: str
    what: str = ""
    position: int = 0
    microbatch: int = -1

    @property
    def order(self) -> tuple[int, int, int, int]:
        return self.step, PHASES.index(self.phase), self.position, self.microbatch

    @property
    def kind(self) -> tuple[int, str, str]:
        return self.step, self.phase, self.what


@dataclass(frozen=True)
class Part:
    """What a rank holds of a value, and the reference's whole one.

    `where` is its place; None where the shape fits none.
    """

    found: Tensor
    whole: Tensor
    where: Where | None


@dataclass(frozen=True)
class Suspect:
    """A value that differs on a rank, small enough to be sent.

    `held` is the name that the rank has for it; `problem` says why there are no numbers, if so.
    """

    spot: Spot
    rank: int
    coordinates: Mapping[str, int]
    error: float
    index: tuple[int, ...] = ()
    value: float | None = None
    expected: float | None = None
    problem: str = ""
    held: str = ""


@dataclass
class Search:
    """One rank's side of it.

    Args:
        trainer: after the step.
        step: counted from 0.
        run: the reference's, with the tensors of this step and the one before.
        reference: what the reference did on the way; ranks share it, and never change it.
        observed: what the trainer did.
        before: the trainer's state before the step.
    """

    trainer: Trainer
    step: int
    run: ReferenceRun
    reference: Observation
    observed: ObservedStep
    before: dict[str, dict[str, Tensor]]

    def suspects(self) -> list[Suspect]:
        """What differs on this rank in the first phase in which anything does.

        Of the passes only the first value; of parameters all that differ.
        """
        for phase, spots in self.spots():
            found = (suspect for spot in spots if (suspect := self.suspect(spot)))
            only_first = phase in ("data", "forward", "backward")
            suspects = list(islice(found, 1) if only_first else found)
            if suspects:
                return suspects
        return []

    def spots(self) -> Iterator[tuple[str, Iterator[Spot]]]:
        """Every value of this rank, phase by phase, in the order of causes."""
        names = [name for name, _ in self.reference.values if name not in NOT_MODULES]
        given = ("tokens", "labels")
        if self.step > 0:
            yield "update", self.spots_of_update(self.step - 1, self.before)
        yield "data", self.spots_of_pass("data", given)
        weights = [name for name in names if name in self.observed.weights]
        yield (
            "weight",
            (Spot(self.step, "weight", x, "value", i) for i, x in enumerate(weights)),
        )
        yield "forward", self.spots_of_pass("forward", names)
        yield "loss", self.spots_of_loss()
        yield "backward", self.spots_of_pass("backward", [x for x, _ in self.reference.gradients])
        parameters = self.run.tensors_at[self.step]["gradient"]
        own = [name for name in parameters if name in self.observed.gradients]
        yield "gradient", (Spot(self.step, "gradient", x, "gradient") for x in own)
        yield "gradient norm", iter([Spot(self.step, "gradient norm", "gradient norm")])
        if self.observed.result is not None:
            yield "update", iter([Spot(self.step, "update", "learning rate")])
            yield "update", self.spots_of_update(self.step, self.observed.state)

    def spots_of_pass(self, phase: str, names: Sequence[str]) -> Iterator[Spot]:
        for position, name in enumerate(names):
            what = "" if name in NOT_MODULES else "input" if name.endswith(INPUT) else "output"
            if name in self.observed.modules:
                for microbatch in range(self.trainer.config.microbatches):
                    yield Spot(self.step, phase, name, what, position, microbatch)

    def spots_of_loss(self) -> Iterator[Spot]:
        """The sum of each microbatch, then the loss of the step."""
        if self.trainer.model.last:
            for spot in self.spots_of_pass("loss", ["loss"]):
                yield Spot(spot.step, "loss", "loss", "sum over tokens", 0, spot.microbatch)
            yield Spot(self.step, "loss", "loss", "", 1)

    def spots_of_update(
        self, step: int, state: Mapping[str, Mapping[str, Tensor]]
    ) -> Iterator[Spot]:
        """Moments before weights: a weight is moved by them."""
        for position, quantity in enumerate([*QUANTITIES[2:], "weight"], start=1):
            for name in self.run.tensors_at[step].get(quantity, ()):
                if name in state.get(quantity, ()):
                    yield Spot(step, "update", name, quantity, position)

    def suspect(self, spot: Spot) -> Suspect | None:
        """What is wrong with the value; None if nothing is."""
        scalars = self.scalars(spot)
        if scalars is not None:
            value, expected, scale = scalars
            error = over(abs(value - expected), scale)
            return self.named(spot, error, (), value, expected) if error > TOLERANCE else None
        part = self.part(spot)
        if part is None:
            what = "no gradient arrives there" if spot.phase == "backward" else "it is not computed"
            return self.named(spot, math.inf, problem=what)
        if part.where is None:
            problem = f"its shape is {tuple(part.found.shape)}, no part of the reference's "
            return self.named(spot, math.inf, problem=f"{problem}{tuple(part.whole.shape)}")
        found, whole = (prepared(spot.what, x) for x in (part.found.cpu(), part.whole))
        apart = difference(found, whole[part.where], whole.shape, part.where)
        error = over(apart.largest, max(size_of(whole).largest, self.floor(spot)))
        if error <= TOLERANCE:
            return None
        index = torch.unravel_index(torch.tensor(apart.place), whole.shape)
        place = tuple(map(int, index)) if whole.ndim else ()
        return self.named(spot, error, place, apart.value, apart.expected)

    def named(
        self,
        spot: Spot,
        error: float,
        index: tuple[int, ...] = (),
        value: float | None = None,
        expected: float | None = None,
        problem: str = "",
    ) -> Suspect:
        """Says which rank it is that differs."""
        coordinates = {
            axis: mesh.get_local_rank() for axis, mesh in self.trainer.parallel.axes.items()
        }
        rank = self.trainer.world.rank
        held = self.held_names.get(spot.name, spot.name)
        return Suspect(spot, rank, coordinates, error, index, value, expected, problem, held)

    @cached_property
    def held_names(self) -> dict[str, str]:
        """A tied head goes by the embedding's name, also where there is only the head."""
        own = {id(x): name for name, x in self.trainer.model.named_parameters()}
        return {name: own.get(id(x), name) for name, x in self.trainer.optimizer.weights.items()}

    def scalars(self, spot: Spot) -> tuple[float, float, float] | None:
        """(found, expected, scale) of a value that all ranks share; None for a tensor."""
        result, run = self.observed.result, self.run
        if spot.name == "learning rate":
            found = self.trainer.optimizer.torch_optimizer.param_groups[0]["lr"]
            return found, run.learning_rates[self.step], max(run.learning_rates)
        if spot.phase == "gradient norm":
            norms = run.gradient_norms
            return result.gradient_norm if result else math.nan, norms[self.step], max(norms)
        if spot.phase == "loss" and spot.microbatch < 0:
            expected = run.losses[self.step]
            return result.loss if result else expected, expected, max(map(abs, run.losses))
        return None

    def part(self, spot: Spot) -> Part | None:
        """What this rank holds of the value, if it does."""
        if spot.microbatch >= 0:
            return self.part_of_pass(spot)
        if spot.name not in self.trainer.optimizer.weights:
            return None
        quantity = "weight" if spot.phase == "weight" else spot.what
        where = own_part(self.trainer, quantity, spot.name).where
        if spot.phase == "weight":
            found, whole = self.observed.weights[spot.name], self.reference.values[spot.name, 0]
        else:
            state = self.observed.state if spot.step == self.step else self.before
            own = {"gradient": self.observed.gradients, **state}[spot.what]
            if spot.name not in own:
                return None
            found, whole = own[spot.name], self.run.tensors_at[spot.step][spot.what][spot.name]
        return Part(found, whole, where)

    def part_of_pass(self, spot: Spot) -> Part | None:
        backward = spot.phase == "backward"
        observed, reference = self.observed.seen, self.reference
        own, wholes = (x.gradients if backward else x.values for x in (observed, reference))
        found, whole = own.get((spot.name, spot.microbatch)), wholes[spot.name, 0]
        if found is None:
            return None
        rows = self.rows(spot.microbatch)
        if spot.name == "loss":  # of the reference, the loss of each token, and its gradient
            return Part(found, whole[rows].amax() if backward else whole[rows].sum(), ())
        axis = "tp_col" if self.trainer.config.parallel.mesh.tp_col > 1 else "tp"
        tp, tp_rank = self.trainer.mesh[axis].size(), self.trainer.mesh.get_local_rank(axis)
        return Part(found, whole, place_of(found.shape, whole.shape, rows, tp_rank, tp))

    def rows(self, microbatch: int) -> slice:
        """The sequences of a microbatch of this rank, by its place on the mesh."""
        config, mesh = self.trainer.config, self.trainer.mesh
        rank = 0
        for axis in DATA_AXES:
            if axis in (mesh.mesh_dim_names or ()):
                rank = rank * getattr(config.parallel.mesh, axis) + mesh.get_local_rank(axis)
        start = (rank * config.microbatches + microbatch) * config.micro_batch_size
        return slice(start, start + config.micro_batch_size)

    def floor(self, spot: Spot) -> float:
        """What the error of a value is measured by at least."""
        if spot.phase in ("gradient", "update", "weight"):
            quantity = "weight" if spot.phase == "weight" else spot.what
            return self.floors[spot.step, quantity]
        backward = spot.phase == "backward" and spot.name != "loss"
        return self.floors[self.step, "backward"] if backward else 0.0

    @cached_property
    def floors(self) -> dict[tuple[int, str], float]:
        sizes = {
            (step, quantity): floor_of(quantity, named)
            for step, tensors in self.run.tensors_at.items()
            for quantity, named in tensors.items()
        }
        arriving = [x for (name, _), x in self.reference.gradients.items() if name != "loss"]
        return {**sizes, (self.step, "backward"): FLOOR * largest(arriving)}


def place_of(
    shape: Sequence[int], whole: Sequence[int], rows: slice, tp_rank: int, tp: int
) -> Where | None:
    """Where a value of `shape` lies in the whole one: its `rows`, and whole dims or tp shares."""
    if len(shape) != len(whole) or shape[0] != rows.stop - rows.start:
        return None
    where = [rows]
    for size, total in zip(shape[1:], whole[1:], strict=True):
        start, length = (0, total) if size == total else chunk(total, tp_rank, tp)
        if size != length:
            return None
        where.append(slice(start, start + length))
    return tuple(where)


def floor_of(quantity: str, tensors: Mapping[str, Tensor]) -> float:
    """As `difference` has it."""
    factor = FLOOR_OF_WEIGHTS if quantity == "weight" else FLOOR
    return factor * largest([prepared(quantity, x) for x in tensors.values()])


def largest(tensors: Sequence[Tensor]) -> float:
    return max((x.abs().amax().item() for x in tensors if x.numel()), default=0.0)
