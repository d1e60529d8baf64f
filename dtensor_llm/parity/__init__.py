"""Parity: whether two runs are the same training, and where they part if they are not.

| file           | what it does                                                                   |
|----------------|--------------------------------------------------------------------------------|
| run.py         | what a recorded run is: losses, norms, and whole tensors by parameter name      |
| difference.py  | how far two tensors are apart: the error formulas                               |
| report.py      | one row a quantity, as a table                                                  |
| verdict.py     | the bounds of each dtype, and from differences to a report                      |
| expect.py      | trains the reference, and what its bounds are measured by                       |
| check.py       | holds a trainer's steps to the reference, on any mesh                           |
"""

from dtensor_llm.parity.check import ParityCheck
from dtensor_llm.parity.expect import expect, reference_arguments
from dtensor_llm.parity.report import Report, Row
from dtensor_llm.parity.run import Run
from dtensor_llm.parity.verdict import BOUND, CONTROL_FACTOR, Expectation, compare_runs, judge

__all__ = [
    "BOUND",
    "CONTROL_FACTOR",
    "Expectation",
    "ParityCheck",
    "Report",
    "Row",
    "Run",
    "compare_runs",
    "expect",
    "judge",
    "reference_arguments",
]
