"""Mechanical mutation score: changes one place of the library at a time and runs the fast tests.

    python scripts/mutate.py --sample 300 --results mutants.jsonl

A mutant that fails a test, does not import, crashes or outlasts its time is killed; the others have
survived, and are printed as diffs: mend each by a test, or list it with its reason in EQUIVALENT of
mutation/targets.py. The score, killed / all, is given with and without these; the exit status goes
by the latter.

Nothing in the working tree is changed: the run works on a copy taken at its start, and each mutant
lives in a forked process only, which imports the changed text in place of the file.

With --results, each outcome is appended to a file; a second run takes from there what it knows of
files that are the same, except survivors whose tests have changed, and how long the unmutated tests
took, if nothing has changed since. A sample of 40 is a part of the sample of 300 of the same seed.

Exit status: 0 for a score of at least --threshold, 1 below it, 2 where the unmutated tests fail.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2s
from pathlib import Path

from mutation.mutants import Mutant, mutants_of
from mutation.server import Job, MutationError, Outcome, Server
from mutation.targets import EQUIVALENT, FOLDER, TESTS
from tabulate import tabulate

DEAD = ("killed", "timed out")
EXTRA_SECONDS = 20.0  # beyond three times what the unmutated tests take


@dataclass(frozen=True)
class Project:
    """What is mutated: files of a package under `root`, and the tests of each."""

    root: Path
    package: str
    tests_folder: str
    tests: Mapping[str, Sequence[str]]
    equivalent: Mapping[str, str]

    def read(self, file: str) -> str:
        return (self.root / self.package / file).read_text(encoding="utf-8")

    def digest(self, *paths: Path) -> str:
        whole = b"\0".join(path.read_bytes() for path in paths)
        return blake2s(whole, digest_size=8).hexdigest()

    def source_digest(self, file: str) -> str:
        return self.digest(self.root / self.package / file)

    def package_digest(self) -> str:
        return self.digest(*sorted((self.root / self.package).rglob("*.py")))

    def tests_digest(self, file: str) -> str:
        """Of the tests of a file and of what they share."""
        folder = self.root / self.tests_folder
        shared = [path for path in sorted(folder.glob("*.py")) if "test_" not in path.name]
        return self.digest(*(folder / f"{name}.py" for name in self.tests[file]), *shared)


@dataclass(frozen=True)
class Record:
    """A line of the results file: what became of a mutant, and of which text.

    Or, with what `unmutated` gives as its id, that a list of tests passes on the package as it is.
    """

    id: str
    source: str  # digest of the unmutated file, or of the package
    tests: str  # digest of its tests
    outcome: str  # killed, timed out or survived
    seconds: float
    by: str  # the test that failed first

    def is_valid(self, project: Project, mutant: Mutant) -> bool:
        """Whether it still holds: a survivor must meet changed tests anew."""
        if self.source != project.source_digest(mutant.file):
            return False
        return self.outcome in DEAD or self.tests == project.tests_digest(mutant.file)


DTENSOR_LLM = Project(Path(__file__).resolve().parents[1], "dtensor_llm", FOLDER, TESTS, EQUIVALENT)


def copied(project: Project, folder: Path) -> Project:
    """The same project in a copy, which nobody edits."""
    ignored = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist")
    shutil.copytree(project.root, folder, ignore=ignored)
    return replace(project, root=folder)


def all_mutants(project: Project, only: Sequence[str]) -> list[Mutant]:
    """Of the files `only`, or of all that have tests."""
    files = only or list(project.tests)
    return [mutant for file in files for mutant in mutants_of(project.read(file), file)]


def sampled(mutants: list[Mutant], size: int | None, seed: int) -> list[Mutant]:
    """The first `size` of an order by the hash of seed and id: each mutant keeps its place."""
    if size is None:
        return mutants
    return sorted(mutants, key=lambda m: blake2s(f"{seed}:{m.id}".encode()).digest())[:size]


def known_records(project: Project, mutants: list[Mutant], results: Path | None) -> list[Record]:
    """What an earlier run has found out of mutants, the last word on each."""
    last = last_records(results)
    return [last[m.id] for m in mutants if m.id in last and last[m.id].is_valid(project, m)]


def last_records(results: Path | None) -> dict[str, Record]:
    if results is None or not results.exists():
        return {}
    records = {}
    for line in results.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError, TypeError):  # a kill has cut it: it is found out anew
            record = Record(**json.loads(line))
            records[record.id] = record
    return records


def keep(record: Record, results: Path | None) -> None:
    if results is not None:
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")


def run_mutants(
    project: Project, mutants: list[Mutant], workers: int, results: Path | None, scratch: Path
) -> list[Record]:
    """Check the unmutated tests of each list, then run the mutants; a record is kept at once.

    Raises MutationError, with their output, where the unmutated tests fail.
    """
    server = Server(project.root, project.package, project.tests_folder, scratch)
    limits = time_limits(project, mutants, server, workers, results)
    jobs = []
    for mutant in mutants:
        tests = tuple(project.tests[mutant.file])
        jobs.append(Job(mutant.file, mutant.source, tests, mutant.id, limits[tests]))
    records: list[Record] = []
    start = time.monotonic()
    for job, outcome in server.run(jobs, workers):
        records.append(record_of(project, job, outcome))
        keep(records[-1], results)
        left = (time.monotonic() - start) / len(records) * (len(jobs) - len(records))
        done = f"[{len(records)}/{len(jobs)}] {left / 60:.0f} min left"
        progress(f"{done}: {outcome.kind}, {outcome.seconds:.1f} s, {job.name}")
    return records


def time_limits(
    project: Project, mutants: list[Mutant], server: Server, workers: int, results: Path | None
) -> dict[tuple[str, ...], float]:
    """{tests: seconds}, from running them on the unchanged code."""
    files = {tuple(project.tests[m.file]): m.file for m in mutants}
    passed = [unmutated(project, file) for file in files.values()]
    known, seconds = last_records(results), dict[tuple[str, ...], float]()
    jobs = []
    for (tests, file), record in zip(files.items(), passed, strict=True):
        if record.id in known and replace(known[record.id], seconds=0.0) == record:
            seconds[tests] = known[record.id].seconds
        else:
            jobs.append(Job(file, project.read(file), tests, file))
    for job, outcome in server.run(jobs, workers):
        progress(f"unmutated, tests of {job.file}: {outcome.kind}, {outcome.seconds:.0f} s")
        if outcome.kind != "survived":
            raise MutationError(f"the unmutated tests fail:\n{outcome.output}")
        seconds[job.tests] = outcome.seconds
        keep(replace(unmutated(project, job.file), seconds=round(outcome.seconds, 2)), results)
    return {tests: 3 * taken + EXTRA_SECONDS for tests, taken in seconds.items()}


def unmutated(project: Project, file: str) -> Record:
    """That the tests of a file pass on the package as it is, in no time."""
    name = "unmutated: " + ", ".join(project.tests[file])
    return Record(name, project.package_digest(), project.tests_digest(file), "survived", 0.0, "")


def record_of(project: Project, job: Job, outcome: Outcome) -> Record:
    source, tests = project.source_digest(job.file), project.tests_digest(job.file)
    seconds = round(outcome.seconds, 2)
    return Record(job.name, source, tests, outcome.kind, seconds, outcome.by)


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def report(project: Project, mutants: list[Mutant], records: Iterable[Record]) -> float:
    """Print the table and the survivors; returns the score without equivalent mutants."""
    outcomes = {record.id: record.outcome for record in records}
    rows = [row(file, mutants, outcomes) for file in project.tests]
    rows = [r for r in rows if r[1]] + [row("all", mutants, outcomes)]
    headers = ("file", "mutants", "killed", "timed out", "survived", "score")
    print(tabulate(rows, headers=headers, floatfmt=".1%"))
    survivors = [m for m in mutants if outcomes[m.id] == "survived"]
    equivalent = [m for m in survivors if m.id in project.equivalent]
    open_ones = [m for m in survivors if m.id not in project.equivalent]
    for mutant in open_ones:
        print(f"\nsurvived: {place(project, mutant)}\n{mutant.diff}")
    for mutant in equivalent:
        reason = project.equivalent[mutant.id]
        print(f"\nequivalent: {place(project, mutant)}\n{mutant.diff}\nbecause {reason}")
    dead = len(mutants) - len(survivors)
    score = dead / max(1, len(mutants) - len(equivalent))
    print(
        f"\nkilled {dead} of {len(mutants)}: {dead / max(1, len(mutants)):.1%}; without "
        f"{len(equivalent)} equivalent ones {score:.1%}"
    )
    return score


def row(file: str, mutants: list[Mutant], outcomes: Mapping[str, str]) -> list[object]:
    own = [m for m in mutants if file in (m.file, "all")]
    counts = Counter(outcomes[m.id] for m in own)
    score = sum(counts[kind] for kind in DEAD) / max(1, len(own))
    return [file, len(own), *(counts[kind] for kind in (*DEAD, "survived")), score]


def place(project: Project, mutant: Mutant) -> str:
    return f"{project.package}/{mutant.file}:{mutant.line}   {mutant.id}"


def wrong_equivalents(
    project: Project, mutants: list[Mutant], records: Iterable[Record]
) -> list[str]:
    """Entries of EQUIVALENT that a test has killed, or that no file of the run has any more."""
    existing = {m.id for file in {m.file for m in mutants} for m in all_mutants(project, [file])}
    files = {m.file for m in mutants}
    lost = [i for i in project.equivalent if i.split(":")[0] in files and i not in existing]
    killed = [r.id for r in records if r.id in project.equivalent and r.outcome in DEAD]
    return [f"{i}: no such mutant" for i in lost] + [f"{i}: is killed" for i in killed]


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return number


def share(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text}: must be between 0 and 1")
    return number


def results_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: must be a file in a folder that is there")
    return path


def parse(arguments: Sequence[str] | None, files: Iterable[str]) -> argparse.Namespace:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--sample", type=positive, metavar="N", help="a random N of all mutants (default: all)")
    add("--seed", type=int, default=0, help="of the sample (default: 0)")
    what = "files of the package, as loss.py (default: all that have tests)"
    add("--only", nargs="+", default=[], choices=list(files), metavar="FILE", help=what)
    add("--workers", type=positive, default=2, metavar="N", help="mutants at a time (default: 2)")
    add("--results", type=results_file, metavar="FILE", help="JSON lines: kept, and continued from")
    add("--threshold", type=share, default=0.9, help="lowest score for exit 0 (default: 0.9)")
    add("--list", action="store_true", help="print the mutants and leave")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, project: Project = DTENSOR_LLM) -> int:
    args = parse(arguments, project.tests)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        project = copied(project, scratch / "repository")
        mutants = sampled(all_mutants(project, args.only), args.sample, args.seed)
        if args.list:
            return list_mutants(project, mutants)
        records = known_records(project, mutants, args.results)
        known = {record.id for record in records}
        new = [mutant for mutant in mutants if mutant.id not in known]
        try:
            if new:
                records += run_mutants(project, new, args.workers, args.results, scratch)
        except MutationError as error:
            print(error, file=sys.stderr)
            return 2
        score = report(project, mutants, records)
        wrong = wrong_equivalents(project, mutants, records)
    for line in wrong:
        print(f"wrong entry in EQUIVALENT: {line}")
    return 0 if score >= args.threshold and not wrong else 1


def list_mutants(project: Project, mutants: list[Mutant]) -> int:
    for mutant in mutants:
        print(f"{place(project, mutant)}\n{mutant.diff}")
    print(f"{len(mutants)} mutants")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no run is left behind
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # a reader has left
        os._exit(141)
