"""Faults of products that run beside the exchange of what they take, or of what they give."""

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dtensor_llm.overlap import AllGather, _GatherAndMultiply, _MultiplyAndScatter
from parity_tests.faults.fault import fault

forward, backward = partial(fault, "forward"), partial(fault, "backward")


@forward(
    "sequence_parallel",
    "2x1x1",
    "loss",
    sabotaged="blocks.0.attention.query",
    symptom="Right on a quick network; else attention looks at what the buffer held before.",
    async_tp=True,
)
def tokens_multiplied_before_they_arrive() -> Iterator[None]:
    """The tokens of other ranks are multiplied as soon as the own ones are, without a wait.

    What is multiplied is what a slow network leaves in the buffer: what was there before.
    """
    arrivals = AllGather.arrivals

    def wrong(self: AllGather) -> Iterator[int]:
        for peer in list(self._awaited):
            self.places[peer].zero_()
            yield peer
        for _ in arrivals(self):
            pass

    with patch.object(AllGather, "arrivals", wrong):
        yield


@forward(
    "sequence_parallel",
    "2x1x1",
    "loss",
    sabotaged="blocks.0.attention.query",
    symptom="The first rank is right; on the others the context begins in the middle.",
    async_tp=True,
)
def own_tokens_laid_first() -> Iterator[None]:
    """Products are laid down in the order in which they are computed: own tokens, then others'."""
    right = _GatherAndMultiply.forward

    def wrong(ctx: Any, x: Tensor, dim: int, group: Any, *others: Any) -> tuple[Tensor, ...]:
        whole, *ys = right(ctx, x, dim, group, *others)
        first = group.rank() * x.shape[dim]
        return whole, *(y.roll(-first, dims=dim) for y in ys)

    with patch.object(_GatherAndMultiply, "forward", staticmethod(wrong)):
        yield


@backward(
    "sequence_parallel",
    "2x1x1",
    "gradient",
    sabotaged="*.output.weight or *.down.weight",
    symptom="The loss falls, more slowly: half of the weights learn from 1/tp of the tokens.",
    async_tp=True,
)
def weights_learn_from_own_tokens() -> Iterator[None]:
    """The gradient of a row-parallel weight is computed beside the gather, of what is there."""
    right = _MultiplyAndScatter.backward

    def wrong(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x, _), (dim, group) = ctx.saved_tensors, ctx.exchange
        own = x.chunk(group.size(), dim)[group.rank()]
        grad_x, *nothing, _, grad_bias = right(ctx, grad)
        return grad_x, *nothing, torch.einsum("btd,btf->df", grad, own), grad_bias

    with patch.object(_MultiplyAndScatter, "backward", staticmethod(wrong)):
        yield


@backward(
    "sequence_parallel",
    "2x1x1",
    "gradient",
    sabotaged="blocks.1.attention_norm",
    symptom="The loss is right; layers below learn as if attention had nothing but queries.",
    async_tp=True,
)
def gradient_sent_before_it_is_whole() -> Iterator[None]:
    """The gradient of the tokens is sent when the queries' part is there, and not yet the keys'."""
    right = _GatherAndMultiply.backward

    def wrong(ctx: Any, grad: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        early, *_ = right(ctx, grad, grads[0], *[None] * (len(grads) - 1))
        _, *others = right(ctx, grad, *grads)
        return early, *others

    with patch.object(_GatherAndMultiply, "backward", staticmethod(wrong)):
        yield
