"""Options of the fuzz, and one thread a process: the runner starts a process for each core."""

import gc
import runpy
import shlex
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from dtensor_llm import initialize, rng
from dtensor_llm.data import Dataset
from dtensor_llm.worlds import processes
from parity_tests.corpora import load, write_ids
from parity_tests.covering import mark_what_is_left_out
from parity_tests.harness import ROOT, Finished, Script

torch.set_num_threads(1)
gc.set_threshold(20_000, 10, 10)  # as it was, collecting took 7 % of the time


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fuzz", "draws of test_composition.py")
    group.addoption("--fuzz", type=int, default=60, metavar="N", help="how many draws (60)")
    group.addoption("--seed", type=int, default=0, metavar="S", help="what they are drawn from (0)")
    group.addoption(
        "--draw", type=int, default=None, metavar="I", help="only draw I, no other test"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for a `draw` runs once for each."""
    if "draw" in metafunc.fixturenames:
        only = metafunc.config.getoption("--draw")
        draws = range(metafunc.config.getoption("--fuzz")) if only is None else [only]
        metafunc.parametrize("draw", draws, ids=lambda index: f"draw{index}")


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --draw no other test runs: the command that a failing draw prints repeats it alone."""
    mark_what_is_left_out(items)
    if config.getoption("--draw") is None:
        return

    def is_draw(item: pytest.Item) -> bool:
        return "draw" in getattr(item, "fixturenames", ())

    config.hook.pytest_deselected(items=[item for item in items if not is_draw(item)])
    items[:] = filter(is_draw, items)


@pytest.fixture(scope="session", autouse=True)
def initial_numbers_are_drawn_once() -> Iterator[None]:
    """By each worker: the initial elements of a weight's part are a function of what is asked."""
    drawn = lru_cache(maxsize=10_000)(rng.normal)

    def normal(*asked: Any, **part: Any) -> Tensor:
        return drawn(*asked, **part).clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initialize, "rng", SimpleNamespace(key=rng.key, normal=normal))
        yield


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Script:
    """Runs a script of scripts/ in this process, in the repository's root."""

    def leave(code: int = 0) -> NoReturn:
        raise SystemExit(code)

    def run(name: str, line: str) -> Finished:
        path = str(ROOT / "scripts" / name)
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(processes, "leave", leave)
        monkeypatch.setattr(sys, "path", sys.path.copy())
        monkeypatch.setattr(sys, "argv", [path, *shlex.split(line)])
        try:
            code = runpy.run_path(path)["main"]()
        except SystemExit as left:
            code = left.code
        return Finished(code, *capsys.readouterr())

    return run


@pytest.fixture
def numbers(tmp_path: Path) -> Dataset:
    """A corpus of 0, 1, 2...: about 2340 training and 150 validation samples of 8 tokens."""
    return load(write_ids(tmp_path / "numbers.u32.bin", range(20_000)))
