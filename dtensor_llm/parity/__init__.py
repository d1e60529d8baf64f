"""Parity: whether two runs are the same training, and where they part if they are not.

| file           | what it does                                                                   |
|----------------|--------------------------------------------------------------------------------|
| run.py         | what a recorded run is: losses, norms, and whole tensors by parameter name      |
| difference.py  | how far two tensors are apart: the error formulas                               |
| report.py      | one row a quantity, as a table                                                  |
| verdict.py     | the bounds of each dtype, and from differences to a report                      |
| expect.py      | trains the reference, and what its bounds are measured by                       |
| check.py       | holds a trainer's steps to the reference, on any mesh                           |
| meshes.py      | that for many meshes, as one table                                              |
| finder/        | finds the first divergence: step, module, microbatch, element                   |
| record.py      | a run on disk, in a format that any trainer can write                           |
| recording.py   | writes it from a trainer on any mesh                                            |
| compare.py     | compares two records                                                            |
| own_model/     | the same for any nn.Module and any way of parallelizing it                      |
"""

from dtensor_llm.parity.check import ParityCheck
from dtensor_llm.parity.expect import expect, reference_arguments
from dtensor_llm.parity.finder.divergence import find_divergence
from dtensor_llm.parity.finder.finding import Finding
from dtensor_llm.parity.report import Report, Row
from dtensor_llm.parity.run import Run
from dtensor_llm.parity.verdict import BOUND, CONTROL_FACTOR, Expectation, compare_runs, judge

__all__ = [
    "BOUND",
    "CONTROL_FACTOR",
    "Expectation",
    "Finding",
    "ParityCheck",
    "Report",
    "Row",
    "Run",
    "compare_runs",
    "expect",
    "find_divergence",
    "judge",
    "reference_arguments",
]
