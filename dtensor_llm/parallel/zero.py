"""ZeRO stage 3: weights, gradients and optimizer state are sharded over the data-parallel ranks.

The idea in five lines. Data parallelism keeps dp equal copies of everything. Keep one: each rank
owns 1/dp of every parameter. Before a block computes, all-gather its weights; after it, free what
belongs to others, and gather again for the backward pass. Gradients leave by reduce-scatter, so a
rank holds the sum only for what it owns, and the optimizer steps on its own part: 1/dp of the
memory for half as many bytes again (three passes over the weights instead of two).

Paper: Rajbhandari et al., arXiv 1910.02054, section 5; torch's FSDP2 (`fully_shard`), with hybrid
sharding (Zhao et al., arXiv 2304.11277, section 3.2.2) when the mesh has two axes.

| what                      | placement on (dp_replicate, dp_shard)                  |
|---------------------------|--------------------------------------------------------|
| weights at rest           | Replicate, Shard(0)                                    |
| weights while in use      | Replicate, Replicate                                   |
| gradients, AdamW moments  | Replicate, Shard(0)                                    |
| tokens, activations       | Shard(0), Shard(0): sequences                          |

Two options trade memory for bytes and for waiting. Without `reshard`, what was gathered for forward
stays for backward: one all-gather a block and microbatch less, and at the end of forward a rank
holds every block whole. `prefetch` blocks are gathered ahead of the one that computes, in both
directions, so that the network works meanwhile; they are whole that much earlier, at equal bytes.
What is in no block (embeddings, final norm, head) is gathered once a microbatch in either case.
Where the shards wait between uses is a third choice: see `dtensor_llm.offload`.

Comm, for each block and microbatch: all-gather forward, all-gather backward (only if it reshards),
reduce-scatter of the gradients, and an all-reduce of the shard over dp_replicate. Under a pipeline
torch's stages keep weights gathered and the reduction switched off until the last microbatch:
gradients are whole on every rank until then, and are reduced once a step. All-gathers of a block
and step: 1, or m + 1 if it reshards (one at each turn from backward to forward or back, and one for
each forward that follows a forward).
"""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, OffloadPolicy, fully_shard

from dtensor_llm.collectives import reduce_by_summing
from dtensor_llm.model import GPT
from dtensor_llm.plan import materialize


def apply(
    model: GPT,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    reshard: bool = True,
    prefetch: int = 1,
    offload: OffloadPolicy | None = None,
) -> None:
    """Shard each block, and what is left of the model, over the one or two axes of `mesh`.

    `model` is on the meta device; block by block it gets memory on `device` and is sharded, so that
    no rank ever holds more than one whole block.

    Args:
        reshard: free a block's gathered weights after its forward pass.
        prefetch: how many blocks ahead weights are gathered.
        offload: where shards wait; None is on `device`.
    """
    policy = offload or OffloadPolicy()
    for block in model.blocks.values():
        materialize(block, device)
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, offload_policy=policy)
    materialize(model, device)
    # The root has no reshard: torch keeps what backward needs first.
    fully_shard(model, mesh=mesh, offload_policy=policy)
    gather_ahead(model, prefetch)
    reduce_by_summing(model)


def gather_ahead(model: GPT, depth: int) -> None:
    """Let each block, when its turn comes, start the all-gathers of the `depth` ones after it."""
    sharded: list[FSDPModule] = [x for x in model.modules() if isinstance(x, FSDPModule)]
    root, *blocks = sharded
    for order, choose in (
        (blocks, FSDPModule.set_modules_to_forward_prefetch),
        (blocks[::-1], FSDPModule.set_modules_to_backward_prefetch),
    ):
        for index, module in enumerate([root, *order]):
            # Nothing would stand for torch's own choice; itself is there already.
            choose(module, order[index : index + depth] or [module])


def free_gathered(model: GPT) -> None:
    """Back to shards, whatever a forward pass without a backward pass has left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
