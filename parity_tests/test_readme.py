"""What README.md shows runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from parity_tests.faults import FAULTS
from parity_tests.harness import ROOT, SECONDS

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def python(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, warnings being errors."""
    whole = [sys.executable, "-W", "error", *command]
    return subprocess.run(whole, cwd=folder, capture_output=True, text=True, timeout=2 * SECONDS)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: str(BLOCKS.index(block)))
def test_every_example_runs(block: str, tmp_path: Path) -> None:
    done = python(tmp_path, "-c", block)
    assert done.returncode == 0, done.stderr


def test_recorded_plain_loop_equals_a_mesh_until_a_learning_rate_differs(tmp_path: Path) -> None:
    """The loop that README shows, and the command below it; then with another rate in step 2."""
    loop = next(block for block in BLOCKS if "RecordWriter" in block)
    command = re.search(r"torchrun (scripts/train_gpt\.py[^`]*?--record) mesh", README)
    assert command is not None
    script, *flags = command[1].replace("\\\n", " ").split()
    mesh, plain, other = (str(tmp_path / name) for name in ("mesh", "plain", "other"))
    rates = '    optimizer.param_groups[0]["lr"] = (1e-3, 1.001e-3, 1e-3)[step]\n'
    changed = loop.replace('"plain"', '"other"')
    changed = changed.replace("    optimizer.step()", f"{rates}    optimizer.step()")
    for arguments in (["-c", loop], ["-c", changed], [str(ROOT / script), *flags, mesh]):
        done = python(tmp_path, *arguments)
        assert done.returncode == 0, done.stderr
    compare = str(ROOT / "scripts" / "compare_runs.py")
    done = python(tmp_path, compare, mesh, plain)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith(": equal")
    done = python(tmp_path, compare, mesh, other)
    assert done.returncode == 1
    assert re.search(r"first difference: weight \(2-norm\), \S+ of step 2:", done.stdout)


def test_number_of_faults_is_that_of_the_gallery() -> None:
    assert f"plants {len(FAULTS)} bugs" in README
