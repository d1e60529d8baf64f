"""ZeRO stage 3: data parallelism whose ranks share out the weights, gradients and optimizer state.

1. Data parallelism keeps dp equal copies of everything. Keep one: each rank owns 1/dp of each
   weight, of its gradient and of its two Adam moments.
2. Before a block is used, all-gather its weights; after use, free them. Backward gathers once more.
3. The block's gradients are reduce-scattered at once: summed over the ranks, each gets its shard.
4. The update works on each element by itself, so a shard is updated where it lies.
   Only the gradient norm needs the other ranks: one number, summed before the root is taken.

Paper: Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 5; Zhao et al., "PyTorch FSDP", arXiv
2304.11277, section 3. Shards here are rows (dim 0), as in FSDP2.

    on each rank      stage 0 (data parallel)   stage 1    stage 2    stage 3
    weights           all                       all        all        1/dp
    gradients         all                       all        1/dp       1/dp
    Adam's moments    all                       1/dp       1/dp       1/dp

    all-gather of each weight on dp          stage 3: 1 before forward, 1 before backward
    reduce-scatter of each gradient on dp    1 after backward
    all-reduce of 1 number on dp             valid labels; loss; squared norm

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

Gathering is concatenation. Its gradient hands each rank its own rows, and as the losses of all
ranks reach the shards, their sums: that is the reduce-scatter. (This page keeps gathered weights
until backward has used them; freeing them is what a real rank gains.)
"""

import math
from collections.abc import Sequence

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


def loss_and_gradients(
    model: Model, tokens: Tensor, labels: Tensor, dropout: Dropout | None = None, *, dp: int
) -> tuple[float, Gradients]:
    """The mean loss of the global batch and its gradient, computed by dp ranks.

    Args:
        model: whole weights.
        tokens: b t of the global batch; dp must divide b.
        labels: b t, -100 ignored.
        dropout: None in evaluation.
        dp: number of ranks.
    """
    ranks = shard(model.weights, dp)
    loss, gradients = sharded_loss_and_gradients(ranks, model.options, tokens, labels, dropout)
    return loss, gather(gradients)


def train_steps(model: Model, batches: Sequence[Batch], how: TrainingOptions, *, dp: int) -> Run:
    """The training loop with all state in shards; the run that comes back has whole tensors.

    Args:
        model: whole initial weights.
        batches: for each step tokens and labels, b t; dp must divide b.
        how: the training options.
        dp: number of ranks.
    """
    ranks = shard(model.weights, dp)
    states = [OptimizerState() for _ in ranks]
    run = Run(weights={})
    for step, (tokens, labels) in enumerate(batches):
        dropout = Dropout(how.seed, step)
        loss, gradients = sharded_loss_and_gradients(ranks, model.options, tokens, labels, dropout)
        norm = math.sqrt(sum(gradient_norm(own) ** 2 for own in gradients))
        run.losses.append(loss)
        run.tokens.append(num_valid(labels))
        run.gradient_norms.append(norm)
        run.learning_rates.append(learning_rate(how, step))
        if run.tokens[-1] > 0:
            for own, own_gradients, state in zip(ranks, gradients, states, strict=True):
                clip(own_gradients, norm, how.clip_grad)
                update(own, own_gradients, state, how, run.learning_rates[-1])
    run.weights = gather(ranks)
    run.optimizer.exp_avg = gather([state.exp_avg for state in states])
    run.optimizer.exp_avg_sq = gather([state.exp_avg_sq for state in states])
    run.optimizer.momentum = gather([state.momentum for state in states])
    run.tensors_at[len(batches) - 1] = state_of(run)
    return run


def shard(weights: Weights, dp: int) -> Ranks:
    """Each rank's rows of each weight: ceil(rows / dp), the last ones fewer, even none."""
    ranks: Ranks = [{} for _ in range(dp)]
    for name, weight in weights.items():
        rows = math.ceil(len(weight) / dp)
        for rank, own in enumerate(ranks):
            own[name] = weight[rank * rows : (rank + 1) * rows].clone()
    return ranks


def gather(ranks: Ranks, *prefixes: str) -> Weights:
    """All-gather the weights with these prefixes (default: all). Backward: reduce-scatter."""
    names = [name for name in ranks[0] if not prefixes or name.startswith(prefixes)]
    return {name: torch.cat([own[name] for own in ranks]) for name in names}


def sharded_loss_and_gradients(
    ranks: Ranks, options: ModelOptions, tokens: Tensor, labels: Tensor, dropout: Dropout | None
) -> tuple[float, list[Gradients]]:
    """The mean loss, and each rank's shards of the gradients."""
    shards = [leaves(own) for own in ranks]
    total = max(1, num_valid(labels))
    loss = 0.0
    for own_tokens, own_labels, own_dropout in split_batch(tokens, labels, dropout, len(ranks)):
        logits = rank_forward(shards, options, own_tokens, own_dropout)
        part = loss_sum(logits, own_labels) / total
        part.backward()
        loss += part.item()
    return loss, [gradients_of_leaves(own) for own in shards]


def rank_forward(
    ranks: Ranks, options: ModelOptions, tokens: Tensor, dropout: Dropout | None
) -> Tensor:
    """What one rank does: each part of the model is gathered when its turn comes."""
    x = embed(gather(ranks, "token_embedding", "position_embedding"), tokens, options, dropout)
    for index in range(options.layers):
        x = block(gather(ranks, f"blocks.{index}."), index, x, options, dropout)
    return head(gather(ranks, "final_norm", options.head_name), x, options)
