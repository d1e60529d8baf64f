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

Comm, for each block and microbatch: all-gather forward, all-gather backward, reduce-scatter of the
gradients, and an all-reduce of the shard over dp_replicate. Under a pipeline torch's stages switch
the reduction off until the last microbatch: gradients are whole on every rank until then, and are
reduced once a step.
"""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from dtensor_llm.collectives import reduce_by_summing
from dtensor_llm.model import GPT
from dtensor_llm.plan import materialize


def apply(model: GPT, mesh: DeviceMesh, device: torch.device) -> None:
    """Shard each block, and what is left of the model, over the one or two axes of `mesh`.

    `model` is on the meta device; block by block it gets memory on `device` and is sharded, so that
    no rank ever holds more than one whole block.
    """
    for block in model.blocks.values():
        materialize(block, device)
        fully_shard(block, mesh=mesh)
    materialize(model, device)
    fully_shard(model, mesh=mesh)
    reduce_by_summing(model)
