"""The repository is laid out as it says: strategies are triples, the top level is small."""

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from parity_tests.harness import ROOT

TOP_LEVEL = {
    "dtensor_llm",
    "reference",
    "parity_tests",
    "scripts",
    "README.md",
    "LICENSE",
    "pyproject.toml",
}
NO_STRATEGIES = {"model", "training", "random_numbers"}  # the rest of reference/
MOST_LINES = 400


def modules(folder: str) -> set[str]:
    return {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__"}


STRATEGIES = sorted(modules("dtensor_llm/parallel"))


def ignored(path: Path) -> bool:
    """By .gitignore, which here has names only."""
    patterns = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    parts = path.relative_to(ROOT).parts
    return any(fnmatch(part, pattern) for part in parts for pattern in [".git", *patterns])


def files(*folders: str, suffix: str = "") -> Iterator[Path]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob(f"*{suffix}")):
            if path.is_file() and not ignored(path):
                yield path


def lines_with(pattern: str, paths: Iterator[Path]) -> list[str]:
    """Each as `file:line: text`."""
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if re.search(pattern, line)
    ]


def lesson_of(folder: str, name: str) -> str:
    """The docstring that a strategy's file opens with."""
    text = (ROOT / folder / f"{name}.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(text)) or ""


def test_every_strategy_is_a_triple() -> None:
    assert STRATEGIES
    assert modules("reference") - NO_STRATEGIES == set(STRATEGIES)
    assert {f"test_{name}" for name in STRATEGIES} <= modules("parity_tests")


@pytest.mark.parametrize("folder", ["dtensor_llm/parallel", "reference"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_strategy_cites_its_paper(folder: str, name: str) -> None:
    assert re.search(r"\barXiv\s\d{4}\.\d{5}\b", lesson_of(folder, name))


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategy_shows_its_placements_and_collectives(name: str) -> None:
    lesson = lesson_of("dtensor_llm/parallel", name)
    assert re.search(r"^\|[ -]+\|", lesson, re.MULTILINE), "a table"
    assert re.search(r"\bComm\b", lesson)


def test_readme_lists_every_strategy() -> None:
    table = re.findall(r"^\| \[(\w+)\]\(dtensor_llm/parallel/\1\.py\)", readme(), re.MULTILINE)
    assert sorted(table) == STRATEGIES


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def test_links_of_the_readme_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)", readme())
    local = [target for target in targets if not target.startswith("https://")]
    assert local
    assert [target for target in local if not (ROOT / target).exists()] == []


def test_top_level_holds_only_what_it_should() -> None:
    found = {path.name for path in ROOT.iterdir() if not ignored(path)}
    assert {name for name in found if not name.startswith(".")} == TOP_LEVEL


def test_no_file_knows_a_machine() -> None:
    home_folders = "|".join(["work", "root", "home", "Users"])
    kinds = (".py", ".md", ".toml", ".yml", ".yaml", "")
    texts = (path for path in files("") if path.suffix in kinds)
    assert lines_with(rf"(^|[\s\"'`=(:])/({home_folders})/", texts) == []


def test_shapes_change_through_einops() -> None:
    """A view as another dtype is no reshape."""
    assert (
        lines_with(r"\.view\((?!torch\.|dtype=)", files("dtensor_llm", "reference", suffix=".py"))
        == []
    )


def test_the_environment_is_read_by_the_worlds_alone() -> None:
    library = (p for p in files("dtensor_llm", suffix=".py") if "worlds" not in p.parts)
    assert lines_with(r"\benviron\b|\bgetenv\b", library) == []


def test_no_file_is_too_long_to_read() -> None:
    lengths = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n")
        for path in files("dtensor_llm", "reference", "scripts", suffix=".py")
    }
    assert lengths
    assert {name: length for name, length in lengths.items() if length >= MOST_LINES} == {}
