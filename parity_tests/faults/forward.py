"""Faults of the forward pass: the loss is wrong from the first step on."""

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate

from dtensor_llm import initialize, loss, model
from dtensor_llm.collectives import redistribute
from dtensor_llm.config import Config
from dtensor_llm.mesh import TP_COPIES, TP_HEADS
from dtensor_llm.model import GPT, MLP, Attention, LearnedPositions
from dtensor_llm.parallel import pipeline_parallel, sequence_parallel, tensor_parallel
from dtensor_llm.parallel.tensor_parallel import RowParallel, RowPart, VocabularyParallel
from dtensor_llm.plan import Call
from parity_tests.faults.fault import fault

planted = partial(fault, "forward")


@planted(
    "tensor_parallel",
    "2x1x1",
    "loss",
    sabotaged="blocks.0.attention.output",
    symptom="The ranks' losses part at once, and training is slightly worse than on one device.",
    sequence_parallel=False,
)
def row_parallel_reduction_dropped() -> Iterator[None]:
    """Each rank goes on with its own partial sum of the attention and MLP outputs."""

    def wrong(self: RowParallel, x: Tensor) -> Tensor:
        y = F.linear(x, self.local("weight"))
        bias = self.local("bias")
        return y if bias is None else y + bias

    with patch.object(RowParallel, "forward", wrong):
        yield


@planted(
    "sequence_parallel",
    "2x1x1",
    "loss",
    sabotaged="blocks.0.attention.output",
    symptom="Training works, as if half of the heads and of the MLP were missing.",
)
def row_parallel_scatter_without_reduction() -> Iterator[None]:
    """With tokens sharded: each rank keeps its tokens, of its own partial sum."""

    def wrong(self: RowParallel, x: Tensor) -> Tensor:
        y = F.linear(x, self.local("weight")).chunk(self.mesh.size(), dim=1)
        return y[self.mesh.get_local_rank()] + self.local("bias")

    with patch.object(RowParallel, "forward", wrong):
        yield


@planted(
    "tensor_parallel",
    "2x1x1",
    "loss",
    sabotaged="blocks.0.attention.output",
    symptom="Nothing at the first step, as biases start at zero; then biases learn tp times as "
    "fast, and a checkpoint of one device gives another loss.",
    sequence_parallel=False,
)
def row_bias_added_by_every_rank() -> Iterator[None]:
    """The bias of the row-parallel linear joins the partial sums, and counts tp times."""

    def wrong(self: RowParallel, x: Tensor) -> Tensor:
        y = F.linear(x, self.local("weight"), self.local("bias"))
        return redistribute(y, self.mesh, Partial(), self.residual, self.residual)

    with patch.object(RowParallel, "forward", wrong):
        yield


@planted(
    "tensor_parallel",
    "2x1x1",
    "loss",
    sabotaged="blocks.0 or blocks.0.addition",
    symptom="Blocks add tp times what they should: training works, with a larger loss at first.",
    sequence_parallel=False,
    parallel_block=True,
)
def parallel_block_reduced_twice() -> Iterator[None]:
    """The branches of a parallel block reduce as ever, and their sum is reduced once more."""

    def wrong(self: RowPart, x: Tensor) -> Tensor:
        mesh, whole = self.__dict__["_parameters"]["weight"].device_mesh, Replicate()
        y = redistribute(F.linear(x, self.local("weight")), mesh, Partial(), whole, whole)
        bias = self.local("bias")
        return y if bias is None else y + bias * self.bias_share

    with patch.object(RowPart, "forward", wrong):
        yield


@planted(
    "tensor_parallel",
    "2x1x1",
    "loss",
    sabotaged="*.output.bias or *.down.bias",
    symptom="Nothing at the first step, as biases start at zero; then biases count tp times.",
    parallel_block=True,
)
def bias_of_a_parallel_block_on_every_rank() -> Iterator[None]:
    """Every rank adds the row-parallel biases to its part of a parallel block's sum."""

    def wrong(self: RowPart, x: Tensor) -> Tensor:
        return F.linear(x, self.local("weight"), self.local("bias"))

    with patch.object(RowPart, "forward", wrong):
        yield


@planted(
    "sequence_parallel",
    "2x1x1",
    "loss",
    sabotaged="position_embedding",
    symptom="The later half of the context has the positions of the first; generation is worse.",
)
def positions_restart_in_every_shard() -> Iterator[None]:
    """Under sequence parallelism, each rank counts its positions from 0."""
    plan = sequence_parallel.plan

    def wrong(model: GPT) -> Any:
        return [entry for entry in plan(model) if entry != ("position_embedding", Call("shard"))]

    with patch.object(sequence_parallel, "plan", wrong):
        yield


@planted(
    "sequence_parallel",
    "2x1x1",
    "loss",
    sabotaged="position_embedding",
    symptom="No position is told from its mirror image on the other rank.",
)
def shards_of_positions_in_reverse() -> Iterator[None]:
    """The last rank takes the first positions: its coordinate counts from the wrong end."""
    shard = LearnedPositions.shard

    def wrong(self: LearnedPositions, index: int, count: int) -> None:
        shard(self, count - 1 - index, count)

    with patch.object(LearnedPositions, "shard", wrong):
        yield


@planted(
    "tensor_parallel",
    "2x1x1",
    "loss",
    sabotaged="token_embedding",
    symptom="The rows of the first token of every shard learn from all other tokens.",
)
def rows_of_other_ranks_not_zeroed() -> Iterator[None]:
    """A token that a rank does not hold looks up the rank's first row instead of nothing."""

    def wrong(self: VocabularyParallel, tokens: Tensor) -> Tensor:
        weight = self.local("weight")
        row = tokens - self.first_row
        own = (row >= 0) & (row < weight.shape[0])
        y = F.embedding(row.where(own, 0), weight)
        return redistribute(y, self.mesh, Partial(), self.residual, self.residual)

    with patch.object(VocabularyParallel, "forward", wrong):
        yield


@planted(
    "tensor_parallel",
    "2x1x1",
    "loss",
    sabotaged="token_embedding",
    symptom="Exact for an even vocabulary; with an odd one the loss drifts by a percent.",
)
def uneven_vocabulary_taken_for_even() -> Iterator[None]:
    """A shard of the vocabulary is said to begin at rank * (size // tp), rounded down."""

    def wrong(size: int, mesh: DeviceMesh) -> tuple[int, int]:
        return size // mesh.size() * mesh.get_local_rank(), size // mesh.size()

    with patch.object(tensor_parallel, "own_part", wrong):
        yield


class _OnlySums:
    """torch.distributed as loss.py sees it, with maxima that stay on their rank."""

    ReduceOp = dist.ReduceOp

    @staticmethod
    def all_reduce(x: Tensor, op: Any = dist.ReduceOp.SUM, *, group: dist.ProcessGroup) -> None:
        if op != dist.ReduceOp.MAX:
            dist.all_reduce(x, op, group=group)


@planted(
    "tensor_parallel",
    "2x1x1",
    "loss",
    sabotaged="loss",
    symptom="Loss a little wrong, more so as the logits grow.",
)
def largest_logit_not_shared() -> Iterator[None]:
    """Each rank subtracts its own largest logit before the exponentials are summed."""
    with patch.object(loss, "dist", _OnlySums):
        yield


@planted(
    "tensor_parallel",
    "2x1x1",
    "loss",
    sabotaged="blocks.0.attention.output",
    symptom="Attention is sharper the more ranks there are.",
)
def attention_scaled_by_the_local_width() -> Iterator[None]:
    """The scale of q k is computed from the rank's own width over all heads."""
    attend = Attention.attend

    def wrong(self: Attention, q: Tensor, *others: Tensor) -> Tensor:
        share = q.shape[1] / self.dropout.extents[0].total  # 1 / tp
        return attend(self, q * share**-0.5, *others)

    with patch.object(Attention, "attend", wrong):
        yield


@planted(
    "tensor_parallel",
    "2x1x1",
    "loss",
    sabotaged="blocks.0.attention.output",
    symptom="Training works, but weights of one mesh mean something else on another.",
)
def heads_permuted() -> Iterator[None]:
    """Heads are joined with the head's own elements outermost: the rows of the output mix heads."""

    def wrong(x: Tensor, pattern: str, **sizes: int) -> Tensor:
        joins = pattern == "b h t k -> b t (h k)"
        return rearrange(x, "b h t k -> b t (k h)" if joins else pattern, **sizes)

    with patch.object(model, "rearrange", wrong):
        yield


@planted(
    "tensor_parallel",
    "2x1x1",
    "loss",
    sabotaged="blocks.0.attention.output",
    symptom="Training works; a checkpoint of one mesh is another model on the next, heads mixed.",
    fused_qkv=True,
    kv_heads=4,
)
def fused_weight_split_by_thirds() -> Iterator[None]:
    """A rank takes its rows of the fused weight for all queries, then all keys, then all values."""

    def wrong(self: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = rearrange(self.qkv(x), "b t (h k) -> b h t k", k=self.head_size)
        groups = y.shape[1] // (self.heads_per_group + 2)
        q, k, v = y.split((self.heads_per_group * groups, groups, groups), dim=1)
        return q, k, v

    with patch.object(Attention, "project", wrong):
        yield


@planted(
    "tensor_parallel",
    "4x1x1",
    "loss",
    sabotaged="*.key.weight or *.value.weight",
    symptom="Training works; the model is another one than its checkpoint says.",
    kv_heads=2,
)
def copies_of_heads_dealt_in_turns() -> Iterator[None]:
    """Rank r takes key/value head r mod g: neighbours, whose query heads share one, have two."""
    place = initialize.local_slice

    def wrong(weight: Any) -> tuple[slice, ...]:
        where = place(weight)
        names = weight.device_mesh.mesh_dim_names
        if TP_COPIES not in names:
            return where
        rows, mesh = where[0].stop - where[0].start, weight.device_mesh
        copies = mesh[TP_COPIES].size()
        rank = mesh[TP_HEADS].get_local_rank() * copies + mesh[TP_COPIES].get_local_rank()
        first = rank % mesh[TP_HEADS].size() * rows
        return (slice(first, first + rows), *where[1:])

    with patch.object(initialize, "local_slice", wrong):
        yield


@planted(
    "model",
    "2x1x1",
    "loss",
    sabotaged="blocks.0.attention.output",
    symptom="A converted Llama checkpoint speaks nonsense; training from scratch hides it.",
    kv_heads=4,
)
def key_heads_repeated_in_turns() -> Iterator[None]:
    """Query head h uses key head h mod g, as if the repeats were interleaved."""
    attend = Attention.attend

    def wrong(self: Attention, q: Tensor, k: Tensor, v: Tensor, samples: Tensor) -> Tensor:
        times = q.shape[1] // k.shape[1]
        k, v = (repeat(x, "b g s k -> b (n g) s k", n=times) for x in (k, v))
        return attend(self, q, k, v, samples)

    with patch.object(Attention, "attend", wrong):
        yield


@planted(
    "model",
    "2x1x1",
    "loss",
    sabotaged="blocks.0.attention.output",
    symptom="Training works; only weights that came from elsewhere, or go there, do not.",
    positions="rope",
)
def rotary_pairs_are_neighbours() -> Iterator[None]:
    """Rotary positions turn elements 2i and 2i + 1 instead of i and i + k/2."""
    rotate = model.rotate

    def wrong(x: Tensor, theta: float) -> Tensor:
        apart = rearrange(x, "b h t (i two) -> b h t (two i)", two=2)
        return rearrange(rotate(apart, theta), "b h t (two i) -> b h t (i two)", two=2)

    with patch.object(model, "rotate", wrong):
        yield


@planted(
    "model",
    "1x1x1",
    "loss",
    sabotaged="blocks.0.mlp.down",
    symptom="A difference in the fourth digit of the loss that is taken for rounding.",
)
def gelu_of_the_other_kind() -> Iterator[None]:
    """The exact GELU where the model is defined with the tanh approximation."""

    def wrong(self: MLP, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    with patch.object(MLP, "forward", wrong):
        yield


@planted(
    "pipeline_parallel",
    "1x2x1",
    "loss",
    sabotaged="blocks.*",
    symptom="Right up to ten layers; a deeper model has another order of layers than its "
    "checkpoint.",
    layers=11,
)
def blocks_in_the_order_of_their_names() -> Iterator[None]:
    """Blocks are sorted as texts, and 10 comes before 2."""
    build = pipeline_parallel.build_stages

    def wrong(*args: Any) -> GPT:
        stage = build(*args)
        stage.blocks = torch.nn.ModuleDict(dict(sorted(stage.blocks.items())))
        return stage

    with patch.object(pipeline_parallel, "build_stages", wrong):
        yield


@planted(
    "pipeline_parallel",
    "1x2x1",
    "loss",
    sabotaged="blocks.1*",
    symptom="Loss a little high; no error, since the shapes of all stages agree.",
)
def every_stage_normalizes_its_output() -> Iterator[None]:
    """A stage ends as the whole model does: its output is normalized before it is sent."""
    forward = GPT.forward

    def wrong(self: GPT, x: Tensor, samples: Tensor) -> Tensor:
        y = forward(self, x, samples)
        return y if self.last else F.layer_norm(y, y.shape[-1:])

    with patch.object(GPT, "forward", wrong):
        yield


@planted(
    "pipeline_parallel",
    "1x2x1",
    "loss",
    sabotaged="blocks.1*",
    symptom="A model one block deeper, which trains as well; its checkpoint has one of two copies.",
    layers=3,
    stage_layers="2,1",
)
def block_on_both_sides_of_a_cut() -> Iterator[None]:
    """Stages after the first begin with the last block of the stage before."""
    cut = pipeline_parallel.layers_of_stages

    def wrong(config: Config) -> tuple[range, ...]:
        first, *rest = cut(config)
        return (first, *(range(layers.start - 1, layers.stop) for layers in rest))

    with patch.object(pipeline_parallel, "layers_of_stages", wrong):
        yield
