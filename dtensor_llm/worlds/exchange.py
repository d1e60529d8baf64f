"""A reduce-scatter and an all-gather along any dim, for gloo of messages between the ranks.

gloo's own reduce-scatter is an all-reduce of the whole tensor, of which each rank then keeps its
part: twice the bytes, and three more copies. Here each rank sends the others their parts and adds
up what it gets, in the order of the ranks. gloo's all-gather goes in a ring and puts the parts one
after another: to have them side by side along a later dim is a copy of the whole, once it is there.
Here each part goes straight to where it belongs. To a recorder each of the two is one operation.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# Private: torch 2.13 has no other way from a name, which is what an operator takes, to its group.
from torch.distributed.distributed_c10d import _resolve_process_group


def reduce_scatter(
    x: Tensor, dim: int, group: dist.ProcessGroup, out: Tensor | None = None
) -> Tensor:
    """The sum over `group` of this rank's part of `x`, cut along `dim`, which the ranks divide.

    `out`, of the part's size, is where to write it; None takes new memory.

    Comm: one reduce-scatter of `x`.
    """
    if out is None:
        out = x.new_empty([n // group.size() if i == dim else n for i, n in enumerate(x.shape)])
    if dist.get_backend(group) == "gloo":
        torch.ops.dtensor_llm.reduce_scatter(out, x.contiguous(), dim, group.group_name)
    else:
        whole = torch.cat(x.chunk(group.size(), dim)) if dim else x
        dist.reduce_scatter_single(out, whole.contiguous(), group=group)
    return out


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The parts `x` of all ranks of `group`, of equal shapes, one after another along `dim`.

    Comm: one all-gather of the result.
    """
    x, size = x.contiguous(), group.size()
    if dist.get_backend(group) == "gloo":
        whole = x.new_empty([n * size if i == dim else n for i, n in enumerate(x.shape)])
        torch.ops.dtensor_llm.all_gather(whole, x, dim, group.group_name)
        return whole
    parts = x.new_empty(size * x.shape[0], *x.shape[1:])
    dist.all_gather_single(parts, x, group=group)
    return torch.cat(parts.chunk(size), dim) if dim else parts


# Operators of their own, so that whoever watches operators sees an exchange whole. What
# `torch.library.custom_op` wraps around one costs a tenth of an exchange of 3 MB.
SCHEMA = "(Tensor(a!) output, Tensor input, int dim, str group_name) -> ()"
torch.library.define("dtensor_llm::reduce_scatter", SCHEMA)
torch.library.define("dtensor_llm::all_gather", SCHEMA)


@torch.library.impl("dtensor_llm::reduce_scatter", "default")
def exchange_and_sum(output: Tensor, input: Tensor, dim: int, group_name: str) -> None:
    """Write this rank's part of the sum of all ranks' `input`, cut along `dim`, into `output`."""
    group = _resolve_process_group(group_name)  # type: ignore[arg-type] # a str, at run time
    own, size = group.rank(), group.size()
    outgoing = input.chunk(size, dim)
    first = int(own == 0)  # of the others: what it sends may lie where the sum will
    incoming = [
        x if peer == own else output if peer == first else torch.empty_like(output)
        for peer, x in enumerate(outgoing)
    ]
    wait_for(swap(outgoing, incoming, group))
    torch.add(incoming[0], incoming[1], out=output)
    for part in incoming[2:]:
        output.add_(part)


@torch.library.impl("dtensor_llm::all_gather", "default")
def exchange(output: Tensor, input: Tensor, dim: int, group_name: str) -> None:
    """Write all ranks' `input` into `output`, one after another along `dim`."""
    group = _resolve_process_group(group_name)  # type: ignore[arg-type] # a str, at run time
    own, size = group.rank(), group.size()
    places = output.chunk(size, dim)
    incoming = [x if x.is_contiguous() else torch.empty_like(input) for x in places]
    works = swap([input] * size, incoming, group)
    places[own].copy_(input)  # while the others are on their way
    wait_for(works)
    for peer, part in enumerate(incoming):
        if peer != own and part is not places[peer]:
            places[peer].copy_(part)


def swap(
    outgoing: Sequence[Tensor], incoming: Sequence[Tensor], group: dist.ProcessGroup
) -> list[dist.Work | None]:
    """Begin to send each other rank of `group` its outgoing tensor, and to receive its incoming.

    Those are contiguous. Receives begin before anything is packed: what comes finds its place.
    """
    own, size = group.rank(), group.size()
    peers = [(own + offset) % size for offset in range(1, size)]
    receives = [dist.irecv(incoming[peer], group=group, group_src=peer) for peer in peers]
    return receives + [
        dist.isend(outgoing[peer].contiguous(), group=group, group_dst=peer) for peer in peers
    ]


def wait_for(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "this rank is in the group"
        work.wait()
