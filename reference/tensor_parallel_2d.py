"""Tensor parallelism in two dimensions: p = q x q ranks on a grid, and everything in blocks.

1. Rank (i, j) has block (i, j) of each matrix, and of the activations the sequences of row i and
   the entries of column j: 1/p of both. Nobody ever has a whole one.
2. A product x W^T needs, at rank (i, l), row i of x and row l of W. SUMMA takes q steps. In step l
   each column hands its block of row l of W to all its ranks (broadcast); rank (i, j) multiplies
   by it; row i adds up what its ranks have, at rank (i, l) (reduce).
3. Backward, a broadcast is a reduce and a reduce is a broadcast: the gradient of y goes along the
   rows, W again down the columns, and the gradients of W's blocks back up to where they belong.
4. The embedding is the same with a one-hot x, of which every rank knows its row. A norm adds up two
   numbers a token along the row. Attention stays on the rank: whole heads of whole sequences.
5. The price: a vector (bias, norm weight) that all rows share has PARTIAL gradients, one from the
   sequences of each row.

Paper: Xu et al., "An Efficient 2D Method for Training Super-Large Deep Learning Models" (Optimus),
arXiv 2104.05343, section 3; SUMMA is van de Geijn and Watts, 1997.

    matrices (v d, outputs inputs, t d)      block (i, j): rows of part i, columns of part j
    biases, norm weights                     part j, the same in every row
    tokens, labels                           sequences of part i
    activations, logits                      sequences of part i, entries of part j

    y = x W^T, W of m n:  broadcast of m n/q down the columns, reduce of b t m/q along the rows
    backward:             broadcasts of both, reduce of m n/q up the columns

In the code a grid is a list of rows, each a list with a tensor, or a dict of weights, a rank. To
broadcast is to use one rank's tensor for all; to reduce is to put a sum in one rank's place.
"""

from itertools import pairwise
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

from reference.model import (
    IGNORED_LABEL,
    Dropout,
    Model,
    ModelOptions,
    Weights,
    drop,
    mix,
    num_valid,
    split_fused,
    widen,
)
from reference.training import Gradients, leaves

Grid = list[list[Weights]]
Blocks = list[list[Tensor]]


def loss_and_gradients(
    model: Model, tokens: Tensor, labels: Tensor, dropout: Dropout | None = None, *, q: int
) -> tuple[float, Gradients]:
    """The mean loss and the gradients of the whole weights, computed by a grid of q x q ranks.

    Args:
        model: whole weights; q must divide query heads, key/value heads and ffn width.
        tokens: b t; q must divide b.
        labels: b t, -100 ignored.
        dropout: None in evaluation.
        q: rows of the grid, and columns.

    Raises:
        ValueError: q does not divide the sequences, or a rank would get nothing of the vocabulary.
    """
    if len(tokens) % q:
        raise ValueError(f"{len(tokens)} sequences cannot be cut into {q} equal parts")
    grid = split_weights(model, q)
    rows = list(tokens.chunk(q))
    masks = [dropout and dropout.starting_at(i * len(rows[0])) for i in range(q)]
    x = embed(grid, rows, model.options, masks)
    for index in range(model.options.layers):
        x = block(grid, f"blocks.{index}", x, model.options, masks)
    x = norm(grid, "final_norm", x, model.options)
    logits = multiply(x, blocks_of(grid, model.options.head_name))
    losses = [loss_sum(*row) for row in zip(logits, labels.chunk(q), strict=True)]
    loss = torch.stack(losses).sum() / max(1, num_valid(labels))
    loss.backward()
    return loss.item(), join_gradients(grid, model)


def parts(x: Tensor, q: int, dim: int) -> list[Tensor]:
    """q parts of ceil(n / q), the last ones smaller or empty."""
    size, largest = x.shape[dim], ceil(x.shape[dim] / q)
    ends = [min(part * largest, size) for part in range(q + 1)]
    return [x.narrow(dim, start, end - start) for start, end in pairwise(ends)]


def split_weights(model: Model, q: int) -> Grid:
    """Each rank's own blocks of the matrices, and its columns' parts of the vectors."""
    vocabulary = model.options.vocab_size
    if ceil(vocabulary / q) * (q - 1) >= vocabulary:
        raise ValueError(f"vocabulary {vocabulary} is too small for {q} parts of equal size")
    grid: Grid = [[{} for _ in range(q)] for _ in range(q)]
    for name, weight in model.weights.items():
        rows = [weight] * q if weight.ndim == 1 else parts(weight, q, dim=0)
        for line, row in zip(grid, rows, strict=True):
            for own, part in zip(line, parts(row, q, dim=-1), strict=True):
                own[name] = part
    return [[leaves(own) for own in line] for line in grid]


def join_gradients(grid: Grid, model: Model) -> Gradients:
    """The gradients of the whole weights: blocks side by side; vectors summed over rows."""
    gradients = {}
    for name, weight in model.weights.items():
        rows = []
        for line in grid:
            own = [rank[name] for rank in line]
            there = [torch.zeros_like(w) if w.grad is None else w.grad for w in own]
            rows.append(torch.cat(there, dim=-1))
        is_vector = weight.ndim == 1
        gradients[name] = torch.stack(rows).sum(dim=0) if is_vector else torch.cat(rows)
    return gradients


def blocks_of(grid: Grid, name: str) -> Blocks:
    return [[own[name] for own in line] for line in grid]


def multiply(x: Blocks, weight: Blocks) -> Blocks:
    """x W^T in q steps; the result of step `line` stays in column `line`."""
    q = len(x)
    y: Blocks = [[] for _ in range(q)]
    for line in range(q):
        copies = weight[line]  # broadcast: column j now has block (line, j)
        for i in range(q):
            partial = [F.linear(x[i][j], copies[j]) for j in range(q)]
            y[i].append(add_up(partial))  # reduce: to rank (i, line)
    return y


def add_up(partial: list[Tensor]) -> Tensor:
    return torch.stack(partial).sum(dim=0)


def linear(grid: Grid, name: str, x: Blocks) -> Blocks:
    """The bias is added once, after the sum: each rank has the entries of its column."""
    y = multiply(x, blocks_of(grid, f"{name}.weight"))
    if f"{name}.bias" not in grid[0][0]:
        return y
    return add(y, blocks_of(grid, f"{name}.bias"))


def add(x: Blocks, y: Blocks) -> Blocks:
    return [[a + b for a, b in zip(*line, strict=True)] for line in zip(x, y, strict=True)]


def look_up(table: Blocks, index: list[Tensor]) -> Blocks:
    """Rows of a table by number; `index` has those that each row of ranks wants."""
    q = len(table)
    found: Blocks = []
    for wanted in index:
        partial: list[list[Tensor]] = [[] for _ in range(q)]
        start = 0
        for line in range(q):
            copies = table[line]  # broadcast, as in `multiply`
            own = (wanted >= start) & (wanted < start + len(copies[0]))
            hot = own.unsqueeze(-1) & (
                (wanted - start).unsqueeze(-1) == torch.arange(len(copies[0]))
            )  # b t v/q: the one-hot block that multiplies it
            for j in range(q):
                partial[j].append(hot.to(copies[j].dtype) @ copies[j])
            start += len(copies[0])
        found.append([add_up(steps) for steps in partial])
    return found


def embed(
    grid: Grid, tokens: list[Tensor], options: ModelOptions, masks: list[Dropout | None]
) -> Blocks:
    x = look_up(blocks_of(grid, "token_embedding.weight"), tokens)
    if options.positions == "learned":
        numbers = torch.arange(tokens[0].shape[1])
        x = add(x, look_up(blocks_of(grid, "position_embedding.weight"), [numbers] * len(grid)))
    return drop_width(x, "embedding_dropout", options, masks)


def block(
    grid: Grid, name: str, x: Blocks, options: ModelOptions, masks: list[Dropout | None]
) -> Blocks:
    """One after the other, or both on the same normed x and added up."""
    first, second = ("norm", None) if options.parallel_block else ("attention_norm", "mlp_norm")
    normed = norm(grid, f"{name}.{first}", x, options)
    heads = attention(grid, f"{name}.attention", normed, options, masks)
    y = linear(grid, f"{name}.attention.output", heads)
    x = add(x, drop_width(y, f"{name}.attention_residual_dropout", options, masks))
    if second is not None:
        normed = norm(grid, f"{name}.{second}", x, options)
    y = linear(grid, f"{name}.mlp.down", mlp_hidden(grid, f"{name}.mlp", normed, options))
    return add(x, drop_width(y, f"{name}.mlp_residual_dropout", options, masks))


def attention(
    grid: Grid, name: str, x: Blocks, options: ModelOptions, masks: list[Dropout | None]
) -> Blocks:
    """Each rank mixes its own heads of its own sequences."""
    q = len(grid)
    if options.fused_qkv:
        rows = linear(grid, f"{name}.qkv", x)
        roles = [[split_fused(own, options) for own in line] for line in rows]
    else:
        apart = [linear(grid, f"{name}.{role}", x) for role in ("query", "key", "value")]
        roles = [list(zip(*line, strict=True)) for line in zip(*apart, strict=True)]
    return [
        [mix(name, *roles[i][j], options, masks[i], part=(j, q)) for j in range(q)]
        for i in range(q)
    ]


def mlp_hidden(grid: Grid, name: str, x: Blocks, options: ModelOptions) -> Blocks:
    up = linear(grid, f"{name}.up", x)
    if options.mlp == "gelu":
        return [[F.gelu(own, approximate="tanh") for own in line] for line in up]
    gate = linear(grid, f"{name}.gate", x)
    return [
        [F.silu(a) * b for a, b in zip(*line, strict=True)] for line in zip(gate, up, strict=True)
    ]


def norm(grid: Grid, name: str, x: Blocks, options: ModelOptions) -> Blocks:
    """LayerNorm or RMSNorm: mean and mean square are of the whole width, added up along the row."""
    y: Blocks = []
    for line, ranks in zip(x, grid, strict=True):
        wide = [widen(own) for own in line]
        if options.norm == "layernorm":
            mean = add_up([own.sum(dim=-1, keepdim=True) for own in wide]) / options.width
            wide = [own - mean for own in wide]
        squares = add_up([own.square().sum(dim=-1, keepdim=True) for own in wide])
        scale = torch.rsqrt(squares / options.width + options.norm_eps)
        normed = [(own * scale).to(line[0].dtype) for own in wide]
        scaled = [own * rank[f"{name}.weight"] for own, rank in zip(normed, ranks, strict=True)]
        if f"{name}.bias" in ranks[0]:
            scaled = [own + rank[f"{name}.bias"] for own, rank in zip(scaled, ranks, strict=True)]
        y.append(scaled)
    return y


def drop_width(x: Blocks, site: str, options: ModelOptions, masks: list[Dropout | None]) -> Blocks:
    """Each rank's piece of the one mask: the sequences of its row, the entries of its column."""
    q = len(x)
    return [
        [drop(x[i][j], site, options.dropout, masks[i], part=(j, q), dim=2) for j in range(q)]
        for i in range(q)
    ]


def loss_sum(logits: list[Tensor], labels: Tensor) -> Tensor:
    """Cross-entropy of a row's sequences, whose logits (b/q t v/q) lie along the row.

    Three numbers a token travel: the largest logit, the sum of exponentials, the label's logit.
    """
    wide = [widen(part) for part in logits]
    largest = torch.stack([part.detach().amax(dim=-1) for part in wide]).amax(dim=0)
    total = add_up([(part - largest.unsqueeze(-1)).exp().sum(dim=-1) for part in wide])
    start, label_logits = 0, []
    for part in wide:
        index = labels - start
        inside = (index >= 0) & (index < part.shape[-1])
        picked = part.gather(-1, index.where(inside, 0).unsqueeze(-1)).squeeze(-1)
        label_logits.append(picked.where(inside, 0))
        start += part.shape[-1]
    losses = total.log() + largest - add_up(label_logits)
    return losses.where(labels != IGNORED_LABEL, 0).sum()
