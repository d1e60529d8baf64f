"""The mutation score: what is changed and what is not, and the bookkeeping of a run."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parity_tests.harness import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import mutate
from mutate import (
    Project,
    Record,
    all_mutants,
    keep,
    known_records,
    report,
    sampled,
    unmutated,
    wrong_equivalents,
)
from mutation import targets
from mutation.mutants import Mutant, mutants_of
from mutation.server import OneCaseOfEachFirst

SECONDS = 60.0


def changed_lines(source: str) -> set[str]:
    """The lines that a mutant has in place of the source's, whatever the rule."""
    return {
        line[1:].strip()
        for mutant in mutants_of(source, "file.py")
        for line in mutant.diff.splitlines()
        if line.startswith("+")
    }


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("y = a + b", {"y = a - b"}),
        ("y = a // b", {"y = a * b"}),
        ("y = a[-1]", {"y = a[0]", "y = a[-2]"}),
        ("y = sum(dim=1)", {"y = sum(dim=0)", "y = sum(dim=2)"}),
        ("y = 0.0", {"y = 1.0"}),
        ("y = a == b", {"y = a != b"}),
        ("y = a < b", {"y = a <= b", "y = b < a"}),
        ("y = a < b + c", {"y = a <= b + c", "y = (b + c) < a", "y = a < b - c"}),
        ("y = a and b", {"y = a or b"}),
        ("y = not a", {"y = a"}),
        ("y = a if b else c", {"y = a if not (b) else c"}),
        ("y = f(flag=True)", {"y = f(flag=False)"}),
        ("y = Shard(0)", {"y = Shard(1)", "y = Replicate()"}),
        ("y = Partial()", {"y = Replicate()"}),
        ("y = Replicate()", {"y = Partial()", "y = Shard(0)"}),
        ("y = a.is_partial()", {"y = a.is_replicate()"}),
        ("y = ReduceOp.MAX", {"y = ReduceOp.SUM"}),
        ('y = mesh["tp"]', {'y = mesh["dp_shard"]'}),
        ("y = a.clone()", {"y = a"}),
        ("y = range(a)", {"y = range(a + 1)", "y = range(a - 1)"}),
        ("y = a[:b]", {"y = a[1:b]", "y = a[:b + 1]", "y = a[:b - 1]"}),
        ("y = a[1:]", {"y = a[0:]", "y = a[2:]", "y = a[1:-1]"}),
        ("y = min(a, b)", {"y = max(a, b)"}),
        ("y += a", {"pass", "y -= a"}),
        ("f(a)", {"pass"}),
        ("a.b = c", {"pass"}),
        ("raise ValueError(f'{a + 1} is wrong', 1)", {"pass"}),
        ("assert a == 1, f'{a + 1}'", {"pass"}),
        ("y = zip(a, b, strict=True)", set()),
        ("y = [a] + [b]", set()),
        ("with g(a): return b", {"if True: return b", "with g(a): pass"}),
        ("y = (a  # this or that\n or b)", {"and b)"}),
    ],
)
def test_what_becomes_of_a_line(line: str, expected: set[str]) -> None:
    source = f"def function(a, b, c, mesh):\n    {line}\n    return y\n"
    assert changed_lines(source) == expected


def test_only_a_name_that_has_a_value_loses_an_assignment() -> None:
    assert changed_lines("def f(a):\n    b = a\n    return b\n") == set()
    assert changed_lines("def f(a):\n    a = g(a)\n    return a\n") == {"pass"}


def test_an_early_return_is_deleted_and_the_last_one_is_not() -> None:
    source = "def f(a):\n    if a:\n        return a\n    return g(a)\n"
    assert changed_lines(source) == {"if not (a):", "pass"}


@pytest.mark.parametrize(("kind", "expected"), [("int", "return -(a)"), ("bool", "return not (a)")])
def test_the_result_changes_its_sign(kind: str, expected: str) -> None:
    assert changed_lines(f"def f(a) -> {kind}:\n    return a\n") == {expected}


WITHOUT_MUTANTS = '''"""1 + 1."""
import torch
from torch import Tensor
__all__ = ["f", 1]
Key = tuple[int, int]

@decorator(True, 1)
class Thing:
    """0 < 1 and 2."""

    field: tuple[int, 1]

def f(a: Shard(0), b: Literal[1] = None) -> Array[1]:
    """Returns 1 + 2."""
    a = a.to(world.device)
    c = copied(a, non_blocking=True)
    assert a is not None and isinstance(c, A | B)
    return a if isinstance(a, A | B) and a.device.type == "cpu" else 1 + 1
'''


def test_what_computes_nothing_is_left_alone() -> None:
    """Documentation, imports, annotations, decorators, and what only a GPU can tell."""
    assert changed_lines(WITHOUT_MUTANTS) == set()


def test_every_strategy_is_mutated_and_every_list_is_of_files() -> None:
    folder = ROOT / "dtensor_llm"
    strategies = {str(path.relative_to(folder)) for path in folder.glob("parallel/*.py")}
    assert strategies <= set(targets.TESTS)
    for file, tests in targets.TESTS.items():
        assert (folder / file).exists()
        for name in tests:
            assert (ROOT / targets.FOLDER / f"{name}.py").exists(), name


def test_mutants_of_the_library_are_distinct_and_have_distinct_ids() -> None:
    mutants = all_mutants(mutate.DTENSOR_LLM, [])
    assert len(mutants) > 500
    assert len({mutant.id for mutant in mutants}) == len(mutants)
    assert len({(mutant.file, mutant.source) for mutant in mutants}) == len(mutants)


def test_ids_stay_when_a_statement_moves_and_change_when_it_does() -> None:
    source = "def f(a, b):\n    if a < b:\n        g(a)\n    return a + b\n"
    ids = {mutant.id for mutant in mutants_of(source, "file.py")}
    moved = {mutant.id for mutant in mutants_of("x = y\n\n\n" + source, "file.py")}
    assert moved == ids
    edited = {mutant.id for mutant in mutants_of(source.replace("g(a)", "g(b)"), "file.py")}
    assert len(ids - edited) == len(edited - ids) == 1


def test_equal_statements_of_a_function_have_different_ids() -> None:
    first, second = mutants_of("def f(a):\n    g(a)\n    g(a)\n", "file.py")
    assert first.id != second.id
    assert (first.line, second.line) == (2, 3)


# Bookkeeping

MATHS = """import time


def double(x):
    return x * 2


def untested(x):
    return x - 1


def wait():
    time.sleep(60 * 0)
"""
TEST_MATHS = """from tiny.maths import double, wait

def test_double():
    assert double(3) == 6

def test_wait():
    wait()
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A package of three functions, one of which no test calls."""
    root = tmp_path / "repository"
    for name, text in {
        "tiny/__init__.py": "",
        "tiny/maths.py": MATHS,
        "checks/__init__.py": "",
        "checks/test_maths.py": TEST_MATHS,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return Project(root, "tiny", "checks", {"maths.py": ("test_maths",)}, {})


def run(project: Project, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The tool on `project`, in a process of its own, since it forks; it waits a few seconds."""
    program = f"""
import sys
from dataclasses import replace
from pathlib import Path
import mutate
mutate.EXTRA_SECONDS = 3
project = mutate.Project(Path({str(project.root)!r}), "tiny", "checks", {project.tests!r}, {{}})
sys.exit(mutate.main(sys.argv[1:], project))
"""
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT / "scripts",
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def test_survivors_are_found_and_a_second_run_continues(project: Project, tmp_path: Path) -> None:
    """Killed by a test, timed out, survived; then nothing is run again."""
    results = tmp_path / "results.jsonl"
    done = run(project, "--results", str(results))
    assert done.returncode == 1, done.stderr
    assert "-    return x - 1\n+    return x + 1" in done.stdout
    assert "-    return x - 1\n+    return x - 0" in done.stdout
    assert "return x * 2" not in done.stdout, "what was killed is not shown"
    records = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    passed, *mutants = records
    assert (passed["id"], passed["outcome"]) == ("unmutated: test_maths", "survived")
    outcomes = {r["id"].split(":", 1)[1].rsplit(":", 1)[0]: r["outcome"] for r in mutants}
    assert outcomes == {
        "double:*>/": "killed",  # 1.5
        "double:2>3": "killed",
        "untested:->+": "survived",
        "untested:1>0": "survived",
        "untested:1>2": "survived",
        "wait:delete": "survived",
        "wait:60>61": "survived",
        "wait:*>/": "killed",
        "wait:0>1": "timed out",
    }
    with results.open("a", encoding="utf-8") as file:
        file.write('{"id": "tiny/maths.py:wait:\n{"id": 3}\n')  # a kill while it was written
    again = run(project, "--results", str(results))
    assert again.stdout == done.stdout
    assert again.stderr == "", "nothing was run"
    assert (project.root / "tiny/maths.py").read_text(encoding="utf-8") == MATHS


def test_unmutated_tests_run_again_where_the_package_has_changed(
    project: Project, tmp_path: Path
) -> None:
    results = tmp_path / "results.jsonl"
    keep(replace(unmutated(project, "maths.py"), seconds=1.0), results)
    done = run(project, "--results", str(results), "--sample", "1")
    assert done.stderr.startswith("[1/1] 0 min left: ")
    (project.root / "tiny/__init__.py").write_text("# another", encoding="utf-8")
    done = run(project, "--results", str(results), "--sample", "2")
    assert done.stderr.startswith("unmutated, tests of maths.py: survived, ")


def test_one_case_of_each_test_comes_first() -> None:
    names = ["a.py::x[1]", "a.py::x[2]", "a.py::x[3]", "a.py::y", "b.py::x[1]", "b.py::x[2]"]
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in names]
    OneCaseOfEachFirst().pytest_collection_modifyitems(items)
    order = [names.index(item.nodeid) for item in items]
    assert order == [0, 3, 4, 1, 5, 2]


def records_of(project: Project, mutants: list[Mutant], survivors: str) -> list[Record]:
    """As if those in the function `survivors` had survived."""
    return [
        recorded(project, m, "survived" if f":{survivors}:" in m.id else "killed") for m in mutants
    ]


def recorded(project: Project, mutant: Mutant, outcome: str) -> Record:
    file = mutant.file
    digests = project.source_digest(file), project.tests_digest(file)
    return Record(mutant.id, *digests, outcome=outcome, seconds=1.0, by="")


def test_equivalent_mutants_count_neither_way(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    mutants = all_mutants(project, [])
    first = next(m.id for m in mutants if ":untested:" in m.id)
    listed = replace(project, equivalent={first: "the sign is lost"})
    score = report(listed, mutants, records_of(listed, mutants, "untested"))
    assert score == 6 / 8
    printed = capsys.readouterr().out
    assert "killed 6 of 9: 66.7%; without 1 equivalent ones 75.0%" in printed
    assert printed.count("\nsurvived: tiny/maths.py:9 ") == 2
    assert "because the sign is lost" in printed


def test_an_entry_that_is_killed_or_gone_is_wrong(project: Project) -> None:
    mutants = all_mutants(project, [])
    killed, survivor = (next(m.id for m in mutants if f":{f}:" in m.id) for f in ("double", "wait"))
    entries = {killed: "a lie", survivor: "the truth", "maths.py:x:y:z": "of another age"}
    listed = replace(project, equivalent=entries)
    wrong = wrong_equivalents(listed, mutants, records_of(listed, mutants, "wait"))
    assert wrong == ["maths.py:x:y:z: no such mutant", f"{killed}: is killed"]


def test_failing_unmutated_tests_end_the_run(project: Project) -> None:
    test = project.root / "checks/test_maths.py"
    test.write_text(TEST_MATHS.replace("== 6", "== 7"), encoding="utf-8")
    done = run(project)
    assert done.returncode == 2
    assert "the unmutated tests fail" in done.stderr
    assert "assert 6 == 7" in done.stderr


def test_samples_are_the_same_and_contain_smaller_ones(project: Project) -> None:
    mutants = all_mutants(project, [])
    few, more = sampled(mutants, 3, seed=0), sampled(mutants, 6, seed=0)
    assert more[:3] == few == sampled(mutants[::-1], 3, seed=0)
    assert sampled(mutants, 6, seed=1) != more


def test_what_has_changed_is_run_again(project: Project, tmp_path: Path) -> None:
    """A survivor after its tests have changed, all after the file has changed."""
    first, second, *others = all_mutants(project, [])
    records = [recorded(project, first, "killed"), recorded(project, second, "survived")]
    results = tmp_path / "results.jsonl"
    lines = [json.dumps(vars(record)) + "\n" for record in records]
    results.write_text("".join(lines), encoding="utf-8")
    mutants = [first, second, *others]
    assert known_records(project, mutants, results) == records
    (project.root / "checks/test_maths.py").write_text("# another", encoding="utf-8")
    assert known_records(project, mutants, results) == records[:1]
    (project.root / "tiny/maths.py").write_text("# another", encoding="utf-8")
    assert known_records(project, mutants, results) == []


def test_a_file_without_tests_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        mutate.main(["--list", "--only", "loss.py", "nothing.py"])
    first = next(iter(mutate.DTENSOR_LLM.tests))
    assert f"invalid choice: 'nothing.py' (choose from '{first}'," in capsys.readouterr().err


def test_bad_values_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, message in (
        (["--threshold", "7"], "7: must be between 0 and 1"),
        (["--results", str(tmp_path)], "must be a file in a folder that is there"),
        (["--results", str(tmp_path / "no" / "x")], "must be a file in a folder that is there"),
    ):
        with pytest.raises(SystemExit) as left:
            mutate.main(flags)
        assert left.value.code == 2
        assert message in capsys.readouterr().err


def test_list_prints_the_mutants(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutate.main(["--list", "--only", "parallel/zero.py", "--sample", "1"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("dtensor_llm/parallel/zero.py:")
    assert printed[-1] == "1 mutants"
