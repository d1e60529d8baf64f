"""What README.md shows runs as it stands."""

import re
import shlex
from pathlib import Path

import pytest

from parity_tests.faults import FAULTS
from parity_tests.harness import ROOT, Script

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


LOOP = next(block for block in BLOCKS if "RecordWriter" in block)


def run_block(block: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run it in a folder, as a program of its own; warnings are errors, as in every test."""
    monkeypatch.chdir(folder)
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", [block for block in BLOCKS if block != LOOP])
def test_every_example_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_block(block, tmp_path, monkeypatch)


def test_recorded_plain_loop_equals_a_mesh_until_a_learning_rate_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    """The loop that README shows, and the command below it; then with another rate in step 2."""
    command = re.search(r"torchrun scripts/(train_gpt\.py)([^`]*?--record) mesh", README)
    assert command is not None
    mesh, plain, other = (tmp_path / name for name in ("mesh", "plain", "other"))
    rates = '    optimizer.param_groups[0]["lr"] = (1e-3, 1.001e-3, 1e-3)[step]\n'
    changed = LOOP.replace('"plain"', '"other"')
    changed = changed.replace("    optimizer.step()", f"{rates}    optimizer.step()")
    for block in (LOOP, changed):
        run_block(block, tmp_path, monkeypatch)
    flags = command[2].replace("\\\n", " ")
    done = script(command[1], f"{flags} {shlex.quote(str(mesh))}")
    assert done.returncode == 0, done.stderr
    done = script("compare_runs.py", shlex.join([str(mesh), str(plain)]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith(": equal")
    done = script("compare_runs.py", shlex.join([str(mesh), str(other)]))
    assert done.returncode == 1
    assert re.search(r"first difference: weight \(2-norm\), \S+ of step 2:", done.stdout)


def test_number_of_faults_is_that_of_the_gallery() -> None:
    assert f"plants {len(FAULTS)} bugs" in README
