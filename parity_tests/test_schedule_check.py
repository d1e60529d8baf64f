"""A schedule that cannot run is refused with its grid and the culprits marked; files, too."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from dtensor_llm.planner.schedule import Times, simulate
from dtensor_llm.schedules.actions import Schedule, Step, parse_step, step_text
from dtensor_llm.schedules.check import MOST_RANKS, MOST_STEPS, ScheduleError, grid, sweep
from dtensor_llm.schedules.csv_files import read_csv, write_csv
from dtensor_llm.schedules.torch_orders import (
    NAMES,
    default_stages_per_rank,
    make_schedule,
)
from parity_tests.harness import Finished, Script


def of(text: str) -> Schedule:
    """A rank a line, idle steps as dots."""
    rows = [line.split() for line in text.strip().splitlines()]
    return Schedule(tuple(tuple(parse_step(cell.strip(".")) for cell in row) for row in rows))


DEADLOCK = """
    0F0 0B0 0F1 0B1
    1F0 1F1 1B0 1B1
"""
REFUSED = {
    "two ranks wait for each other": (
        DEADLOCK,
        "the schedule cannot run:\n"
        "rank 0, step 1: 0B0 waits for 1B0, step 2 of rank 1\n"
        "rank 1, step 1: 1F1 waits for 0F1, step 2 of rank 0",
        [(0, 1), (1, 1)],
    ),
    "a backward before its forward": (
        "0F0 0B1 0F1 0B0\n1F0 1F1 1B0 1B1",
        "rank 0, step 1: 0B1 waits for 0F1, step 2 of the same rank",
        [(0, 1)],
    ),
    "weights before the input": (
        "0F0 0W0 0I0",
        "rank 0, step 1: 0W0 waits for 0I0, step 2 of the same rank",
        [(0, 1)],
    ),
    "a stage behind its own next one": (
        "1F0 0F0 1B0 0B0",
        "rank 0, step 0: 1F0 waits for 0F0, step 1 of the same rank",
        [(0, 0)],
    ),
    "a pair that needs what it would send": (
        "0F0 0F1 0B0 0B1\n1F0 .. (2F0;1B0)OVERLAP_F_B 2B0 1F1 2F1 2B1 1B1",
        "rank 1, step 2: 1B0 waits for 2B0, step 3 of the same rank",
        [(1, 2)],
    ),
    "missing backward": ("0F0 0F1 0B0", "0B1 is missing", [(0, 1)]),
    "missing weights": (
        "0F0 0I0",
        "F and I for microbatch 0: 0W0 is missing",
        [(0, 0), (0, 1)],
    ),
    "missing input": ("0F0 0W0", "F and W for microbatch 0: 0I0 is missing", [(0, 0), (0, 1)]),
    "missing forward": ("0B0 0F1 0B1", "stage 0 does B for microbatch 0: 0F0 is missing", [(0, 0)]),
    "missing microbatch": ("0F1 0B1", "stage 0 does nothing for microbatch 0: 0F0 is missing", []),
    "both backwards": (
        "0F0 0B0 0I0 0W0",
        "does F and B and I and W for microbatch 0: B is I and W in one",
        [(0, 0), (0, 1), (0, 2), (0, 3)],
    ),
    "twice": ("0F0 0B0 0F0", "rank 0 does 0F0 more than once: steps 0 and 2", [(0, 0), (0, 2)]),
    "wrong rank": (
        "0F0 0F1 1B0 0B0 0B1\n1F0 1F1 1B1",
        "rank 0, step 2: 1B0 is on the wrong rank: stage 1 is on rank 1",
        [(0, 2)],
    ),
    "a stage too many": ("0F0 0B0\n2F0 2B0", "stage 1 is on no rank, but stage 2 is", []),
    "an idle rank": ("0F0 0B0\n. .", "rank 1 has no actions", []),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    text, message, culprits = REFUSED[name]
    with pytest.raises(ScheduleError) as caught:
        sweep(of(text))
    assert message in caught.value.problem
    assert sorted(caught.value.culprits) == sorted(culprits)
    shown = str(caught.value)
    assert shown.startswith(caught.value.problem)
    rows = of(text).programs
    for rank, step in culprits:
        assert f">{step_text(rows[rank][step])}<" in shown
    assert shown.count(">") == len(culprits)


def test_a_schedule_of_nothing() -> None:
    with pytest.raises(ScheduleError, match="the schedule has no ranks"):
        simulate(Schedule(()), Times.equal(1))
    with pytest.raises(ScheduleError, match="rank 0 has no actions"):
        simulate(Schedule(((),)), Times.equal(1))


def test_the_grid_is_ranks_by_steps() -> None:
    with pytest.raises(ScheduleError) as caught:
        simulate(of(DEADLOCK), Times.equal(2))
    assert str(caught.value).partition("\n\n")[2].splitlines() == [
        "step  rank 0  rank 1",
        "0      0F0     1F0",
        "1     >0B0<   >1F1<",
        "2      0F1     1B0",
        "3      0B1     1B1",
    ]


def test_of_a_long_grid_every_culprit_is_shown() -> None:
    cells = [[f"0F{step}" for step in range(500)]]
    lines = grid(cells, [(0, 321), (0, 4)]).splitlines()
    assert len(lines) == 1 + MOST_STEPS + 2
    assert lines[1].split() == ["0", "0F0"]
    assert "4     >0F4<" in lines
    assert "(293 steps between)" in lines
    assert "321   >0F321<" in lines
    assert lines[-1] == "(167 steps after)"
    lines = grid(cells, [(0, 499)]).splitlines()
    assert len(lines) == 1 + 1 + MOST_STEPS
    assert lines[1] == "(460 steps before)"
    assert lines[-1] == "499   >0F499<"


def test_of_a_wide_grid_every_culprit_is_shown() -> None:
    cells = [[f"{rank}F0"] for rank in range(300)]
    head, line, rest = grid(cells, [(0, 0), (299, 0)]).splitlines()
    assert head.count("rank") == MOST_RANKS
    assert line.split()[1] == ">0F0<" and line.split()[-1] == ">299F0<"
    assert rest == f"({300 - MOST_RANKS} more ranks)"


def test_a_long_cell_is_cut() -> None:
    text = grid([["words of a page that is no schedule", "0F0"]], [(0, 0)])
    assert text.splitlines()[1] == "0     >words of a page that is no sc...<"


def torch_accepts(schedule: Schedule) -> bool:
    """Whether torch finds sends and receives for it."""
    stages: Any = [
        SimpleNamespace(num_stages=schedule.num_stages, group_size=schedule.num_ranks, group_rank=0)
    ]
    runtime = _PipelineScheduleRuntime(stages, schedule.num_microbatches)
    actions: dict[int, list[_Action | None]] = {
        rank: [_Action.from_str(step_text(step)) for step in program]
        for rank, program in enumerate(schedule.programs)
    }
    try:
        runtime._prepare_schedule_with_comms(actions)
    except AssertionError:
        return False
    return True


def swapped(programs: list[list[Step]], draw: random.Random) -> None:
    program = draw.choice(programs)
    first = draw.randrange(len(program) - 1)
    second = min(len(program) - 1, first + draw.choice((1, 1, 2, 5)))
    program[first], program[second] = program[second], program[first]


def removed(programs: list[list[Step]], draw: random.Random) -> None:
    program = draw.choice(programs)
    program.pop(draw.randrange(len(program)))


def moved(programs: list[list[Step]], draw: random.Random) -> None:
    step = draw.choice(programs)[-1]
    program = draw.choice(programs)
    program.insert(draw.randrange(len(program)), step)


@pytest.mark.parametrize("change", [swapped, removed, moved])
@pytest.mark.parametrize("name", NAMES)
def test_same_verdict_as_torch(
    name: str, change: Callable[[list[list[Step]], random.Random], None]
) -> None:
    """Sound schedules with something changed at random: refused where torch refuses."""
    draw = random.Random(f"{name} {change.__name__}")
    verdicts = []
    sound = make_schedule(
        name, num_ranks=2, num_microbatches=6, stages_per_rank=default_stages_per_rank(name)
    )
    for _ in range(40):
        programs = [list(program) for program in sound.programs]
        change(programs, draw)
        schedule = Schedule(tuple(tuple(program) for program in programs))
        try:
            sweep(schedule)
        except ScheduleError as error:
            verdicts.append(False)
            assert error.culprits or "missing" in error.problem
        else:
            verdicts.append(True)
        if change is not moved:  # torch does not see that an action comes twice
            assert verdicts[-1] == torch_accepts(schedule), programs
    assert False in verdicts
    assert change is not swapped or True in verdicts


BAD_FILES = {
    "two ranks that wait for each other": (
        "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
        "rank 1, step 1: 1F1 waits for 0F1, step 2 of rank 0",
        [">0B0<", ">1F1<"],
    ),
    "a backward before its forward": (
        "0F0,0B1,0F1,0B0\n1F0,1F1,1B0,1B1\n",
        "rank 0, step 1: 0B1 waits for 0F1, step 2 of the same rank",
        [">0B1<"],
    ),
    "a backward that is missing": (
        "0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n",
        "stage 0 does F for microbatch 1: 0B1 is missing",
        [">0F1<"],
    ),
    "an action that there is not": (
        "0F0,0F1,0B0,0B1\n1F0,1B0,1X1,1B1\n",
        "rank 1, step 2: '1X1' is not an action",
        [">1X1<"],
    ),
    "an action on the wrong rank": (
        "0F0,0F1,1B0,0B0,0B1\n1F0,1F1,1B1\n",
        "rank 0, step 2: 1B0 is on the wrong rank: stage 1 is on rank 1",
        [">1B0<"],
    ),
    "losses in another order": (
        "0F0,0F1,0B1,0B0\n1F1,1B1,1F0,1B0\n",
        "rank 1 does 1F1 before 1F0, but torch takes the losses of the last stage in order",
        [">1F1<", ">1F0<"],
    ),
}


@pytest.mark.parametrize("text", ["\ufeff{}", "{}\n\n", "{}\r\n"])
def test_spreadsheets_write_a_mark_before_and_blank_lines_after(text: str, tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text(text.format("0F0,0B0\n1F0,1B0"), encoding="utf-8")
    assert read_csv(path) == of("0F0 0B0\n1F0 1B0")


def test_number_too_long_for_any_schedule_is_no_action() -> None:
    with pytest.raises(ValueError, match="is not an action: write the stage"):
        parse_step("0F" + "1" * 5000)


@pytest.mark.parametrize("name", BAD_FILES)
def test_training_refuses_a_bad_file_with_its_grid(
    name: str, script: Script, tmp_path: Path
) -> None:
    text, message, culprits = BAD_FILES[name]
    path = tmp_path / "bad.csv"
    path.write_text(text)
    done = script("train_gpt.py", f"--mesh 1x2x1 --schedule-csv {path}")
    assert_refused_with_grid(done, message, culprits)
    first, second, *lines = done.stderr.splitlines()
    assert first == "1 problem in the configuration:"
    assert second.startswith(f"  - --schedule-csv {path}: ")
    assert all(line.startswith("    ") for line in lines if line), "below the one problem"


@pytest.mark.parametrize("name", [name for name in BAD_FILES if name != "losses in another order"])
def test_show_schedule_refuses_a_bad_file_with_its_grid(
    name: str, script: Script, tmp_path: Path
) -> None:
    text, message, culprits = BAD_FILES[name]
    path = tmp_path / "bad.csv"
    path.write_text(text)
    assert_refused_with_grid(script("show_schedule.py", f"--csv {path}"), message, culprits)


def assert_refused_with_grid(done: Finished, message: str, culprits: Sequence[str]) -> None:
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count(message) == 1
    assert "Traceback" not in done.stderr
    _, _, shown = done.stderr.partition("\n\n")
    head, *steps = shown.splitlines()
    assert head.split() == ["step", "rank", "0", "rank", "1"]
    assert [step.split()[0] for step in steps] == [str(number) for number in range(len(steps))]
    marked = [cell for step in steps for cell in step.split() if cell.startswith(">")]
    assert sorted(marked) == sorted(culprits)


@pytest.mark.parametrize("name", NAMES)
def test_files_are_torchs(name: str, tmp_path: Path) -> None:
    """Written by us, read by torch, written by torch, read by us."""
    schedule = make_schedule(name, num_ranks=2, num_microbatches=4)
    write_csv(schedule, tmp_path / "ours.csv")
    stages: Any = [SimpleNamespace(num_stages=schedule.num_stages, group_size=2, group_rank=0)]
    runtime = _PipelineScheduleRuntime(stages, 4)
    runtime._load_csv(str(tmp_path / "ours.csv"))
    runtime._dump_csv(str(tmp_path / "torchs.csv"), format="compute_only")
    assert read_csv(tmp_path / "torchs.csv", num_ranks=2, num_microbatches=4) == schedule


def test_idle_cells_stay_where_they_are(tmp_path: Path) -> None:
    path = tmp_path / "idle.csv"
    path.write_text("0F0,,,0B0\n,1F0,1B0\n")
    schedule = read_csv(path)
    assert schedule.programs[0][1:3] == ((), ())
    write_csv(schedule, path)
    assert path.read_text().splitlines() == ["0F0,,,0B0", ",1F0,1B0"]
    assert simulate(schedule, Times.equal(2)).makespan == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0\n", "rank 0, step 1: '0X0' is not an action"),
        ("0F0,0B\n", "rank 0, step 1: '0B' is not an action"),
        ("0F0,0B0xyz\n", "rank 0, step 1: '0B0xyz' is not an action"),
        ("0F0,0B0\n1F0,1SEND_B0,1B0\n", "rank 1, step 1: '1SEND_B0' is not an action"),
        ("0F0,0UNSHARD,0B0\n", "'0UNSHARD' is not an action"),
        ("-1F0,0B0\n", "'-1F0' is not an action"),
        ("(0F0;0F1)OVERLAP_F_B,0B0\n", "must hold an F and then a B"),
        ("(0F0)OVERLAP_F_B,0B0\n", "is not an action"),
        ("0F0,0B0\n,\n", "rank 1 has no actions: its row is empty"),
        ("", "is empty: it needs a row for each rank"),
        ('0F0,"0B0\n', "is not a CSV file"),
        ("0B0,0F0\n", "0B0 waits for 0F0"),
        ("0F0,0F99999999999\n", "stage 0 does F for microbatch 0: 0B0 is missing"),
    ],
)
def test_bad_files(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ScheduleError) as caught:
        read_csv(path)
    assert message in str(caught.value)


def test_a_bad_cell_is_marked_in_the_grid_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("0F0,0B0\n1F0,oops\n")
    with pytest.raises(ScheduleError) as caught:
        read_csv(path)
    assert str(caught.value).splitlines()[-2:] == ["0      0F0     1F0", "1      0B0    >oops<"]


def test_files_for_other_sizes(tmp_path: Path) -> None:
    path = tmp_path / "two.csv"
    write_csv(make_schedule("1f1b", num_ranks=2, num_microbatches=4), path)
    with pytest.raises(ScheduleError, match="has 2 rows, but there are 4 ranks; one row each"):
        read_csv(path, num_ranks=4)
    with pytest.raises(ScheduleError, match="is for 4 microbatches, but there are 8"):
        read_csv(path, num_microbatches=8)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "binary.csv"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ScheduleError, match="is not a CSV file"):
        read_csv(path)
