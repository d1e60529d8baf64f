"""Tensor parallelism: every matrix multiplication split over the ranks of an axis.

The idea in five lines. Two linears in a row need one exchange, not two: split the first by its
output (columns of x W^T), do the nonlinearity on each part, split the second by its input (rows),
and sum the partial results. Attention is the same with whole heads as the parts, since a head
meets no other head before the output projection. The vocabulary is split too: each rank embeds its
own rows, and cross-entropy exchanges three numbers a token instead of the logits.

Paper: Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3. The functions f and g there are
`collectives.redistribute` here.

| module                       | weight   | bias      | input          | output                |
|------------------------------|----------|-----------|----------------|-----------------------|
| token_embedding              | Shard(0) |           | Replicate      | Partial -> residual   |
| query, key, value, gate, up  | Shard(0) | Shard(0)  | Replicate      | Shard(2)              |
| qkv (--fused-qkv)            | Shard(0) | Shard(0)  | Replicate      | Shard(2)              |
| key, value, g < tp           | copies   | copies    | Replicate      | Shard(2), in copies   |
| output, down                 | Shard(1) | Replicate | Shard(2)       | Partial -> residual   |
| ... of a parallel block      | Shard(1) | Replicate | Shard(2)       | Partial               |
| head                         | Shard(0) |           | Replicate      | Shard(2), to the loss |
| norms, positions             | Replicate| Replicate | residual       | residual              |

The rows of `qkv` go by groups of heads, (query.., key, value) after (query.., key, value): an equal
part of them is whole groups, and the parts in a row are the weight of one device.

Where the g key/value heads are fewer than the ranks, tp is two axes, tp_heads x tp_copies = g x
tp/g, on which `copies` is (Shard(0), Replicate): each head is held by tp/g neighbours, whose query
heads look into it. Each has the gradient from its own query heads, (Shard(0), Partial), so they are
summed over tp_copies once a step, in one buffer (`reduce_copied_gradients`).

`residual` is the placement of activations between these: Replicate, or Shard(1) when
`sequence_parallel` shards tokens there. Comm, for each block, b t d numbers each time: forward two
all-reduces, backward two (residual Replicate); with parallel blocks one and one, since the parts of
attention and MLP are added before the reduction, after each has met its dropout. A step: one
all-reduce over tp_copies of what a rank holds of the copied weights, if any; with parallel blocks
one over tp of the row-parallel biases, which only the first rank uses.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from dtensor_llm.collectives import redistribute, sum_in_one_buffer
from dtensor_llm.loss import vocabulary_parallel_cross_entropy
from dtensor_llm.mesh import TP_COPIES, split_tp
from dtensor_llm.model import GPT
from dtensor_llm.overlap import ComputedAhead, GatherAndMultiply, MultipliesAndScatters
from dtensor_llm.plan import (
    Call,
    ComputesOnLocalTensors,
    GatherAgain,
    Input,
    LocalModule,
    Output,
    Plan,
    own_part,
    partial_gradients,
)


class RowParallel(ComputesOnLocalTensors):
    """b t f/tp -> residual: partial sums are reduced, then the bias is added, once."""

    mesh: DeviceMesh
    residual: Placement

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.local("weight"))
        y = redistribute(y, self.mesh, Partial(), self.residual, self.residual)
        return y if self._parameters["bias"] is None else y + self.local("bias")


class RowPart(ComputesOnLocalTensors):
    """b t f/tp -> b t d, a part of the sum over the ranks; the first rank's has the bias, once."""

    bias_share: float  # 1 on the first rank, else 0

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.local("weight"))
        if self._parameters["bias"] is None:
            return y
        return y + self.local("bias") * self.bias_share


class VocabularyParallel(ComputesOnLocalTensors):
    """Tokens b t -> residual: rows of other ranks count as zero, then the parts are summed."""

    mesh: DeviceMesh
    residual: Placement
    first_row: int

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.local("weight")  # v/tp d
        row = tokens - self.first_row
        own = (row >= 0) & (row < weight.shape[0])
        y = F.embedding(row.where(own, 0), weight) * own[..., None]  # b t d
        return redistribute(y, self.mesh, Partial(), self.residual, self.residual)


def plan(
    model: GPT,
    mesh: DeviceMesh,
    residual: Placement,
    *,
    gather_again: bool = False,
    overlap: bool = False,
) -> Plan:
    """The table above, for what `model` holds, but for its last row.

    With `gather_again`, sharded tokens are gathered a second time for the backward pass; with
    `overlap` they travel while others are multiplied.
    """
    assert isinstance(residual, Shard) or not (gather_again or overlap), "only shards are gathered"
    column = LocalModule(Shard(0), mixin=ComputedAhead if overlap else ComputesOnLocalTensors)
    key_value = column
    if model.config.num_kv_heads < mesh.size():
        both = split_tp(mesh, model.config.num_kv_heads)
        key_value = replace(
            column, parameters=(Shard(0), Replicate()), gradients=(Shard(0), Partial()), mesh=both
        )
    table: list[tuple[str, ParallelStyle]] = []
    if model.first:
        first_row, _ = own_part(model.config.vocab_size, mesh)
        vocabulary = {"mesh": mesh, "residual": residual, "first_row": first_row}
        embedding = LocalModule(Shard(0), mixin=VocabularyParallel, attributes=vocabulary)
        table += [("token_embedding", embedding)]
    for name in linears_of_attention(model) + linears_of_mlp(model):
        copied = name in ("attention.key", "attention.value")
        table += [(f"blocks.*.{name}", key_value if copied else column)]
    table += [("blocks.*.attention.dropout", Call("shard", (0,)))]
    if model.config.parallel_block:
        table += ends_of_parallel_blocks(mesh, residual)
    else:
        table += ends_of_blocks(mesh, residual, overlap)
    for name, source, linears in entries(model):
        table += [enter(name, source, linears, residual, again=gather_again, overlap=overlap)]
    return table + [("head", column)] * model.last


def linears_of_attention(model: GPT) -> list[str]:
    """Those that take the residual stream, by their names in a block."""
    names = ["qkv"] if model.config.fused_qkv else ["query", "key", "value"]
    return [f"attention.{name}" for name in names]


def linears_of_mlp(model: GPT) -> list[str]:
    """Those that take the residual stream, by their names in a block."""
    return ["mlp.gate"] * (model.config.mlp == "swiglu") + ["mlp.up"]


def entries(model: GPT) -> list[tuple[str, str, list[str]]]:
    """Where the residual stream enters split multiplications: (module, source, linears).

    `source` is the submodule that gives it out; empty: the module is given it. The linears are
    submodules, too, or the module itself.
    """
    found = []
    if model.config.parallel_block:
        found += [("blocks.*", "norm", linears_of_attention(model) + linears_of_mlp(model))]
    else:
        for module, linears in (
            ("attention", linears_of_attention(model)),
            ("mlp", linears_of_mlp(model)),
        ):
            inner = [name.removeprefix(f"{module}.") for name in linears]
            found += [(f"blocks.*.{module}", "", inner)]
    return found + [("head", "", [""])] * model.last


def enter(
    module: str,
    source: str,
    linears: list[str],
    residual: Placement,
    *,
    again: bool,
    overlap: bool,
) -> tuple[str, ParallelStyle]:
    """An entry of the plan, for one of the `entries`."""
    if isinstance(residual, Shard) and overlap:
        return module, GatherAndMultiply(residual, linears, source, again)
    if isinstance(residual, Shard) and again:
        return module, GatherAgain(residual, source)
    if source:
        return f"{module}.{source}", Output(residual, Replicate(), Partial())
    return module, Input(residual, Replicate(), Partial())


def ends_of_blocks(mesh: DeviceMesh, residual: Placement, overlap: bool) -> Plan:
    """Where attention and MLP are left: each with a reduction of its own."""
    row = LocalModule(
        {"weight": Shard(1), "bias": Replicate()},
        # With tokens sharded, each rank adds the bias to its own tokens only.
        gradients={"bias": Partial() if residual.is_shard() else Replicate()},
        mixin=MultipliesAndScatters if overlap else RowParallel,
        attributes={"mesh": mesh, "residual": residual},
    )
    return [
        ("blocks.*.attention.output", row),
        ("blocks.*.mlp.down", row),
    ]


def ends_of_parallel_blocks(mesh: DeviceMesh, residual: Placement) -> Plan:
    """One reduction for both: their parts are added first."""
    row = LocalModule(
        {"weight": Shard(1), "bias": Replicate()},
        gradients={"bias": Partial()},  # whole on the first rank, zero on the others
        mixin=RowPart,
        attributes={"bias_share": float(mesh.get_local_rank() == 0)},
    )
    return [
        ("blocks.*.attention.output", row),
        ("blocks.*.mlp.down", row),
        ("blocks.*.addition", Output(Partial(), residual, residual)),
    ]


def replicated_plan(model: GPT) -> Plan:
    """The table's last row where tokens are not sharded: whole weights, equal gradients."""
    whole = LocalModule(Replicate())
    return [(name, whole) for name in model.residual_modules()]


def reduce_copied_gradients(model: GPT, gradients: Mapping[str, Tensor]) -> None:
    """Sum, in place, the gradients of copies of key and value heads over the ranks that hold them.

    `gradients` are {parameter name: this rank's part, reduced over dp}; those of every copy become
    the sum, bit for bit, so that copies stay equal.

    Comm: one all-reduce over tp_copies; none where every rank has heads of its own.
    """
    weights = model.weights()
    if copied := [name for name in partial_gradients(model, TP_COPIES) if name in gradients]:
        mesh = weights[copied[0]].device_mesh  # type: ignore[attr-defined] # a DTensor's
        parts = [gradients[name] for name in copied]
        sum_in_one_buffer(parts, mesh.get_group(TP_COPIES), mesh.device_type)


def loss_function(vocab_size: int, mesh: DeviceMesh) -> Callable[[Tensor, Tensor], Tensor]:
    """(local logits b t v/tp, labels b t) -> the summed loss, the same on every rank."""
    first_row, _ = own_part(vocab_size, mesh)
    group = mesh.get_group()
    return partial(vocabulary_parallel_cross_entropy, first_row=first_row, group=group)
