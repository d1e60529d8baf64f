"""ZeRO: data parallelism whose ranks share out optimizer state, then gradients, then weights.

1. Data parallelism keeps dp equal copies of everything. Stage 1 shares out what the optimizer
   remembers: each rank updates 1/dp of each weight, so it needs 1/dp of the moments and of the
   summed gradients. Afterwards the ranks give each other the updated rows.
2. Stage 2 frees a whole gradient as soon as it is summed: after every microbatch a rank keeps the
   rows it owns, and adds up those. Stage 1 adds up whole gradients and sums them over ranks once.
3. Stage 3 shares out the weights too. Before a block is used, all-gather its weights; after use,
   free them. Backward gathers once more, and its gradients are reduce-scattered at once.
4. The update works on each element by itself, so rows are updated where they lie.
   Only the gradient norm needs the other ranks: one number, summed before the root is taken.
5. Hybrid: several such groups of dp ranks, on other sequences, each a whole replica. What is shared
   out travels within a group, which is to be one machine; between the groups only the summed rows
   of gradients do, 1/dp of the model from each rank. Every group then makes the same update.

Paper: Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 5; Zhao et al., "PyTorch FSDP", arXiv
2304.11277, section 3 (hybrid: 3.2.2). Shards here are rows (dim 0), as in FSDP2.

    on each rank, between two microbatches    stage 0    stage 1    stage 2    stage 3
    weights                                   all        all        all        1/dp
    gradients                                 all        all        1/dp       1/dp
    Adam's moments                            all        1/dp       1/dp       1/dp

    collectives of a step on dp, m microbatches     stage 1    stage 2    stage 3
    all-gather of each weight                       1          1          2 m: forward, backward
    reduce-scatter of each gradient                 1          m          m
    all-reduce of its rows over replicas            1          1          m
    all-reduce of 1 number                          valid labels; loss; squared norm

Three choices change when and where, and no number, so that this page is the reference for them too:

    free gathered weights after forward   gathered twice, one block at a time whole
    ... or keep them                      gathered once, at the end of forward all blocks whole
    gather some blocks ahead              the same bytes, sooner: so many blocks more are whole
    offload the optimizer                 moments, and a copy of shards and gradients, on the host:
                                          each step, gradients go out and weights come in
    offload the weights                   shards of all three on the host: in for each gathering,
                                          out for each reduction

An offloaded `update` is the one below: it takes each element by itself, wherever that lies (Ren et
al., ZeRO-Offload, arXiv 2101.06840, section 4.1).

Stage 3 here lets autograd do it: gathering is concatenation. Its gradient hands each rank its own
rows, and as the losses of all ranks reach the shards, their sums: that is the reduce-scatter. (This
page keeps gathered weights until backward has used them; freeing them is what a real rank gains.
And it adds up over replicas once a step.)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reference.model import (
    Dropout,
    Model,
    ModelOptions,
    Weights,
    block,
    embed,
    forward,
    head,
    loss_sum,
    num_valid,
)
from reference.training import (
    Batch,
    Gradients,
    OptimizerState,
    Run,
    TrainingOptions,
    clip,
    gradient_norm,
    gradients_of_leaves,
    learning_rate,
    leaves,
    split_batch,
    state_of,
    update,
)

Ranks = list[Weights]
Piece = tuple[Tensor, Tensor, Dropout | None]  # tokens, labels, dropout


@dataclass
class Rank:
    """What one rank holds between two microbatches.

    Args:
        weights: all rows, or in stage 3 the rank's own.
        gradients: all rows in stage 1, else the rank's own.
        state: of the rank's own rows.
    """

    weights: Weights
    gradients: Gradients = field(default_factory=dict)
    state: OptimizerState = field(default_factory=OptimizerState)


def loss_and_gradients(
    model: Model,
    tokens: Tensor,
    labels: Tensor,
    dropout: Dropout | None = None,
    *,
    dp: int,
    stage: int = 3,
    microbatches: int = 1,
    replicas: int = 1,
) -> tuple[float, Gradients]:
    """The mean loss of the global batch and its gradient, computed by replicas x dp ranks.

    Args:
        model: whole weights.
        tokens: b t of the global batch; replicas x dp x microbatches must divide b.
        labels: b t, -100 ignored.
        dropout: None in evaluation.
        dp: number of ranks that share the model out.
        stage: 1, 2 or 3.
        microbatches: accumulation steps of each rank.
        replicas: groups of so many ranks.
    """
    groups = [start(model.weights, dp, stage) for _ in range(replicas)]
    pieces = pieces_of(tokens, labels, dropout, replicas * dp, microbatches)
    loss, gradients = hybrid(groups, model.options, pieces, max(1, num_valid(labels)), stage)
    return loss, gather(gradients)


def train_steps(
    model: Model,
    batches: Sequence[Batch],
    how: TrainingOptions,
    *,
    dp: int,
    stage: int = 3,
    microbatches: int = 1,
    replicas: int = 1,
) -> Run:
    """The training loop of replicas x dp ranks; the run that comes back has whole tensors.

    Args:
        model: whole initial weights.
        batches: for each step tokens and labels, b t; replicas x dp x microbatches must divide b.
        how: the training options.
        dp: number of ranks that share the model out.
        stage: 1, 2 or 3.
        microbatches: accumulation steps of each rank.
        replicas: groups of so many ranks.
    """
    groups = [start(model.weights, dp, stage) for _ in range(replicas)]
    run = Run(weights={})
    for step, (tokens, labels) in enumerate(batches):
        pieces = pieces_of(tokens, labels, Dropout(how.seed, step), replicas * dp, microbatches)
        loss, gradients = hybrid(groups, model.options, pieces, max(1, num_valid(labels)), stage)
        norm = math.sqrt(sum(gradient_norm(own) ** 2 for own in gradients))
        run.losses.append(loss)
        run.tokens.append(num_valid(labels))
        run.gradient_norms.append(norm)
        run.learning_rates.append(learning_rate(how, step))
        if run.tokens[-1] > 0:
            for own in gradients:
                clip(own, norm, how.clip_grad)
            for ranks in groups:
                optimizer_step(ranks, gradients, how, run.learning_rates[-1], stage)
    ranks = groups[0]
    run.weights = gather([rank.weights for rank in ranks]) if stage == 3 else ranks[0].weights
    run.optimizer.exp_avg = gather([rank.state.exp_avg for rank in ranks])
    run.optimizer.exp_avg_sq = gather([rank.state.exp_avg_sq for rank in ranks])
    run.optimizer.momentum = gather([rank.state.momentum for rank in ranks])
    run.tensors_at[len(batches) - 1] = state_of(run)
    return run


def start(weights: Weights, dp: int, stage: int) -> list[Rank]:
    """What the ranks hold before the first step."""
    held = shard(weights, dp) if stage == 3 else [leaves(weights) for _ in range(dp)]
    return [Rank({name: w.detach() for name, w in own.items()}) for own in held]


def pieces_of(
    tokens: Tensor, labels: Tensor, dropout: Dropout | None, dp: int, microbatches: int
) -> list[list[Piece]]:
    """[rank][microbatch]"""
    shares = split_batch(tokens, labels, dropout, dp)
    return [list(split_batch(*share, microbatches)) for share in shares]


def hybrid(
    groups: list[list[Rank]],
    options: ModelOptions,
    pieces: list[list[Piece]],
    total: int,
    stage: int,
) -> tuple[float, list[Gradients]]:
    """Each group of ranks by itself, with its part of the batch; then all-reduce over the groups.

    Gives the loss and, for each rank of any group, the gradients of its rows.
    """
    dp, loss = len(groups[0]), 0.0
    summed: list[Gradients] = []
    for index, ranks in enumerate(groups):
        own = pieces[index * dp : (index + 1) * dp]
        part, gradients = STAGES[stage](ranks, options, own, total)
        loss += part
        summed = list(map(added, summed, gradients)) if summed else gradients
    return loss, summed


def stage_1(
    ranks: list[Rank], options: ModelOptions, pieces: list[list[Piece]], total: int
) -> tuple[float, list[Gradients]]:
    """Whole gradients add up over the microbatches; then one reduce-scatter."""
    loss = 0.0
    for rank, own in zip(ranks, pieces, strict=True):
        rank.gradients = {name: torch.zeros_like(w) for name, w in rank.weights.items()}
        for piece in own:
            part, gradients = backward(rank.weights, options, piece, total)
            rank.gradients = added(rank.gradients, gradients)
            loss += part
    return loss, reduce_scatter([rank.gradients for rank in ranks])


def stage_2(
    ranks: list[Rank], options: ModelOptions, pieces: list[list[Piece]], total: int
) -> tuple[float, list[Gradients]]:
    """A reduce-scatter after each microbatch; the owners' rows add up, and nothing else is kept."""
    loss = 0.0
    for rank, rows in zip(ranks, shard(ranks[0].weights, len(ranks)), strict=True):
        rank.gradients = {name: torch.zeros_like(w) for name, w in rows.items()}
    for of_all_ranks in zip(*pieces, strict=True):
        whole = []
        for rank, piece in zip(ranks, of_all_ranks, strict=True):
            part, gradients = backward(rank.weights, options, piece, total)
            whole.append(gradients)
            loss += part
        for rank, rows in zip(ranks, reduce_scatter(whole), strict=True):
            rank.gradients = added(rank.gradients, rows)
    return loss, [rank.gradients for rank in ranks]


def stage_3(
    ranks: list[Rank], options: ModelOptions, pieces: list[list[Piece]], total: int
) -> tuple[float, list[Gradients]]:
    """Each rank gathers what it computes with; gradients reach the owners' rows through that."""
    shards = [leaves(rank.weights) for rank in ranks]
    loss = 0.0
    for own in pieces:
        for tokens, labels, dropout in own:
            logits = rank_forward(shards, options, tokens, dropout)
            part = loss_sum(logits, labels) / total
            part.backward()
            loss += part.item()
    for rank, rows in zip(ranks, shards, strict=True):
        rank.gradients = gradients_of_leaves(rows)
    return loss, [rank.gradients for rank in ranks]


Stage = Callable[[list[Rank], ModelOptions, list[list[Piece]], int], tuple[float, list[Gradients]]]
STAGES: dict[int, Stage] = {1: stage_1, 2: stage_2, 3: stage_3}
"""Each gives the loss and, for each rank, the summed gradients of the rows that it owns."""


def optimizer_step(
    ranks: list[Rank],
    gradients: list[Gradients],
    how: TrainingOptions,
    lr: float,
    stage: int,
) -> None:
    """Every rank updates its rows; where weights are whole, all-gather them after that."""
    dp = len(ranks)
    for index, (rank, own) in enumerate(zip(ranks, gradients, strict=True)):
        rows = rank.weights if stage == 3 else rows_of(rank.weights, index, dp)
        update(rows, own, rank.state, how, lr)
    if stage < 3:
        updated = [rows_of(rank.weights, index, dp) for index, rank in enumerate(ranks)]
        for rank in ranks:
            rank.weights = gather(updated)


def backward(
    weights: Weights, options: ModelOptions, piece: Piece, total: int
) -> tuple[float, Gradients]:
    """A microbatch's part of the loss and of the gradients, on a rank with whole weights."""
    tokens, labels, dropout = piece
    own = leaves(weights)
    part = loss_sum(forward(Model(options, own), tokens, dropout), labels) / total
    part.backward()
    return part.item(), gradients_of_leaves(own)


def added(a: Gradients, b: Gradients) -> Gradients:
    return {name: a[name] + b[name] for name in a}


def reduce_scatter(whole: list[Gradients]) -> list[Gradients]:
    """Each rank's rows of the sum over all ranks."""
    total = {name: torch.stack([own[name] for own in whole]).sum(dim=0) for name in whole[0]}
    return shard(total, len(whole))


def shard(weights: Weights, dp: int) -> Ranks:
    """Each rank's rows of each weight: ceil(rows / dp), the last ones fewer, even none."""
    cut = [rows_of(weights, rank, dp) for rank in range(dp)]
    return [{name: rows.clone() for name, rows in own.items()} for own in cut]


def rows_of(weights: Weights, rank: int, dp: int) -> Weights:
    """Views of the rows that the rank owns."""
    cut = {name: math.ceil(len(weight) / dp) for name, weight in weights.items()}
    return {n: weight[rank * cut[n] : (rank + 1) * cut[n]] for n, weight in weights.items()}


def gather(ranks: Ranks, *prefixes: str) -> Weights:
    """All-gather the weights with these prefixes (default: all). Backward: reduce-scatter."""
    names = [name for name in ranks[0] if not prefixes or name.startswith(prefixes)]
    return {name: torch.cat([own[name] for own in ranks]) for name in names}


def rank_forward(
    ranks: Ranks, options: ModelOptions, tokens: Tensor, dropout: Dropout | None
) -> Tensor:
    """What one rank does: each part of the model is gathered when its turn comes."""
    x = embed(gather(ranks, "token_embedding", "position_embedding"), tokens, options, dropout)
    for index in range(options.layers):
        x = block(gather(ranks, f"blocks.{index}."), index, x, options, dropout)
    return head(gather(ranks, "final_norm", options.head_name), x, options)
