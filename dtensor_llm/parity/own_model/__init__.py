"""Parity of any model: is it, parallelized by its author, the same training as on one device?

| file          | what it does                                                                  |
|---------------|-------------------------------------------------------------------------------|
| check.py      | the entry: `check_parity`                                                       |
| task.py       | what is to be checked, which rank holds what, and what is refused at once        |
| training.py   | trains on one device and on every rank of a world of threads, and compares       |
| verdict.py    | the bounds, and a row a quantity                                                |
| recording.py  | records the outputs of modules and their gradients in one step                  |
| divergence.py | runs a step again and names the first module that differs                       |
"""

from dtensor_llm.parity.finder.finding import Finding
from dtensor_llm.parity.own_model.check import OwnModelReport, check_parity
from dtensor_llm.parity.own_model.task import OwnModelError

__all__ = ["Finding", "OwnModelError", "OwnModelReport", "check_parity"]
