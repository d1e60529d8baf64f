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
from dtensor_llm.planner.parameters import (
    Group,
    Parameter,
    Place,
    block_parameters,
    groups,
    is_first,
    num_blocks,
    other_parameters,
    owned_shape,
    padded_numel,
    shards_weights,
    tp_shape,
)

TAKE_TOKENS = ("query", "key", "value", "qkv", "gate", "up")  # linears of a block

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

    The `model_states` of its parts, which may be uneven, but for three things: messages pad the
    rows of gradients, and `fully_shard` those of weights; AdamW counts the steps of each parameter;
    and at the end of a step stage 1, too, has freed all gradients but the rank's own.
    """
    train, found = config.train, groups(config, place)
    size = train.element_size
    own = [math.prod(owned_shape(p, config, place)) for group in found for p in group.values()]
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
        optimizer=states.optimizer + counters * BYTES_OF_COUNTER,
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
    the stage has where blocks are not freed after forward, and under a pipeline, from the first
    backward on. Stage 0: all, for torch's `replicate` computes with a copy. Else none.
    """
    block, rest = sizes_of_groups(config, place)
    if config.dp == 1 or config.parallel.zero in (1, 2) or config.parallel.ddp:
        return 0
    frees = shards_weights(config) and config.parallel.reshards_after_forward
    many = not frees or config.parallel.mesh.pp > 1
    return (num_blocks(config, place) if many else 1) * block.gathered + rest.gathered


def most_gradients(config: Config, place: Place) -> int:
    """Elements of gradients, reduced or not.

    Whole ones of the stage where they are reduced once a step, of several microbatches or at stage
    0. Else those that are not reduced yet, beside the rank's part of what is.
    """
    parallel, (block, rest) = config.parallel, sizes_of_groups(config, place)
    if config.dp > 1 and parallel.zero in (1, 2):
        return most_in_buckets(config, place)
    if config.dp > 1 and shards_weights(config):
        return most_sharded(config, place)
    whole = num_blocks(config, place) * block.whole + rest.whole
    if config.dp > 1 and parallel.ddp and parallel.ddp_bucket_view:
        # Views of messages that last; each is on its own before: with m microbatches, until the
        # last one has added to it.
        return whole + (whole if config.microbatches > 1 else max(block.largest, rest.largest))
    return whole


def most_in_buckets(config: Config, place: Place) -> int:
    """Stages 1 and 2: a gradient goes into its message, and is freed, as soon as it is there.

    The largest module counts, then, beside the parts that are reduced by then. Stage 1 has several
    microbatches' whole gradients until the last one.
    """
    parallel, count = config.parallel, num_blocks(config, place)
    block, rest = sizes_of_groups(config, place)
    if config.microbatches > 1 and (parallel.zero == 1 or parallel.defer_reduce):
        return count * block.whole + rest.whole
    if config.microbatches > 1:
        return count * block.part + rest.part + max(block.largest, rest.largest)
    used_last = group_sizes(head_parameters(config, place), config, place)
    before = 0 if is_first(place) else rest.part
    in_block = before + (count - 1) * block.part + block.largest
    in_rest = count * block.part + max(rest.part, rest.largest * is_first(place))
    return max(used_last.largest, in_block, in_rest)


def most_sharded(config: Config, place: Place) -> int:
    """Stage 3: the L blocks are reduced one by one, then the rest.

    Of the rest, the head and the final norm have their gradients from the beginning of the backward
    pass on. Under a pipeline all groups are whole until the end of the step; the rest comes first.
    """
    count, (block, rest) = num_blocks(config, place), sizes_of_groups(config, place)
    if config.parallel.mesh.pp > 1:
        in_rest = count * block.whole + rest.in_turn
        return max(in_rest, (count - 1) * block.whole + block.in_turn + rest.part)
    used_last = numel(head_parameters(config, place), config, place)
    if config.microbatches > 1 and config.parallel.defer_reduce:
        in_block = (count - 1) * block.whole + block.in_turn + rest.whole
        return max(in_block, count * block.part + rest.in_turn)
    if config.microbatches > 1:
        return count * block.part + rest.part + max(block.whole + used_last, rest.whole)
    in_block = (count - 1) * block.part + block.in_turn + used_last
    return max(in_block, count * block.part + rest.in_turn)


def head_parameters(config: Config, place: Place) -> Group:
    """What is in no block and has its gradient before the blocks."""
    rest = other_parameters(config, place)
    names = ("final_norm", "head") if is_first(place) else tuple(rest)
    return {name: p for name, p in rest.items() if name.startswith(names)}


@dataclass(frozen=True)
class GroupSizes:
    """Elements of the parameters that data parallelism takes together, after tensor parallelism.

    Args:
        whole: all.
        gathered: all, with the padding of `fully_shard`.
        part: what a dp_shard rank has of `gathered`.
        last: those of the last parameter, whose whole gradient torch lets go of late.
        largest: the most whose gradients come together: those of a module, weight and bias, or
            where tokens travel beside products, of all linears that take them.
    """

    whole: int
    gathered: int
    part: int
    last: int
    largest: int

    @property
    def in_turn(self) -> int:
        """Gradients while the group is reduced: first all, then the part, and still the last."""
        return max(self.whole, self.part + self.last)


def sizes_of_groups(config: Config, place: Place) -> tuple[GroupSizes, GroupSizes]:
    """A block's (none where the stage has none), and those of what is in no block."""
    block = block_parameters(config.model) if num_blocks(config, place) else {}
    rest = other_parameters(config, place)
    return group_sizes(block, config, place), group_sizes(rest, config, place)


def group_sizes(group: Group, config: Config, place: Place) -> GroupSizes:
    shards = config.parallel.mesh.dp_shard
    padded = sum(padded_numel(parameter, config, place) for parameter in group.values())
    last = dict(list(group.items())[-1:]) if shards > 1 else {}
    return GroupSizes(
        whole=numel(group, config, place),
        gathered=padded if shards_weights(config) else numel(group, config, place),
        part=padded // shards,
        last=numel(last, config, place),
        largest=most_at_once(group, config, place),
    )


def most_at_once(group: Group, config: Config, place: Place) -> int:
    """Elements of the parameters whose gradients one step of the backward pass gives."""
    steps: dict[str, dict[str, Parameter]] = {}
    for name, parameter in group.items():
        steps.setdefault(step_of_backward(name, config), {})[name] = parameter
    return max((numel(step, config, place) for step in steps.values()), default=0)


def step_of_backward(name: str, config: Config) -> str:
    """The module of a parameter; the linears that take the same tokens are one with `async_tp`."""
    module = name.rpartition(".")[0]
    branch, _, linear = module.rpartition(".")
    if config.parallel.async_tp and linear in TAKE_TOKENS:
        return "linears" if config.model.parallel_block else branch
    return module


def numel(group: Group, config: Config, place: Place) -> int:
    """Elements after tensor parallelism."""
    return sum(math.prod(tp_shape(parameter, config, place)) for parameter in group.values())
