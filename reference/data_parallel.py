"""Data parallelism: every rank has the whole model and a part of the global batch.

1. Each rank computes the gradient of its own sequences, one microbatch after the other; the
   gradients add up in place, and nothing is sent meanwhile.
2. Then one all-reduce SUMS the gradients over the ranks, and all make the same optimizer step.
3. Ranks, and microbatches, may have different numbers of valid labels. So no rank may take a mean
   of its own: each divides its SUM of token losses by the number of valid labels in the GLOBAL
   batch, which is counted, and summed over the ranks, before the first backward pass.

Paper: Li et al., "PyTorch Distributed", arXiv 2006.15704, section 3.2 (which averages instead).

    value                  on each rank
    weights, optimizer     whole
    tokens, labels         sequences b/dp, in m microbatches
    gradients              partial until the all-reduce, then whole

    all-reduce of 1 number on dp         1 a step: the count of valid labels
    all-reduce of all gradients on dp    1 a step, whatever the number of microbatches
    all-reduce of 1 number on dp         1 a step: the loss, to print it
"""

import torch
from torch import Tensor

from reference.model import Dropout, Model, forward, loss_sum, num_valid
from reference.training import Gradients, gradients_of_leaves, leaves, split_batch


def loss_and_gradients(
    model: Model,
    tokens: Tensor,
    labels: Tensor,
    dropout: Dropout | None = None,
    *,
    dp: int,
    microbatches: int = 1,
) -> tuple[float, Gradients]:
    """The mean loss of the global batch and its gradient, computed by dp ranks.

    Args:
        model: whole weights.
        tokens: b t of the global batch; dp x microbatches must divide b.
        labels: b t, -100 ignored.
        dropout: None in evaluation.
        dp: number of ranks.
        microbatches: accumulation steps of each rank.
    """
    shares = list(split_batch(tokens, labels, dropout, dp))
    total = max(1, sum(num_valid(own_labels) for _, own_labels, _ in shares))
    results = [rank_backward(model, *share, microbatches, total) for share in shares]
    losses, gradients = zip(*results, strict=True)
    return sum(losses), {
        name: all_reduce([own[name] for own in gradients]) for name in gradients[0]
    }


def rank_backward(
    model: Model,
    tokens: Tensor,
    labels: Tensor,
    dropout: Dropout | None,
    microbatches: int,
    total: int,
) -> tuple[float, Gradients]:
    """One rank's part of the loss and of the gradients: sums over its tokens, divided by total."""
    weights = leaves(model.weights)
    loss = 0.0
    for own_tokens, own_labels, own_dropout in split_batch(tokens, labels, dropout, microbatches):
        logits = forward(Model(model.options, weights), own_tokens, own_dropout)
        part = loss_sum(logits, own_labels) / total
        part.backward()
        loss += part.item()
    return loss, gradients_of_leaves(weights)


def all_reduce(partial: list[Tensor]) -> Tensor:
    """The sum over the ranks, for all of them."""
    return torch.stack(partial).sum(dim=0)
