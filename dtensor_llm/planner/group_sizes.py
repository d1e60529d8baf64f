"""How many elements data parallelism takes together: of a block, and of what is in no block."""

import math
from dataclasses import dataclass

from dtensor_llm.config import Config
from dtensor_llm.planner.parameters import (
    Group,
    Parameter,
    Place,
    block_parameters,
    blocks_of,
    other_parameters,
    padded_numel,
    shards_weights,
    tp_shape,
)

TAKE_TOKENS = ("query", "key", "value", "qkv", "gate", "up")  # linears of a block


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


@dataclass(frozen=True)
class StageSizes:
    """Those of a pipeline stage, or of the whole model: `count` blocks, and what is in no block."""

    count: int
    block: GroupSizes
    rest: GroupSizes

    @property
    def whole(self) -> int:
        return self.count * self.block.whole + self.rest.whole

    @property
    def gathered(self) -> int:
        return self.count * self.block.gathered + self.rest.gathered

    @property
    def part(self) -> int:
        return self.count * self.block.part + self.rest.part

    @property
    def largest(self) -> int:
        return max(self.block.largest, self.rest.largest)


def stage_sizes(config: Config, stage: int, place: Place) -> StageSizes:
    rest = other_parameters(config, stage)
    block = block_parameters(config.model) if blocks_of(config, stage) else {}
    return StageSizes(
        blocks_of(config, stage),
        group_sizes(block, config, place),
        group_sizes(rest, config, place),
    )


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
    """The module of a parameter; the linears that take the same tokens are one with `async_tp`.

    On a grid a linear adds its bias apart, so that its two parameters are by themselves.
    """
    module = name.rpartition(".")[0]
    if config.parallel.mesh.tp_row > 1 and "norm" not in module:
        return name
    branch, _, linear = module.rpartition(".")
    if config.parallel.async_tp and linear in TAKE_TOKENS:
        return "linears" if config.model.parallel_block else branch
    return module


def numel(group: Group, config: Config, place: Place) -> int:
    """Elements after tensor parallelism."""
    return sum(math.prod(tp_shape(parameter, config, place)) for parameter in group.values())


def head_parameters(config: Config, stage: int) -> Group:
    """What a stage has in no block and gets its gradient before the blocks."""
    rest = other_parameters(config, stage)
    names = ("final_norm", "head") if stage == 0 else tuple(rest)
    return {name: p for name, p in rest.items() if name.startswith(names)}
