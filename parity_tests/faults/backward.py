"""Faults of the backward pass: the first loss is right, the gradients are not."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from dtensor_llm import collectives, loss, train
from dtensor_llm.collectives import GatheredAgain
from dtensor_llm.parallel import pipeline_parallel, sequence_parallel, tensor_parallel
from dtensor_llm.parallel.tensor_parallel import RowParallel
from dtensor_llm.plan import Input, LocalModule
from parity_tests.faults.fault import fault

planted = partial(fault, "backward")

Cross = loss._VocabularyParallelCrossEntropy
Redistribute = collectives._Redistribute
# (gradient, group, placement it has, placement that is wanted) -> gradient
Move = Callable[[Tensor, Any, Placement, Placement], Tensor]


def moving_gradients(move: Move) -> Any:
    """`redistribute` with another way back."""

    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return move(grad, *ctx.back), None, None, None, None  # type: ignore[attr-defined] # a free attribute

    return patch.object(Redistribute, "backward", staticmethod(backward))


def changing(plan: Callable[..., Any], change: Callable[[Any], None]) -> Callable[..., Any]:
    """The plan with `change` applied to each of its LocalModule styles."""

    def changed(*args: Any, **options: Any) -> Any:
        table = list(plan(*args, **options))
        for _, style in table:
            if isinstance(style, LocalModule):
                change(style)
        return table

    return changed


@planted(
    "tensor_parallel",
    "2x1x1",
    "gradient",
    sabotaged="final_norm",
    symptom="The first loss is right; every rank's replicated weights then go their own ways.",
    sequence_parallel=False,
)
def backward_all_reduce_dropped() -> Iterator[None]:
    """The function f of Megatron-LM, without its all-reduce in the backward pass."""

    def wrong(grad: Tensor, group: Any, before: Placement, after: Placement) -> Tensor:
        return grad if before.is_partial() else collectives.move(grad, group, before, after)

    with moving_gradients(wrong):
        yield


@planted(
    "sequence_parallel",
    "2x1x1",
    "gradient",
    sabotaged="final_norm",
    symptom="The loss falls, more slowly; weights near the input learn from half of the heads.",
)
def gathered_tokens_go_back_unsummed() -> Iterator[None]:
    """The backward pass of the all-gather takes the rank's own tokens, and sums nothing."""

    def wrong(grad: Tensor, group: Any, before: Placement, after: Placement) -> Tensor:
        if before.is_partial() and isinstance(after, Shard):
            return grad.chunk(group.size(), after.dim)[group.rank()].contiguous()
        return collectives.move(grad, group, before, after)

    with moving_gradients(wrong):
        yield


@planted(
    "sequence_parallel",
    "2x1x1",
    "gradient",
    sabotaged="blocks.1.mlp.*",
    symptom="Each rank's share of the weights learns from its share of the tokens alone.",
)
def only_own_tokens_go_back() -> Iterator[None]:
    """The backward pass of the reduce-scatter leaves zeros for the tokens of other ranks."""

    def wrong(grad: Tensor, group: Any, before: Placement, after: Placement) -> Tensor:
        if isinstance(before, Shard) and after.is_replicate():
            parts = [torch.zeros_like(grad)] * group.size()
            parts[group.rank()] = grad
            return torch.cat(parts, dim=before.dim)
        return collectives.move(grad, group, before, after)

    with moving_gradients(wrong):
        yield


@planted(
    "tensor_parallel",
    "2x1x1",
    "gradient",
    sabotaged="blocks.1.mlp.*",
    symptom="Nothing that Adam's loss curve shows: gradients are too large by powers of tp.",
    sequence_parallel=False,
)
def gradient_of_a_sum_is_summed() -> Iterator[None]:
    """The all-reduce of a row-parallel output is an all-reduce backward too, as in plain autograd.

    Every rank has the whole gradient of the output, and gets it tp times.
    """

    def wrong(grad: Tensor, group: Any, before: Placement, after: Placement) -> Tensor:
        before = Partial() if before == after == Replicate() else before
        return collectives.move(grad, group, before, after)

    with moving_gradients(wrong):
        yield


@planted(
    "sequence_parallel",
    "2x1x1",
    "gradient",
    sabotaged="final_norm",
    symptom="Weights below every gather learn 1/tp as fast; Adam hides it but for eps.",
)
def gathered_tokens_go_back_averaged() -> Iterator[None]:
    """The reduce-scatter of the backward pass averages over tp, as that of data parallelism may."""

    def wrong(grad: Tensor, group: Any, before: Placement, after: Placement) -> Tensor:
        moved = collectives.move(grad, group, before, after)
        return moved / group.size() if before.is_partial() else moved

    with moving_gradients(wrong):
        yield


@planted(
    "tensor_parallel",
    "2x1x1",
    "gradient",
    sabotaged="final_norm",
    symptom="The blocks learn from the logits of one rank's part of the vocabulary.",
    sequence_parallel=False,
)
def input_of_the_head_forgotten() -> Iterator[None]:
    """The head is column-parallel, but nothing sums the gradient of its input."""
    plan = tensor_parallel.plan

    def wrong(*args: Any, **options: Any) -> Any:
        table = plan(*args, **options)
        return [(name, s) for name, s in table if name != "head" or not isinstance(s, Input)]

    with patch.object(tensor_parallel, "plan", wrong):
        yield


@planted(
    "sequence_parallel",
    "2x1x1",
    "gradient",
    "norm",
    sabotaged="position_embedding.weight or *norm.*",
    symptom="The loss looks right, while the ranks' copies of the norms drift apart.",
)
def norm_gradients_not_reduced() -> Iterator[None]:
    """Under sequence parallelism each rank's norm gradient is taken for the whole one."""

    def change(style: LocalModule) -> None:
        style.gradients = Replicate()

    with patch.object(sequence_parallel, "plan", changing(sequence_parallel.plan, change)):
        yield


@planted(
    "sequence_parallel",
    "2x1x1",
    "gradient",
    ".bias",
    sabotaged="blocks.*.bias",
    symptom="The biases of attention and MLP outputs differ between ranks; weights are right.",
)
def row_bias_gradient_not_reduced() -> Iterator[None]:
    """With tokens sharded, the row-parallel bias's gradient is of the rank's own tokens alone."""

    def change(style: LocalModule) -> None:
        if style.mixin is RowParallel:
            style.gradients = {"bias": Replicate()}

    with patch.object(tensor_parallel, "plan", changing(tensor_parallel.plan, change)):
        yield


@planted(
    "tensor_parallel",
    "2x1x1",
    "gradient",
    ".bias",
    sabotaged="blocks.*.bias",
    symptom="The biases of attention and MLP outputs learn tp times as fast.",
    sequence_parallel=False,
)
def row_bias_gradient_summed_though_whole() -> Iterator[None]:
    """Without sharded tokens every rank has the bias's whole gradient, and they are summed."""

    def change(style: LocalModule) -> None:
        if style.mixin is RowParallel:
            style.gradients = {"bias": Partial()}

    with patch.object(tensor_parallel, "plan", changing(tensor_parallel.plan, change)):
        yield


@planted(
    "tensor_parallel",
    "2x1x1",
    "gradient",
    "norm",
    sabotaged="position_embedding.weight or *norm.*",
    symptom="Norms and positions learn tp times as fast; Adam hides most of it.",
    sequence_parallel=False,
)
def norm_gradients_summed_though_whole() -> Iterator[None]:
    """The rule of sequence parallelism is applied where it is switched off."""

    def change(style: LocalModule) -> None:
        style.gradients = Partial()

    plan = changing(tensor_parallel.replicated_plan, change)
    with patch.object(tensor_parallel, "replicated_plan", plan):
        yield


@planted(
    "tensor_parallel",
    "2x1x1",
    "gradient",
    sabotaged="head",
    symptom="The first token of each shard of the vocabulary becomes likelier with every step.",
)
def label_subtracted_by_every_rank() -> Iterator[None]:
    """In the gradient of the loss, ranks that lack the label subtract 1 from their column 0."""

    def wrong(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, column, _, valid = ctx.saved_tensors
        minus_one = -torch.ones_like(column, dtype=probabilities.dtype)
        grad_logits = probabilities.scatter_add(-1, column, minus_one)
        return grad_logits * grad.where(valid, 0.0)[..., None], None, None, None

    with patch.object(Cross, "backward", staticmethod(wrong)):
        yield


@planted(
    "tensor_parallel",
    "2x1x1",
    "gradient",
    sabotaged="head",
    symptom="The loss is right; the model forgets to speak, as prompts and padding pull at it.",
)
def ignored_labels_pull() -> Iterator[None]:
    """Tokens with an ignored label add nothing to the loss, and their softmax to its gradient."""

    def wrong(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, column, own, _ = ctx.saved_tensors
        minus_one_hot = -own[..., None].to(probabilities.dtype)
        grad_logits = probabilities.scatter_add(-1, column, minus_one_hot)
        return grad_logits * grad[..., None], None, None, None

    with patch.object(Cross, "backward", staticmethod(wrong)):
        yield


@planted(
    "sequence_parallel",
    "2x1x1",
    "gradient",
    sabotaged="*.query.weight or *.key.weight or *.value.weight or *.up.weight or head.weight",
    symptom="Right on a quick network; else weights learn from what the buffer held before.",
    gather_again=True,
    tied_embeddings=False,
)
def gathered_tokens_read_before_wait() -> Iterator[None]:
    """The asynchronous gather of the backward pass is begun, and its buffer read without a wait.

    What is read is what a slow network leaves in the buffer: what was there before.
    """

    def wrong(self: GatheredAgain) -> Tensor:
        if self.gather is None:
            self.start()
        assert self.gather is not None
        return self.gather.wait().zero_()  # waits only so that the ranks stay together

    with patch.object(GatheredAgain, "gathered", wrong):
        yield


@planted(
    "train",
    "1x1x1",
    "gradient",
    sabotaged="gradient",
    symptom="A larger global batch makes no difference to the noise of training.",
    micro_batch_size=2,
)
def last_microbatch_only() -> Iterator[None]:
    """Gradients of the microbatches before the last are thrown away."""

    def wrong(self: train.Trainer, **_: bool) -> None:
        self.optimizer.zero_grad()

    with patch.object(train.Trainer, "choose_reduction", wrong):
        yield


@planted(
    "train",
    "1x1x1",
    "gradient",
    sabotaged="gradient",
    symptom="The last sequences of a batch count most; the loss curve says nothing.",
    micro_batch_size=2,
)
def accumulated_gradients_decay() -> Iterator[None]:
    """Each microbatch halves what was accumulated before it: a decaying average, not a sum."""

    def wrong(self: train.Trainer, **_: bool) -> None:
        for weight in self.model.parameters():
            if weight.grad is not None:
                weight.grad.mul_(0.5)

    with patch.object(train.Trainer, "choose_reduction", wrong):
        yield


@planted(
    "pipeline_parallel",
    "1x2x1",
    "gradient",
    sabotaged="gradient",
    symptom="Gradient norm 1/m of one device's: clipping never acts, SGD learns m times slower.",
)
def pipeline_divides_by_microbatches() -> Iterator[None]:
    """torch's schedules rescale the gradients by default."""

    def rescaling(stage: Any, count: int, loss_function: Any, **_: Any) -> Schedule1F1B:
        return Schedule1F1B(stage, count, loss_function, scale_grads=True)

    with patch.dict(pipeline_parallel.ONE_STAGE, {"1f1b": rescaling}):
        yield
