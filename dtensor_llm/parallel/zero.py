"""ZeRO: the data-parallel ranks share out optimizer state, then gradients, then weights.

The idea in five lines. Data parallelism keeps dp equal copies of everything. Stage 1: each rank
updates only 1/dp of every parameter, needs the moments and the summed gradients of that part alone,
and then all-gathers the weights. Stage 2 frees a whole gradient as soon as it is summed, after each
microbatch. Stage 3 frees weights too, and gathers a block's before it computes, forward and
backward. Memory falls to 1/dp, for half as many bytes again (three passes over the weights, not 2).

Paper: Rajbhandari et al., arXiv 1910.02054, section 5. Stage 3 is torch's FSDP2 (`fully_shard`),
stages 1 and 2 are ours (`buckets.py`): torch's ZeroRedundancyOptimizer refuses DTensors. Hybrid
sharding (Zhao et al., arXiv 2304.11277, section 3.2.2) when the mesh has two axes.

Placements on dp_shard, between two microbatches; on dp_replicate all of it is Replicate, and tokens
and activations are Shard(0) on both: sequences.

| what                      | stage 0   | stage 1   | stage 2   | stage 3                       |
|---------------------------|-----------|-----------|-----------|-------------------------------|
| weights                   | Replicate | Replicate | Replicate | Shard(0), Replicate in use    |
| gradients, accumulated    | Partial   | Partial   | Shard(0)  | Shard(0)                      |
| optimizer state           | Replicate | Shard(0)  | Shard(0)  | Shard(0)                      |

Shard(0) is of the tp-local tensor, cut as by torch.chunk: a rank owns the same rows in every stage.

Comm of a step of m microbatches, for each of the buckets (one a block, one for what is left), on
dp_shard. N is what a bucket's parameters have, every number of rows rounded up to a multiple of
dp_shard, in the dtype of the weights:

| stage | all-gather of N        | reduce-scatter of N | all-reduce on dp_replicate |
|-------|------------------------|---------------------|----------------------------|
| 1     | 1, after the update    | 1                   | 1 of N / dp_shard          |
| 2     | 1, after the update    | m                   | 1 of N / dp_shard          |
| 3     | 2 m, forward, backward | m                   | m of N / dp_shard          |

`--defer-reduce` makes every m in the last two columns 1, and holds whole gradients until the last
microbatch: of stage 2 that leaves stage 1. Under a pipeline torch's stages defer those of stage 3
in any case. (Stage 3 keeps what is left of the model whole from forward to backward: one gather.)

Two options of stage 3 trade memory for bytes and for waiting. Without `reshard`, what was gathered
for forward stays for backward: m all-gathers of a block and not 2 m, and at the end of forward a
rank holds every block whole. `prefetch` blocks are gathered ahead of the one that computes, in both
directions, so that the network works meanwhile; they are whole that much earlier, at equal bytes.
Under a pipeline torch's stages keep weights until the last microbatch: 1 all-gather, or m + 1 with
`reshard` (at each turn from backward to forward or back, and for each forward after a forward).
Where the shards wait between uses is a third choice: see `dtensor_llm.offload`.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, OffloadPolicy, fully_shard

from dtensor_llm.buckets import Bucket, Buckets
from dtensor_llm.collectives import AllGatherOfParts, reduce_by_summing
from dtensor_llm.model import GPT
from dtensor_llm.plan import materialize


def apply(
    model: GPT,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    reshard: bool,
    prefetch: int,
    offload: OffloadPolicy | None,
    overlap: bool,
) -> None:
    """Shard each block, and what is left of the model, over the one or two axes of `mesh`.

    `model` is on the meta device; block by block it gets memory on `device` and is sharded, so that
    no rank ever holds more than one whole block.

    Args:
        reshard: free a block's gathered weights after its forward pass.
        prefetch: how many blocks ahead weights are gathered.
        offload: where shards wait; None is on `device`.
        overlap: reduce a block's gradients while the next computes, where there are no streams;
            not for a pipeline stage, which may have no weights beside its blocks'.
    """
    policy = offload or OffloadPolicy()
    for block in model.blocks.values():
        materialize(block, device)
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, offload_policy=policy)
    materialize(model, device)
    # The root has no reshard: torch keeps what backward needs first.
    root = fully_shard(model, mesh=mesh, offload_policy=policy)
    if device.type == "cpu":
        # Private: without it a gather ahead is waited for at once where there are no streams.
        root._set_unshard_async_op(True)
        for module in fsdp_modules(model):
            module.set_custom_all_gather(AllGatherOfParts())
    gather_ahead(model, prefetch)
    # Others read a sum as soon as it is there: on the second axis, and on its way to the host.
    alone = device.type == "cpu" and mesh.ndim == 1 and offload is None
    reduce_by_summing(model, overlap=overlap and alone)


def gather_ahead(model: GPT, depth: int) -> None:
    """Let each block, when its turn comes, start the all-gathers of the `depth` ones after it."""
    root, *blocks = fsdp_modules(model)
    for order, choose in (
        (blocks, FSDPModule.set_modules_to_forward_prefetch),
        (blocks[::-1], FSDPModule.set_modules_to_backward_prefetch),
    ):
        for index, module in enumerate([root, *order]):
            # Nothing would stand for torch's own choice; itself is there already.
            choose(module, order[index : index + depth] or [module])


def free_gathered(model: GPT) -> None:
    """Back to shards, whatever a forward pass without a backward pass has left gathered."""
    for module in fsdp_modules(model):
        module.reshard()


def fsdp_modules(model: GPT) -> list[FSDPModule]:
    """The model itself first, then its blocks."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def share_out(
    parts: Sequence[GPT], mesh: DeviceMesh, *, microbatches: int, each_microbatch: bool
) -> Buckets:
    """Stages 1 and 2: give each rank rows of every parameter to reduce and update.

    `parts` are the rank's pipeline stages, with memory. Each has a bucket for each block and one
    for what is left; what two of them share has one of its own. For `microbatches` and
    `each_microbatch` see `Buckets`: with the latter it is stage 2, without it stage 1.
    """
    weights: dict[str, nn.Parameter] = {}
    groups: dict[str, dict[str, nn.Parameter]] = {}
    held = [part.weights() for part in parts]
    uses = Counter(name for own in held for name in own)
    for index, own in enumerate(held):
        for name, weight in own.items():
            block = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else f"rest {index}"
            groups.setdefault(name if uses[name] > 1 else block, {})[name] = weight
        weights |= own
    buckets = Buckets(
        [Bucket(group, mesh, uses=uses[next(iter(group))]) for group in groups.values()],
        axis="dp_shard",
        microbatches=microbatches,
        each_microbatch=each_microbatch,
    )
    buckets.watch(weights)
    return buckets
