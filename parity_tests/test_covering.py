"""What the fast tier leaves out of a product is nothing that it promises to run."""

from collections import Counter
from itertools import combinations, product

import pytest

from parity_tests.covering import covering_cases, covering_set

ROWS = [tuple(map(str, row)) for row in product(range(4), range(3), range(2), range(2))]


@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 13), (3, 30), (4, 48)])
def test_few_rows_hold_all_values_together(strength: int, most: int) -> None:
    chosen = covering_set(ROWS, strength)
    assert len(chosen) <= most
    for places in combinations(range(4), strength):
        held = {tuple(row[i] for i in places) for row in chosen}
        assert held == {tuple(row[i] for i in places) for row in ROWS}


def test_only_what_is_there_can_be_chosen() -> None:
    diagonal = [(str(i), str(i)) for i in range(3)]
    assert covering_set(diagonal, 2) == set(diagonal)


def test_a_case_is_left_out_where_others_have_all_of_it() -> None:
    cases = {
        "alone": ("1x1x2", {}),
        "one": ("1x1x2", {"zero": 1}),
        "both": ("1x1x4", {"zero": 1, "micro_batch_size": 1}),
        "other mesh": ("2x1x1", {"micro_batch_size": 1}),
        "other value": ("1x1x2", {"zero": 2}),
    }
    left_out = {case.values[0] for case in covering_cases(cases) if case.marks}
    assert left_out == {"alone", "one"}


@pytest.mark.covering
@pytest.mark.parametrize("a", [0, 1])
@pytest.mark.parametrize("b", [0, 1])
@pytest.mark.parametrize("c", [0, 1])
def test_marked_cases_are_chosen(a: int, b: int, c: int, request: pytest.FixtureRequest) -> None:
    """Four of these eight are fast, the others of the full tier; either may not run now."""
    cases = [item for item in request.session.items if "marked_cases" in item.nodeid]
    is_full = Counter(item.get_closest_marker("full") is not None for item in cases)
    assert is_full[True] in (0, 4)
    assert is_full[False] in (0, 4)
    assert {a, b, c} <= {0, 1}
