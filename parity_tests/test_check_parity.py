"""scripts/check_parity.py and scripts/compare_runs.py from command line to exit status."""

import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from dtensor_llm.config import Config
from dtensor_llm.mesh import parse_mesh
from dtensor_llm.model import Attention
from dtensor_llm.parity import meshes
from dtensor_llm.parity.meshes import Checked, factorings, summary, table
from dtensor_llm.parity.report import Report, Row
from dtensor_llm.train import StepResult, Trainer
from dtensor_llm.worlds import processes
from parity_tests.faults import BY_NAME
from parity_tests.harness import Script, torchrun

SMALL = "--layers 2 --width 32 --seq-len 8 --data LICENSE"  # a text that stays as it is


def test_every_factoring_is_a_row(script: Script) -> None:
    done = script("check_parity.py", f"--ranks 4 {SMALL} --layers 4 --heads 2 --steps 1")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split()[0]: line for line in done.stdout.splitlines()[3:9]}
    assert list(rows) == ["4x1x1", "2x2x1", "2x1x2", "1x4x1", "1x2x2", "1x1x4"]
    assert "refused" in rows.pop("4x1x1")
    assert all(" ok " in row for row in rows.values())
    assert "4x1x1 is refused: 1 problem" in done.stdout
    assert "tp=4 must divide --heads" in done.stdout
    assert done.stdout.endswith("equal to one device: 5 of 5 meshes; 1 refused by the settings\n")


def test_factorings() -> None:
    assert len(factorings(8)) == 10
    assert set(map(str, factorings(4))) == {"4x1x1", "2x2x1", "2x1x2", "1x4x1", "1x2x2", "1x1x4"}
    assert all(mesh.num_ranks == 12 for mesh in factorings(12))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_lower_precision_is_measured_by_one_device(script: Script, dtype: str) -> None:
    line = f"--mesh 2x1x2 {SMALL} --layers 1 --dtype {dtype} --global-batch-size 16 --steps 2"
    done = script("check_parity.py", line)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as multiples of one device's; 2 is the bound" in done.stdout
    numbers = [float(cell) for cell in done.stdout.splitlines()[3].split()[1:6]]
    assert all(0 <= number <= 2 for number in numbers), done.stdout
    assert max(numbers) > 0.1, "other roundings than one device's; a part may be 0.00 as printed"


def test_planted_bug_is_found_and_named(script: Script) -> None:
    fault = BY_NAME["norm_gradients_not_reduced"]
    with fault.plant():
        done = script("check_parity.py", f"--mesh 2x1x1 {SMALL} --steps 2")
    assert done.returncode == 1
    assert "FAIL" in done.stdout
    assert "2x1x1 differs:" in done.stdout
    assert re.search(r"first divergence: step 1, gradient: gradient of \S+, rank", done.stdout)
    assert "the reduction over tp is missing" in done.stdout
    assert "equal to one device: 0 of 1 meshes" in done.stdout


def test_one_bad_mesh_of_many_is_a_failure(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its numbers differ or its world comes to no end."""
    bad = Report((Row("loss", "step 1", 1.0, 1e-12, 0),))

    def check_rank(config: Config, *_: Any, **__: Any) -> Checked:
        mesh = str(config.parallel.mesh)
        if mesh == "1x2x1" and crashes:
            raise RuntimeError("a rank has fallen over")
        return Checked(mesh, bad if mesh == "1x2x1" else Report(()))

    monkeypatch.setattr(meshes, "check_rank", check_rank)
    for crashes in (False, True):
        done = script("check_parity.py", f"--ranks 2 {SMALL} --steps 2")
        assert done.returncode == 1
        assert done.stdout.count("FAIL") == 1 + (not crashes)
        assert done.stdout.endswith("equal to one device: 2 of 3 meshes\n")
        assert ("a rank has fallen over" in done.stdout) == crashes


def test_run_without_a_finite_number_is_located(script: Script) -> None:
    def attend(_: Attention, q: Tensor, k: Tensor, v: Tensor, __: Tensor) -> Tensor:
        return (q + k + v) * float("nan")

    with patch.object(Attention, "attend", attend):
        done = script("check_parity.py", f"--mesh 2x1x1 {SMALL} --steps 2")
    assert done.returncode == 1
    assert "not finite first on" in done.stdout
    assert (
        "first divergence: step 1, forward pass: input of blocks.0.attention.output" in done.stdout
    )


def test_every_step_is_compared(script: Script) -> None:
    """What goes wrong in the last update changes no loss, norm or gradient any more."""
    update = Trainer.update

    def wrong(self: Trainer, result: StepResult) -> None:
        update(self, result)
        if result.step == 2:
            self.optimizer.shards["final_norm.weight"].data.mul_(1 + 1e-6)

    with patch.object(Trainer, "update", wrong):
        done = script("check_parity.py", f"--mesh 1x1x2 {SMALL}")
    assert done.returncode == 1
    assert "first difference: weight, final_norm.weight" in done.stdout
    assert done.stdout.count("FAIL") == 2, "the mesh, and the weights"


def test_search_can_be_asked_for(script: Script) -> None:
    """A float32 run passes by its own rule; the search is in float64."""
    done = script("check_parity.py", f"--mesh 1x1x2 {SMALL} --steps 1 --dtype float32 --find")
    assert done.returncode == 0
    assert "1x1x2: in float64 no number of any step is off by 1e-09" in done.stdout


def test_processes_are_started_for_it(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torchrun, in place of this process, with the same command line."""

    class Replaced(Exception):
        pass

    def replace(path: str, command: list[str]) -> None:
        assert path == sys.executable
        raise Replaced(command)

    line = f"--mesh 2x1x1 --world processes {SMALL} --steps 2 --find"
    monkeypatch.setattr(os, "execv", replace)
    with pytest.raises(Replaced) as replaced:
        script("check_parity.py", line)
    (command,) = replaced.value.args
    launcher = processes.torchrun(2)
    assert command[: len(launcher)] == launcher
    done = torchrun(2, *command[len(launcher) :])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal to one device: 1 of 1 meshes" in done.stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--ranks 0", "--ranks 0: must be a whole number from 1 to 1024"),
        ("--ranks two", "invalid int value: 'two'"),
        ("--mesh 2x2", "--mesh 2x2: not TPxPPxDP"),
        ("--mesh 3x1x1", "tp=3 must divide --heads"),
        ("--ranks 2 --layer 3", "--layer is not a flag; did you mean --layers?"),
        ("--mesh 2x2x2 --ranks 4", "--mesh 2x2x2 has 8 ranks, and --ranks is 4; leave one"),
        ("--mesh -1x1x1", "tp=-1 fills the ranks, and their number is not known here"),
        ("--ranks 2 --record somewhere", "--record: train_gpt.py does that; leave it out"),
        ("--ranks 2 --lr fast", "--lr fast: must be a finite number"),
    ],
)
def test_bad_input_ends_with_one_message(script: Script, line: str, message: str) -> None:
    done = script("check_parity.py", f"{line} --data LICENSE")
    assert done.returncode == 2
    assert message in done.stderr
    assert not done.stdout


def test_world_that_fails_is_a_failed_mesh() -> None:
    results = [Checked("2x1x1", problem="rank 1 failed:\n...")]
    assert "FAIL" in table(results)
    assert "2x1x1 differs:\nrank 1 failed:" in summary(results)


def test_table_shows_the_worst_of_each_kind() -> None:
    rows = [
        Row("loss", "step 1", 1e-16, 1e-12, 0),
        Row("gradient norm", "step 1", 2e-16, 1e-12, 0),
        Row("gradient", "a", 3e-13, 1e-12, 0),
        Row("weight", "a", 4e-14, 1e-12, 0),
        Row("exp_avg", "a", 5e-14, 1e-12, 0),
        Row("exp_avg_sq", "a", 2e-12, 1e-12, 0),
    ]
    good, bad = Report(tuple(rows[:-1])), Report(tuple(rows))
    mesh = str(parse_mesh("2x2x2", None))
    lines = table([Checked(mesh, good), Checked(mesh, bad)]).splitlines()
    cells = ["2x2x2", "1.0e-16", "2.0e-16", "3.0e-13", "4.0e-14"]
    assert lines[3].split() == [*cells, "5.0e-14", "ok", "0.0", "s"]
    assert lines[4].split() == [*cells, "2.0e-12", "FAIL", "0.0", "s"]


# compare_runs.py


TRAIN = f"{SMALL} --global-batch-size 8 --dtype float64 --lr 1e-3 --record-every 1 --warmup-steps 0"


def test_recorded_runs_of_two_meshes_compare_clean(script: Script, tmp_path: Path) -> None:
    """With an eps that does not let AdamW multiply rounding: 4 steps stay within 1e-12."""
    a, b = tmp_path / "a", tmp_path / "b"
    for mesh, folder in (("2x2x2", a), ("1x1x1", b)):
        line = f"--mesh {mesh} {TRAIN} --eps 1e-6 --steps 4 --record {folder}"
        done = script("train_gpt.py", line)
        assert done.returncode == 0, done.stderr
    done = script("compare_runs.py", f"{a} {b}")
    assert done.returncode == 0, done.stdout
    assert f"A: {a}: 4 steps, tensors of 4; mesh 2x2x2; dtype float64" in done.stdout
    assert done.stdout.rstrip().endswith(": equal")
    again = script("train_gpt.py", f"--mesh 1x1x1 {TRAIN} --steps 4 --record {a}")
    assert again.returncode == 2
    assert f"--record {a} already holds a record; another folder would do" in again.stderr


def test_rounding_that_adamw_multiplies_is_judged_by_a_control(
    script: Script, tmp_path: Path
) -> None:
    """With an eps far below most gradients one device is as far from itself, too."""
    runs = {"a": "2x1x1", "b": "1x1x1", "c": "1x1x1 --micro-batch-size 1"}
    for name, mesh in runs.items():
        line = f"--mesh {mesh} {TRAIN} --eps 1e-12 --steps 3 --record {tmp_path / name}"
        assert script("train_gpt.py", line).returncode == 0
    pair = f"{tmp_path / 'a'} {tmp_path / 'b'}"
    done = script("compare_runs.py", pair)
    assert done.returncode == 1
    assert (
        "record B again with another --micro-batch-size and pass that as --control" in done.stdout
    )
    done = script("compare_runs.py", f"{pair} --control {tmp_path / 'c'}")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nowhere nowhere", "nowhere holds no record"),
        ("a b --bound -1", "--bound -1.0: must be a finite number above 0"),
        ("a b --bound 1 --reference c", "the reference sets the bounds; leave one out"),
        ("a b --control c --reference d", "one of the two sets the bounds; leave one out"),
    ],
)
def test_bad_comparison_ends_with_one_message(script: Script, line: str, message: str) -> None:
    done = script("compare_runs.py", line)
    assert done.returncode == 2
    assert message in done.stderr
