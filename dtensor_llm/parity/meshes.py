"""Proves meshes: trains on each, holds it to the reference, and makes one table of all.

A mesh that the settings do not allow (tp=8 with 4 heads) is a row with the reason, not a failure.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

from dtensor_llm.config import Config, MeshSizes
from dtensor_llm.data import Batch, Dataset
from dtensor_llm.mesh import fitting_meshes
from dtensor_llm.parity.check import ParityCheck
from dtensor_llm.parity.expect import TrainReference
from dtensor_llm.parity.finder.divergence import find_divergence
from dtensor_llm.parity.finder.finding import Finding
from dtensor_llm.parity.finder.search import TOLERANCE
from dtensor_llm.parity.report import Report, Row
from dtensor_llm.parity.verdict import OF_RMS, YARDSTICK_FACTOR, Expectation
from dtensor_llm.train import Trainer, TrainingError, train
from dtensor_llm.worlds import World

COLUMNS = {
    "loss": ("loss",),
    "norm": ("gradient norm",),
    "gradient": ("gradient",),
    "weight": ("weight",),
    "moments": ("exp_avg", "exp_avg_sq", "momentum"),
}


@dataclass(frozen=True)
class Checked:
    """What became of one mesh.

    Args:
        mesh: as it is written on a command line.
        report: None where it did not come to one.
        problem: why not; empty where the mesh is refused by no rule and nothing went wrong.
        refused: whether the settings do not allow the mesh.
        finding: where the mesh parts from the reference, in words.
        seconds: that it took.
    """

    mesh: str
    report: Report | None = None
    problem: str = ""
    refused: bool = False
    finding: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return self.refused or (self.report is not None and self.report.passed)


def factorings(num_ranks: int) -> list[MeshSizes]:
    """Every tp x pp x dp of so many ranks, tensor parallelism first."""
    meshes = fitting_meshes(num_ranks, MeshSizes())
    return sorted(meshes, key=lambda mesh: (-mesh.tp, -mesh.pp))


def whole_batches(config: Config, data: Dataset) -> list[Batch]:
    return [data.batch(step) for step in range(config.train.steps)]


def check_rank(
    config: Config,
    data: Dataset,
    train_reference: TrainReference,
    expected: Expectation,
    world: World,
    *,
    always_search: bool = False,
) -> Checked:
    """Train and compare; where they differ, find where. Every rank calls it and gets the same.

    `expected` is what `expect` gives for every step. With `always_search` the finder looks, in
    float64, also where the report passes.
    """
    mesh = str(config.parallel.mesh)
    started = time.perf_counter()
    trainer = Trainer(config, world)
    check = ParityCheck(trainer)
    problem = ""
    report = None
    try:
        train(trainer, data, [check])
        report = check.compare(expected)
    except TrainingError as error:  # on every rank alike
        problem = str(error)
    finding: Finding | str | None = None
    if always_search or report is None or not report.passed:
        first = None if report is None else report.first
        finding = find_divergence(config, world, data, train_reference, first)
        finding = finding or f"in float64 no number of any step is off by {TOLERANCE:.0e}"
    seconds = time.perf_counter() - started
    return Checked(mesh, report, problem, finding=str(finding or ""), seconds=seconds)


def table(results: Sequence[Checked]) -> str:
    """A row for each mesh, with the worst error of each kind.

    In float64 as it is; in lower precision as a multiple of what one device has.
    """
    measured = any(_is_multiple(result.report) for result in results if result.report)
    headers = ["mesh", *COLUMNS, "verdict", "time"]
    caption = "errors" + (
        f", as multiples of one device's; {YARDSTICK_FACTOR:g} is the bound" if measured else ""
    )
    rows = [[r.mesh, *_cells(r), _verdict(r), f"{r.seconds:.1f} s"] for r in results]
    return f"{caption}\n{tabulate(rows, headers=headers, disable_numparse=True)}"


def _is_multiple(report: Report) -> bool:
    return any(row.quantity.endswith(OF_RMS) for row in report.rows)


def _cells(result: Checked) -> list[str]:
    """The worst number of each column."""
    if result.report is None:
        return [""] * len(COLUMNS)
    multiple = _is_multiple(result.report)

    def number(row: Row) -> float:
        return row.error / row.bound * YARDSTICK_FACTOR if multiple and row.bound else row.error

    rows = [(row.quantity.removesuffix(OF_RMS), number(row)) for row in result.report.rows]
    cells = []
    for quantities in COLUMNS.values():
        errors = [error for quantity, error in rows if quantity in quantities]
        cells.append(f"{max(errors):{'.2f' if multiple else '.1e'}}" if errors else "")
    return cells


def _verdict(result: Checked) -> str:
    if result.refused:
        return "refused"
    return "ok" if result.passed else "FAIL"


def summary(results: Sequence[Checked]) -> str:
    """Everything about the meshes that did not pass, and the count."""
    lines = []
    for result in results:
        if result.passed and result.finding:
            lines.append(f"{result.mesh}: {result.finding}")
        if result.refused:
            lines.append(f"{result.mesh} is refused: {result.problem}")
        elif not result.passed:
            lines.append(f"\n{result.mesh} differs:")
            lines += [str(part) for part in (result.report, result.problem, result.finding) if part]
    trained = [result for result in results if not result.refused]
    passed, refused = sum(result.passed for result in trained), len(results) - len(trained)
    lines.append(
        f"equal to one device: {passed} of {len(trained)} meshes"
        + (f"; {refused} refused by the settings" if refused else "")
    )
    return "\n".join(lines)
