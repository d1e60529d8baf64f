"""scripts/bench_step.py: what it is asked for that it does not do, and how sure its ratios are."""

import os
import sys

import pytest

from parity_tests.harness import ROOT, Script

sys.path.insert(0, str(ROOT / "scripts"))

from benchmark.report import left_out, ratio


def test_a_profile_is_of_one_step_alone(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "execv")  # else a script that does not refuse would replace the tests
    done = script("bench_step.py", "--profile one --only dp --steps 1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--only: --profile one times no other; leave one of them out" in done.stderr


def test_ratio_is_printed_with_its_interval() -> None:
    """Of 15 draws the median is between the 4th and the 12th in 96.5 % of cases."""
    own = [1.0 + 0.01 * index for index in range(15)]
    assert ratio(own[::-1], [0.5] * 15, share=2.0) == "1.070 (1.03 to 1.11)"
    assert ratio(own[:5], [1.0] * 5) == "1.020"


@pytest.mark.parametrize(("count", "expected"), [(5, None), (6, 0), (9, 1), (15, 3), (25, 7)])
def test_draws_outside_the_interval_of_the_median(count: int, expected: int | None) -> None:
    """From the table of the binomial distribution."""
    assert left_out(count) == expected
