"""The contract of communication as tables: what a step was predicted to move, and what it did."""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from itertools import groupby

import torch.distributed as dist
from tabulate import tabulate
from torch.distributed.device_mesh import DeviceMesh

from dtensor_llm.config import Config
from dtensor_llm.data import Dataset
from dtensor_llm.planner.costs import PURPOSES, step_traffic
from dtensor_llm.planner.parameters import Place
from dtensor_llm.planner.recorder import CommRecorder
from dtensor_llm.planner.traffic import Traffic, merged
from dtensor_llm.train import Trainer
from dtensor_llm.worlds import World

PLACE_AXES = tuple(field.name for field in fields(Place))


@dataclass(frozen=True)
class Contract:
    """What the rank at `place` was predicted to communicate in a step, and what it was seen to."""

    place: Place
    predicted: list[Traffic]
    counted: list[Traffic]

    @property
    def holds(self) -> bool:
        return self.predicted == self.counted


def measure(config: Config, data: Dataset, world: World) -> list[Contract]:
    """Train some steps and record the last; every rank calls it and gets the contracts of all.

    Comm: a step's, and an all-gather of what each rank recorded.
    """
    trainer = Trainer(config, world)
    with contextlib.ExitStack() as open_recorder:
        recorder = CommRecorder(trainer.mesh)
        for step in range(first_steps(config) + 1):
            if step == first_steps(config):
                open_recorder.enter_context(recorder)
            batch = data.batch(step, trainer.samples)
            trainer.step(step, batch.tokens, batch.labels)
    place = place_of(trainer.mesh)
    own = Contract(place, step_traffic(config, place), recorder.table())
    contracts = [own] * world.size
    if world.size > 1:
        dist.all_gather_object(contracts, own)
    return contracts


def place_of(mesh: DeviceMesh) -> Place:
    """The calling rank's."""
    axes = set(PLACE_AXES) & set(mesh.mesh_dim_names or ())
    return Place(**{axis: mesh.get_local_rank(axis) for axis in axes})


def first_steps(config: Config) -> int:
    """How many steps communicate more than later ones: see `costs`."""
    return 1 + config.parallel.ddp + config.parallel.ddp_static_graph


def contract_table(contract: Contract) -> str:
    """A row for each operation and axis: predicted, and counted where it is not the same."""
    predicted, counted = (
        {(t.axis, t.operation): t for t in side} for side in (contract.predicted, contract.counted)
    )
    rows = []
    for axis, operation in sorted(predicted.keys() | counted.keys()):
        nothing = Traffic(operation, axis, 0, 0, Fraction(0))
        pair = [side.get((axis, operation), nothing) for side in (predicted, counted)]
        cells = [pair_cell(*values) for values in zip(*map(numbers, pair), strict=True)]
        rows.append([axis, operation, *cells, "yes" if pair[0] == pair[1] else "NO"])
    headers = ["axis", "operation", "count", "payload", "wire", "equal"]
    return _table(rows, headers, num_texts=2)


def pair_cell(predicted: str, counted: str) -> str:
    return predicted if predicted == counted else f"{predicted}, counted {counted}"


def prediction_table(config: Config, place: Place) -> str:
    """A row for each purpose, operation and axis."""
    rows = [
        [t.axis, t.operation, purpose, *numbers(t)]
        for purpose, predict in PURPOSES.items()
        for t in merged(predict(config, place))
    ]
    headers = ["axis", "operation", "purpose", "count", "payload", "wire"]
    return _table(sorted(rows), headers, num_texts=3)


def axis_table(parts: Iterable[Traffic]) -> str:
    """A row for each axis: everything that a rank communicates over it."""
    ordered = sorted(parts, key=lambda t: t.axis)
    rows = [
        [axis, *numbers(merged([Traffic("any", axis, *_sizes(t)) for t in over_it])[0])]
        for axis, over_it in groupby(ordered, key=lambda t: t.axis)
    ]
    return _table(rows, ["axis", "count", "payload", "wire"], num_texts=1)


def _sizes(t: Traffic) -> tuple[int, int, Fraction]:
    return t.count, t.payload, t.wire


def numbers(t: Traffic) -> list[str]:
    """Count, payload and wire bytes as text."""
    wire = f"{int(t.wire):,}" if t.wire.denominator == 1 else f"{float(t.wire):,.1f}"
    return [f"{t.count:,}", f"{t.payload:,}", wire]


def _table(rows: Sequence[Sequence[str]], headers: Sequence[str], num_texts: int) -> str:
    align = ["left"] * num_texts + ["right"] * (len(headers) - num_texts)
    return tabulate(rows, headers=headers, colalign=align if rows else None, disable_numparse=True)


def describe(place: Place) -> str:
    """`pp=0, dp_shard=1, tp=0`."""
    return ", ".join(f"{axis}={getattr(place, axis)}" for axis in PLACE_AXES)
