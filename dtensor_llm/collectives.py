"""What every strategy says to torch's parts in the same words: placements in, sums out.

`redistribute` moves an activation between placements, and its gradient back. DTensor does that for
DTensors; here both ends are local tensors, because the modules between them compute on local ones,
and going through DTensor three times a call costs more than the exchange itself on a small model.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from dtensor_llm.worlds.reduce_scatter import reduce_scatter


def redistribute(
    x: Tensor, mesh: DeviceMesh, before: Placement, after: Placement, gradient: Placement
) -> Tensor:
    """The local tensor of `x` in the placement `after`.

    `x` is this rank's local tensor of a global one placed as `before` on the one-axis `mesh`;
    `gradient` is the placement in which the gradient of the result will arrive. The backward pass
    moves it to where `before` wants it, so the four functions of Megatron-LM are four calls
    (f, g: arXiv 1909.08053, section 3; with tokens sharded, g and its conjugate: arXiv 2205.05198,
    section 4.2.2):

    | before    | after     | gradient  | forward        | backward       |
    |-----------|-----------|-----------|----------------|----------------|
    | Replicate | Replicate | Partial   | nothing        | all-reduce     |
    | Partial   | Replicate | Replicate | all-reduce     | nothing        |
    | Shard(1)  | Replicate | Partial   | all-gather     | reduce-scatter |
    | Partial   | Shard(1)  | Shard(1)  | reduce-scatter | all-gather     |

    A sharded dim must divide by the size of the axis.
    """
    return _Redistribute.apply(x, mesh.get_group(), before, after, gradient)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        group: dist.ProcessGroup,
        before: Placement,
        after: Placement,
        gradient: Placement,
    ) -> Tensor:
        # The gradient of every part of a Partial tensor is the gradient of their sum.
        wanted = Replicate() if before.is_partial() else before
        ctx.back = (group, gradient, wanted)  # type: ignore[attr-defined] # a free attribute
        return move(x, group, before, after)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return move(grad, *ctx.back), None, None, None, None  # type: ignore[attr-defined] # as above


def move(x: Tensor, group: dist.ProcessGroup, before: Placement, after: Placement) -> Tensor:
    """This rank's local tensor in the placement `after`, from the one in the placement `before`.

    Comm: Partial to Replicate: all-reduce; Partial to Shard: reduce-scatter; Shard to Replicate:
    all-gather; equal placements: none.
    """
    if before == after:
        return x.view_as(x)
    if before.is_partial() and after.is_replicate():
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total
    if before.is_partial() and isinstance(after, Shard):
        return reduce_scatter(x, after.dim, group)
    assert isinstance(before, Shard) and after.is_replicate(), f"{before} to {after}: not a move"
    parts = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    dist.all_gather_single(parts, x.contiguous(), group=group)
    return torch.cat(parts.chunk(group.size()), dim=before.dim)


def reduce_by_summing(model: nn.Module) -> None:
    """Make `fully_shard` and `replicate` add gradients up instead of averaging them.

    The loss is divided once, by the tokens of the global batch. Both of the first calls are needed:
    without the second, a factor of one still asks gloo for a scaled sum, which it lacks in float32.
    None of them reaches the modules inside.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_reduce_scatter(SummingReduceScatter())


class SummingReduceScatter(ReduceScatter):
    """The `reduce_scatter` that `fully_shard` is to use."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM and not async_op, "reduce_by_summing asks for no other"
        reduce_scatter(input_tensor, 0, group, out=output_tensor)
