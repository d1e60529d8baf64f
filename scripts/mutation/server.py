"""Runs tests on a changed module: a process that has imported torch and pytest forks one for each.

The forked process finds the changed text in place of one file when it imports the package, which
the server itself never does. POSIX only.
"""

import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType

import pytest

from mutation.targets import STARTS_PROCESSES

MEMORY = 16 * 2**30  # bytes of addresses for one run: a mutant may ask for any size
LONGEST = 3600.0  # seconds for the unmutated tests, also on a machine that does other things
NOT_IMPORTED, TOOL_FAILED = 98, 99  # exit statuses beside those of pytest
NO_TESTS = int(pytest.ExitCode.NO_TESTS_COLLECTED)


class MutationError(RuntimeError):
    """The tests cannot be run, or fail on the unchanged code."""


@dataclass(frozen=True)
class Job:
    """One run of tests: `source` in place of `file`, at most `seconds` long."""

    file: str
    source: str
    tests: tuple[str, ...]
    name: str
    seconds: float = LONGEST


@dataclass(frozen=True)
class Outcome:
    """What came of a job.

    Attributes:
        kind: killed, timed out or survived.
        seconds: how long it took.
        by: the test that failed first, or how else it was killed.
        output: what pytest has printed.
    """

    kind: str
    seconds: float
    by: str
    output: str


class ChangedSource(importlib.machinery.SourceFileLoader):
    """Loads a module from another text than its file's."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self.source = source
        self.is_loaded = False

    def get_code(self, fullname: str) -> CodeType:
        assert fullname == self.name
        self.is_loaded = True
        return compile(self.source, self.path, "exec", dont_inherit=True)


class Finder(importlib.abc.MetaPathFinder):
    """Comes first in sys.meta_path and knows one module."""

    def __init__(self, loader: ChangedSource) -> None:
        self.loader = loader

    def find_spec(
        self, fullname: str, path: object, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname != self.loader.name:
            return None
        return importlib.util.spec_from_file_location(
            fullname, self.loader.path, loader=self.loader
        )


@dataclass(eq=False)  # pytest keeps plugins in a set
class FirstFailure:
    """A pytest plugin that writes the first failure's name to a file."""

    path: Path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.note(report)

    def note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and not self.path.exists():
            self.path.write_text(report.nodeid, encoding="utf-8")


class OneCaseOfEachFirst:
    """A pytest plugin: the first case of every test, then the second of those that have one, ...

    Cases of a test are alike, and so a bug is met sooner.
    """

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        seen: Counter[str] = Counter()
        turns: list[int] = []
        for item in items:
            test = item.nodeid.split("[")[0]
            turns.append(seen[test])
            seen[test] += 1
        in_turns = sorted(zip(turns, items, strict=True), key=lambda pair: pair[0])
        items[:] = [item for _, item in in_turns]


@dataclass
class Run:
    """A forked process."""

    job: Job
    pid: int
    log: Path
    start: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    def kill(self) -> None:
        """With all that it has started: it leads a process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def outcome(self) -> Outcome | None:
        """None while it runs."""
        seconds, is_late = self.seconds, self.seconds > self.job.seconds
        if is_late:
            self.kill()
        pid, status = os.waitpid(self.pid, 0 if is_late else os.WNOHANG)
        if pid == 0:
            return None
        self.kill()  # what it may have left behind
        output = self.log.read_text(encoding="utf-8", errors="replace")
        failure = self.log.with_suffix(".first")
        by = failure.read_text(encoding="utf-8") if failure.exists() else ""
        if is_late:
            return Outcome("timed out", seconds, f"{self.job.seconds:.0f} s", output)
        code = os.waitstatus_to_exitcode(status)
        if code in (NOT_IMPORTED, TOOL_FAILED, NO_TESTS):
            raise MutationError(f"{self.job.name}: the tests did not run it:\n{output}")
        if code == 0:
            return Outcome("survived", seconds, "", output)
        ending = f"signal {-code}" if code < 0 else f"exit status {code}"
        return Outcome("killed", seconds, by or ending, output)


class Server:
    """Imports what the tests at `root` need of other packages, and forks."""

    def __init__(self, root: Path, package: str, tests_folder: str, scratch: Path) -> None:
        self.root, self.package = root, package
        self.tests_folder, self.scratch = tests_folder, scratch
        os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: threads do not fork
        preload(self.root)
        self.count = 0

    def run(self, jobs: Iterable[Job], workers: int) -> Iterator[tuple[Job, Outcome]]:
        """Each job's outcome, as they end; `workers` run at a time."""
        waiting, running = deque(jobs), list[Run]()
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    running.append(self.fork(waiting.popleft()))
                time.sleep(0.02)
                for run in list(running):
                    outcome = run.outcome()
                    if outcome is not None:
                        running.remove(run)
                        yield run.job, outcome
        finally:
            for run in running:
                run.kill()
                with contextlib.suppress(ChildProcessError):  # its outcome has been asked for
                    os.waitpid(run.pid, 0)

    def fork(self, job: Job) -> Run:
        self.count += 1
        log = self.scratch / f"{self.count}.log"
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid != 0:
            return Run(job, pid, log)
        code = TOOL_FAILED
        try:
            os.setsid()
            redirect_output(log)
            code = self.test(job, log.with_suffix(".first"))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def test(self, job: Job, failure: Path) -> int:
        """In the forked process: pytest's exit status."""
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        os.chdir(self.root)
        sys.path.insert(0, str(self.root))
        name = ".".join([self.package, *Path(job.file).with_suffix("").parts])
        path = self.root / self.package / job.file
        loader = ChangedSource(name.removesuffix(".__init__"), str(path), job.source)
        sys.meta_path.insert(0, Finder(loader))
        code = pytest.main(
            [
                *("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"),
                *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # plugins imported early
                *("-k", STARTS_PROCESSES, "--rootdir", str(self.root)),
                *(f"{self.tests_folder}/{test}.py" for test in job.tests),
            ],
            plugins=[FirstFailure(failure), OneCaseOfEachFirst()],
        )
        return int(code) if code or loader.is_loaded else NOT_IMPORTED


def redirect_output(log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)


def preload(root: Path) -> None:
    """Import every module from elsewhere that a file of the repository imports at its top."""
    own = {path.stem for path in [*root.iterdir(), *root.glob("scripts/*")]}
    for name in sorted({n for path in root.rglob("*.py") for n in imported(path)}):
        if name.split(".")[0] not in own:
            with warnings.catch_warnings(), contextlib.suppress(ImportError):
                warnings.simplefilter("ignore")
                importlib.import_module(name)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def imported(path: Path) -> Sequence[str]:
    names: list[str] = []
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    return names
