"""Faults of what is shared out by rows, and of the messages: ZeRO stages 1 and 2, and DDP."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from dtensor_llm import buckets, train
from dtensor_llm.buckets import Bucket, Buckets
from dtensor_llm.model import GPT
from dtensor_llm.parallel import data_parallel
from dtensor_llm.parallel.data_parallel import BucketSums
from dtensor_llm.plan import materialize
from parity_tests.faults.fault import fault

HYBRID = "dp_replicate=2,dp_shard=2"


@fault(
    "optimizer",
    "zero",
    "1x1x2",
    "weight",
    sabotaged="update",
    symptom="Every rank trains its own rows; the others keep the first weights for ever.",
    zero=1,
)
def updated_rows_not_gathered() -> Iterator[None]:
    """The weights are not made whole again after the ranks have updated their rows."""
    with patch.object(Buckets, "gather", lambda _: None):
        yield


@fault(
    "optimizer",
    "zero",
    "1x1x2",
    "weight",
    sabotaged="update",
    symptom="The loss jumps up after the first step, and comes down slowly.",
    zero=2,
    vocab_size=62,  # equal parts: padding is memory as it comes
)
def gathered_rows_in_another_order() -> Iterator[None]:
    """The updated rows of all ranks are put together from the last rank to the first."""
    receive = Bucket.receive_weights

    def wrong(self: Bucket) -> None:
        self.wait()
        assert self.message is not None
        self.message = self.message.flip(0)
        receive(self)

    with patch.object(Bucket, "receive_weights", wrong):
        yield


@fault(
    "reduction",
    "zero",
    "1x1x2",
    "gradient",
    sabotaged="gradient",
    symptom="With m microbatches the gradient norm is about 1/m of what it was.",
    zero=2,
    micro_batch_size=1,
)
def only_the_last_microbatch_kept() -> Iterator[None]:
    """Each microbatch's rows take the place of those before, instead of being added to them."""
    accumulate = Bucket.accumulate

    def wrong(self: Bucket, *, is_last: bool) -> None:
        self.total = None
        accumulate(self, is_last=is_last)

    with patch.object(Bucket, "accumulate", wrong):
        yield


@fault(
    "reduction",
    "zero",
    "1x1x2",
    "gradient",
    sabotaged="gradient",
    symptom="Gradient norm 1/dp of one device's, at stages 1 and 2 alone.",
    zero=1,
)
def scattered_sums_averaged() -> Iterator[None]:
    """The reduce-scatter averages what was divided by all tokens already."""
    pack = Bucket.pack

    def wrong(self: Bucket, name: str, gradient: torch.Tensor) -> None:
        pack(self, name, gradient / self.size)

    with patch.object(Bucket, "pack", wrong):
        yield


@fault(
    "reduction",
    "zero",
    HYBRID,
    "gradient",
    sabotaged="gradient",
    symptom="Right without replicas; with them, two models drift apart.",
    zero=2,
    micro_batch_size=1,
)
def rows_not_summed_over_replicas() -> Iterator[None]:
    """Hybrid: the rows are summed over the ranks that own rows, and not over their replicas."""
    build = Bucket.__init__

    def wrong(self: Bucket, *arguments: Any, **named: Any) -> None:
        build(self, *arguments, **named)
        self.replicas = None

    with patch.object(Bucket, "__init__", wrong):
        yield


@fault(
    "reduction",
    "zero",
    "1x1x2",
    "exp_avg",
    "token_embedding",
    sabotaged="token_embedding.weight",
    symptom="All is well with 50304 token ids, and the loss stalls with 50257.",
    zero=1,
    vocab_size=61,
)
def rows_off_by_one_where_uneven() -> Iterator[None]:
    """A rank's first row is its number times rows / dp rounded down, where messages round up."""

    def wrong(size: int, index: int, count: int) -> tuple[int, int]:
        first, length = right(size, index, count)
        return min(first, index * (size // count)), length

    right = buckets.chunk
    with patch.object(buckets, "chunk", wrong):
        yield


@fault(
    "reduction",
    "zero",
    "1x1x2",
    "gradient",
    sabotaged="gradient",
    symptom="Depends on which rank is late; on one machine it often looks right.",
    zero=2,
    micro_batch_size=2,
)
def bucket_read_before_it_is_there() -> Iterator[None]:
    """Nobody waits for a reduction: where ranks are late, what the memory held is added up."""
    reduce = Bucket.reduce

    def wrong(self: Bucket) -> None:
        reduce(self)
        assert self.work is not None and self.line is not None
        self.work.wait()
        self.line.zero_()  # as new memory may be; other numbers would do as well
        self.work = None

    with patch.object(Bucket, "reduce", wrong):
        yield


@fault(
    "reduction",
    "zero",
    "1x1x2",
    "gradient",
    sabotaged="gradient",
    symptom="Gradients of some ranks are lost, of others not, and never the same ones twice.",
    zero=1,
)
def message_reused_before_it_is_sent() -> Iterator[None]:
    """The memory of a message is cleared for the next one as soon as its reduction has begun."""
    reduce = Bucket.reduce

    def wrong(self: Bucket) -> None:
        reduce(self)
        assert self.message is not None
        self.message.zero_()

    with patch.object(Bucket, "reduce", wrong):
        yield


@fault(
    "reduction",
    "data_parallel",
    "1x1x2",
    "gradient",
    sabotaged="gradient",
    symptom="Gradient norm 1/dp of one device's, with DistributedDataParallel alone.",
    zero=0,
    ddp=True,
)
def ddp_averages_over_dp() -> Iterator[None]:
    """DistributedDataParallel's default: it divides by dp what was divided by all tokens."""

    def wrong(sums: BucketSums, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return allreduce_hook(sums.group, bucket)

    with patch.object(data_parallel, "sum_bucket", wrong):
        yield


@fault(
    "reduction",
    "data_parallel",
    "1x1x2",
    "gradient",
    sabotaged="gradient",
    symptom="As fast as without communication, and it is: each rank trains its own model.",
    zero=0,
    ddp=True,
)
def ddp_goes_by_the_model_inside() -> Iterator[None]:
    """The model is called, and not DistributedDataParallel around it: nothing is reduced."""

    def wrong(model: GPT, _: DeviceMesh, device: torch.device, __: object) -> GPT:
        materialize(model, device)
        return model

    with patch.object(data_parallel, "wrap", wrong):
        yield


@fault(
    "reduction",
    "zero",
    "1x1x2",
    "gradient",
    sabotaged="gradient",
    symptom="As if there were one microbatch: the batch is m times smaller than one thinks.",
    zero=2,
    defer_reduce=True,
    micro_batch_size=2,
)
def deferred_gradients_not_held() -> Iterator[None]:
    """Whole gradients are freed after each microbatch, although they are not reduced yet."""
    arrived = Buckets.arrived

    def wrong(self: Buckets, name: str, weight: torch.Tensor) -> None:
        arrived(self, name, weight)
        weight.grad = None

    with patch.object(Buckets, "arrived", wrong):
        yield


@fault(
    "reduction",
    "data_parallel",
    "1x1x2",
    "gradient",
    sabotaged="gradient",
    symptom="The replicas drift apart slowly: each has a last microbatch of its own.",
    zero=0,
    ddp=True,
    micro_batch_size=2,
)
def ddp_reduces_all_microbatches_but_the_last() -> Iterator[None]:
    """`no_sync` is switched the wrong way round."""

    def wrong(self: train.Trainer, *, is_last: bool) -> None:
        module = self.parallel.modules[0]
        assert isinstance(module, DistributedDataParallel)
        module.require_backward_grad_sync = not is_last

    with patch.object(train.Trainer, "choose_reduction", wrong):
        yield
