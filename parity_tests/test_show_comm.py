"""scripts/show_comm.py from its command line to its exit status."""

import re

import pytest

from dtensor_llm.planner import costs
from parity_tests.harness import Script, torchrun

SMALL = "--layers 2 --width 32 --seq-len 8 --global-batch-size 8 --data LICENSE"


def test_shows_what_was_predicted_and_counted(script: Script) -> None:
    done = script("show_comm.py", f"--mesh 2x2x2 {SMALL}")
    assert done.returncode == 0, done.stderr
    assert "as predicted on each of 8 ranks, to the byte" in done.stdout
    # 4 microbatches x 1 block x 4, and the embedding or the head; 1 x 8 x 32 float32 each.
    assert (
        re.findall(r"^tp +all-gather +(.+?) +yes$", done.stdout, re.MULTILINE)
        == ["20     20,480  10,240"] * 2
    )
    assert len(re.findall(r"^axis +count +payload +wire$", done.stdout, re.MULTILINE)) == 2


def test_one_rank_communicates_nothing(script: Script) -> None:
    done = script("show_comm.py", f"--mesh 1x1x1 {SMALL}")
    assert (done.returncode, "as predicted on each of 1 ranks" in done.stdout) == (0, True)


@pytest.mark.parametrize("forgotten", ["loss, vocabulary parallel", "token count"])
def test_a_wrong_form_ends_with_status_1(
    script: Script, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    """And the rows that differ show both, on the ranks where they differ."""
    monkeypatch.delitem(costs.PURPOSES, forgotten)
    done = script("show_comm.py", f"--mesh 2x1x2 {SMALL}")
    assert done.returncode == 1
    assert "NOT as predicted on 4 of 4 ranks" in done.stdout
    assert re.search(r"all-reduce .*, counted .* NO$", done.stdout, re.MULTILINE)
    assert done.stdout.count("rank pp=0") == 4


def test_processes_show_the_same(script: Script) -> None:
    line = f"--mesh 2x1x1 {SMALL}"
    as_processes = torchrun(2, "scripts/show_comm.py", *line.split())
    as_threads = script("show_comm.py", line)
    assert (as_processes.returncode, as_threads.returncode) == (0, 0), as_processes.stderr
    assert as_processes.stdout == as_threads.stdout


def test_predicts_what_no_machine_here_runs(script: Script) -> None:
    flags = "--predict --mesh 8x4x16 --model gpt3-175b --global-batch-size 1536"
    done = script("show_comm.py", flags)
    assert done.returncode == 0, done.stderr
    titles = re.findall(
        r"^mesh 8x4x16, m = 8 microbatches, rank pp=(\d)", done.stdout, re.MULTILINE
    )
    assert titles == ["0", "1", "2", "3"]
    # 24 blocks x 8 microbatches x 4 of b t d = 12 x 2048 x 12288 float32.
    payload = 24 * 8 * 4 * 12 * 2048 * 12288 * 4
    row = rf"^tp +all-gather +blocks, tensor parallel +768 +{payload:,} +{payload * 7 // 8:,}$"
    assert len(re.findall(row, done.stdout, re.MULTILINE)) == 4


@pytest.mark.parametrize("predict", ["", "--predict"])
def test_bad_input_is_told_at_once(script: Script, predict: str) -> None:
    done = script("show_comm.py", f"{predict} --mesh 3x2x1 --heads 8 --lr fast --wire 3")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for text in ("--lr fast", "--wire is not a flag", "tp=3"):
        assert text in done.stderr, done.stderr
    done = script("show_comm.py", f"{predict} --mesh")
    assert (done.returncode, "--mesh without a value" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--predct", "--predct is not a flag; did you mean --predict?"),
        ("--record run", "--record: train_gpt.py does that; leave it out"),
        ("--metrics=m --predict", "--metrics: train_gpt.py does that; leave it out"),
        ("--check-parity", "--check-parity: train_gpt.py does that; leave it out"),
    ],
)
def test_what_it_does_not_do_is_refused(script: Script, line: str, message: str) -> None:
    done = script("show_comm.py", f"--mesh 2x1x1 {SMALL} {line}")
    assert (done.returncode, done.stdout, message in done.stderr) == (2, "", True), done.stderr


def test_help_says_what_it_does(script: Script) -> None:
    done = script("show_comm.py", "--help")
    assert done.returncode == 0
    assert "--predict" in done.stdout
