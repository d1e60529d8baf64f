"""What must hold between a pipeline's schedule and everything else."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from dtensor_llm import pipeline
from dtensor_llm.checks.rule import (
    DIVISORS_TRIED,
    Rule,
    Surroundings,
    batch_factors,
)
from dtensor_llm.config import Config
from dtensor_llm.refused_pairs import RefusedPair
from dtensor_llm.schedules.check import ScheduleError
from dtensor_llm.schedules.csv_files import load
from dtensor_llm.schedules.kinds import (
    LOOP,
    NAMES,
    default_stages_per_rank,
    fewest_microbatches,
    refusal,
)
from dtensor_llm.settings import join_or
from dtensor_llm.stages import split_problems

MICROBATCHES = {
    "1f1b": RefusedPair.SCHEDULE_1F1B,
    "interleaved-1f1b": RefusedPair.ROUNDS,
    "interleaved-zero-bubble": RefusedPair.ROUNDS,
    "dualpipev": RefusedPair.SCHEDULE_DUALPIPEV,
}
"""Why a schedule does not admit some numbers of microbatches."""


def file_has_a_schedule(config: Config, _: Surroundings) -> Iterator[str]:
    file = config.parallel.schedule_csv
    if file is None:
        return
    try:
        load(file)
    except ScheduleError as error:
        yield refused_file(file, error.problem.removeprefix(f"{Path(file)}, "), error.grid)
    except OSError as error:
        yield f"--schedule-csv {file} cannot be read: {error.strerror}; another file would do"


def refused_file(file: str, problem: str, shown: str) -> str:
    """Why a file is none that can be run, and below it the ranks and steps that it holds."""
    return f"--schedule-csv {file}: {problem}" + (f"\n\n{shown}" if shown else "")


def file_fits_the_ranks(config: Config, _: Surroundings) -> Iterator[str]:
    parallel, file = config.parallel, config.parallel.schedule_csv
    if file is None or not is_readable(config):
        return
    if parallel.stages_per_rank is not None:
        yield (
            f"--stages-per-rank {parallel.stages_per_rank} with --schedule-csv {file}: "
            f"{RefusedPair.FILE_AND_STAGES.reason}; leaving one of them out would do"
        )
    num_ranks = load(file).num_ranks
    if num_ranks != parallel.mesh.pp:
        yield (
            f"--schedule-csv {file} has {num_ranks} rows, but pp={parallel.mesh.pp}, and "
            f"{RefusedPair.FILE_AND_PP.reason}; pp={num_ranks} would do"
        )


def file_has_as_many_microbatches(config: Config, _: Surroundings) -> Iterator[str]:
    file, m = config.parallel.schedule_csv, config.microbatches
    if file is None or not sequences_divide(config) or not is_readable(config):
        return
    wanted, parts = load(file).num_microbatches, config.batch_parts
    if m != wanted:
        batch, micro = config.train.global_batch_size, config.micro_batch_size
        cures = [f"--global-batch-size {wanted * parts * micro}"]
        if batch % (parts * wanted) == 0:
            cures.insert(0, f"--micro-batch-size {batch // parts // wanted}")
        yield (
            f"--schedule-csv {file} is for {wanted} microbatches: "
            f"{RefusedPair.FILE_AND_MICROBATCHES.reason}, but {arithmetic(config)}; "
            f"{join_or(cures)} would do"
        )


def schedule_has_its_stages(config: Config, _: Surroundings) -> Iterator[str]:
    parallel = config.parallel
    name, asked = parallel.schedule, parallel.stages_per_rank
    if not runs_by_name(config) or name in LOOP or asked is None:
        return
    own = default_stages_per_rank(name)
    if asked != own:
        others = [other for other in NAMES if other in LOOP]
        yield (
            f"--stages-per-rank {asked} with --schedule {name}: "
            f"{RefusedPair.STAGES_PER_RANK.reason}; --stages-per-rank {own} or --schedule "
            f"{join_or(others)} would do"
        )


def schedule_admits_the_microbatches(config: Config, _: Surroundings) -> Iterator[str]:
    name, pp, m = config.parallel.schedule, config.parallel.mesh.pp, config.microbatches
    if not runs_by_name(config) or not sequences_divide(config) or admits(name, pp, m):
        return
    parts, micro, fewest = (
        config.batch_parts,
        config.micro_batch_size,
        fewest_microbatches(name, pp),
    )
    too_few, per_rank = m < fewest, config.train.global_batch_size // parts
    more = fewest if too_few else (m // pp + 1) * pp
    cures = [f"--global-batch-size {more * parts * micro}", "--schedule gpipe"]
    if fitting := fitting_micro_batch(name, pp, per_rank, per_rank // (fewest if too_few else m)):
        cures.insert(0, f"--micro-batch-size {fitting}")
    rest = f"which {m} // pp={pp} = {m // pp} rounds do not divide"
    if too_few:
        rest = f"fewer than {'2 x ' if fewest > pp else ''}pp={pp}"
    yield (
        f"{MICROBATCHES[name].reason}, but {arithmetic(config)}, {rest}; {join_or(cures)} would do"
    )


def admits(name: str, num_ranks: int, num_microbatches: int) -> bool:
    stages = default_stages_per_rank(name)
    return num_microbatches > 0 and (
        refusal(
            name,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            stages_per_rank=stages,
        )
        is None
    )


def fitting_micro_batch(name: str, num_ranks: int, sequences: int, limit: int) -> int | None:
    """The largest micro-batch up to `limit` that makes microbatches the schedule admits.

    Or else the smallest above it.
    """
    below = range(limit, max(0, limit - DIVISORS_TRIED), -1)
    above = range(limit + 1, min(sequences, limit + DIVISORS_TRIED) + 1)
    return next(
        (
            n
            for n in chain(below, above)
            if sequences % n == 0 and admits(name, num_ranks, sequences // n)
        ),
        None,
    )


def arithmetic(config: Config) -> str:
    """`--global-batch-size 8 / (dp=1 x micro-batch 4) = 2`."""
    return (
        f"--global-batch-size {config.train.global_batch_size} / ({batch_factors(config)} x "
        f"micro-batch {config.micro_batch_size}) = {config.microbatches}"
    )


def sequences_divide(config: Config) -> bool:
    """Else another rule has spoken."""
    return config.train.global_batch_size % (config.batch_parts * config.micro_batch_size) == 0


def is_readable(config: Config) -> bool:
    """Whether it is known which stages there are."""
    return next(file_has_a_schedule(config, Surroundings()), None) is None


def fits(config: Config) -> bool:
    """Whether each rank has its stages."""
    return is_readable(config) and next(file_fits_the_ranks(config, Surroundings()), None) is None


def has_stages(config: Config) -> bool:
    """Whether it is known which blocks each of them has: else other rules have spoken."""
    return fits(config) and not any(split_problems(config))


def runs_by_name(config: Config) -> bool:
    """Whether `--schedule` counts."""
    return config.parallel.mesh.pp > 1 and config.parallel.schedule_csv is None


def layers_can_be_cut_into_stages(config: Config, _: Surroundings) -> Iterator[str]:
    if fits(config):
        yield from split_problems(config)


def split_backward_finds_its_weights(config: Config, _: Surroundings) -> Iterator[str]:
    parallel = config.parallel
    if not fits(config) or not pipeline.splits_backward(config):
        return
    file, name = parallel.schedule_csv, parallel.schedule
    flag = f"--schedule {name}" if file is None else f"--schedule-csv {file}"
    cure = "--schedule 1f1b" if file is None else "B in place of I and W"
    if parallel.zero == 3 and parallel.reshard_after_forward:
        yield (
            f"--reshard-after-forward with {flag}: {RefusedPair.SPLIT_AND_RESHARD.reason}; leaving "
            f"--reshard-after-forward out, or {cure}, would do"
        )
    if parallel.ddp:
        yield (
            f"--ddp with {flag}: {RefusedPair.SPLIT_AND_DDP.reason}; leaving --ddp out, or {cure}, "
            "would do"
        )


PIPELINE_RULES = (
    Rule(file_has_a_schedule, frozenset({"schedule_csv"})),
    Rule(file_fits_the_ranks, frozenset({"schedule_csv", "stages_per_rank", "mesh"})),
    Rule(
        file_has_as_many_microbatches,
        frozenset({"schedule_csv", "global_batch_size", "micro_batch_size", "mesh"}),
    ),
    Rule(
        schedule_has_its_stages, frozenset({"schedule", "schedule_csv", "stages_per_rank", "mesh"})
    ),
    Rule(
        schedule_admits_the_microbatches,
        frozenset({"global_batch_size", "micro_batch_size", "mesh", "schedule", "schedule_csv"}),
    ),
    Rule(
        layers_can_be_cut_into_stages,
        frozenset(
            {"layers", "mesh", "schedule", "schedule_csv", "stages_per_rank", "stage_layers"}
        ),
    ),
    Rule(
        split_backward_finds_its_weights,
        frozenset(
            {"schedule", "schedule_csv", "stages_per_rank", "mesh"}
            | {"zero", "ddp", "reshard_after_forward"}
        ),
    ),
)
