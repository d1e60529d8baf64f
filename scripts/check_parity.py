"""Prove meshes equal to one device: python scripts/check_parity.py --ranks 8 --dtype float64.

Trains a small GPT (8 layers, 8 heads, 8 microbatches: every factoring of 8 ranks is legal) on each
mesh and compares losses, gradient norms, gradients, weights and optimizer state with reference/.
Exit status 1 where a mesh differs; what differs first is named.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dtensor_llm.checks import Surroundings
from dtensor_llm.checks.machine_rules import MAX_THREADS
from dtensor_llm.command_line import parse_beside_flags, parser_beside_flags
from dtensor_llm.config import Config, ConfigError, MeshSizes
from dtensor_llm.data import Dataset
from dtensor_llm.launch import read, surroundings
from dtensor_llm.mesh import parse_mesh
from dtensor_llm.parity.expect import expect
from dtensor_llm.parity.meshes import Checked, check_rank, factorings, summary, table, whole_batches
from dtensor_llm.parity.verdict import Expectation
from dtensor_llm.worlds import World, WorldError, processes, threads

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository, for reference/

from reference.training import train as train_reference

MICROBATCHES = 8
MODEL = ["--layers=8", "--heads=8", "--seq-len=16"]
TRAINING = ["--steps=3", "--lr=1e-3", "--dtype=float64", "--eval-every=0", "--check-parity"]
SECONDS = 600.0  # without any communication, before a world of threads counts as hung


Check = Callable[..., Checked]
"""`check_rank`, with what is asked of it filled in."""


@dataclass(frozen=True)
class Case:
    """A mesh, and how to train on it; without a configuration, why the settings refuse it."""

    mesh: str
    config: Config | None = None
    data: Dataset | None = None
    refusal: str = ""


def main() -> int:
    asked, flags = own_arguments(sys.argv[1:])
    place = processes.read_place()
    try:
        meshes = meshes_asked_for(asked.mesh, asked.ranks, place.size)
    except ConfigError as error:
        processes.refuse(str(error))
    num_ranks, where = meshes[0].num_ranks, surroundings()
    spawns = asked.world == "processes" and place.size == 1
    if spawns:
        where = dataclasses.replace(where, num_processes=num_ranks, local_processes=num_ranks)
    elif place.size == 1:
        flags = ["--world", "threads", *flags]
    cases = [make_case(mesh, flags, where) for mesh in meshes]
    if all(case.config is None for case in cases):
        processes.refuse(cases[0].refusal)
    if spawns:
        os.execv(sys.executable, [*processes.torchrun(num_ranks), __file__, *sys.argv[1:]])
    check = partial(check_rank, always_search=asked.find)
    run = check_as_threads if place.size == 1 else check_as_processes
    results = run(cases, check)
    if place.rank == 0:
        print(table(results))
        print(summary(results))
    return 0 if all(result.passed for result in results) else 1


def own_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """What this script reads itself, and the flags of train_gpt.py, defaults first."""
    parser = parser_beside_flags(__doc__)
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="check every tp x pp x dp of N ranks (default: 8)"
    )
    parser.add_argument("--mesh", metavar="MESH", help="check this mesh alone")
    parser.add_argument(
        "--world",
        choices=("threads", "processes"),
        help="threads of this process (default), or processes, for which torchrun is started",
    )
    parser.add_argument(
        "--find", action="store_true", help="search for a first divergence also where all is equal"
    )
    asked, flags = parse_beside_flags(parser, argv, refused=("--record", "--metrics"))
    gives_model = any(flag.partition("=")[0] == "--model" for flag in flags)
    if asked.ranks is not None and not 1 <= asked.ranks <= MAX_THREADS:
        parser.error(f"--ranks {asked.ranks}: must be a whole number from 1 to {MAX_THREADS}")
    return asked, [*([] if gives_model else MODEL), *TRAINING, *flags]


def meshes_asked_for(mesh: str | None, num_ranks: int | None, started: int) -> list[MeshSizes]:
    """Raises ConfigError for a mesh that cannot be read, or that has other ranks than asked for."""
    if mesh is None:
        return factorings(num_ranks or (8 if started == 1 else started))
    sizes = parse_mesh(mesh, num_ranks or (None if started == 1 else started))
    if num_ranks is not None and sizes.num_ranks != num_ranks:
        text = f"--mesh {mesh} has {sizes.num_ranks} ranks, and --ranks is {num_ranks}"
        raise ConfigError([f"{text}; leave one of them out"])
    return [sizes]


def make_case(mesh: MeshSizes, flags: Sequence[str], where: Surroundings) -> Case:
    """The training on `mesh`, with 8 microbatches where nothing else is asked for."""
    flags = ["--global-batch-size", str(MICROBATCHES * mesh.num_ranks), *flags]
    flags += ["--mesh", str(mesh)]
    try:
        config, data = read(flags, where)
        per_rank, rest = divmod(config.train.global_batch_size, config.batch_parts * MICROBATCHES)
        if config.train.micro_batch_size is None and per_rank and not rest:
            config, data = read([*flags, "--micro-batch-size", str(per_rank)], where)
    except ConfigError as error:
        return Case(str(mesh), refusal=str(error))
    return Case(str(mesh), config, data)


def check_as_threads(cases: Sequence[Case], check: Check) -> list[Checked]:
    """One mesh after another, each in a world of threads; a failing world is a failed mesh."""
    expected, results = None, []
    for number, case in enumerate(cases, start=1):
        if case.config is None or case.data is None:
            results.append(Checked(case.mesh, problem=case.refusal, refused=True))
            continue
        config, data = case.config, case.data
        expected = expected or expectation(config, data)
        progress(f"{case.mesh}: {number} of {len(cases)}")
        main = partial(check, config, data, train_reference, expected)
        try:
            size, timeout = config.parallel.mesh.num_ranks, config.run.timeout or SECONDS
            results.append(threads.run(size, main, timeout=timeout)[0])
        except WorldError as error:
            results.append(Checked(case.mesh, problem=str(error)))
    return results


def check_as_processes(cases: Sequence[Case], check: Check) -> list[Checked]:
    """All meshes in one world: this process is a rank of it."""

    def main(world: World) -> list[Checked]:
        expected, results = None, []
        for case in cases:
            if case.config is None or case.data is None:
                results.append(Checked(case.mesh, problem=case.refusal, refused=True))
                continue
            config, data = case.config, case.data
            expected = expected or world.share(partial(expectation, config, data))
            if world.rank == 0:
                progress(case.mesh)
            results.append(check(config, data, train_reference, expected, world))
        return results

    run = next(case.config for case in cases if case.config is not None).run
    return processes.run(main, device=run.device, timeout=run.timeout)


def expectation(config: Config, data: Dataset) -> Expectation:
    """The same for every mesh: one device does not know of it."""
    return expect(config, whole_batches(config, data), train_reference, on_progress=progress)


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    processes.end(main)
