"""Classic bugs, planted in the real code for as long as a `with` block lasts.

A bound proves something only if a wrong program breaks it. Each fault here is a mistake that people
have made; the tests show that the parity check sees it, and that it names what was broken.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate

from dtensor_llm import initialize, optimizer, train
from dtensor_llm.collectives import move, redistribute
from dtensor_llm.model import GPT, Dropout
from dtensor_llm.parallel import data_parallel, pipeline_parallel, sequence_parallel, zero
from dtensor_llm.parallel.tensor_parallel import RowParallel
from dtensor_llm.plan import Call


@dataclass(frozen=True)
class Fault:
    """A planted bug.

    Args:
        name: of the function that plants it.
        mesh: a mesh on which it matters.
        quantity: a quantity of the parity report that must fail.
        tensors: part of the name of the tensor that must be reported as the worst; "" for any.
        options: configuration on which it matters.
        plant: the context manager.
    """

    name: str
    mesh: str
    quantity: str
    tensors: str
    options: Mapping[str, Any]
    plant: Callable[[], AbstractContextManager[None]] = field(repr=False)


FAULTS: list[Fault] = []

Planter = Callable[[], Iterator[None]]


def fault(
    mesh: str, quantity: str, tensors: str = "", **options: Any
) -> Callable[[Planter], Planter]:
    """Register the function below as a fault."""

    def register(plant: Planter) -> Planter:
        name = plant.__name__
        FAULTS.append(Fault(name, mesh, quantity, tensors, options, contextmanager(plant)))
        return plant

    return register


@fault("2x1x1", "loss", sequence_parallel=False)
def row_parallel_reduction_dropped() -> Iterator[None]:
    """Each rank goes on with its own partial sum of the attention and MLP outputs."""

    def forward(self: RowParallel, x: Tensor) -> Tensor:
        y = F.linear(x, self.local("weight"))
        bias = self.local("bias")
        return y if bias is None else y + bias

    with patch.object(RowParallel, "forward", forward):
        yield


@fault("2x1x1", "loss")
def row_parallel_scatter_without_reduction() -> Iterator[None]:
    """With tokens sharded: each rank keeps its tokens, of its own partial sum."""

    def forward(self: RowParallel, x: Tensor) -> Tensor:
        y = F.linear(x, self.local("weight")).chunk(self.mesh.size(), dim=1)
        return y[self.mesh.get_local_rank()] + self.local("bias")

    with patch.object(RowParallel, "forward", forward):
        yield


@fault("2x1x1", "loss", sequence_parallel=False)
def row_bias_added_by_every_rank() -> Iterator[None]:
    """The bias of the row-parallel linear joins the partial sums, and counts tp times."""

    def forward(self: RowParallel, x: Tensor) -> Tensor:
        y = F.linear(x, self.local("weight"), self.local("bias"))
        return redistribute(y, self.mesh, Partial(), self.residual, self.residual)

    with patch.object(RowParallel, "forward", forward):
        yield


@fault("1x1x2", "gradient")
def zero_averages_over_dp() -> Iterator[None]:
    """FSDP's default: the reduce-scatter divides by dp what was divided by all tokens already."""
    with patch.object(zero, "reduce_by_summing", lambda _: None):
        yield


@fault("1x1x2", "gradient", zero=0)
def replicas_average_over_dp() -> Iterator[None]:
    """The all-reduce of data parallelism divides by dp."""
    with patch.object(data_parallel, "reduce_by_summing", lambda _: None):
        yield


@fault("1x1x1", "gradient", micro_batch_size=2)
def last_microbatch_only() -> Iterator[None]:
    """Gradients of the microbatches before the last are thrown away."""

    def wrong(self: train.Trainer, **_: bool) -> None:
        self.optimizer.zero_grad()

    with patch.object(train.Trainer, "choose_reduction", wrong):
        yield


@fault("2x1x1", "gradient", "norm")
def norm_gradients_not_reduced() -> Iterator[None]:
    """Under sequence parallelism each rank's norm gradient is taken for the whole one."""
    plan = sequence_parallel.plan

    def wrong(model: GPT) -> Any:
        table = list(plan(model))
        for _, style in table:
            if hasattr(style, "gradients"):
                style.gradients = Replicate()
        return table

    with patch.object(sequence_parallel, "plan", wrong):
        yield


@fault("2x1x1", "gradient norm")
def replicated_weights_counted_by_every_rank() -> Iterator[None]:
    """In the gradient norm, a weight that all tp ranks hold counts tp times."""

    with patch.object(train, "counts_here", lambda *_: True):
        yield


@fault("1x2x1", "gradient norm", tied_embeddings=True)
def tied_weight_counted_twice() -> Iterator[None]:
    """In the gradient norm, the embedding counts on the first stage and on the last."""

    def wrong(self: train.Trainer, name: str) -> bool:
        return optimizer.counts_here(self.optimizer.weights[name], self.mesh)

    with patch.object(train.Trainer, "counts_here", wrong):
        yield


@fault("1x2x1", "gradient norm")
def norm_of_one_stage() -> Iterator[None]:
    """Each pipeline stage clips by the norm of its own gradients."""

    def wrong(self: train.Trainer, loss: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        own_loss = loss.double() * float(self.reports_loss)
        dist.all_reduce(own_loss)
        return own_loss, counted

    with patch.object(train.Trainer, "sum_over_ranks", wrong):
        yield


@fault("1x1x2", "loss")
def loss_divided_by_local_tokens() -> Iterator[None]:
    """Each data-parallel rank divides by its own number of valid tokens."""
    count = train.count_valid_tokens

    def local(labels: Tensor, *_: Any) -> Tensor:
        return count(labels)

    with patch.object(train, "count_valid_tokens", local):
        yield


@fault("1x1x2", "loss")
def every_rank_draws_the_first_shard() -> Iterator[None]:
    """Each rank fills its shard with the numbers that belong to the first one."""
    where = initialize.local_slice

    def first(x: Tensor) -> tuple[slice, ...]:
        return tuple(slice(0, s.stop - s.start) for s in where(x))

    with patch.object(initialize, "local_slice", first):
        yield


@fault("2x1x1", "loss", dropout=0.2)
def dropout_mask_repeated_by_every_rank() -> Iterator[None]:
    """The tp ranks drop the same elements of their different shards."""
    shard = Dropout.shard

    def first(self: Dropout, dim: int, _: int, count: int) -> None:
        shard(self, dim, 0, count)

    with patch.object(Dropout, "shard", first):
        yield


@fault("2x1x1", "loss")
def positions_restart_in_every_shard() -> Iterator[None]:
    """Under sequence parallelism, each rank counts its positions from 0."""
    plan = sequence_parallel.plan

    def wrong(model: GPT) -> Any:
        return [entry for entry in plan(model) if entry != ("position_embedding", Call("shard"))]

    with patch.object(sequence_parallel, "plan", wrong):
        yield


@fault("1x2x1", "gradient", "token_embedding", tied_embeddings=True)
def tied_gradients_not_summed() -> Iterator[None]:
    """The two stages' copies of the tied embedding go their own ways."""
    with patch.object(pipeline_parallel, "sum_tied_gradients", lambda *_: None):
        yield


@fault("2x1x1", "gradient")
def backward_all_reduce_dropped() -> Iterator[None]:
    """The function f of Megatron-LM, without its all-reduce in the backward pass."""

    def wrong(x: Tensor, group: Any, before: Any, after: Any) -> Tensor:
        if before.is_partial() and torch._C._current_autograd_node() is not None:
            return x if after.is_replicate() else x.chunk(group.size(), after.dim)[group.rank()]
        return move(x, group, before, after)

    with patch("dtensor_llm.collectives.move", wrong):
        yield


@fault("1x1x2", "weight")
def norms_and_biases_decay() -> Iterator[None]:
    """Weight decay is applied to every parameter."""
    with patch.object(optimizer, "is_decayed", lambda _: True):
        yield


@fault("1x1x1", "weight")
def learning_rate_one_step_late() -> Iterator[None]:
    """The schedule counts from the step after."""
    right = train.learning_rate
    with patch.object(train, "learning_rate", lambda config, step: right(config, step + 1)):
        yield
