"""Tensor parallelism in two dimensions: activations and weights lie in blocks on a q x q grid.

The idea in five lines. Tensor parallelism on one axis cuts the weights, but each rank has b t d
activations whole. Put p = q^2 ranks on a grid and cut both, on both axes: no rank ever holds more
than 1/p of a matrix or an activation. To multiply, SUMMA goes through the blocks line by line: in
step l a line of them is broadcast along one axis, each rank multiplies what it then has, and the
results add up, here or along the other axis. Attention exchanges nothing: a rank has whole heads
of whole sequences.

Papers: Xu et al., "An Efficient 2D Method for Training Super-Large Deep Learning Models" (Optimus),
arXiv 2104.05343, section 3; van de Geijn and Watts, SUMMA, 1997. Here every matrix is used as the
paper uses the head's (C = A B^T), so that one placement serves all, a tied embedding is the same
block twice, and a backward pass broadcasts the gradient of C once for both of its products.

Rank (i, j) is in row i and column j: i is its coordinate on tp_row, and j on tp_col.

| what                                       | on tp_row | on tp_col | gradient          |
|--------------------------------------------|-----------|-----------|-------------------|
| weights of linears, head, embedding; positions | Shard(0) | Shard(1) | complete          |
| biases, norm weights                       | Replicate | Shard(0)  | Partial on tp_row |
| activations b t d, b t f; logits b t v     | Shard(0)  | Shard(2)  | complete          |
| query, key, value b h t k                  | Shard(0)  | Shard(1)  | complete          |
| tokens, labels b t                         | Shard(0)  | Replicate |                   |

Comm, in numbers that go by a rank, for b sequences on the grid and a linear of n inputs, m outputs:

| collective    | on tp_row                         | on tp_col                        |
|---------------|-----------------------------------|----------------------------------|
| broadcast     | q of n m/q^2 forward, q backward  | q of b t m/q^2 backward          |
| reduce        | q of n m/q^2 backward             | q of b t m/q^2 forward           |

Embedding and positions, of v d numbers: q broadcasts of v d/q^2 forward and q reduces backward, on
tp_row. A norm: two all-reduces of b t/q forward (without a mean one) and one of 2 b t/q (b t/q)
backward, on tp_col. The loss is that of `tensor_parallel` on tp_col. Partial gradients are summed
on tp_row once a step. A GPT-2 block sends (18 b t d + 36 d^2)/q, and on one axis of p ranks
8 (1 - 1/p) b t d: many tokens on 2 x 2 ranks send more here, on 4 x 4 little more than half.

Memory: a rank holds 1/p of each matrix, its gradient and moments, 1/q of each vector, and keeps 1/p
of each activation for the backward pass, but for two numbers a token and norm (1/q). On one axis
the inputs of products are whole, also with tokens sharded between them.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import einsum
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from dtensor_llm.model import GPT, RMSNorm
from dtensor_llm.plan import Call, ComputesOnLocalTensors, LocalModule, Placements, Plan, chunk

MATRIX: Placements = (Shard(0), Shard(1))
VECTOR: Placements = (Replicate(), Shard(0))
VECTOR_GRADIENT: Placements = (Partial(), Shard(0))  # each row of ranks has other sequences


@dataclass(frozen=True)
class Grid:
    """A rank's place on the grid, and the two groups it is in."""

    mesh: DeviceMesh

    @cached_property
    def row(self) -> dist.ProcessGroup:
        """The ranks of the same row: the axis tp_col."""
        return self.mesh.get_group("tp_col")

    @cached_property
    def column(self) -> dist.ProcessGroup:
        """The ranks of the same column: the axis tp_row."""
        return self.mesh.get_group("tp_row")

    def parts(self, size: int) -> list[tuple[int, int]]:
        """(start, length) of every part of a dim."""
        return [chunk(size, index, self.row.size()) for index in range(self.row.size())]


def broadcast(own: Tensor, shape: tuple[int, ...], group: dist.ProcessGroup, root: int) -> Tensor:
    """The block of the rank `root` of the group, which is of `shape`."""
    block = own.contiguous() if group.rank() == root else own.new_empty(shape)
    dist.broadcast(block, group=group, group_src=root)
    return block


def reduce(part: Tensor, group: dist.ProcessGroup, root: int) -> Tensor | None:
    """The sum of the parts, on the rank `root` of the group; None elsewhere."""
    total = part.contiguous()
    dist.reduce(total, group=group, group_dst=root)
    return total if group.rank() == root else None


class _Multiply(torch.autograd.Function):
    """C = A B^T, and dA = dC B, dB = dC^T A, by SUMMA: each step l moves one line of blocks.

    `outputs` is the size of the dim that C has from B.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, outputs: int, grid: Grid) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.cut = (outputs, grid)
        own: Tensor | None = None
        for line, (_, length) in enumerate(grid.parts(outputs)):
            block = broadcast(b, (length, b.shape[1]), grid.column, line)  # m/q n/q
            total = reduce(a @ block.T, grid.row, line)  # b/q t m/q
            own = total if own is None else own
        assert own is not None
        return own

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        a, b = ctx.saved_tensors
        outputs, grid = ctx.cut
        grad_a, grad_b = torch.zeros_like(a), None
        for line, (_, length) in enumerate(grid.parts(outputs)):
            block = broadcast(b, (length, b.shape[1]), grid.column, line)  # m/q n/q
            arrived = broadcast(grad, (*grad.shape[:-1], length), grid.row, line)  # b/q t m/q
            grad_a += arrived @ block
            part = einsum(arrived, a, "b t m, b t n -> m n")
            total = reduce(part, grid.column, line)
            grad_b = total if grad_b is None else grad_b
        assert grad_b is not None
        return grad_a, grad_b, None, None


class BlockLinear(ComputesOnLocalTensors):
    """b/q t n/q -> b/q t m/q; the bias of the rank's columns is added after the sum, once."""

    grid: Grid
    out_features: int

    def forward(self, x: Tensor) -> Tensor:
        y = _Multiply.apply(x, self.local("weight"), self.out_features, self.grid)
        return y if self._parameters["bias"] is None else y + self.local("bias")


class _LookUp(torch.autograd.Function):
    """Rows of a table of `size` rows in blocks: a product with a one-hot matrix all ranks know."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor, size: int, grid: Grid) -> Tensor:
        ctx.save_for_backward(index)
        ctx.cut = (size, grid)
        found = table.new_zeros(*index.shape, table.shape[1])  # b/q t d/q
        for line, (start, length) in enumerate(grid.parts(size)):
            block = broadcast(table, (length, table.shape[1]), grid.column, line)  # v/q d/q
            own = (index >= start) & (index < start + length)
            found += F.embedding((index - start).where(own, 0), block) * own[..., None]
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (index,) = ctx.saved_tensors
        size, grid = ctx.cut
        grad_table = None
        for line, (start, length) in enumerate(grid.parts(size)):
            own = (index >= start) & (index < start + length)
            row = (index - start).where(own, 0)
            # All rows and no more: the sum keeps the memory that they are in.
            part = torch.ops.aten.embedding_dense_backward(
                grad * own[..., None], row, length, -1, False
            )
            total = reduce(part, grid.column, line)
            grad_table = total if grad_table is None else grad_table
        assert grad_table is not None
        return grad_table, None, None, None


class BlockEmbedding(ComputesOnLocalTensors):
    """Tokens b/q t -> b/q t d/q."""

    grid: Grid
    num_embeddings: int

    def forward(self, tokens: Tensor) -> Tensor:
        return _LookUp.apply(self.local("weight"), tokens, self.num_embeddings, self.grid)


class BlockPositions(ComputesOnLocalTensors):
    """b/q t d/q -> b/q t d/q: adds the positions, which are looked up like an embedding."""

    grid: Grid
    seq_len: int

    def forward(self, x: Tensor) -> Tensor:
        token = torch.arange(x.shape[1], device=x.device)[None]  # 1 t
        return x + _LookUp.apply(self.local("weight"), token, self.seq_len, self.grid)


class _Norm(torch.autograd.Function):
    """LayerNorm, or without `centers` RMSNorm, of rows of `width` that lie cut over a group."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        settings: tuple[int, float, bool, dist.ProcessGroup],
    ) -> Tensor:
        width, eps, centers, group = settings
        wide = widened(x)  # b/q t d/q
        mean = summed(wide, group) / width if centers else None
        centered = wide if mean is None else wide - mean
        scale = (summed(centered.square(), group) / width + eps).rsqrt()
        ctx.save_for_backward(x, weight, bias, mean, scale)
        ctx.settings = settings
        y = centered * scale * weight
        return (y if bias is None else y + bias).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        width, _, _, group = ctx.settings
        wide = widened(grad)
        normed = (x if mean is None else x - mean) * scale
        grad_normed = wide * weight
        parts = [(grad_normed * normed).sum(dim=-1)]
        parts += [] if mean is None else [grad_normed.sum(dim=-1)]
        sums = torch.stack(parts)
        dist.all_reduce(sums, group=group)
        grad_x = grad_normed - normed * sums[0, ..., None] / width
        if mean is not None:
            grad_x -= sums[1, ..., None] / width
        grad_x = (grad_x * scale).to(x.dtype)
        over_tokens = tuple(range(x.ndim - 1))
        grad_weight = (wide * normed).sum(dim=over_tokens).to(weight.dtype)
        grad_bias = None if bias is None else wide.sum(dim=over_tokens).to(bias.dtype)
        return grad_x, grad_weight, grad_bias, None


def widened(x: Tensor) -> Tensor:
    """At least float32: statistics are not taken in less."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over the last dim, of which every rank of the group has a part; b t 1."""
    total = x.sum(dim=-1, keepdim=True)
    dist.all_reduce(total, group=group)
    return total


class BlockNorm(ComputesOnLocalTensors):
    """b/q t d/q -> b/q t d/q, with the mean and variance of the whole width."""

    grid: Grid
    width: int
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self._parameters.get("bias") is None else self.local("bias")
        settings = (self.width, self.eps, not isinstance(self, RMSNorm), self.grid.row)
        return _Norm.apply(x, self.local("weight"), bias, settings)


def plan(model: GPT, mesh: DeviceMesh) -> Plan:
    """The table above, for what `model` holds, on the `mesh` of tp_row and tp_col."""
    grid, width = {"grid": Grid(mesh)}, model.config.width

    def blocks(mixin: type[ComputesOnLocalTensors]) -> LocalModule:
        placed = {"weight": MATRIX, "bias": VECTOR}
        return LocalModule(placed, {"bias": VECTOR_GRADIENT}, mixin, grid)

    linear = blocks(BlockLinear)
    norm = LocalModule(VECTOR, VECTOR_GRADIENT, BlockNorm, {**grid, "width": width})
    table: list[tuple[str, ParallelStyle]] = []
    if model.first:
        table += [("token_embedding", LocalModule(MATRIX, None, BlockEmbedding, grid))]
        positions = LocalModule(MATRIX, None, BlockPositions, grid)
        table += [("position_embedding", positions)] * (model.config.positions == "learned")
    roles = ["qkv"] if model.config.fused_qkv else ["query", "key", "value"]
    names = [f"attention.{role}" for role in (*roles, "output")]
    names += ["mlp.up", "mlp.down"] + ["mlp.gate"] * (model.config.mlp == "swiglu")
    table += [(f"blocks.*.{name}", linear) for name in names]
    norms = ["norm"] if model.config.parallel_block else ["attention_norm", "mlp_norm"]
    table += [(f"blocks.*.{name}", norm) for name in norms]
    if model.last:
        table += [("final_norm", norm), ("head", linear)]
    return table


def dropout_plan(model: GPT) -> Plan:
    """On the axis tp_col: heads of attention probabilities, the width elsewhere."""
    own_heads, own_width = Call("shard", (0,)), Call("shard", (1,))
    table: list[tuple[str, ParallelStyle]] = [
        ("blocks.*.attention.dropout", own_heads),
        ("blocks.*.attention_residual_dropout", own_width),
        ("blocks.*.mlp_residual_dropout", own_width),
    ]
    return table + [("embedding_dropout", own_width)] * model.first
