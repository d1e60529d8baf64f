"""Products that run beside the exchange of what they take, or of what they give.

With tokens sharded over tp, a split multiplication waits for the tokens of other ranks before it,
and for the other parts of its sum after it. It need not: a product of b t d with a weight is, for
each rank's tokens, one of its own.

| product                         | what travels                   | what is computed meanwhile    |
|---------------------------------|--------------------------------|-------------------------------|
| forward, query, key, ..., head  | all-gather of the tokens       | the part of the own tokens    |
| forward, output and down        | reduce-scatter of the sum      | the part of the own tokens    |
| backward, output and down       | all-gather of the gradients    | the part of the own tokens    |
| backward, query, key, ..., head | reduce-scatter of the tokens'  | gradients of weights and bias |

The first and third begin with the own tokens and take others' as they arrive; the second computes
others' first, sends each off, and ends with the own. The fourth is whole: the gradients of the
weights are as much work as those of the tokens, and need no one. What is sent, what is kept for the
backward pass and what is summed is as without it, and sums over ranks go in the order of the ranks,
whatever arrives first. On CUDA torch's own operators do all but the fourth.

Paper: Wang et al., "Overlap communication with dependent computation via decomposition in large
deep learning models", ASPLOS 2023, sections 3 and 5. Theirs goes around a ring, from neighbour to
neighbour; here each rank sends its part to all others at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle

from dtensor_llm.plan import ComputesOnLocalTensors
from dtensor_llm.worlds import symmetric_memory
from dtensor_llm.worlds.exchange import AllGather, ReduceScatter, all_gather, reduce_scatter


class ComputedAhead(ComputesOnLocalTensors):
    """A linear whose result is there before it is called: `GatherAndMultiply` has computed it."""

    result: list[Tensor]

    def forward(self, _: Tensor) -> Tensor:
        return self.result.pop()


@dataclass
class GatherAndMultiply(ParallelStyle):
    """Gather what `source` of the module gives out, and compute the `linears` that take it.

    Each of them is `ComputedAhead`, and called once. What was gathered is kept for the backward
    pass, or with `again` only the shard, which is gathered a second time. `source` is a submodule's
    name, or empty for the module's own first argument, and `before` its placement; `linears` are
    submodules' names, or empty for the module itself.
    """

    before: Shard
    linears: Sequence[str]
    source: str = ""
    again: bool = False

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linears: list[Any] = [module.get_submodule(name) for name in self.linears]
        group, dim, again = device_mesh.get_group(), self.before.dim, self.again
        function = _FusedGatherAndMultiply if is_fused(device_mesh) else _GatherAndMultiply

        def gather(x: Tensor) -> Tensor:
            weights = [linear.local("weight") for linear in linears]
            biases = [local_bias(linear) for linear in linears]
            whole, *ys = function.apply(x, dim, group, again, *weights, *biases)
            for linear, y in zip(linears, ys, strict=True):
                linear.result = [y]
            return whole

        if self.source:
            module.get_submodule(self.source).register_forward_hook(lambda _, __, x: gather(x))
        else:
            module.register_forward_pre_hook(lambda _, args: (gather(args[0]), *args[1:]))
        return module


class MultipliesAndScatters(ComputesOnLocalTensors):
    """A linear b t f/tp -> b t/tp d: partial sums are reduced, then the bias is added, once."""

    mesh: DeviceMesh
    residual: Shard

    def forward(self, x: Tensor) -> Tensor:
        group, dim = self.mesh.get_group(), self.residual.dim
        function = _FusedMultiplyAndScatter if is_fused(self.mesh) else _MultiplyAndScatter
        return function.apply(x, dim, group, self.local("weight"), local_bias(self))


def local_bias(linear: ComputesOnLocalTensors) -> Tensor | None:
    return None if linear._parameters["bias"] is None else linear.local("bias")


class _GatherAndMultiply(torch.autograd.Function):
    """Tokens b t/tp d to b t d, and the product of these with each weight.

    Comm: forward one all-gather, backward one reduce-scatter of b t d; with `again` backward one
    all-gather, too.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, again: bool, *parameters: Any
    ) -> tuple[Tensor, ...]:
        """`parameters` are the weights, n d, then as many biases, n or None."""
        weights, biases = halves(parameters)
        gather = AllGather(x, dim, group)
        ys = [x.new_empty(*gather.whole.shape[:-1], len(weight)) for weight in weights]
        places = [y.chunk(group.size(), dim) for y in ys]
        for rank in chain([group.rank()], gather.arrivals()):
            for weight, bias, place in zip(weights, biases, places, strict=True):
                multiply(gather.places[rank], weight.T, place[rank], bias)
        ctx.save_for_backward(x if again else gather.whole, *weights)
        ctx.set_materialize_grads(False)
        ctx.exchange, ctx.again = (dim, group), again
        return gather.whole, *ys

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        kept, *weights = ctx.saved_tensors
        gather = AllGather(kept, *ctx.exchange) if ctx.again else None
        total = None if grad is None else grad.clone(memory_format=torch.contiguous_format)
        rows = [None if y is None else y.flatten(0, -2) for y in grads]  # (b t) n
        for y, own_rows, weight in zip(grads, rows, weights, strict=True):
            if y is not None and total is None:
                total = y @ weight
            elif own_rows is not None and total is not None:
                total.flatten(0, -2).addmm_(own_rows, weight)
        assert total is not None, "no gradient, and autograd asks for one"
        scatter = ReduceScatter(total, *ctx.exchange)
        for peer in scatter.peers:
            scatter.send(peer)
        tokens = (kept if gather is None else gather.wait()).flatten(0, -2)
        of_parameters = parameter_gradients(ctx, rows, tokens)  # beside the scatter
        return scatter.wait(), None, None, None, *of_parameters


class _MultiplyAndScatter(torch.autograd.Function):
    """Parts b t f/tp times a weight d f/tp to sums b t/tp d, and a bias d.

    Comm: forward one reduce-scatter, backward one all-gather of b t d.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        scatter = ReduceScatter(x.new_empty(*x.shape[:-1], len(weight)), dim, group)
        tokens = x.chunk(group.size(), dim)
        for peer in scatter.peers:
            multiply(tokens[peer], weight.T, scatter.parts[peer])
            scatter.send(peer)
        own = group.rank()
        multiply(tokens[own], weight.T, scatter.parts[own])
        ctx.save_for_backward(x, weight)
        ctx.exchange = dim, group
        total = scatter.wait()
        return total if bias is None else total.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        dim, group = ctx.exchange
        gather, grad_x = AllGather(grad, dim, group), torch.empty_like(x)
        places = grad_x.chunk(group.size(), dim)
        for rank in chain([group.rank()], gather.arrivals()):
            multiply(gather.places[rank], weight, places[rank])
        grad_weight = gather.whole.flatten(0, -2).T @ x.flatten(0, -2)
        grad_bias = grad.flatten(0, -2).sum(dim=0) if ctx.needs_input_grad[4] else None
        return grad_x, None, None, grad_weight, grad_bias


class _FusedGatherAndMultiply(torch.autograd.Function):
    """`_GatherAndMultiply` by torch's operators: no exchange of a pass waits for another one's."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, again: bool, *parameters: Any
    ) -> tuple[Tensor, ...]:
        weights, biases = halves(parameters)
        matrices = [weight.T for weight in weights]
        whole, ys = symmetric_memory.gather_and_multiply(x, matrices, dim, group)
        for y, bias in zip(ys, biases, strict=True):
            if bias is not None:
                y.add_(bias)
        ctx.save_for_backward(x if again else whole, *weights)
        ctx.set_materialize_grads(False)
        ctx.exchange, ctx.again = (dim, group), again
        return whole, *ys

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        kept, *weights = ctx.saved_tensors
        given = [(y, w) for y, w in zip(grads, weights, strict=True) if y is not None]
        grad_x = None if grad is None else reduce_scatter(grad, *ctx.exchange)
        if given:
            ys, matrices = zip(*given, strict=True)
            products = torch.cat(ys, dim=-1), torch.cat(matrices)
            part = symmetric_memory.multiply_and_scatter(*products, *ctx.exchange)
            grad_x = part if grad_x is None else grad_x + part
        tokens = (all_gather(kept, *ctx.exchange) if ctx.again else kept).flatten(0, -2)
        rows = [None if y is None else y.flatten(0, -2) for y in grads]
        return grad_x, None, None, None, *parameter_gradients(ctx, rows, tokens)


class _FusedMultiplyAndScatter(torch.autograd.Function):
    """`_MultiplyAndScatter` by torch's operators."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        total = symmetric_memory.multiply_and_scatter(x, weight.T, dim, group)
        ctx.save_for_backward(x, weight)
        ctx.exchange = dim, group
        return total if bias is None else total.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        whole, (grad_x,) = symmetric_memory.gather_and_multiply(grad, [weight], *ctx.exchange)
        grad_weight = whole.flatten(0, -2).T @ x.flatten(0, -2)
        grad_bias = grad.flatten(0, -2).sum(dim=0) if ctx.needs_input_grad[4] else None
        return grad_x, None, None, grad_weight, grad_bias


def is_fused(mesh: DeviceMesh) -> bool:
    """Whether torch has operators for the device, which are faster than what is written here."""
    return mesh.device_type == "cuda"


def parameter_gradients(
    ctx: Any, rows: Sequence[Tensor | None], tokens: Tensor
) -> list[Tensor | None]:
    """Those of the weights, then of the biases, of linears.

    `rows` are the gradients of what each gives out, (b t) n, and `tokens` what they took, (b t) d.
    """
    of_weights = [None if y is None else y.T @ tokens for y in rows]
    _, has_bias = halves(ctx.needs_input_grad[4:])
    return of_weights + [
        y.sum(dim=0) if y is not None and needed else None
        for y, needed in zip(rows, has_bias, strict=True)
    ]


def multiply(x: Tensor, matrix: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """Write x matrix + bias, of b t n and n m, into `out`; both may be some tokens of a whole.

    One product for each sequence, so that neither has to be copied.
    """
    matrices = matrix.expand(len(x), *matrix.shape)
    if bias is None:
        torch.bmm(x, matrices, out=out)
    else:
        torch.baddbmm(bias, x, matrices, out=out)


def halves(values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    half = len(values) // 2
    return values[:half], values[half:]
