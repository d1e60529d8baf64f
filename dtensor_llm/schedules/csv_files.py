"""Schedules in torch's CSV format: a row for each rank, a cell for each step, empty where idle.

Only computation is written (torch's `compute_only`): sends, receives and FSDP's gathers follow from
it, and torch adds them.
"""

import csv
from functools import cache
from pathlib import Path

from dtensor_llm.schedules.actions import Schedule, parse_step
from dtensor_llm.schedules.check import ScheduleError, cells_of, check_losses, sweep


def read_csv(
    path: str | Path,
    *,
    num_ranks: int | None = None,
    num_microbatches: int | None = None,
) -> Schedule:
    """Read a schedule, and check that it can run.

    Args:
        path: the file.
        num_ranks: how many there must be; None takes what the file has.
        num_microbatches: likewise.

    Raises:
        ScheduleError: with the grid of the file, where a cell is none, or the schedule not sound.
        OSError: the file cannot be read.
    """
    cells = _cells(Path(path))
    if num_ranks is not None and len(cells) != num_ranks:
        rule = f"but there are {num_ranks} ranks; one row each"
        raise ScheduleError(f"{path} has {len(cells)} rows, {rule}", cells)
    programs = []
    for rank, row in enumerate(cells):
        program = []
        for step, text in enumerate(row):
            try:
                program.append(parse_step(text))
            except ValueError as error:
                problem = f"{path}, rank {rank}, step {step}: {error}"
                raise ScheduleError(problem, cells, [(rank, step)]) from None
        programs.append(tuple(program))
    schedule = Schedule(tuple(programs))
    try:
        sweep(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"{path}, {error.problem}", cells, error.culprits) from None
    if num_microbatches is not None and schedule.num_microbatches != num_microbatches:
        found = f"{schedule.num_microbatches} microbatches"
        raise ScheduleError(f"{path} is for {found}, but there are {num_microbatches}", cells)
    return schedule


@cache
def load(path: str) -> Schedule:
    """`read_csv` for training, once a process: whoever asks again gets the same schedule.

    Raises:
        ScheduleError: as there, and where the losses come in another order than the microbatches.
        OSError: as there.
    """
    schedule = read_csv(path)
    check_losses(schedule)
    return schedule


def microbatches_in(path: str) -> int | None:
    """How many the file's schedule is for; None where it is none."""
    try:
        return load(path).num_microbatches
    except (OSError, ScheduleError):
        return None


def _cells(path: Path) -> list[list[str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            cells = list(csv.reader(file, strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ScheduleError(f"{path} is not a CSV file: {error}") from None
    while cells and not cells[-1]:  # a blank line
        cells.pop()
    if not cells:
        raise ScheduleError(f"{path} is empty: it needs a row for each rank")
    return cells


def write_csv(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule such that `read_csv` and torch read it back."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(cells_of(schedule))
