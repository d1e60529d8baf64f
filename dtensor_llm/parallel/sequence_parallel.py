"""Sequence parallelism: between the split multiplications, each rank keeps its own tokens.

The idea in five lines. Norms, residual additions and dropout work token by token, so under tensor
parallelism every rank does them all over again and stores the same activations. Shard them by
tokens instead. An all-reduce is a reduce-scatter followed by an all-gather: leave with the first,
enter with the second, and the bytes on the wire stay what they were while the activations divide by
tp. The price: a norm's weight meets t/tp tokens on each rank, so its gradient is Partial, to be
summed. Forget that, and the loss looks right while the norms drift apart.

Paper: Korthikanti et al., arXiv 2205.05198, section 4.2.2.

| module                                | weight, bias | gradient | activations |
|---------------------------------------|--------------|----------|-------------|
| attention_norm, mlp_norm, final_norm  | Replicate    | Partial  | Shard(1)    |
| position_embedding                    | Replicate    | Partial  | Shard(1)    |
| residual and embedding dropout        |              |          | Shard(1)    |

Comm, for each block, b t d numbers each time: forward two all-gathers and two reduce-scatters,
backward the same (`tensor_parallel` with residual Shard(1)). The Partial gradients are summed once
a step in one buffer; where `fully_shard` or `replicate` reduces a gradient too, they do it before,
one all-reduce for each such parameter.

What divides by tp is what lies between the multiplications; the gathered inputs of query, key,
value, gate and up are kept whole for the backward pass (the paper gathers them again).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from dtensor_llm.model import GPT
from dtensor_llm.plan import Call, LocalModule, Plan

RESIDUAL = Shard(1)  # placement of activations b t d between the split multiplications


def plan(model: GPT) -> Plan:
    """The table above, for what `model` holds."""
    norm = LocalModule(Replicate(), gradients=Partial())
    own_tokens = Call("shard", (0,))
    table: list[tuple[str, ParallelStyle]] = [(name, norm) for name in model.residual_modules()]
    table += [("blocks.*.attention_residual_dropout", own_tokens)]
    table += [("blocks.*.mlp_residual_dropout", own_tokens)]
    if model.first:
        table += [("embedding_dropout", own_tokens)]
        table += [("position_embedding", Call("shard"))] * (model.config.positions == "learned")
    return table


def reduce_partial_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Sum the Partial gradients over the tp axis, in one buffer; others are left alone.

    `fully_shard` and `replicate` have done it already where they reduced the gradient; without data
    parallelism it is done here, once a step.

    Comm: one all-reduce over `mesh`.
    """
    partial = [
        (p, p.grad)
        for p in model.parameters()
        if isinstance(p.grad, DTensor) and any(place.is_partial() for place in p.grad.placements)
    ]
    if not partial:
        return
    local = [gradient.to_local() for _, gradient in partial]
    whole = torch.cat([part.flatten() for part in local])
    dist.all_reduce(whole, group=mesh.get_group())
    sums = whole.split([part.numel() for part in local])
    for (p, gradient), part, total in zip(partial, local, sums, strict=True):
        summed = total.reshape(part.shape)
        p.grad = DTensor.from_local(summed, gradient.device_mesh, [Replicate()], run_check=False)
