"""What a configuration says of its pipeline: which stages each rank has; their blocks: `stages`.

Stages are numbered in the order of the model; a rank of pp has one or several of them.
Without a pipeline there is one stage on one rank.
"""

from itertools import accumulate

from dtensor_llm.config import Config
from dtensor_llm.schedules import closed_forms
from dtensor_llm.schedules.csv_files import load
from dtensor_llm.schedules.kinds import LOOP, SPLIT, default_stages_per_rank, stages_of_ranks


def stages_per_rank(config: Config) -> int:
    """What is asked for, or else the schedule's own number."""
    asked = config.parallel.stages_per_rank
    return default_stages_per_rank(config.parallel.schedule) if asked is None else asked


def placement(config: Config) -> tuple[tuple[int, ...], ...]:
    """The stages of each rank of the pp axis."""
    parallel = config.parallel
    if parallel.mesh.pp == 1:
        return ((0,),)
    if parallel.schedule_csv is not None:
        return load(parallel.schedule_csv).stages
    return stages_of_ranks(
        parallel.schedule, num_ranks=parallel.mesh.pp, stages_per_rank=stages_per_rank(config)
    )


def num_stages(config: Config) -> int:
    """Stages of the whole pipeline."""
    return sum(map(len, placement(config)))


def rank_of_stage(config: Config) -> dict[int, int]:
    """The rank of the pp axis that has each stage."""
    return {stage: rank for rank, own in enumerate(placement(config)) for stage in own}


def live_microbatches(config: Config, rank: int) -> int:
    """The most microbatches, each on one stage, that a rank of pp holds at once."""
    parallel, m = config.parallel, config.microbatches
    if parallel.mesh.pp == 1:
        return 1
    if parallel.schedule_csv is not None:
        kinds = [action.kind for action in load(parallel.schedule_csv).actions(rank)]
        return max(accumulate({"F": 1, "B": -1, "I": 0, "W": -1}[kind] for kind in kinds))
    return closed_forms.live_microbatches(
        parallel.schedule,
        rank=rank,
        num_ranks=parallel.mesh.pp,
        num_microbatches=m,
        stages_per_rank=stages_per_rank(config),
    )


def splits_backward(config: Config) -> bool:
    """Whether some stage computes the gradients of its weights apart from those of its input."""
    parallel = config.parallel
    if parallel.mesh.pp == 1:
        return False
    if parallel.schedule_csv is None:
        return parallel.schedule in SPLIT
    file = load(parallel.schedule_csv)
    return any(a.kind == "W" for rank in range(file.num_ranks) for a in file.actions(rank))


def spell(config: Config) -> str:
    """`pp=4`, or with several stages a rank `the 8 stages of pp=4`."""
    stages, pp = num_stages(config), config.parallel.mesh.pp
    return f"pp={pp}" if stages == pp else f"the {stages} stages of pp={pp}"


def settings_for(config: Config, stages: int) -> list[str]:
    """What to change for at most so many stages; nothing for a schedule from a file."""
    parallel = config.parallel
    name, pp, each = parallel.schedule, parallel.mesh.pp, stages_per_rank(config)
    if parallel.schedule_csv is not None:
        return []
    fewer = [f"--stages-per-rank {stages // pp}"] * (name in LOOP and stages // pp not in (0, each))
    fewer += [f"pp={stages // each}"] * (stages >= each)
    return fewer + ["--schedule 1f1b"] * (each > 1 and stages >= pp)


def ties_on_one_rank(config: Config) -> bool:
    """Whether one rank has the first and the last of several stages, and their tied embedding."""
    home = rank_of_stage(config)
    several = len(home) > 1
    return config.model.tied_embeddings and several and home[0] == home[len(home) - 1]
