"""scripts/train_gpt.py with a planted bug: -m parity_tests.faulty_train FAULT [ARGUMENT...]."""

import runpy
import sys

from parity_tests.faults import BY_NAME
from parity_tests.harness import ROOT

if __name__ == "__main__":
    name = sys.argv.pop(1)
    with BY_NAME[name].plant():
        runpy.run_path(str(ROOT / "scripts" / "train_gpt.py"), run_name="__main__")
