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
| norm of a parallel block              | Replicate    | Partial  | Shard(1)    |

Comm, for each block, b t d numbers each time: forward two all-gathers and two reduce-scatters,
backward the same; half as many with parallel blocks (`tensor_parallel` with residual Shard(1)). The
Partial gradients are summed once a step, in one buffer, after data parallelism has reduced them. A
parallel block reduces after dropout, so there each rank draws the masks of all tokens.

What divides by tp is what lies between the multiplications. The gathered inputs of query, key,
value, gate, up and head are kept whole for the backward pass, or (`--gather-again`, as in the
paper) only their shards are: then there is one all-gather more for each attention, MLP and head (or
parallel block), which begins when the backward pass comes to the module, and runs beside it until
the first linear needs the tokens for the gradient of its weight (`plan.GatherAgain`).

With `--async-tp` the same bytes travel while the linears at both ends multiply those tokens that
are there (`overlap`); what leaves a parallel block, and the embedding, is no product, and waits.
"""

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from dtensor_llm.collectives import sum_in_one_buffer
from dtensor_llm.model import GPT
from dtensor_llm.plan import Call, LocalModule, Plan, partial_gradients

RESIDUAL = Shard(1)  # placement of activations b t d between the split multiplications


def plan(model: GPT) -> Plan:
    """The table above, for what `model` holds."""
    norm = LocalModule(Replicate(), gradients=Partial())
    own_tokens = Call("shard", (0,))
    table: list[tuple[str, ParallelStyle]] = [(name, norm) for name in model.residual_modules()]
    if not model.config.parallel_block:  # there dropout comes before the sum, on all tokens
        table += [("blocks.*.attention_residual_dropout", own_tokens)]
        table += [("blocks.*.mlp_residual_dropout", own_tokens)]
    if model.first:
        table += [("embedding_dropout", own_tokens)]
        table += [("position_embedding", Call("shard"))] * (model.config.positions == "learned")
    return table


def reduce_partial_gradients(model: GPT, gradients: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
    """Sum over the tp axis, in place, what every rank has of the Partial gradients.

    `gradients` are {parameter name: this rank's part, reduced over dp}: so the sum is taken once a
    step, of 1/dp of each where dp shards them, and in one buffer, however many they are.

    Comm: one all-reduce over `mesh`; none where nothing is Partial.
    """
    (axis,) = mesh.mesh_dim_names or ()
    partial = [gradients[name] for name in partial_gradients(model, axis) if name in gradients]
    sum_in_one_buffer(partial, mesh.get_group(), mesh.device_type)
