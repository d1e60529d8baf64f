"""Chooses which combinations of a test's parameters the fast tier runs; `-m full` runs the others.

A test marked `covering(strength)` runs with few of all the combinations that its parametrize marks
make: with every value of each parameter together with every value of any `strength - 1` others (2
where the mark does not say). A bug that takes that many values to show is met; those that take more
are what the fuzz and the full tier look for. Strength 1 is for parameters whose pairs other tests
combine.
"""

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import pytest

from dtensor_llm.mesh import parse_mesh

T = TypeVar("T")

Row = tuple[str, ...]
"""The value of each parameter, as text."""


def mark_what_is_left_out(items: list[pytest.Item]) -> None:
    """Mark `full` those cases of a `covering` test that its covering set does without."""
    cases: dict[tuple[str, int], dict[Row, pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("covering")
        if mark is not None and isinstance(item, pytest.Function):
            test = item.nodeid.partition("[")[0]
            row = tuple(map(repr, item.callspec.params.values()))
            cases.setdefault((test, *(mark.args or (2,))), {})[row] = item
    for (_, strength), rows in cases.items():
        fast = covering_set(list(rows), strength)
        for row in rows:
            if row not in fast:
                rows[row].add_marker(pytest.mark.full)


def covering_set(rows: Sequence[Row], strength: int) -> set[Row]:
    """Few of the rows that contain all which is in any of them at `strength` positions."""
    width = len(rows[0])
    positions = list(itertools.combinations(range(width), min(strength, width)))
    return chosen(
        {row: {(place, tuple(row[i] for i in place)) for place in positions} for row in rows}
    )


def covering_cases(cases: Mapping[str, tuple[str, Mapping[str, Any]]]) -> list[Any]:
    """Parameters for a table {name: (mesh, options)}: `full` are those that a covering set lacks.

    It has every value of an option with every mesh axis where some case has the two, and every set
    of axes that a mesh has.
    """

    def contained(mesh: str, options: Mapping[str, Any]) -> set[Hashable]:
        axes = frozenset(axis for axis, size in asdict(parse_mesh(mesh, None)).items() if size > 1)
        values = [(option, str(value)) for option, value in options.items()]
        return {(axis, *value) for axis in axes or {""} for value in values} | {axes}

    fast = chosen({name: contained(*case) for name, case in cases.items()})
    return [pytest.param(name, marks=() if name in fast else pytest.mark.full) for name in cases]


def chosen(contained: Mapping[T, set[Any]]) -> set[T]:
    """Few keys whose sets have all that is in any: the next one adds the most, the first such."""
    missing = set[Any]().union(*contained.values())
    found = set[T]()
    while missing:
        best = max(contained, key=lambda key: len(contained[key] & missing))
        found.add(best)
        missing -= contained[best]
    return found
