"""Pipeline parallelism: every rank has some of the layers, and microbatches pass from rank to rank.

1. Cut the layers into stages. A stage needs the activations of the stage before it, and in backward
   the gradients of the stage after it: two small messages a microbatch, and no collective at all.
   All wait for the slowest stage. Equal counts of blocks are not equal work, since the last stage
   has the head too: over a large vocabulary it costs as much as several blocks (`best_cut`).
2. One batch at a time would leave all stages but one idle. Cut it into m microbatches that follow
   each other: of m + stages - 1 turns, each stage is busy in m.
3. GPipe runs all forwards, then all backwards: each stage holds the activations of m microbatches.
4. 1F1B starts each backward as early as it can: a stage holds as many as there are stages from it
   to the end, however large m is. The idle turns are the same.
5. Several smaller stages on each rank fill the pipeline sooner. And a backward cut in two keeps
   nobody waiting: the gradient of its input at once, those of its weights where the rank idles.

Papers: Huang et al., "GPipe", arXiv 1811.06965; Narayanan et al., arXiv 2104.04473, sections 2.2.1
(1F1B with a flush) and 2.2.2 (several stages); Qi et al., arXiv 2401.10241 (the backward in two).

    on each rank                weights and optimizer state of its layers
                                stage 0: embeddings; last stage: final norm, head, loss; either
                                may be without a block
    send/receive of b/m t d     forward: m to the next stage; backward: m to the one before
    all-reduce of v d           tied weights only: 1 a step between first and last stage, which
                                both have the embedding, each with a part of its gradient
    fraction of idle time       (stages - 1) / (m + stages - 1), of GPipe and 1F1B
    microbatches held           GPipe: m; 1F1B: min(m, stages - stage)

Actions are written as in torch: "2F0" is the forward of microbatch 0 on stage 2, "2B0" its whole
backward, "2I0" the gradient of its input, "2W0" those of its weights. A schedule is a list of them
for each rank, which does them in that order, each once what it needs has arrived.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations, pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from reference.model import (
    Dropout,
    Model,
    ModelOptions,
    Weights,
    block,
    embed,
    head,
    loss_sum,
    num_valid,
)
from reference.training import Gradients, gradients_of_leaves, leaves, split_batch

Microbatch = tuple[Tensor, Tensor, Dropout | None]
Schedule = Literal["gpipe", "1f1b"]


class Action(NamedTuple):
    """One thing that a stage does."""

    stage: int
    kind: Literal["F", "B", "I", "W"]
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Execution:
    """The result of a schedule, and how it came about.

    `timetable` has a row for each turn: what each rank did in it, None where it was idle.
    `live` has, after each action, the number of microbatches whose activations its rank holds; one
    that two of its stages hold counts twice.
    """

    loss: float
    gradients: Gradients
    timetable: list[list[Action | None]]
    live: dict[Action, int]


def loss_and_gradients(
    model: Model,
    tokens: Tensor,
    labels: Tensor,
    dropout: Dropout | None = None,
    *,
    stages: int,
    microbatches: int,
    schedule: Schedule = "1f1b",
    counts: Sequence[int] | None = None,
) -> tuple[float, Gradients]:
    """The mean loss of the batch and its gradient, computed by a pipeline; arguments as `run`."""
    execution = run(
        model,
        tokens,
        labels,
        dropout,
        stages=stages,
        microbatches=microbatches,
        schedule=schedule,
        counts=counts,
    )
    return execution.loss, execution.gradients


def run(
    model: Model,
    tokens: Tensor,
    labels: Tensor,
    dropout: Dropout | None = None,
    *,
    stages: int,
    microbatches: int,
    schedule: Schedule,
    counts: Sequence[int] | None = None,
) -> Execution:
    """Train on one batch with a stage on each rank, and report what happened when.

    Args:
        model: whole weights.
        tokens: b t; microbatches must divide b.
        labels: b t, -100 ignored.
        dropout: None in evaluation.
        stages: number of ranks.
        microbatches: m.
        schedule: the order of the actions.
        counts: blocks of each stage; None is an equal share of one at least.

    Raises:
        ValueError: more stages than blocks, or counts that are not of these.
    """
    programs = [actions(schedule, stage, stages, microbatches) for stage in range(stages)]
    return execute(model, tokens, labels, dropout, programs=programs, counts=counts)


def execute(
    model: Model,
    tokens: Tensor,
    labels: Tensor,
    dropout: Dropout | None = None,
    *,
    programs: Sequence[Sequence[Action]],
    counts: Sequence[int] | None = None,
) -> Execution:
    """Train on one batch by any schedule: `programs[rank]` is what a rank does, in its order.

    A stage's own actions on a microbatch come in theirs: F, then B, or F, I, W.
    `counts` are the blocks of each stage; None is an equal share of one at least.

    Raises:
        ValueError: more stages than blocks, or counts that are not of these.
        RuntimeError: a deadlock.
    """
    stages = 1 + max(action.stage for program in programs for action in program)
    microbatches = 1 + max(action.microbatch for program in programs for action in program)
    counts = equal_counts(model.options.layers, stages) if counts is None else counts
    if (len(counts), sum(counts)) != (stages, model.options.layers):
        raise ValueError(f"{counts} are not {model.options.layers} blocks on {stages} stages")
    pipeline = [make_stage(model, index, counts) for index in range(stages)]
    pieces = list(split_batch(tokens, labels, dropout, microbatches))
    total = max(1, num_valid(labels))
    left = [list(program) for program in programs]
    arrived: dict[Action, Tensor] = {}
    timetable: list[list[Action | None]] = []
    live: dict[Action, int] = {}
    while any(left):
        turn = next_turn(left, arrived, last=stages - 1)
        timetable.append(turn)
        for program, action in zip(programs, turn, strict=True):
            if action is not None:
                pipeline[action.stage].act(action, pieces[action.microbatch], total, arrived)
                own = {action.stage for action in program}
                live[action] = sum(len(pipeline[stage].outputs) for stage in own)
    loss = sum(pipeline[-1].losses)
    return Execution(loss, join_gradients(pipeline, model), timetable, live)


def actions(schedule: Schedule, stage: int, stages: int, microbatches: int) -> list[Action]:
    """What a stage does, in its order: warm up, then a forward and a backward by turns, then drain.

    1F1B warms up until the first backward can arrive, GPipe until no forward is left.
    """
    warmup = microbatches if schedule == "gpipe" else min(microbatches, stages - 1 - stage)
    forwards = [Action(stage, "F", index) for index in range(microbatches)]
    backwards = [Action(stage, "B", index) for index in range(microbatches)]
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return forwards[:warmup] + steady + backwards[microbatches - warmup :]


def next_turn(
    programs: list[list[Action]], arrived: dict[Action, Tensor], last: int
) -> list[Action | None]:
    """Take the next action of every rank for which what it needs has arrived.

    Raises:
        RuntimeError: no rank can go on: a deadlock.
    """
    turn: list[Action | None] = []
    for program in programs:
        ready = program and needs(program[0], last) in (None, *arrived)
        turn.append(program[0] if ready else None)
    if not any(turn):
        waiting = ", ".join(str(program[0]) for program in programs if program)
        raise RuntimeError(f"every rank waits: {waiting}")
    for program, action in zip(programs, turn, strict=True):
        if action:
            program.pop(0)
    return turn


def needs(action: Action, last: int) -> Action | None:
    """The name under which another stage sends what an action needs; None where it needs nothing.

    Gradients go by the name of a whole backward.
    """
    if action.kind == "F":
        return action if action.stage > 0 else None
    return None if action.kind == "W" or action.stage == last else action._replace(kind="B")


@dataclass
class Stage:
    """Some blocks, and what is held of each microbatch from its forward to its backward.

    What a stage sends is put into `arrived` under the name of the action that needs it.
    """

    blocks: range
    weights: Weights
    options: ModelOptions
    is_last: bool
    inputs: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[int, Tensor | None] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)

    def act(
        self, action: Action, piece: Microbatch, total: int, arrived: dict[Action, Tensor]
    ) -> None:
        """Do one action."""
        if action.kind == "F":
            self.forward(action, piece, total, arrived)
        elif action.kind == "W":
            self.backward_weights(action.microbatch)
        else:
            self.backward_input(action, arrived)
            if action.kind == "B":
                self.backward_weights(action.microbatch)

    def forward(
        self, action: Action, piece: Microbatch, total: int, arrived: dict[Action, Tensor]
    ) -> None:
        """Compute the blocks, and send the activations on; the last stage has the loss instead."""
        stage, _, number = action
        tokens, labels, dropout = piece
        if stage == 0:
            x = embed(self.weights, tokens, self.options, dropout)
        else:
            # What came from another rank has no history: this stage's graph begins here.
            x = self.inputs[number] = arrived.pop(action).requires_grad_()
        for index in self.blocks:
            x = block(self.weights, index, x, self.options, dropout)
        if self.is_last:
            x = loss_sum(head(self.weights, x, self.options), labels) / total
            self.losses.append(x.item())
        else:
            arrived[Action(stage + 1, "F", number)] = x.detach()
        self.outputs[number] = x

    def backward_input(self, action: Action, arrived: dict[Action, Tensor]) -> None:
        """Go back through one microbatch's graph to its input, and send that one's gradient back.

        The graph stays, and the output's gradient with it: the weights need both.
        """
        stage, _, number = action
        gradient = self.gradients[number] = arrived.pop(action._replace(kind="B"), None)
        if stage > 0:
            (arrived[Action(stage - 1, "B", number)],) = torch.autograd.grad(
                self.outputs[number], self.inputs.pop(number), gradient, retain_graph=True
            )

    def backward_weights(self, number: int) -> None:
        """Go back once more, now to the weights, and let go of the microbatch.

        On a real rank the gradients on the way are kept from the first time, not computed again.
        """
        output, gradient = self.outputs.pop(number), self.gradients.pop(number)
        torch.autograd.backward(output, gradient, inputs=list(self.weights.values()))


def equal_counts(layers: int, stages: int) -> list[int]:
    """Blocks of each stage, the first stages having one more where need be.

    Raises:
        ValueError: more stages than blocks.
    """
    if layers < stages:
        raise ValueError(f"{layers} blocks are too few for {stages} stages")
    size, extra = divmod(layers, stages)
    return [size + (stage < extra) for stage in range(stages)]


def best_cut(costs: Sequence[int], stages: int) -> tuple[int, ...]:
    """Items of each stage, one at least, in a row, so that the slowest stage is as fast as can be.

    The items are the embedding, every block and the head. By trying every cut: of the best, that of
    the least sum of squares, and of those the one that gives most to the first stages.
    """

    def rank(counts: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        ends = list(accumulate(counts))
        sums = [sum(costs[end - count : end]) for end, count in zip(ends, counts, strict=True)]
        return max(sums), sum(x * x for x in sums), tuple(-count for count in counts)

    places = combinations(range(1, len(costs)), stages - 1)
    cuts = ((0, *inner, len(costs)) for inner in places)
    return min((tuple(b - a for a, b in pairwise(cut)) for cut in cuts), key=rank)


def make_stage(model: Model, index: int, counts: Sequence[int]) -> Stage:
    """The stage's blocks, and with the first the embeddings, with the last the head."""
    options, stages = model.options, len(counts)
    start = sum(counts[:index])
    blocks = range(start, start + counts[index])
    prefixes = [f"blocks.{block}." for block in blocks]
    if index == 0:
        prefixes += ["token_embedding", "position_embedding"]
    if index == stages - 1:
        prefixes += ["final_norm", options.head_name]
    own = {name: w for name, w in model.weights.items() if name.startswith(tuple(prefixes))}
    return Stage(blocks, leaves(own), options, is_last=index == stages - 1)


def join_gradients(ranks: list[Stage], model: Model) -> Gradients:
    """All stages' gradients. A tied weight is on two stages, and has the sum of their parts."""
    gradients: Gradients = {}
    for name in model.weights:
        parts = [gradients_of_leaves(stage.weights) for stage in ranks if name in stage.weights]
        gradients[name] = torch.stack([part[name] for part in parts]).sum(dim=0)
    return gradients
