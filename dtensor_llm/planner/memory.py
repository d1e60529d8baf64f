"""The bytes of weights, gradients and optimizer state that a rank holds, in closed form.

A rank's stage has, after tensor parallelism, Psi elements; of dp ranks each owns a part of about
Psi / dp. What ZeRO cuts, a rank holds of its own elements alone:

| ZeRO stage | weights | gradients | optimizer |
|------------|---------|-----------|-----------|
| 0          | Psi     | Psi       | Psi       |
| 1          | Psi     | Psi       | own       |
| 2          | Psi     | own       | own       |
| 3          | own     | own       | own       |

Paper: Rajbhandari et al., ZeRO, arXiv 1910.02054, section 5 and table 1. Their mixed precision has
2, 2 and 12 bytes for each element of the three; we hold all in one dtype.

That is what lasts from step to step. Within a step more is there: at stage 3 the weights that are
whole while they compute, and the gradients of a block before they are reduced. Both are held equal
to what lives in a real step (`live_bytes`), to the byte. Activations and buffers are not in here,
nor where it lies: see `host`.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from dtensor_llm.config import Config
from dtensor_llm.planner.group_sizes import (
    StageSizes,
    group_sizes,
    head_parameters,
    numel,
    stage_sizes,
)
from dtensor_llm.planner.parameters import Place, groups, owned_shape, shards_weights, stages_of
from dtensor_llm.planner.pipeline_memory import (
    most_gathered_of_stages,
    most_gradients_of_stages,
    most_in_first_backward,
)

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
GATHERED, BUFFERS = "gathered weights", "buffers"

BYTES_OF_COUNTER = 4
"""What torch's AdamW keeps for each parameter besides moments: a float32, the steps it has made."""


@dataclass(frozen=True)
class Roles:
    """Bytes for each role: of one element, or of all that a rank holds."""

    weights: Fraction | int
    gradients: Fraction | int
    optimizer: Fraction | int

    @property
    def total(self) -> Fraction | int:
        return self.weights + self.gradients + self.optimizer


def model_states(
    stage: int, elements: Fraction | int, own: Fraction | int, per_element: Roles
) -> Roles:
    """What a rank holds from step to step: the table above.

    Args:
        stage: of ZeRO, 0 to 3.
        elements: Psi, of the rank's pipeline stage after tensor parallelism.
        own: how many of them this data-parallel rank owns.
        per_element: bytes for each role.
    """
    return Roles(
        weights=per_element.weights * (own if stage >= 3 else elements),
        gradients=per_element.gradients * (own if stage >= 2 else elements),
        optimizer=per_element.optimizer * (own if stage >= 1 else elements),
    )


def at_rest(config: Config, place: Place) -> Roles:
    """What the rank at `place` holds between two steps, gradients not yet forgotten.

    The `model_states` of its parts, which may be uneven, but for four things: messages pad the rows
    of gradients, and `fully_shard` those of weights; AdamW counts the steps of each parameter; at
    the end of a step stage 1, too, has freed all gradients but the rank's own; and a second copy of
    a tied weight has no optimizer state.
    """
    train, found = config.train, groups(config, place)
    size = train.element_size
    stepped = [p for group in found for p in group.values() if not p.is_copy]
    own = [math.prod(owned_shape(p, config, place)) for p in stepped]
    states = model_states(
        config.parallel.zero,
        sum(numel(group, config, place) for group in found),
        sum(own),
        Roles(size, size, train.num_moments * size),
    )
    padded = sum(group_sizes(group, config, place).part for group in found)
    gradients = padded * size if config.parallel.zero > 0 else states.gradients
    counters = sum(elements > 0 for elements in own) if train.optimizer == "adamw" else 0
    return Roles(
        weights=padded * size if shards_weights(config) else states.weights,
        gradients=gradients,
        optimizer=train.num_moments * size * sum(own) + counters * BYTES_OF_COUNTER,
    )


def at_peak(config: Config, place: Place) -> Roles:
    """The most that each role has within a step: weights with those that are gathered."""
    rest, size = at_rest(config, place), config.train.element_size
    return Roles(
        weights=rest.weights + size * most_gathered(config, place),
        gradients=size * most_gradients(config, place),
        optimizer=rest.optimizer,
    )


def most_gathered(config: Config, place: Place) -> int:
    """Elements of weights that are there a second time, to compute with.

    Stage 3: those of one block, and what is in no block from its first use to its last; all that
    there is where blocks are not freed after forward. Stage 0: all, for torch's `replicate`
    computes with a copy. Else none. Under a pipeline see `most_gathered_of_stages`.
    """
    if config.dp == 1 or config.parallel.zero in (1, 2) or config.parallel.ddp:
        return 0
    if config.parallel.mesh.pp > 1:
        return most_gathered_of_stages(config, place)
    sizes = stage_sizes(config, 0, place)
    frees = shards_weights(config) and config.parallel.reshards_after_forward
    return sizes.block.gathered + sizes.rest.gathered if frees else sizes.gathered


def most_gradients(config: Config, place: Place) -> int:
    """Elements of gradients, reduced or not.

    Whole ones of the rank where they are reduced once a step, of several microbatches or at stage
    0. Else those that are not reduced yet, beside the rank's part of what is.
    """
    parallel = config.parallel
    if config.dp > 1 and parallel.zero > 0:
        if parallel.mesh.pp > 1:
            return most_gradients_of_stages(config, place)
        sizes = stage_sizes(config, 0, place)
        if shards_weights(config):
            return most_sharded(config, sizes, place)
        return most_in_buckets(config, sizes, place)
    whole = sum(numel(group, config, place) for group in groups(config, place))
    if config.dp > 1 and parallel.ddp and parallel.ddp_bucket_view:
        # Views of messages that last; each is on its own before: with m microbatches, until the
        # last one has added to it.
        stages = [stage_sizes(config, stage, place) for stage in stages_of(config, place)]
        return whole + (whole if config.microbatches > 1 else max(x.largest for x in stages))
    return whole


def most_in_buckets(config: Config, sizes: StageSizes, place: Place) -> int:
    """Stages 1 and 2: a gradient goes into its message, and is freed, as soon as it is there.

    The largest module counts, then, beside the parts that are reduced by then. Stage 1 has several
    microbatches' whole gradients until the last one.
    """
    if config.microbatches == 1:
        return most_in_first_backward(config, 0, sizes, place)
    each = config.parallel.reduces_each_microbatch
    return sizes.part + sizes.largest if each else sizes.whole


def most_sharded(config: Config, sizes: StageSizes, place: Place) -> int:
    """Stage 3: the L blocks are reduced one by one, then the rest.

    Of the rest, the head and the final norm have their gradients from the beginning of the backward
    pass on.
    """
    count, block, rest = sizes.count, sizes.block, sizes.rest
    used_last = numel(head_parameters(config, 0), config, place)
    if config.microbatches > 1 and config.parallel.defer_reduce:
        in_block = (count - 1) * block.whole + block.in_turn + rest.whole
        return max(in_block, count * block.part + rest.in_turn)
    if config.microbatches > 1:
        return sizes.part + max(block.whole + used_last, rest.whole)
    in_block = (count - 1) * block.part + block.in_turn + used_last
    return max(in_block, count * block.part + rest.in_turn)
