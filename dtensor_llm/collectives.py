"""What every strategy says to torch's parts in the same words: placements in, sums out.

`redistribute` moves an activation between placements, and its gradient back. DTensor does that for
DTensors; here both ends are local tensors, because the modules between them compute on local ones,
and going through DTensor three times a call costs more than the exchange itself on a small model.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from dtensor_llm.worlds import exchange


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
        return exchange.reduce_scatter(x, after.dim, group)
    assert isinstance(before, Shard) and after.is_replicate(), f"{before} to {after}: not a move"
    return exchange.all_gather(x, before.dim, group)


class GatheredAgain:
    """A gathered tensor that the backward pass gathers anew, once for all who saved a view of it.

    `pack` and `unpack` are for `torch.autograd.graph.saved_tensors_hooks`; `start` sends the shard
    on its way, so that the gather runs beside the computation until the first `unpack` waits.

    Comm: one all-gather.
    """

    def __init__(self, shard: Tensor, whole: Tensor, group: dist.ProcessGroup, dim: int) -> None:
        """`whole` is what `shard`, a dim `dim` in parts, was gathered to; it is not kept."""
        self.shard, self.group, self.dim = shard.detach().contiguous(), group, dim
        self.address = whole.untyped_storage().data_ptr()
        self.gather: exchange.AllGather | None = None

    def pack(self, x: Tensor) -> Tensor | tuple["GatheredAgain", Tensor]:
        """A view of the whole tensor gives way to its shape alone; all else is kept."""
        if x.untyped_storage().data_ptr() != self.address:
            return x
        shape = torch.empty((), device="meta").as_strided(x.shape, x.stride(), x.storage_offset())
        return self, shape

    def start(self, *_: Tensor) -> None:
        """Begin to gather, unless that has been done for the other half of a split backward."""
        if self.gather is None:
            self.gather = exchange.AllGather(self.shard, self.dim, self.group)

    def gathered(self) -> Tensor:
        """The whole tensor, after waiting for it."""
        if self.gather is None:
            self.start()
        assert self.gather is not None
        return self.gather.wait()


def unpack(packed: Tensor | tuple[GatheredAgain, Tensor]) -> Tensor:
    """What `GatheredAgain.pack` was given."""
    if isinstance(packed, Tensor):
        return packed
    again, view = packed
    return again.gathered().as_strided(view.shape, view.stride(), view.storage_offset())


def sum_in_one_buffer(parts: Sequence[Tensor], group: dist.ProcessGroup, device: str) -> None:
    """Sum the tensors over the group, in place; they may lie elsewhere than on its `device`.

    Comm: one all-reduce, however many tensors there are; none of none.
    """
    if not parts:
        return
    whole = torch.cat([part.flatten() for part in parts]).to(device)
    dist.all_reduce(whole, group=group)
    for part, total in zip(parts, whole.split([p.numel() for p in parts]), strict=True):
        part.copy_(total.view_as(part))


def reduce_by_summing(model: nn.Module, *, overlap: bool = False) -> None:
    """Make `fully_shard` and `replicate` add gradients up instead of averaging them.

    The loss is divided once, by the tokens of the global batch. Both of the first calls are needed:
    without the second, a factor of one still asks gloo for a scaled sum, which it lacks in float32.
    None of them reaches the modules inside.

    With `overlap`, what a block reduces is on its way while the blocks before it compute, which
    torch does where there are streams only. That takes a `model` whose own weights, beside its
    blocks', have gradients: their reduction ends the backward pass, and the others'.
    """
    on_its_way: list[exchange.ReduceScatter] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            own = list(module.parameters()) if overlap and module is not model else None
            module.set_custom_reduce_scatter(SummingReduceScatter(on_its_way, own))


class AllGatherOfParts(AllGather):
    """The `all_gather` that `fully_shard` is to use for a module where there are no streams."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        arrival = Arrival(exchange.AllGather(input_tensor, 0, group, output_tensor))
        if async_op:
            return arrival
        arrival.wait()
        return None


class Arrival(dist.Work):
    """Of what is gathered: waited for before it is read."""

    def __init__(self, gather: exchange.AllGather) -> None:
        super().__init__()
        self.gather = gather

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - of the base class
        self.gather.wait()
        return True


class SummingReduceScatter(ReduceScatter):
    """The `reduce_scatter` that `fully_shard` is to use for one module.

    Args:
        on_its_way: the last reduce-scatter of any module, until it is waited for.
        weights: the module's shards, where its own may be on its way for a while; `fully_shard`
            reads a sum at once where it adds it to a gradient that is there.
    """

    def __init__(
        self,
        on_its_way: list[exchange.ReduceScatter],
        weights: Sequence[nn.Parameter] | None = None,
    ) -> None:
        self.on_its_way, self.weights = on_its_way, weights

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        self.wait()  # what was sent is let go of before there is more
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
        scatter = exchange.ReduceScatter(input_tensor, 0, group, output_tensor)
        scatter.send_all()
        self.on_its_way.append(scatter)
        if self.weights is None or any(weight.grad is not None for weight in self.weights):
            self.wait()

    def wait(self) -> None:
        while self.on_its_way:
            self.on_its_way.pop().wait()
