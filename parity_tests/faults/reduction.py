"""Faults of what is summed over ranks and microbatches: token counts, gradients, loss and norm."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from dtensor_llm import optimizer, parallelize, train
from dtensor_llm.collectives import SummingReduceScatter
from dtensor_llm.config import Config
from dtensor_llm.model import GPT
from dtensor_llm.parallel import (
    data_parallel,
    pipeline_parallel,
    sequence_parallel,
    tensor_parallel,
    zero,
)
from dtensor_llm.plan import Part, local_tensor, partial_gradients
from parity_tests.faults.fault import fault

planted = partial(fault, "reduction")

HYBRID = "dp_replicate=2,dp_shard=2"


def halve(weight: Tensor) -> None:
    """Make an average over two ranks of a gradient that was summed."""
    assert weight.grad is not None
    local_tensor(weight.grad).div_(2)


@planted(
    "zero",
    "1x1x2",
    "gradient",
    sabotaged="gradient",
    symptom="Gradient norm 1/dp of one device's: clipping acts too seldom.",
)
def zero_averages_over_dp() -> Iterator[None]:
    """FSDP's default: the reduce-scatter divides by dp what was divided by all tokens already."""
    with patch.object(zero, "reduce_by_summing", lambda *_, **__: None):
        yield


@planted(
    "zero",
    "1x1x2",
    "gradient",
    sabotaged="gradient",
    symptom="Right without accumulation; with it, and a slow network, microbatches are lost.",
    micro_batch_size=2,
)
def sums_read_on_their_way() -> Iterator[None]:
    """The reduction of a block is waited for at the next block's, although it was added at once.

    What a slow network leaves to add is what the buffer held before: here zeros.
    """
    right = SummingReduceScatter.__call__

    def wrong(self: SummingReduceScatter, output_tensor: Tensor, **others: Any) -> None:
        if self.weights is not None:
            self.weights = []
        right(self, output_tensor.zero_(), **others)

    with patch.object(SummingReduceScatter, "__call__", wrong):
        yield


@planted(
    "data_parallel",
    "1x1x2",
    "gradient",
    sabotaged="gradient",
    symptom="Gradient norm 1/dp of one device's; the loss curve of Adam is as before.",
    zero=0,
)
def replicas_average_over_dp() -> Iterator[None]:
    """The all-reduce of data parallelism divides by dp."""
    with patch.object(data_parallel, "reduce_by_summing", lambda _: None):
        yield


@planted(
    "data_parallel",
    "1x1x2",
    "gradient",
    sabotaged="gradient",
    symptom="Accumulation saves memory, and its microbatches beyond the first are lost.",
    zero=0,
    micro_batch_size=2,
)
def reduced_after_the_first_microbatch() -> Iterator[None]:
    """Deferred reduction is switched the wrong way round: on for the first microbatch alone."""

    def wrong(self: train.Trainer, *, is_last: bool) -> None:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(not is_last)

    with patch.object(train.Trainer, "choose_reduction", wrong):
        yield


@planted(
    "zero",
    HYBRID,
    "gradient",
    sabotaged="gradient",
    symptom="Two models are trained; each sees half of the data, and the saved one is the first.",
)
def replicas_never_meet() -> Iterator[None]:
    """Hybrid sharding gets the shard axis only: nothing is summed over the replicas."""

    def wrong(_: Config, mesh: DeviceMesh) -> DeviceMesh:
        return mesh["dp_shard"]

    with patch.object(parallelize, "data_mesh", wrong):
        yield


@planted(
    "data_parallel",
    "1x1x2",
    "loss",
    sabotaged="loss",
    symptom="The loss is about dp times too large, and ranks with few tokens count most.",
)
def loss_divided_by_local_tokens() -> Iterator[None]:
    """Each data-parallel rank divides by its own number of valid tokens."""
    count = train.count_valid_tokens

    def local(labels: Tensor, *_: Any) -> Tensor:
        return count(labels)

    with patch.object(train, "count_valid_tokens", local):
        yield


@planted(
    "zero",
    HYBRID,
    "loss",
    sabotaged="loss",
    symptom="Right on one axis; with replicas the loss is twice too large.",
)
def tokens_counted_on_one_axis() -> Iterator[None]:
    """The number of tokens is summed over the shard axis and not over the replicas."""
    count = train.count_valid_tokens

    def wrong(labels: Tensor, groups: Iterable[dist.ProcessGroup] = ()) -> Tensor:
        return count(labels, list(groups)[-1:])

    with patch.object(train, "count_valid_tokens", wrong):
        yield


@planted(
    "train",
    "1x1x1",
    "loss",
    sabotaged="loss",
    symptom="Accumulation over 4 is not one batch of 4 times the size; short answers count more.",
    micro_batch_size=2,
)
def mean_of_the_microbatches_means() -> Iterator[None]:
    """Each microbatch divides by its own tokens, and the mean of those is taken."""

    def wrong(
        loss_function: Callable[..., Tensor], logits: Tensor, labels: Tensor, **_: Tensor
    ) -> Tensor:
        tokens = train.count_valid_tokens(labels).clamp(min=1)
        return loss_function(logits, labels) / tokens / 4

    with patch.object(train, "normalized", wrong):
        yield


@planted(
    "pipeline_parallel",
    "1x2x1",
    "loss",
    sabotaged="loss",
    symptom="Without a pipeline all is right; with one, the loss grows with the number of "
    "microbatches.",
)
def pipeline_normalizes_each_microbatch() -> Iterator[None]:
    """The schedule's loss function takes each microbatch's mean over all of its own labels."""

    def wrong(
        loss_function: Callable[..., Tensor], logits: Tensor, labels: Tensor, **_: Tensor
    ) -> Tensor:
        return loss_function(logits, labels) / labels.numel()

    with patch.object(parallelize, "normalized", wrong):
        yield


@planted(
    "pipeline_parallel",
    "1x2x1",
    "gradient",
    "token_embedding",
    sabotaged="token_embedding.weight",
    symptom="Embedding and head drift apart; a checkpoint keeps one of them.",
    tied_embeddings=True,
)
def tied_gradients_not_summed() -> Iterator[None]:
    """The two stages' copies of the tied embedding go their own ways."""
    with patch.object(pipeline_parallel, "sum_tied_gradients", lambda *_: None):
        yield


@planted(
    "pipeline_parallel",
    "1x2x1",
    "gradient",
    "token_embedding",
    sabotaged="token_embedding.weight",
    symptom="The copies stay equal, and learn half as fast as everything else.",
    tied_embeddings=True,
)
def tied_gradients_averaged() -> Iterator[None]:
    """The two gradients of the tied embedding are averaged, as if they were of replicas."""
    add_up = pipeline_parallel.sum_tied_gradients

    def wrong(gradient: Tensor, mesh: DeviceMesh, peer: int) -> None:
        add_up(gradient, mesh, peer)
        gradient.div_(2)

    with patch.object(pipeline_parallel, "sum_tied_gradients", wrong):
        yield


@planted(
    "sequence_parallel",
    "2x1x1",
    "gradient",
    sabotaged="position_embedding.weight or *norm.* or *.bias",
    symptom="Norms, positions and biases learn 1/tp as fast as the matrices.",
)
def partial_gradients_averaged() -> Iterator[None]:
    """The Partial gradients of sharded tokens are averaged over tp instead of summed."""
    reduce = sequence_parallel.reduce_partial_gradients

    def wrong(model: GPT, gradients: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
        reduce(model, gradients, mesh)
        for name in partial_gradients(model):
            gradients[name].div_(2)

    with patch.object(sequence_parallel, "reduce_partial_gradients", wrong):
        yield


@planted(
    "tensor_parallel",
    "4x1x1",
    "gradient",
    "attention",
    sabotaged="*.key.* or *.value.*",
    symptom="Each copy of a key head learns from its own query heads; a checkpoint keeps one copy.",
    kv_heads=2,
)
def copied_gradients_not_summed() -> Iterator[None]:
    """With fewer key/value heads than ranks, the copies of a head go their own ways."""
    with patch.object(tensor_parallel, "reduce_copied_gradients", lambda *_: None):
        yield


@planted(
    "tensor_parallel",
    "4x1x1",
    "gradient norm",
    sabotaged="gradient norm",
    symptom="The norm is a little too large with more tp ranks than key/value heads.",
    kv_heads=2,
)
def copies_counted_by_every_rank() -> Iterator[None]:
    """In the gradient norm, a key/value head counts on every rank that holds a copy of it."""

    def wrong(part: Part, mesh: DeviceMesh) -> bool:
        return part.tp_copies is not None or optimizer.counts_here(part, mesh)

    with patch.object(train, "counts_here", wrong):
        yield


@planted(
    "tensor_parallel",
    "2x1x1",
    "loss",
    sabotaged="loss",
    symptom="The printed loss is tp times too large; training is right.",
)
def loss_reported_by_every_tp_rank() -> Iterator[None]:
    """All ranks that know the loss add it to the sum over ranks."""
    build = train.Trainer.__init__

    def wrong(self: train.Trainer, *args: Any) -> None:
        build(self, *args)
        self.reports_loss = self.model.last

    with patch.object(train.Trainer, "__init__", wrong):
        yield


@planted(
    "tensor_parallel",
    "2x1x1",
    "gradient norm",
    sabotaged="gradient norm",
    symptom="The norm grows with tp, and clipping is too hard.",
)
def replicated_weights_counted_by_every_rank() -> Iterator[None]:
    """In the gradient norm, a weight that all tp ranks hold counts tp times."""
    with patch.object(train, "counts_here", lambda *_: True):
        yield


@planted(
    "zero",
    HYBRID,
    "gradient norm",
    sabotaged="gradient norm",
    symptom="With replicas the norm is larger by a factor of sqrt(2).",
)
def shards_counted_by_every_replica() -> Iterator[None]:
    """In the gradient norm, a sharded weight counts on every rank, also on those that copy it."""

    def wrong(part: Part, mesh: DeviceMesh) -> bool:
        return bool(part.axes) or optimizer.counts_here(part, mesh)

    with patch.object(train, "counts_here", wrong):
        yield


@planted(
    "pipeline_parallel",
    "1x2x1",
    "gradient norm",
    sabotaged="gradient norm",
    symptom="The norm is a little too large; with a large vocabulary clipping is too hard.",
    tied_embeddings=True,
)
def tied_weight_counted_twice() -> Iterator[None]:
    """In the gradient norm, the embedding counts on the first stage and on the last."""

    def wrong(self: train.Trainer, _: str, part: Part) -> bool:
        return optimizer.counts_here(part, self.mesh)

    with patch.object(train.Trainer, "counts_here", wrong):
        yield


@planted(
    "pipeline_parallel",
    "1x2x1",
    "gradient norm",
    sabotaged="gradient norm",
    symptom="The printed norm is the first stage's; each stage clips by another factor.",
)
def norm_of_one_stage() -> Iterator[None]:
    """Each pipeline stage clips by the norm of its own gradients."""

    def wrong(self: train.Trainer, loss: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        own_loss = loss.double() * float(self.reports_loss)
        dist.all_reduce(own_loss)
        return own_loss, counted

    with patch.object(train.Trainer, "sum_over_ranks", wrong):
        yield


@planted(
    "zero",
    "1x1x2",
    "gradient norm",
    sabotaged="gradient norm",
    symptom="The norm depends on how many ranks hold the weights, if only a little.",
)
def norms_of_shards_added_up() -> Iterator[None]:
    """The ranks' norms are added, and not their squares."""

    def wrong(tensors: list[Tensor]) -> Tensor:
        norm = optimizer.sum_of_squares(tensors).sqrt()
        total = norm.clone()
        dist.all_reduce(total)
        return norm * total  # its sum over ranks is the square of the sum of norms

    with patch.object(train, "sum_of_squares", wrong):
        yield
