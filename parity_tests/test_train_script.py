"""scripts/train_gpt.py from its command line to its exit status, in both worlds."""

import json
import random
import re
import resource
import shlex
import sys
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from dtensor_llm.worlds import processes
from parity_tests.faults import BY_NAME
from parity_tests.harness import ROOT, Finished, Script, run_script, torchrun

SCRIPT = str(ROOT / "scripts" / "train_gpt.py")
STEPS = "--layers 2 --global-batch-size 16 --dtype float64 --lr 1e-3 --steps 3 --data LICENSE"
QUANTITIES = ["loss", "gradient norm", "gradient", "weight", "exp_avg", "exp_avg_sq"]
SMALL = "--layers 2 --width 32 --seq-len 8 --global-batch-size 8 --steps 3 --dtype float64"
BOUND = 1e-12
SECONDS_TO_REFUSE = 10.0


TrainGPT = Callable[[str], Finished]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A text file of words drawn at random: quicker to open than the standard library."""
    words = random.Random(0).choices(["mesh", "rank", "stage", "shard", "axis"], k=2000)
    path = tmp_path_factory.mktemp("data") / "words.txt"
    path.write_text(" ".join(words))
    return str(path)


def small(text: str, line: str) -> list[str]:
    """Arguments for a small model, and those of the line."""
    return shlex.split(f"{SMALL} --data {shlex.quote(text)} {line}")


@pytest.fixture
def train_gpt(text: str, script: Script) -> TrainGPT:
    """Runs the script in this process, on a small model and the text."""
    return lambda line: script("train_gpt.py", shlex.join(small(text, line)))


def printed_steps(output: str) -> list[tuple[str, str]]:
    """(loss, gradient norm) of each step, as they were printed."""
    return re.findall(r"^step +\d+  loss (\S+)  grad norm (\S+)  lr ", output, re.MULTILINE)


def assert_same_lines(steps: list[tuple[str, str]], expected: list[tuple[str, str]]) -> None:
    """All 10 digits of each loss, and 9 of each gradient norm."""
    for (loss, norm), (expected_loss, expected_norm) in zip(steps, expected, strict=True):
        assert len(loss.replace(".", "")) == 10
        assert loss == expected_loss
        assert float(norm) == pytest.approx(float(expected_norm), rel=1e-9)


def largest_error(output: str) -> float:
    (error,) = re.findall(r"^largest error (\S+) ", output, re.MULTILINE)
    return float(error)


# Parity from the command line


def test_both_worlds_equal_the_reference_and_one_device(script: Script) -> None:
    """The same command as 8 processes, and as one process with 8 threads."""
    line = f"--mesh 2x2x2 {STEPS} --check-parity"
    as_processes, as_threads = torchrun(8, SCRIPT, *line.split()), script("train_gpt.py", line)
    for done in (as_processes, as_threads):
        assert done.returncode == 0, done.stdout + done.stderr
        assert largest_error(done.stdout) <= BOUND
        for quantity in QUANTITIES:
            assert re.search(rf"^{quantity}  .* ok$", done.stdout, re.MULTILINE), quantity
    steps = printed_steps(script("train_gpt.py", f"--mesh 1x1x1 {STEPS}").stdout)
    assert len(steps) == 3
    for done in (as_processes, as_threads):
        assert_same_lines(printed_steps(done.stdout), steps)


def test_planted_bug_is_named_by_processes(text: str) -> None:
    faulty = ["-m", "parity_tests.faulty_train", "norm_gradients_not_reduced"]
    done = torchrun(2, *faulty, *small(text, "--mesh 2x1x1 --check-parity"))
    assert done.returncode == 1, done.stdout + done.stderr
    named = r"DIFFERS from the reference: .*gradient of (blocks\.\d\.\w+|final)_norm\.weight"
    assert re.search(named, done.stdout), done.stdout
    assert set(re.findall(r"exitcode *: (\d+)", done.stderr)) == {"1"}, done.stderr


def test_planted_bug_is_named_by_threads(train_gpt: TrainGPT) -> None:
    with BY_NAME["tied_gradients_not_summed"].plant():
        done = train_gpt("--mesh 1x2x1 --check-parity")
    assert done.returncode == 1, done.stdout + done.stderr
    named = r"DIFFERS from the reference: .*gradient of token_embedding\.weight"
    assert re.search(named, done.stdout), done.stdout


def test_rounding_beyond_the_fixed_bound_is_measured_by_a_control(train_gpt: TrainGPT) -> None:
    """8 steps at a learning rate of 0.1: the bound of some quantity is that of the control."""
    done = train_gpt(
        "--mesh 2x1x1 --steps 8 --lr 0.1 --warmup-steps 0 --check-parity --eval-every 0"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    bounds = [float(b) for b in re.findall(r"(\S+)  ok$", done.stdout, re.MULTILINE)]
    assert len(bounds) == len(QUANTITIES)
    assert max(bounds) > min(bounds) == BOUND


# The lines of a run


@pytest.mark.parametrize("mesh", ["2x1x1", "1x2x1", "1x1x2", "4x2x1", "2x2x2"])
def test_lines_are_those_of_one_device(mesh: str, train_gpt: TrainGPT) -> None:
    one = printed_steps(train_gpt("--mesh 1x1x1").stdout)
    assert len(one) == 3
    assert_same_lines(printed_steps(train_gpt(f"--mesh {mesh}").stdout), one)


def test_lines_of_processes_are_those_of_one_device(train_gpt: TrainGPT, text: str) -> None:
    """The last stage knows the loss, rank 0 alone prints it; all processes are started fresh."""
    one = train_gpt("--mesh 1x1x1")
    many = run_script(*processes.torchrun(2), SCRIPT, *small(text, "--mesh 1x2x1"))
    assert many.returncode == 0, many.stderr
    assert_same_lines(printed_steps(many.stdout), printed_steps(one.stdout))
    assert many.stdout.count("\n") == one.stdout.count("\n")


def test_threads_say_what_a_cluster_would_run(train_gpt: TrainGPT) -> None:
    lines = train_gpt("--mesh 2x1x1").stdout.splitlines()
    assert "2 ranks: they run as threads" in lines[0]
    assert lines[0].endswith(
        "torchrun --nnodes NODES --nproc-per-node 2/NODES scripts/train_gpt.py --mesh 2x1x1"
    )
    assert lines[1].startswith("mesh 2x1x1 (tp 2) on cpu, threads; ")
    assert lines[2].startswith(
        "8 sequences of 8 tokens a step: 1 data-parallel ranks x 1 microbatches x 8; "
    )


def test_start_of_a_pipeline_says_how_it_is_cut(train_gpt: TrainGPT) -> None:
    lines = train_gpt("--mesh 1x2x1 --layers 3 --stage-layers 0,3").stdout.splitlines()
    assert "parameters, stages of 0,3 blocks by 1f1b, " in lines[1]


def test_metrics_hold_what_is_printed(train_gpt: TrainGPT, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    done = train_gpt(f"--mesh 2x2x2 --steps 4 --eval-every 2 --eval-samples 5 --metrics {path}")
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in path.read_text().splitlines()]
    order = [(record["kind"], record["step"]) for record in records]
    steps = [("step", number) for number in (1, 2, 3, 4)]
    evaluations = [("evaluation", number) for number in (0, 2, 4)]
    assert order == [evaluations[0], *steps[:2], evaluations[1], *steps[2:], evaluations[2]]

    trained = [record for record in records if record["kind"] == "step"]
    printed = [(f"{r['loss']:#.10g}", f"{r['gradient_norm']:#.10g}") for r in trained]
    assert printed == printed_steps(done.stdout)
    assert [record["num_tokens"] for record in trained] == [64] * 4
    assert all(record["tokens_per_second"] * record["seconds"] > 63 for record in trained)

    evaluated = [record for record in records if record["kind"] == "evaluation"]
    expected = [(str(r["step"]), f"{r['loss']:#.10g}", str(r["num_tokens"])) for r in evaluated]
    line = r"^eval after (\d) steps  validation loss (\S+)  \((\d+) tokens, "
    assert re.findall(line, done.stdout, re.MULTILINE) == expected
    assert [record["num_tokens"] for record in evaluated] == [40] * 3

    written = path.read_text()
    again = train_gpt(f"--mesh 1x1x1 --metrics {path}")
    assert (again.returncode, path.read_text()) == (2, written)


def test_run_shorter_than_the_first_evaluation_has_none(train_gpt: TrainGPT) -> None:
    assert "eval after" not in train_gpt("--mesh 1x1x1 --eval-every 4").stdout


def test_help(train_gpt: TrainGPT) -> None:
    done = train_gpt("--help")
    assert done.returncode == 0
    assert done.stderr == ""
    assert "--check-parity" in done.stdout


# Bad input


def test_bad_input_is_one_message_and_status_2() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_script(sys.executable, SCRIPT, *shlex.split("--lr nan --layers 3.5 --data /nowhere"))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "3 problems in the configuration:\n"
        "  - --layers 3.5: must be a whole number of at least 1 (blocks)\n"
        "  - --lr nan: must be a finite number of at least 0\n"
        f"  - data /nowhere: no such file or folder in {ROOT}; give stdlib, a file or a folder\n"
    )
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < SECONDS_TO_REFUSE


RANK_0_IS_LATE = """
import os, runpy, sys, time
time.sleep(1.0 * (os.environ["RANK"] == "0"))
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def test_bad_input_under_torchrun_is_told_once(tmp_path: Path) -> None:
    """torchrun ends all ranks once one has left: rank 0, which speaks, must not be cut short."""
    late = tmp_path / "late.py"
    late.write_text(RANK_0_IS_LATE)
    log = ["--log-dir", str(tmp_path), "--redirects", "3"]
    done = torchrun(2, *log, str(late), SCRIPT, "--mesh", "2x2x2", "--seq-len", "9")
    assert done.returncode == 1  # torchrun's own
    assert "exitcode  : 2" in done.stderr
    logs = sorted(path.read_text() for path in tmp_path.rglob("std*.log"))
    assert logs == [
        *("", "", ""),
        "2 problems in the configuration:\n"
        "  - --seq-len 9 is not a multiple of tp=2, but with sequence parallelism all ranks take "
        "equally many tokens: 9 / 2 leaves 1; --seq-len 8, 10 or --no-sequence-parallel would do\n"
        "  - mesh tp=2 x pp=2 x dp=2 = 8 ranks, but 2 were started; 1x1x2 or 1x2x1 would fit\n",
    ]


def test_bad_data_is_bad_input(train_gpt: TrainGPT, tmp_path: Path) -> None:
    path = tmp_path / "ids.bin"
    path.write_bytes(array("H", [*range(300)] * 100).tobytes())
    done = train_gpt(f"--lr nan --data {path}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "2 problems in the configuration:\n"
        "  - --lr nan: must be a finite number of at least 0\n"
        f"  - data {path}: token 256 (from 0) has id 256, but ids must be below --vocab-size 256; "
        "give --vocab-size 257 or more, or tokenize with the model's own vocabulary\n"
    )


# Failures of a run


def test_loss_that_is_not_finite_ends_all_ranks(text: str) -> None:
    """The weights of the first step, at a learning rate of 1e300, give no finite loss any more."""
    done = torchrun(2, SCRIPT, *small(text, "--mesh 2x1x1 --lr 1e300 --warmup-steps 0"))
    assert len(printed_steps(done.stdout)) == 1
    assert done.stdout.endswith(
        "\nstopped: step 2: loss nan, gradient norm nan; not finite first on rank 0, gradient of "
        "token_embedding.weight; the weights are those of the step before\n"
    )
    assert set(re.findall(r"exitcode *: (\d+)", done.stderr)) == {"1"}
