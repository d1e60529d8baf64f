"""Tensor parallelism: every rank computes a part of each layer's width, for all tokens.

1. The first linear of a pair is cut by output columns: each rank makes whole heads, or whole hidden
   units, from the same input, and what follows (softmax, GELU) needs no other rank.
2. The second is cut by the input rows that match: each rank gets a full-sized but partial result.
3. One all-reduce a pair, f in backward and g in forward, makes partial results whole.
4. The embedding and the head are cut by vocabulary, so that the logits, the largest activation, are
   never whole: the cross-entropy needs three numbers a token from the other ranks.

Paper: Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3 and figure 3 (f and g).

    weight                               rank's part         what the ranks' results are
    token_embedding, head          v d   rows v/tp           partial sums, shards of logits
    query, key, value, gate, up          rows (outputs)/tp   shards: heads, hidden units
    qkv (fused)                          whole groups/tp     shards: groups of heads
    key, value, fewer heads than tp      one head            copies of a head on tp/heads ranks
    attention.output, mlp.down           columns (inputs)/tp partial sums
    their biases, norms, positions       whole               whole

    all-reduce of b t d on tp            forward: 1 + 2 a layer (g); backward: 2 a layer + 1 (f)
                                         parallel blocks: 1 a layer each way
    all-reduce of the copied gradients   once a step, among the ranks that hold the same head
    all-reduce of b t on tp              forward: 3 (largest logit, sum of exponentials, label's)

In the code, a value that is equal on all ranks is ONE tensor and a value that differs is a LIST
with a tensor for each rank. Then autograd knows both all-reduces: using one tensor tp times adds
up the gradients of its uses, and the gradient of a sum goes to each of its terms.
"""

from math import ceil

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from reference.model import (
    IGNORED_LABEL,
    Dropout,
    Model,
    ModelOptions,
    Weights,
    attention_heads,
    drop,
    mlp_hidden,
    norm,
    num_valid,
    widen,
)
from reference.training import Gradients, leaves

Ranks = list[Weights]
COLUMN_PARALLEL = (".query", ".key", ".value", ".qkv", ".gate", ".up")
ROW_PARALLEL = (".attention.output", ".mlp.down")
VOCABULARY_PARALLEL = ("token_embedding", "head")


def loss_and_gradients(
    model: Model, tokens: Tensor, labels: Tensor, dropout: Dropout | None = None, *, tp: int
) -> tuple[float, Gradients]:
    """The mean loss and the gradients of the whole weights, computed by tp ranks.

    Args:
        model: whole weights; tp must divide query heads and ffn width, and divide key/value heads
            or be a multiple of them.
        tokens: b t.
        labels: b t, -100 ignored.
        dropout: None in evaluation.
        tp: number of ranks.

    Raises:
        ValueError: a rank would get nothing of the vocabulary.
    """
    ranks = split_weights(model, tp)
    x = embed(ranks, tokens, model.options, dropout)
    for index in range(model.options.layers):
        x = block(ranks, index, x, model.options, dropout)
    x = norm(ranks[0], "final_norm", x, model.options)
    loss = loss_sum(head(ranks, f(x, tp), model.options), labels) / max(1, num_valid(labels))
    loss.backward()
    return loss.item(), join_gradients(ranks, model)


def f(x: Tensor, tp: int) -> list[Tensor]:
    """Give every rank the tensor. Forward: nothing. Backward: all-reduce of the gradients."""
    return [x] * tp


def g(partial: list[Tensor]) -> Tensor:
    """Add up the ranks' partial results. Forward: all-reduce. Backward: nothing."""
    return torch.stack(partial).sum(dim=0)


def split_dim(name: str) -> int | None:
    """The dim of a parameter that is cut over the ranks; None when each rank has the whole."""
    module, kind = name.rsplit(".", 1)
    if module in VOCABULARY_PARALLEL or module.endswith(COLUMN_PARALLEL):
        return 0
    if module.endswith(ROW_PARALLEL) and kind == "weight":
        return 1
    return None


def num_copies(name: str, options: ModelOptions, tp: int) -> int:
    """How many ranks in a row hold the same part: several where key/value heads are too few."""
    module, _ = name.rsplit(".", 1)
    few = module.endswith((".key", ".value")) and options.num_kv_heads < tp
    return tp // options.num_kv_heads if few else 1


def split_weights(model: Model, tp: int) -> Ranks:
    """Each rank's own weights. Sizes are ceil(n / tp), the last one smaller, as in torch.chunk."""
    vocabulary = model.options.vocab_size
    if ceil(vocabulary / tp) * (tp - 1) >= vocabulary:
        raise ValueError(f"vocabulary {vocabulary} is too small for {tp} parts of equal size")
    ranks: Ranks = [{} for _ in range(tp)]
    for name, weight in model.weights.items():
        dim = split_dim(name)
        copies = num_copies(name, model.options, tp)
        parts = [weight] * tp
        if dim is not None:
            parts = [part for part in weight.chunk(tp // copies, dim) for _ in range(copies)]
        for own, part in zip(ranks, parts, strict=True):
            own[name] = part
    return [leaves(own) for own in ranks]


def join_gradients(ranks: Ranks, model: Model) -> Gradients:
    """The gradients of the whole weights.

    Those of a cut weight are laid side by side, those of copies of a part added up: each comes from
    the query heads of one rank. A weight that every rank has whole worked for all
    of them as the copy of rank 0; the other copies have none, or (under sequence parallelism) the
    gradient from other tokens, which is added.
    """
    tp, gradients = len(ranks), {}
    for name, weight in model.weights.items():
        parts = [own[name].grad for own in ranks]
        present = [part for part in parts if part is not None]
        dim = split_dim(name)
        if not present:
            gradients[name] = torch.zeros_like(weight)
        elif dim is None:
            gradients[name] = torch.stack(present).sum(dim=0)
        else:
            copies = num_copies(name, model.options, tp)
            sums = [torch.stack(present[i : i + copies]).sum(dim=0) for i in range(0, tp, copies)]
            gradients[name] = torch.cat(sums, dim)
    return gradients


def embed(ranks: Ranks, tokens: Tensor, options: ModelOptions, dropout: Dropout | None) -> Tensor:
    x = g(embedding_parts(ranks, tokens))
    if options.positions == "learned":
        x = x + ranks[0]["position_embedding.weight"][: tokens.shape[1]]
    return drop(x, "embedding_dropout", options.dropout, dropout)


def embedding_parts(ranks: Ranks, tokens: Tensor) -> list[Tensor]:
    """Each rank looks up the tokens that lie in its part of the vocabulary, and has 0 elsewhere."""
    parts = []
    start = 0
    for own in ranks:
        rows = own["token_embedding.weight"]  # v/tp d
        index = tokens - start
        inside = (index >= 0) & (index < len(rows))
        vectors = rows[index.where(inside, 0)]
        parts.append(vectors * rearrange(inside, "b t -> b t 1"))
        start += len(rows)
    return parts


def block(
    ranks: Ranks, index: int, x: Tensor, options: ModelOptions, dropout: Dropout | None
) -> Tensor:
    if options.parallel_block:
        return parallel_block(ranks, index, x, options, dropout)
    tp, name = len(ranks), f"blocks.{index}"
    copies = f(norm(ranks[0], f"{name}.attention_norm", x, options), tp)
    heads = [
        attention_heads(own, f"{name}.attention", copy, options, dropout, part=(rank, tp))
        for rank, (own, copy) in enumerate(zip(ranks, copies, strict=True))
    ]  # b t (h k)/tp
    y = row_parallel(ranks, f"{name}.attention.output", heads)
    x = x + drop(y, f"{name}.attention_residual_dropout", options.dropout, dropout)
    copies = f(norm(ranks[0], f"{name}.mlp_norm", x, options), tp)
    hidden = [
        mlp_hidden(own, f"{name}.mlp", copy, options)
        for own, copy in zip(ranks, copies, strict=True)
    ]  # b t f/tp
    y = row_parallel(ranks, f"{name}.mlp.down", hidden)
    return x + drop(y, f"{name}.mlp_residual_dropout", options.dropout, dropout)


def parallel_block(
    ranks: Ranks, index: int, x: Tensor, options: ModelOptions, dropout: Dropout | None
) -> Tensor:
    """One f and one g for attention and feed-forward network together."""
    copies = f(norm(ranks[0], f"blocks.{index}.norm", x, options), len(ranks))
    y = g(parallel_block_parts(ranks, index, copies, options, dropout))
    for bias, site in parallel_block_biases(ranks[0], index):
        y = y + drop(bias.expand_as(y), site, options.dropout, dropout)
    return x + y


def parallel_block_parts(
    ranks: Ranks,
    index: int,
    copies: list[Tensor],
    options: ModelOptions,
    dropout: Dropout | None,
) -> list[Tensor]:
    """Each rank's part of attention plus feed-forward network, b t d, without the biases.

    Dropout is linear: the mask of a sum may fall on each of its terms.
    """
    tp, name = len(ranks), f"blocks.{index}"
    parts = []
    for rank, (own, x) in enumerate(zip(ranks, copies, strict=True)):
        heads = attention_heads(own, f"{name}.attention", x, options, dropout, part=(rank, tp))
        y = F.linear(heads, own[f"{name}.attention.output.weight"])
        z = F.linear(mlp_hidden(own, f"{name}.mlp", x, options), own[f"{name}.mlp.down.weight"])
        y = drop(y, f"{name}.attention_residual_dropout", options.dropout, dropout)
        parts.append(y + drop(z, f"{name}.mlp_residual_dropout", options.dropout, dropout))
    return parts


def parallel_block_biases(own: Weights, index: int) -> list[tuple[Tensor, str]]:
    """Each with the dropout that it meets; none where the model has none."""
    name = f"blocks.{index}"
    sites = {"attention.output": "attention_residual_dropout", "mlp.down": "mlp_residual_dropout"}
    return [
        (own[f"{name}.{module}.bias"], f"{name}.{site}")
        for module, site in sites.items()
        if f"{name}.{module}.bias" in own
    ]


def row_parallel(ranks: Ranks, name: str, parts: list[Tensor]) -> Tensor:
    """A linear on inputs that lie cut over the ranks. The bias is added once, after the sum."""
    y = g(row_parallel_parts(ranks, name, parts))
    bias = ranks[0].get(f"{name}.bias")
    return y if bias is None else y + bias


def row_parallel_parts(ranks: Ranks, name: str, parts: list[Tensor]) -> list[Tensor]:
    return [F.linear(x, own[f"{name}.weight"]) for own, x in zip(ranks, parts, strict=True)]


def head(ranks: Ranks, copies: list[Tensor], options: ModelOptions) -> list[Tensor]:
    """Each rank's logits, b t v/tp, of normed activations."""
    return [F.linear(x, own[options.head_name]) for own, x in zip(ranks, copies, strict=True)]


def loss_sum(logits: list[Tensor], labels: Tensor) -> Tensor:
    """Cross-entropy summed over the valid labels, from the ranks' parts of the logits (b t v/tp).

    log(sum of exp(logit)) - logit of the label; the largest logit is taken out of the exponentials
    first, and as it cancels, no gradient flows through it.
    """
    wide = [widen(part) for part in logits]
    largest = torch.stack([part.detach().amax(dim=-1) for part in wide]).amax(dim=0)
    exponentials = g([(part - largest.unsqueeze(-1)).exp().sum(dim=-1) for part in wide])
    label_logit = g(label_logit_parts(wide, labels))
    losses = exponentials.log() + largest - label_logit
    return losses.where(labels != IGNORED_LABEL, 0).sum()


def label_logit_parts(logits: list[Tensor], labels: Tensor) -> list[Tensor]:
    """The logit of the label (b t), on the rank that has it; 0 on the others."""
    parts = []
    start = 0
    for part in logits:
        index = labels - start
        inside = (index >= 0) & (index < part.shape[-1])
        picked = part.gather(-1, rearrange(index.where(inside, 0), "b t -> b t 1"))
        parts.append(rearrange(picked, "b t 1 -> b t").where(inside, 0))
        start += part.shape[-1]
    return parts
