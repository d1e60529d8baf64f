"""What a rank of a pipeline holds at once, of weights and gradients: its actions, played through.

Gathered weights, of `fully_shard` and `replicate`: torch's GPipe and 1F1B keep those of their stage
from the first use on; its runtime for several stages those of up to three.

Gradients, where ZeRO cuts them:

| ZeRO stage     | a stage's gradients                                                            |
|----------------|--------------------------------------------------------------------------------|
| 3              | whole from its first backward on, reduced block by block after its last        |
| 1, 2 deferred  | likewise, but each goes into its message as its last microbatch adds to it     |
| 2              | one module's at a time, and what is reduced; after a split backward all of the |
|                | stage, for the gradients of its weights come all at once                       |
"""

from collections import Counter

from dtensor_llm import pipeline
from dtensor_llm.config import Config
from dtensor_llm.planner.group_sizes import (
    GroupSizes,
    StageSizes,
    group_sizes,
    head_parameters,
    stage_sizes,
)
from dtensor_llm.planner.parameters import (
    Place,
    is_first,
    shards_weights,
    shares_table,
    stages_of,
    table,
)
from dtensor_llm.planner.pipeline_costs import schedule_of
from dtensor_llm.schedules.actions import Action
from dtensor_llm.schedules.gathers import MOST_WHOLE, moments


def most_gathered_of_stages(config: Config, place: Place) -> int:
    """Elements of weights that are there a second time, to compute with."""
    own = stages_of(config, place)
    gathered = {stage: stage_sizes(config, stage, place).gathered for stage in own}
    if len(own) <= MOST_WHOLE:
        return sum(gathered.values())
    whole: set[int] = set()
    most = 0
    for moment in moments(schedule_of(config).programs[place.pp]):
        # What is gathered ahead is in its message until it is used.
        whole = whole - set(moment.freed) | {action.stage for action in moment.step}
        most = max(most, sum(gathered[stage] for stage in whole))
    return most


def most_gradients_of_stages(config: Config, place: Place) -> int:
    """Elements of gradients, reduced or not, at ZeRO stages 1 to 3."""
    played = Gradients(config, place)
    for action in schedule_of(config).actions(place.pp):
        if action.kind in "BW":
            played.add(action)
    return played.most


class Gradients:
    """The gradients of a rank while its actions are played through; all numbers are elements."""

    def __init__(self, config: Config, place: Place) -> None:
        self.config, self.place = config, place
        self.sizes = {
            stage: stage_sizes(config, stage, place) for stage in stages_of(config, place)
        }
        self.held = dict.fromkeys(self.sizes, 0)
        self.done: Counter[int] = Counter()
        self.each = config.parallel.reduces_each_microbatch
        self.table = None
        if shares_table(config) and is_first(config, place):
            group = {"token_embedding.weight": table(config.model)}
            self.table = SharedTable(
                group_sizes(group, config, place), config.microbatches, self.each
            )
        self.most = 0

    def add(self, action: Action) -> None:
        """Play one backward that makes gradients of weights."""
        stage = action.stage
        self.done[stage] += 1
        uses_table = self.table is not None and stage in (0, pipeline.num_stages(self.config) - 1)
        others = sum(self.held.values()) - self.held[stage]
        if self.table is not None and uses_table and stage > 0:
            self.table.arrive()  # the head's gradient comes first
        before = self.table.most if self.table else 0
        peak, left = self.within(action)
        self.most = max(self.most, others + before + peak)
        self.held[stage] = left
        if self.table is not None and uses_table and stage == 0:
            self.table.arrive()
            self.most = max(self.most, others + left + self.table.most)
        if self.table is not None:
            self.table.settle()

    def within(self, action: Action) -> tuple[int, int]:
        """(most, after) of the action's stage."""
        stage, sizes = action.stage, self.sizes[action.stage]
        is_last = self.done[stage] == self.config.microbatches
        if shards_weights(self.config):
            return (most_in_reduction(sizes), sizes.part) if is_last else (sizes.whole, sizes.whole)
        if not self.each and self.config.microbatches > 1:
            return sizes.whole, sizes.part if is_last else sizes.whole
        before = self.held[stage]
        if action.kind == "W" and stage > 0:
            return before + sizes.whole, sizes.part
        if before:
            return before + sizes.largest, sizes.part
        return most_in_first_backward(self.config, stage, sizes, self.place), sizes.part


class SharedTable:
    """The gradient of a tied embedding that two stages share: two of them in each microbatch."""

    def __init__(self, sizes: GroupSizes, microbatches: int, each: bool) -> None:
        self.sizes, self.each = sizes, each
        self.expected, self.num_arrived = 2 * microbatches, 0
        self.held = self.most = 0

    def arrive(self) -> None:
        """Add one gradient up; `most` is what is there meanwhile, `held` what is left."""
        self.num_arrived += 1
        reduced = self.sizes.part if self.each and self.num_arrived > 2 else 0
        self.most = self.sizes.whole + reduced
        pairs = self.num_arrived % 2 == 0
        is_reduced = pairs and (self.each or self.num_arrived == self.expected)
        self.held = self.sizes.part if is_reduced else self.most

    def settle(self) -> None:
        """The backward that it came in is over."""
        self.most = self.held


def most_in_reduction(sizes: StageSizes) -> int:
    """Of a stage at ZeRO stage 3, after its last backward: the rest is reduced, then each block."""
    count, block, rest = sizes.count, sizes.block, sizes.rest
    in_rest = count * block.whole + rest.in_turn
    return max(in_rest, (count - 1) * block.whole + block.in_turn + rest.part)


def most_in_first_backward(config: Config, stage: int, sizes: StageSizes, place: Place) -> int:
    """At ZeRO stages 1 and 2, where gradients are reduced as they come, and none are there yet.

    On copies alone the message of a bucket is what later ones are added to: it counts from the
    bucket's first gradient on.
    """
    count, block, rest = sizes.count, sizes.block, sizes.rest
    alone = config.parallel.mesh.dp_shard == 1
    used_last = group_sizes(head_parameters(config, stage), config, place)
    in_head = rest.part * alone + used_last.largest
    before = rest.part if used_last.whole and (alone or stage > 0) else 0
    in_block = before + (count - 1 + alone) * block.part + block.largest
    looked_up = (rest.part * alone + rest.largest) * (stage == 0)
    return max(in_head, in_block, count * block.part + max(rest.part, looked_up))
