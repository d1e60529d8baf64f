"""Faults of two-dimensional tensor parallelism, of every kind: a wrong block, a wrong sum."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dtensor_llm.parallel import tensor_parallel_2d
from dtensor_llm.parallel.tensor_parallel_2d import VECTOR, Grid
from dtensor_llm.train import Trainer
from parity_tests.faults.fault import fault

STRATEGY = "tensor_parallel_2d"


@fault(
    "forward",
    STRATEGY,
    "tp=2x2",
    "loss",
    sabotaged="blocks.0.attention.query",
    symptom="A model with its outputs in another order: it trains well, and no checkpoint fits it.",
)
def block_broadcast_from_the_next_root() -> Iterator[None]:
    """In step l of a product, a column receives the block of row l + 1, where that is as large."""

    def wrong(ctx: Any, a: Tensor, b: Tensor, outputs: int, grid: Grid) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.cut = (outputs, grid)
        q = grid.row.size()
        own: list[Tensor | None] = []
        for line, (_, length) in enumerate(grid.parts(outputs)):
            root = (line + (outputs % q == 0)) % q
            shape = (length, b.shape[1])
            block = tensor_parallel_2d.broadcast(b, shape, grid.column, root)
            own.append(tensor_parallel_2d.reduce(a @ block.T, grid.row, line))
        mine = own[grid.row.rank()]
        assert mine is not None
        return mine

    with patch.object(tensor_parallel_2d._Multiply, "forward", staticmethod(wrong)):
        yield


@fault(
    "forward",
    STRATEGY,
    "tp=2x2",
    "loss",
    sabotaged="blocks.0.attention_norm",
    symptom="Training works; each column of ranks norms a narrower model by itself.",
)
def norm_statistics_of_own_columns() -> Iterator[None]:
    """Mean and variance are those of the columns that the rank has."""

    def wrong(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return x.sum(dim=-1, keepdim=True) * group.size()

    with patch.object(tensor_parallel_2d, "summed", wrong):
        yield


@fault(
    "forward",
    STRATEGY,
    "tp=2x2",
    "loss",
    sabotaged="token_embedding",
    symptom="Only where the grid does not divide the vocabulary: a token id counts twice, and the "
    "last one has no vector.",
)
def vocabulary_block_begins_too_early() -> Iterator[None]:
    """A block of the vocabulary is said to begin at row * (size // q), rounded down."""
    right = Grid.parts

    def wrong(self: Grid, size: int) -> list[tuple[int, int]]:
        each = size // self.row.size()
        return [(row * each, length) for row, (_, length) in enumerate(right(self, size))]

    with patch.object(Grid, "parts", wrong):
        yield


@fault(
    "forward",
    STRATEGY,
    "tp=2x2",
    "loss",
    sabotaged="blocks.0.attention.query",
    symptom="A product of the first columns of the input alone, as if the model were narrower.",
)
def products_not_reduced_along_the_row() -> Iterator[None]:
    """Partial results b t m/q stay what the rank itself has."""
    right = tensor_parallel_2d.reduce

    def wrong(part: Tensor, group: dist.ProcessGroup, root: int) -> Tensor | None:
        if part.ndim == 3:
            return part if group.rank() == root else None
        return right(part, group, root)

    with patch.object(tensor_parallel_2d, "reduce", wrong):
        yield


@fault(
    "backward",
    STRATEGY,
    "tp=2x2",
    "gradient",
    ".weight",
    sabotaged="gradient",
    symptom="Each row of ranks trains its blocks on its own sequences alone.",
)
def weight_gradients_not_reduced_over_rows() -> Iterator[None]:
    """The gradient of a block of W is that of the sequences of one row."""
    right = tensor_parallel_2d.reduce

    def wrong(part: Tensor, group: dist.ProcessGroup, root: int) -> Tensor | None:
        if part.ndim == 2:
            return part if group.rank() == root else None
        return right(part, group, root)

    with patch.object(tensor_parallel_2d, "reduce", wrong):
        yield


@fault(
    "backward",
    STRATEGY,
    "tp=2x2",
    "gradient",
    sabotaged="head or final_norm",
    symptom="The loss of the first step is right; gradients of activations are of no function.",
)
def gradients_not_broadcast_along_the_row() -> Iterator[None]:
    """In every step of a backward product, a rank takes the gradient it has itself."""
    right = tensor_parallel_2d.broadcast

    def wrong(own: Tensor, shape: tuple[int, ...], group: dist.ProcessGroup, root: int) -> Tensor:
        if own.ndim == 3:
            return F.pad(own, (0, shape[-1] - own.shape[-1]))
        return right(own, shape, group, root)

    with patch.object(tensor_parallel_2d, "broadcast", wrong):
        yield


@fault(
    "reduction",
    STRATEGY,
    "tp=2x2",
    "gradient",
    sabotaged="gradient",
    symptom="Rows of ranks drift apart: each has norms and biases of its own sequences.",
)
def vector_gradients_not_summed_over_rows() -> Iterator[None]:
    """Biases and norm weights have the gradient of the sequences of the rank's row."""
    with patch.object(tensor_parallel_2d, "VECTOR_GRADIENT", VECTOR):
        yield


@fault(
    "data",
    STRATEGY,
    "tp=2x2",
    "loss",
    sabotaged="data",
    symptom="Half of the batch is read twice and half never; no loss curve tells.",
)
def rows_of_the_grid_read_the_same_sequences() -> Iterator[None]:
    """A rank finds its part of the batch by its data-parallel coordinates alone."""

    def wrong(self: Trainer) -> int:
        return self.mesh.get_local_rank("dp_shard")

    with patch.object(Trainer, "data_rank", wrong):
        yield
