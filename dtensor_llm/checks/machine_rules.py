"""What must hold between settings and machines: processes, devices, memory and files."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from dtensor_llm import pipeline
from dtensor_llm.checks.memory_floor import memory_floor
from dtensor_llm.checks.model_rules import legal_meshes
from dtensor_llm.checks.pipeline_rules import has_stages
from dtensor_llm.checks.rule import Rule, Surroundings
from dtensor_llm.config import Config
from dtensor_llm.settings import SETTINGS, join_or
from dtensor_llm.stages import is_by_hand

MAX_THREADS = 1024
"""Ranks of a threads world, which take turns on the cores of one machine."""


def mesh_fits_the_processes(config: Config, surroundings: Surroundings) -> Iterator[str]:
    mesh, started = config.parallel.mesh, surroundings.num_processes
    if config.run.world == "threads":
        if started > 1:
            yield (
                f"--world threads runs every rank in one process, but {started} were started; "
                "start one, or leave --world out"
            )
        return
    if config.world_kind(started) == "threads" or mesh.num_ranks == started:
        return
    tp = f"{mesh.tp_row}x{mesh.tp_col}" if mesh.tp_row * mesh.tp_col > 1 else mesh.tp
    axes = [("tp", tp), ("pp", mesh.pp), ("dp", mesh.dp)]
    product = " x ".join(
        f"{axis}={size}" for axis, size in axes + [("cp", mesh.cp)] * (mesh.cp > 1)
    )
    yield f"mesh {product} = {mesh.num_ranks} ranks, but " + (
        f"1 process was started; start {mesh.num_ranks} with torchrun --nproc-per-node, or leave "
        "--world out to run the ranks as threads"
        if started == 1
        else f"{started} were started; {_meshes_that_fit(config, surroundings)}"
    )


def _meshes_that_fit(config: Config, surroundings: Surroundings) -> str:
    fitting = legal_meshes(config, surroundings)[:3]
    if not fitting:
        return f"no mesh of {surroundings.num_processes} ranks fits these settings"
    return f"{join_or(fitting)} would fit"


def threads_are_not_too_many(config: Config, surroundings: Surroundings) -> Iterator[str]:
    num_ranks = config.parallel.mesh.num_ranks
    if config.world_kind(surroundings.num_processes) == "threads" and num_ranks > MAX_THREADS:
        yield (
            f"mesh {config.parallel.mesh} = {num_ranks} ranks is more than the threads of one "
            f"process can run: at most {MAX_THREADS}, which take turns on this machine's cores; "
            "a smaller mesh, or torchrun with a process per rank would do"
        )


def cuda_is_there(config: Config, surroundings: Surroundings) -> Iterator[str]:
    device, num_cuda = config.run.device, surroundings.num_cuda
    if device == "cpu" or (device == "auto" and num_cuda == 0):
        return
    if config.world_kind(surroundings.num_processes) == "threads":
        if device == "cuda":
            yield (
                "--device cuda: ranks that are threads compute on the CPU; start a process per "
                "device with torchrun --nproc-per-node, or --device cpu would do"
            )
    elif num_cuda < surroundings.local_processes:
        fewer = f"at most {num_cuda} processes a machine or " if num_cuda else ""
        yield (
            f"--device {device} takes a CUDA device for each process: "
            f"{surroundings.local_processes} run on this machine, and torch sees {num_cuda}; "
            f"{fewer}--device cpu would do"
        )


def async_tp_is_in_one_machine(config: Config, surroundings: Surroundings) -> Iterator[str]:
    """On CUDA, where torch's products over symmetric memory do the work."""
    tp, local = config.parallel.mesh.tp, surroundings.local_processes
    if not config.parallel.async_tp or not _is_on_cuda(config, surroundings):
        return
    if local % tp:
        legal = join_or(f"tp={n}" for n in range(2, local + 1) if local % n == 0)
        yield (
            f"--async-tp with tp={tp} on CUDA: the ranks of a tp axis read each other's memory, "
            f"and so are in one machine, but {local} processes run on this one; "
            + " or ".join(filter(None, [legal, "leaving --async-tp out would do"]))
        )


def _is_on_cuda(config: Config, surroundings: Surroundings) -> bool:
    kind = config.world_kind(surroundings.num_processes)
    return kind == "processes" and config.run.device != "cpu" and surroundings.num_cuda > 0


def memory_is_enough(config: Config, surroundings: Surroundings) -> Iterator[str]:
    """Holds for ranks on the CPU alone: the memory of CUDA devices is not looked at."""
    if _is_on_cuda(config, surroundings) or not has_stages(config) or _fits(config, surroundings):
        return
    floor = memory_floor(config)
    copies = f" x {floor.copies} copies" if floor.copies > 1 else ""
    if floor.more_copies_of_weights:
        copies += f", and {floor.more_copies_of_weights} more copies of the weights"
    here = Fraction(surroundings.local_processes, surroundings.num_processes)
    yield (
        f"memory: the run takes at least {_gib(floor.total)}: weights, gradients and optimizer "
        f"{floor.parameters:,} x {floor.tensors_per_parameter} x {floor.element_size} bytes"
        f"{copies} = {_gib(floor.states)}, activations {_gib(floor.activations)}"
        + (f"; {here} of that on this machine, which" if here < 1 else "; this machine")
        + f" has {_gib(surroundings.memory_bytes or 0)}; {_what_fits(config, surroundings)}"
    )


def _fits(config: Config, surroundings: Surroundings) -> bool:
    if surroundings.memory_bytes is None:
        return True
    here = Fraction(surroundings.local_processes, surroundings.num_processes)
    return memory_floor(config).total * here <= surroundings.memory_bytes


def _gib(size: int) -> str:
    gib = size / 2**30
    return f"{gib:,.1f} GiB" if gib < 1e7 else f"{gib:.1e} GiB"


def _what_fits(config: Config, surroundings: Surroundings) -> str:
    """The changes of one setting that bring the run into memory."""

    def with_layers(layers: int) -> Config:
        return replace(config, model=replace(config.model, layers=layers))

    changed = {
        "--zero 3": replace(config, parallel=replace(config.parallel, zero=3)),
        "--micro-batch-size 1": replace(config, train=replace(config.train, micro_batch_size=1)),
    }
    cures = [flag for flag, other in changed.items() if _fits(other, surroundings)]
    fewest, too_many = pipeline.num_stages(config), config.model.layers
    if not is_by_hand(config) and fewest < too_many and _fits(with_layers(fewest), surroundings):
        while too_many - fewest > 1:
            middle = (fewest + too_many) // 2
            if _fits(with_layers(middle), surroundings):
                fewest = middle
            else:
                too_many = middle
        cures.append(f"--layers {fewest}")
    return f"{join_or(cures)} would fit" if cures else "a smaller --model would fit"


def metrics_can_be_written(config: Config, surroundings: Surroundings) -> Iterator[str]:
    if config.run.metrics is None or not surroundings.first_machine:
        return
    path = Path(config.run.metrics)
    try:
        if path.is_dir():
            yield f"--metrics {path} is a folder; --metrics {path / 'metrics.jsonl'} would do"
        elif not path.parent.is_dir():
            yield f"--metrics {path}: there is no folder {path.parent}; create it first"
        elif path.is_file() and path.stat().st_size > 0:
            found = "is among --data" if _is_data(path, config) else "is there and not empty"
            yield f"--metrics {path} {found}, and is not overwritten; a new file would do"
        else:
            try_writing(path)
    except OSError as error:
        yield f"--metrics {path} cannot be written: {error.strerror}; another file would do"


def _is_data(path: Path, config: Config) -> bool:
    names = (Path(name) for name in config.run.data if name != "stdlib")
    return any(name.exists() and path.samefile(name) for name in names)


def record_can_be_written(config: Config, surroundings: Surroundings) -> Iterator[str]:
    if config.run.record is None or not surroundings.first_machine:
        return
    path = Path(config.run.record)
    try:
        if not path.parent.is_dir():
            yield f"--record {path}: there is no folder {path.parent}; create it first"
        elif (path / "record.jsonl").exists():
            yield f"--record {path} already holds a record; another folder would do"
        elif path.exists() and not path.is_dir():
            yield f"--record {path} is a file; the name of a new folder would do"
        else:
            try_writing(path / "record.jsonl" if path.is_dir() else path)
    except OSError as error:
        yield f"--record {path} cannot be written: {error.strerror}; another folder would do"


def metrics_and_record_are_apart(config: Config, _: Surroundings) -> Iterator[str]:
    if config.run.metrics is None or config.run.record is None:
        return
    path, folder = Path(config.run.metrics), Path(config.run.record)
    if path.absolute() in (folder.absolute(), folder.absolute() / "record.jsonl"):
        yield f"--metrics {path} is where --record {folder} writes; another file would do"


def try_writing(path: Path) -> None:
    """Raise OSError where `path` cannot be written; leave no trace."""
    if path.exists():
        path.open("ab").close()
    else:
        tempfile.TemporaryFile(dir=path.parent).close()


MACHINE_RULES = (
    Rule(mesh_fits_the_processes, frozenset({"mesh", "world"})),
    Rule(threads_are_not_too_many, frozenset({"mesh", "world"})),
    Rule(cuda_is_there, frozenset({"mesh", "world", "device"})),
    Rule(async_tp_is_in_one_machine, frozenset({"async_tp", "mesh", "world", "device"})),
    Rule(
        memory_is_enough,
        frozenset(
            name for name, setting in SETTINGS.items() if setting.section in ("model", "parallel")
        )
        | {"global_batch_size", "micro_batch_size", "optimizer", "momentum", "dtype"}
        | {"world", "device", "check_parity"},
    ),
    Rule(metrics_can_be_written, frozenset({"metrics", "data"})),
    Rule(record_can_be_written, frozenset({"record"})),
    Rule(metrics_and_record_are_apart, frozenset({"metrics", "record"})),
)
