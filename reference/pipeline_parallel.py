"""Pipeline parallelism: every rank has some of the layers, and microbatches pass from rank to rank.

1. Cut the layers into stages. A stage needs the activations of the stage before it, and in backward
   the gradients of the stage after it: two small messages a microbatch, and no collective at all.
2. One batch at a time would leave all stages but one idle. Cut it into m microbatches that follow
   each other: of m + stages - 1 turns, each stage is busy in m.
3. GPipe runs all forwards, then all backwards: each stage holds the activations of m microbatches.
4. 1F1B starts each backward as early as it can: a stage holds as many as there are stages from it
   to the end, however large m is. The idle turns are the same.

Papers: Huang et al., "GPipe", arXiv 1811.06965; Narayanan et al., arXiv 2104.04473, section 2.2
(1F1B with a flush).

    on each rank                weights and optimizer state of its layers
                                stage 0: embeddings; last stage: final norm, head, loss
    send/receive of b/m t d     forward: m to the next stage; backward: m to the one before
    all-reduce of v d           tied weights only: 1 a step between first and last stage, which
                                both have the embedding, each with a part of its gradient
    fraction of idle time       (stages - 1) / (m + stages - 1)
    microbatches held           GPipe: m; 1F1B: min(m, stages - stage)

Actions are written as in torch: "2F0" is the forward of microbatch 0 on stage 2.
"""

from dataclasses import dataclass, field
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
    kind: Literal["F", "B"]
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Execution:
    """The result of a schedule, and how it came about.

    `timetable` has a row for each turn: what each stage did in it, None where it was idle.
    `live` has, after each action, the number of microbatches whose activations its stage holds.
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
) -> Execution:
    """Train on one batch, and report what happened when.

    Args:
        model: whole weights, at least one block for each stage.
        tokens: b t; microbatches must divide b.
        labels: b t, -100 ignored.
        dropout: None in evaluation.
        stages: number of ranks.
        microbatches: m.
        schedule: the order of the actions.

    Raises:
        ValueError: more stages than blocks.
    """
    if model.options.layers < stages:
        raise ValueError(f"{model.options.layers} blocks are too few for {stages} stages")
    ranks = [make_stage(model, index, stages) for index in range(stages)]
    programs = [actions(schedule, index, stages, microbatches) for index in range(stages)]
    pieces = list(split_batch(tokens, labels, dropout, microbatches))
    total = max(1, num_valid(labels))
    arrived: dict[Action, Tensor] = {}
    timetable: list[list[Action | None]] = []
    live: dict[Action, int] = {}
    while any(programs):
        turn = next_turn(programs, arrived, last=stages - 1)
        timetable.append(turn)
        for action in filter(None, turn):
            stage = ranks[action.stage]
            if action.kind == "F":
                stage.forward(action, pieces[action.microbatch], total, arrived)
            else:
                stage.backward(action, arrived)
            live[action] = len(stage.outputs)
    loss = sum(ranks[-1].losses)
    return Execution(loss, join_gradients(ranks, model), timetable, live)


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
    """Take the next action of every stage for which what it needs has arrived.

    Raises:
        RuntimeError: no stage can go on: a deadlock.
    """
    turn: list[Action | None] = []
    for program in programs:
        needs_nothing = program and program[0][:2] in ((0, "F"), (last, "B"))
        ready = program and (needs_nothing or program[0] in arrived)
        turn.append(program[0] if ready else None)
    if not any(turn):
        waiting = ", ".join(str(program[0]) for program in programs if program)
        raise RuntimeError(f"every stage waits: {waiting}")
    for program, action in zip(programs, turn, strict=True):
        if action:
            program.pop(0)
    return turn


@dataclass
class Stage:
    """A rank: some blocks, and what it holds of each microbatch from its forward to its backward.

    What a stage sends is put into `arrived` under the action that needs it.
    """

    blocks: range
    weights: Weights
    options: ModelOptions
    inputs: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)

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
        if self.blocks.stop == self.options.layers:
            x = loss_sum(head(self.weights, x, self.options), labels) / total
            self.losses.append(x.item())
        else:
            arrived[Action(stage + 1, "F", number)] = x.detach()
        self.outputs[number] = x

    def backward(self, action: Action, arrived: dict[Action, Tensor]) -> None:
        """Go back through one microbatch's graph, and send the gradient of its input back."""
        stage, _, number = action
        torch.autograd.backward(self.outputs.pop(number), arrived.pop(action, None))
        if stage > 0:
            gradient = self.inputs.pop(number).grad
            assert gradient is not None
            arrived[Action(stage - 1, "B", number)] = gradient


def make_stage(model: Model, index: int, stages: int) -> Stage:
    """An equal share of the blocks, the first stages having one more where need be."""
    options = model.options
    size, extra = divmod(options.layers, stages)
    start = index * size + min(index, extra)
    blocks = range(start, start + size + (index < extra))
    prefixes = [f"blocks.{block}." for block in blocks]
    if index == 0:
        prefixes += ["token_embedding", "position_embedding"]
    if index == stages - 1:
        prefixes += ["final_norm", options.head_name]
    own = {name: w for name, w in model.weights.items() if name.startswith(tuple(prefixes))}
    return Stage(blocks, leaves(own), options)


def join_gradients(ranks: list[Stage], model: Model) -> Gradients:
    """All stages' gradients. A tied weight is on two stages, and has the sum of their parts."""
    gradients: Gradients = {}
    for name in model.weights:
        parts = [gradients_of_leaves(stage.weights) for stage in ranks if name in stage.weights]
        gradients[name] = torch.stack([part[name] for part in parts]).sum(dim=0)
    return gradients
