"""What a pipeline communicates in one step, and how often its weights are gathered, in closed form.

Of v stages on each of p ranks, v p - 1 boundaries have a stage on either side. Over each of them go
m activations and m gradients, unless both sides are on one rank, as at the turn of a V.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from dtensor_llm import pipeline
from dtensor_llm.config import Config
from dtensor_llm.planner.parameters import (
    Group,
    Place,
    block_parameters,
    blocks_of,
    groups,
    other_parameters,
    owned_shape,
    shards_weights,
    stages_of,
    table,
)
from dtensor_llm.planner.payloads import activation, over, shards_tokens, times
from dtensor_llm.planner.traffic import Traffic
from dtensor_llm.schedules.actions import Schedule
from dtensor_llm.schedules.csv_files import load
from dtensor_llm.schedules.gathers import MOST_WHOLE, stage_gathers
from dtensor_llm.schedules.torch_orders import make_schedule


def pipeline_activations(config: Config, place: Place) -> list[Traffic]:
    """Activations of the rank's own tokens to the next stage, their gradients to the one before."""
    home = pipeline.rank_of_stage(config)
    neighbours = sum(
        home.get(other, place.pp) != place.pp
        for stage in stages_of(config, place)
        for other in (stage - 1, stage + 1)
    )
    own = activation(config) // (config.parallel.mesh.tp if shards_tokens(config) else 1)
    both_ways = [t for way in ("send", "recv") for t in over(config, way, ("pp",), own)]
    return times(config.microbatches * neighbours, both_ways)


def tied_gradients(config: Config, place: Place) -> list[Traffic]:
    """The ranks of the first and of the last stage exchange their gradients of a tied embedding."""
    home = pipeline.rank_of_stage(config)
    ends = {home[0], home[len(home) - 1]}
    if not config.model.tied_embeddings or len(ends) == 1 or place.pp not in ends:
        return []
    shape = owned_shape(table(config.model), config, place)
    own = math.prod(shape) * config.train.element_size
    return [t for way in ("send", "recv") for t in over(config, way, ("pp",), own)]


@dataclass(frozen=True)
class Gathered:
    """A group of parameters, and how many times ZeRO gathers it in a step."""

    group: Group
    times: int


def gathered_groups(config: Config, place: Place) -> Iterator[Gathered]:
    """All groups of the rank at `place`, at ZeRO stages 1 to 3."""
    if not shards_weights(config):
        yield from (Gathered(group, 1) for group in groups(config, place))
        return
    for stage in stages_of(config, place):
        in_block, in_rest = gathers(config, place, stage)
        for _ in range(blocks_of(config, stage)):
            yield Gathered(block_parameters(config.model), in_block)
        if rest := other_parameters(config, stage):
            yield Gathered(rest, in_rest)


def gathers(config: Config, place: Place, stage: int) -> tuple[int, int]:
    """All-gathers of each of the stage's blocks, and of what is in no block, at ZeRO stage 3.

    Under a pipeline gradients are reduced after the last microbatch, and the block that has done a
    backward stays whole until then. A block that is freed after forward is found sharded by what
    comes next, and by the first of all: m + 1 times, in any order of m forwards and as many
    backwards of which a forward is first. One that is not freed is gathered once. With more than
    three stages on a rank, torch frees whole stages in between, and gathers them again.
    """
    m, frees = config.microbatches, config.parallel.reshards_after_forward
    if config.parallel.mesh.pp == 1:
        return m + m * frees, m
    if len(stages_of(config, place)) <= MOST_WHOLE:
        return 1 + m * frees, 1
    return stage_gathers(schedule_of(config).programs[place.pp], stage, frees=frees)


def split_backwards(config: Config, stage: int) -> int:
    """Microbatches whose backward of the weights the stage does apart; torch not on the first."""
    if stage == 0 or not pipeline.splits_backward(config):
        return 0
    actions = schedule_of(config).actions(pipeline.rank_of_stage(config)[stage])
    return sum((action.stage, action.kind) == (stage, "W") for action in actions)


def schedule_of(config: Config) -> Schedule:
    """What each rank does with its microbatches, in its order; of a mesh with a pipeline."""
    parallel = config.parallel
    if parallel.schedule_csv is not None:
        return load(parallel.schedule_csv)
    return _torch_schedule(
        parallel.schedule, parallel.mesh.pp, config.microbatches, pipeline.stages_per_rank(config)
    )


@cache
def _torch_schedule(name: str, num_ranks: int, num_microbatches: int, stages: int) -> Schedule:
    return make_schedule(
        name,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        stages_per_rank=stages,
    )
