"""Sequence parallelism: between the linears of tensor parallelism each rank keeps its own tokens.

1. Tensor parallelism leaves norms, dropout and residuals whole: tp ranks do the same work on, and
   store, the same b t d activations.
2. All of these treat each token by itself, so cut them by tokens: t/tp for each rank.
3. Before a column-parallel linear, all-gather the tokens; after a row-parallel one, reduce-scatter
   the partial sums. An all-reduce is these two in a row, so not a byte more is sent.
4. The price: a norm's weight now meets only the rank's tokens, so each rank has a PARTIAL gradient.
   It must be summed over tp, and so must that of every bias and position used on the shards.
5. What is gathered may be thrown away after use and gathered again when the backward pass needs it
   for the gradient of a weight: t/tp tokens are kept instead of t, for one all-gather more.
6. No rank has to wait for all tokens: a linear works token by token, too. While the others' travel,
   a rank multiplies its own; and of a sum it computes the others' parts first, so that these travel
   while it computes its own. Backward is the mirror image, each with the other's order.

Papers: Korthikanti et al., "Reducing activation recomputation", arXiv 2205.05198, section 4.2.2;
for the last point Wang et al., "Overlap communication with dependent computation via decomposition
in large deep learning models", ASPLOS 2023, section 5.

    activation                           under tensor parallelism   here
    residual, norm and dropout           whole                      tokens t/tp
    input of column-parallel linears     whole                      whole (all-gathered; t/tp kept)
    heads, hidden units, logits          part of the width          part of the width

    weight gradients                     norms, biases of attention.output and mlp.down, positions:
                                         partial, summed on tp; all others as before

    all-gather, reduce-scatter of b t d on tp     forward: 2 a layer + 1 of each
                                                  backward: the same, each the other's transpose
                                                  parallel blocks: 1 a layer
    all-reduce of d on tp                         one for each weight of the partial kind, per step
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from reference.model import (
    Dropout,
    Model,
    ModelOptions,
    drop,
    mix,
    mlp_hidden,
    norm,
    num_valid,
    query_key_value,
)
from reference.tensor_parallel import (
    Ranks,
    embedding_parts,
    join_gradients,
    loss_sum,
    parallel_block_biases,
    parallel_block_parts,
    row_parallel_parts,
    split_weights,
)
from reference.training import Gradients

Compute = Callable[[int, Tensor], tuple[Tensor, ...]]  # (rank, some tokens) -> what they become


def loss_and_gradients(
    model: Model,
    tokens: Tensor,
    labels: Tensor,
    dropout: Dropout | None = None,
    *,
    tp: int,
    overlapped: bool = False,
) -> tuple[float, Gradients]:
    """The mean loss and the gradients of the whole weights, computed by tp ranks.

    Args:
        model: whole weights; tp must divide query heads and ffn width, and divide key/value heads
            or be a multiple of them.
        tokens: b t; tp must divide t.
        labels: b t, -100 ignored.
        dropout: None in evaluation.
        tp: number of ranks.
        overlapped: whether linears are computed in parts, in the order in which tokens come and go;
            parallel blocks are not.

    Raises:
        ValueError: tp does not divide the tokens, or a rank would get nothing of the vocabulary.
    """
    if tokens.shape[1] % tp:
        raise ValueError(f"{tokens.shape[1]} tokens cannot be cut into {tp} equal parts")
    ranks = split_weights(model, tp)
    shards = embed(ranks, tokens, model.options, dropout)
    for index in range(model.options.layers):
        shards = block(ranks, index, shards, model.options, dropout, overlapped)
    shards = norms(ranks, "final_norm", shards, model.options)

    def head(rank: int, x: Tensor) -> tuple[Tensor]:
        return (F.linear(x, ranks[rank][model.options.head_name]),)

    logits = [logits for (logits,) in enter(shards, head, overlapped)]  # b t v/tp
    loss = loss_sum(logits, labels) / max(1, num_valid(labels))
    loss.backward()
    return loss.item(), join_gradients(ranks, model)


def all_gather(shards: list[Tensor]) -> list[Tensor]:
    """Token shards (b t/tp d) to the whole (b t d) on every rank. Backward: reduce-scatter."""
    return [torch.cat(shards, dim=1)] * len(shards)


def reduce_scatter(partial: list[Tensor]) -> list[Tensor]:
    """Partial sums (b t d) to sums of the rank's tokens (b t/tp d). Backward: all-gather."""
    return list(torch.stack(partial).sum(dim=0).chunk(len(partial), dim=1))


def enter(shards: list[Tensor], compute: Compute, overlapped: bool) -> list[tuple[Tensor, ...]]:
    """What each rank makes of all tokens, whose shards lie on all ranks."""
    if overlapped:
        return [as_they_arrive(rank, shards, compute) for rank in range(len(shards))]
    return [compute(rank, x) for rank, x in enumerate(all_gather(shards))]


def as_they_arrive(rank: int, shards: list[Tensor], compute: Compute) -> tuple[Tensor, ...]:
    """The rank computes its own tokens first, then the next rank's, and so on around.

    Each result goes where its tokens belong, whenever it is computed.
    """
    tp = len(shards)
    results: list[tuple[Tensor, ...]] = [()] * tp
    for step in range(tp):
        source = (rank + step) % tp
        results[source] = compute(rank, shards[source])
    return tuple(torch.cat(parts, dim=1) for parts in zip(*results, strict=True))


def others_first(ranks: Ranks, name: str, parts: list[Tensor]) -> list[Tensor]:
    """`reduce_scatter` of a linear: each rank computes the next rank's tokens first, its own last.

    A rank adds up what it gets in the order of the ranks, and not in that of arrival.
    """
    tp = len(ranks)
    terms = [[torch.empty(0)] * tp for _ in range(tp)]  # by rank that gets it, and that sends it
    for source, (own, x) in enumerate(zip(ranks, parts, strict=True)):
        for step in range(1, tp + 1):
            target = (source + step) % tp
            tokens = x.chunk(tp, dim=1)[target]
            terms[target][source] = F.linear(tokens, own[f"{name}.weight"])
    return [torch.stack(own_terms).sum(dim=0) for own_terms in terms]


def embed(
    ranks: Ranks, tokens: Tensor, options: ModelOptions, dropout: Dropout | None
) -> list[Tensor]:
    tp = len(ranks)
    shards = reduce_scatter(embedding_parts(ranks, tokens))
    if options.positions == "learned":
        positions = [
            own["position_embedding.weight"][: tokens.shape[1]].chunk(tp)[rank]
            for rank, own in enumerate(ranks)
        ]
        shards = [x + position for x, position in zip(shards, positions, strict=True)]
    return [
        drop(x, "embedding_dropout", options.dropout, dropout, part=(rank, tp))
        for rank, x in enumerate(shards)
    ]


def block(
    ranks: Ranks,
    index: int,
    shards: list[Tensor],
    options: ModelOptions,
    dropout: Dropout | None,
    overlapped: bool,
) -> list[Tensor]:
    if options.parallel_block:
        return parallel_block(ranks, index, shards, options, dropout)
    tp, name = len(ranks), f"blocks.{index}"

    def project(rank: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return query_key_value(ranks[rank], f"{name}.attention", x, options)

    def feed(rank: int, x: Tensor) -> tuple[Tensor]:
        return (mlp_hidden(ranks[rank], f"{name}.mlp", x, options),)

    normed = norms(ranks, f"{name}.attention_norm", shards, options)
    heads = [
        mix(f"{name}.attention", q, k, v, options, dropout, (rank, tp))
        for rank, (q, k, v) in enumerate(enter(normed, project, overlapped))
    ]  # b t (h k)/tp
    ys = row_parallel(ranks, f"{name}.attention.output", heads, overlapped)
    shards = add_dropped(shards, ys, f"{name}.attention_residual_dropout", options, dropout)
    normed = norms(ranks, f"{name}.mlp_norm", shards, options)
    hidden = [x for (x,) in enter(normed, feed, overlapped)]  # b t f/tp
    ys = row_parallel(ranks, f"{name}.mlp.down", hidden, overlapped)
    return add_dropped(shards, ys, f"{name}.mlp_residual_dropout", options, dropout)


def parallel_block(
    ranks: Ranks, index: int, shards: list[Tensor], options: ModelOptions, dropout: Dropout | None
) -> list[Tensor]:
    """One gather and one scatter for attention and feed-forward network together."""
    whole = all_gather(norms(ranks, f"blocks.{index}.norm", shards, options))
    ys = reduce_scatter(parallel_block_parts(ranks, index, whole, options, dropout))
    for rank, own in enumerate(ranks):
        for bias, site in parallel_block_biases(own, index):
            part = (rank, len(ranks))
            ys[rank] = ys[rank] + drop(
                bias.expand_as(ys[rank]), site, options.dropout, dropout, part
            )
    return [x + y for x, y in zip(shards, ys, strict=True)]


def norms(ranks: Ranks, name: str, shards: list[Tensor], options: ModelOptions) -> list[Tensor]:
    """Each rank norms its own tokens with its own copy of the weight."""
    return [norm(own, name, x, options) for own, x in zip(ranks, shards, strict=True)]


def row_parallel(ranks: Ranks, name: str, parts: list[Tensor], overlapped: bool) -> list[Tensor]:
    """A linear on inputs cut over the ranks; each rank adds its copy of the bias to its tokens."""
    if overlapped:
        shards = others_first(ranks, name, parts)  # b t/tp d
    else:
        shards = reduce_scatter(row_parallel_parts(ranks, name, parts))
    if f"{name}.bias" not in ranks[0]:
        return shards
    return [y + own[f"{name}.bias"] for own, y in zip(ranks, shards, strict=True)]


def add_dropped(
    shards: list[Tensor],
    ys: list[Tensor],
    site: str,
    options: ModelOptions,
    dropout: Dropout | None,
) -> list[Tensor]:
    """The residual connection; each rank uses its tokens' part of the one global mask."""
    return [
        x + drop(y, site, options.dropout, dropout, part=(rank, len(shards)))
        for rank, (x, y) in enumerate(zip(shards, ys, strict=True))
    ]
