"""What a planted bug is, and the list that the other files of this folder fill."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from dtensor_llm.config import Config
from dtensor_llm.parity import Report, Row
from parity_tests.harness import parity, small_config

KINDS = ("forward", "backward", "reduction", "optimizer", "randomness", "data")

Check = Callable[[Config], Report]


@dataclass(frozen=True)
class Fault:
    """A planted bug.

    Args:
        name: of the function that plants it.
        kind: one of KINDS.
        strategy: whose code it breaks: a file of dtensor_llm/parallel, or another part's name.
        mesh: a mesh on which it matters.
        quantity: a quantity of the report that must fail.
        tensors: part of the name of what must be reported as the worst; "" for any.
        sabotaged: what goes wrong first: a pattern (fnmatch), or several with "or", of a module's
            or parameter's name; or a phase: "data", "loss", "gradient" (of every parameter, while
            activations and their gradients are right), "gradient norm" or "update".
        symptom: what a user would see.
        breaks: what is wrong.
        check: trains a configuration, or reads its data, and reports what is not as it must be.
        options: configuration on which it matters.
        plant: the context manager.
    """

    name: str
    kind: str
    strategy: str
    mesh: str
    quantity: str
    tensors: str
    sabotaged: str
    symptom: str
    breaks: str
    check: Check = field(repr=False)
    options: Mapping[str, Any]
    plant: Callable[[], AbstractContextManager[None]] = field(repr=False)

    @property
    def config(self) -> Config:
        return small_config(self.mesh, **self.options)

    def is_sabotaged(self, name: str) -> bool:
        """Whether a module, parameter or phase of this name is what goes wrong first."""
        return any(fnmatchcase(name, pattern) for pattern in self.sabotaged.split(" or "))

    def row_that_names_it(self, report: Report) -> Row | None:
        """The failed row of the quantity that is broken, if the report names the right tensor."""
        failed = [row for row in report.rows if row.quantity == self.quantity and not row.passed]
        return next((row for row in failed if self.tensors in row.worst), None)


FAULTS: list[Fault] = []

Planter = Callable[[], Iterator[None]]


def fault(
    kind: str,
    strategy: str,
    mesh: str,
    quantity: str,
    tensors: str = "",
    *,
    sabotaged: str,
    symptom: str,
    check: Check = parity,
    **options: Any,
) -> Callable[[Planter], Planter]:
    """Register the function below as a fault; its docstring says what it breaks."""

    def register(plant: Planter) -> Planter:
        found = Fault(
            name=plant.__name__,
            kind=kind,
            strategy=strategy,
            mesh=mesh,
            quantity=quantity,
            tensors=tensors,
            sabotaged=sabotaged,
            symptom=symptom,
            breaks=plant.__doc__ or "",
            check=check,
            options=options,
            plant=contextmanager(plant),
        )
        FAULTS.append(found)
        return plant

    return register
