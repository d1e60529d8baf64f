"""A reduce-scatter whose bytes are those of a reduce-scatter, on gloo too.

gloo's own is an all-reduce of the whole tensor, of which each rank then keeps its part: twice the
bytes, and three more copies. Here each rank sends the others their parts and adds up what it gets,
in the order of the ranks. To a recorder that is one operation.
"""

import torch
import torch.distributed as dist
from torch import Tensor
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
        exchange_and_sum(out, x, dim, group.group_name)
    else:
        whole = torch.cat(x.chunk(group.size(), dim)) if dim else x
        dist.reduce_scatter_single(out, whole.contiguous(), group=group)
    return out


# An operator of its own, so that whoever watches operators sees the exchange whole.
@torch.library.custom_op("dtensor_llm::reduce_scatter", mutates_args=("output",))
def exchange_and_sum(output: Tensor, input: Tensor, dim: int, group_name: str) -> None:
    """Write this rank's part of the sum of all ranks' `input`, cut along `dim`, into `output`."""
    group = _resolve_process_group(group_name)  # type: ignore[arg-type] # a str, at run time
    own, size = group.rank(), group.size()
    parts = list(input.chunk(size, dim))
    messages = []
    for peer in (own + offset for offset in range(1, size)):
        peer %= size
        outgoing, parts[peer] = parts[peer].contiguous(), torch.empty_like(output)
        messages.append(dist.P2POp(dist.isend, outgoing, group=group, group_peer=peer))
        messages.append(dist.P2POp(dist.irecv, parts[peer], group=group, group_peer=peer))
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    torch.add(parts[0], parts[1], out=output)
    for part in parts[2:]:
        output.add_(part)
