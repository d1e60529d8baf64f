"""scripts/bench_step.py: what it is asked for that it does not do."""

import sys

from parity_tests.harness import run_script


def test_a_profile_is_of_one_step_alone() -> None:
    done = run_script(
        sys.executable, "scripts/bench_step.py", "--profile", "one", "--only", "dp", "--steps", "1"
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "--only: --profile one times no other; leave one of them out" in done.stderr
