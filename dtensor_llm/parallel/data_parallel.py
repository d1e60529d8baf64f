"""Data parallelism: every rank holds the weights, sees other sequences, and gradients are summed.

The idea in five lines. The global batch is cut over the ranks; each one runs forward and backward
on its part, in microbatches if it is large. Gradients of different sequences add up, so one
all-reduce (a sum) after the last microbatch gives every rank the gradient of the whole batch, and
equal optimizers keep equal weights equal. The loss of each token has already been divided by the
number of valid tokens in the *global* batch: nothing is averaged afterwards.

Paper: Li et al., PyTorch Distributed, arXiv 2006.15704. torch's `replicate` does the work, since it
composes with tensor parallelism; `--ddp` takes the paper's DistributedDataParallel, for tp = 1. Its
buckets follow `--ddp-bucket-mb`, and it averages unless it is given another way to reduce.

| what                | placement on dp                     |
|---------------------|-------------------------------------|
| weights             | Replicate                           |
| tokens, activations | Shard(0): sequences                 |
| gradients           | Partial until reduced, then Replicate |

Comm: one all-reduce of the gradients a step, however many microbatches, in a bucket per block that
starts as soon as the backward pass of the last one has left it.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

# Private path: torch 2.13 exports this replicate, the one that composes with tp, nowhere else.
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from dtensor_llm.collectives import reduce_by_summing
from dtensor_llm.model import GPT
from dtensor_llm.plan import materialize
from dtensor_llm.worlds.exchange import AllReduce


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


@dataclass(frozen=True)
class DDPOptions:
    """What torch's DistributedDataParallel is told; `bucket_mb` in MiB."""

    bucket_mb: float
    bucket_view: bool
    static_graph: bool


def wrap(
    model: GPT, mesh: DeviceMesh, device: torch.device, options: DDPOptions
) -> DistributedDataParallel:
    """The same by torch's DistributedDataParallel, for plain parameters; to be called in its place.

    `model` is on the meta device and gets memory on `device`. Nothing is sent at the start, as all
    ranks draw the same weights.
    """
    materialize(model, device)
    module = DistributedDataParallel(
        model,
        process_group=mesh.get_group(),
        init_sync=False,
        bucket_cap_mb=options.bucket_mb,
        gradient_as_bucket_view=options.bucket_view,
        static_graph=options.static_graph,
    )
    module.register_comm_hook(BucketSums(mesh.get_group()), sum_bucket)
    return module


MOST_ON_THEIR_WAY = 2  # buckets, while others are computed: each holds memory that ranks share


@dataclass
class BucketSums:
    """Of a module's buckets, over the ranks of `group`.

    Args:
        on_their_way: of this backward pass, in the order of the buckets.
    """

    group: dist.ProcessGroup
    on_their_way: list[AllReduce] = field(default_factory=list)


def sum_bucket(sums: BucketSums, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """What is done with a bucket of gradients: a sum, where DistributedDataParallel averages.

    It reads no bucket before the last one's turn. By then those that go through shared memory,
    which move on when another bucket is there, are done; there a small one goes as a message.

    Comm: one all-reduce.
    """
    reduction, on_their_way = AllReduce(bucket.buffer(), sums.group), sums.on_their_way
    for earlier in on_their_way:
        earlier.advance()
    if reduction.work is None:
        on_their_way.append(reduction)
    while len(on_their_way) > (0 if bucket.is_last() else MOST_ON_THEIR_WAY):
        on_their_way.pop(0).wait()
    if reduction.work is not None:
        return reduction.work.get_future().then(lambda done: done.value()[0])
    future = torch.futures.Future[Tensor]()
    future.set_result(bucket.buffer())
    return future
