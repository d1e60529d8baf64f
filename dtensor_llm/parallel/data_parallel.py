"""Data parallelism: every rank holds the weights, sees other sequences, and gradients are summed.

The idea in five lines. The global batch is cut over the ranks; each one runs forward and backward
on its part, in microbatches if it is large. Gradients of different sequences add up, so one
all-reduce (a sum) after the last microbatch gives every rank the gradient of the whole batch, and
equal optimizers keep equal weights equal. The loss of each token has already been divided by the
number of valid tokens in the *global* batch: nothing is averaged afterwards.

Paper: Li et al., PyTorch Distributed, arXiv 2006.15704. torch's `replicate` does the work: unlike
DDP it composes with tensor and pipeline parallelism.

| what                | placement on dp                     |
|---------------------|-------------------------------------|
| weights             | Replicate                           |
| tokens, activations | Shard(0): sequences                 |
| gradients           | Partial until reduced, then Replicate |

Comm: one all-reduce of the gradients a step, in a bucket per block that starts as soon as the
backward pass has left it.
"""

import torch

# Private path: torch 2.13 exports this replicate, the one that composes with tp, nowhere else.
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh

from dtensor_llm.collectives import reduce_by_summing
from dtensor_llm.model import GPT
from dtensor_llm.plan import materialize


def apply(model: GPT, mesh: DeviceMesh, device: torch.device) -> None:
    """Replicate each block, and what is left of the model, over the one-axis `mesh`.

    `model` is on the meta device; block by block it gets memory on `device` and is wrapped, so that
    no rank holds a second copy of the model meanwhile.
    """
    for block in model.blocks.values():
        materialize(block, device)
        replicate(block, mesh=mesh)
    materialize(model, device)
    replicate(model, mesh=mesh)
    reduce_by_summing(model)
