"""Pipeline stages of any model by the clock: how long its layers take, and so each cut of them.

Of a model whose layers are of several kinds nobody knows the costs before they are measured.
`time_layers` takes the times, `stages.balance` cuts by them, and `schedule.simulate` says what a
step with the cut will take:

    times = time_layers(layers, batch, loss=loss)
    cut = balance(tuple(t.whole for t in times), num_stages)
    step = simulate(schedule, times_of_stages(times, cut)).makespan
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtensor_llm.planner.schedule import Times
from dtensor_llm.worlds import World


class LayerTime(NamedTuple):
    """Seconds that a layer takes for one microbatch."""

    forward: float
    backward: float

    @property
    def whole(self) -> float:
        return self.forward + self.backward


def time_layers(
    layers: Sequence[nn.Module],
    x: Tensor,
    *,
    loss: Callable[[Tensor], Tensor],
    context: Mapping[str, Any] | None = None,
    repeats: int = 5,
) -> list[LayerTime]:
    """The median times of each layer on this rank; gradients are added up, then let go of.

    In a round all layers have their turn, so that they meet the same weather. The first round is
    not counted.

    Args:
        layers: each takes what the one before gives, and `context`.
        x: one microbatch of what the first layer takes; it needs no gradient.
        loss: of what the last layer gives; its time counts as that layer's.
        context: further arguments of every layer, by name.
        repeats: rounds, 1 or more.
    """
    rounds = [_round(layers, x, loss, context or {}) for _ in range(1 + repeats)][1:]
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    return [
        LayerTime(*(statistics.median(seconds) for seconds in zip(*of_layer, strict=True)))
        for of_layer in zip(*rounds, strict=True)
    ]


def _round(
    layers: Sequence[nn.Module],
    x: Tensor,
    loss: Callable[[Tensor], Tensor],
    context: Mapping[str, Any],
) -> list[LayerTime]:
    """As on stages of one layer each: what a layer takes has no history."""
    taken, given, forward = [], [], []
    for index, layer in enumerate(layers):
        taken.append(x.detach().requires_grad_(index > 0))
        start = time.perf_counter()
        x = layer(taken[-1], **context)
        if index == len(layers) - 1:
            x = loss(x)
        forward.append(time.perf_counter() - start)
        given.append(x)
    gradient, backward = None, []
    for own, output in zip(reversed(taken), reversed(given), strict=True):
        start = time.perf_counter()
        torch.autograd.backward(output, gradient)
        backward.append(time.perf_counter() - start)
        gradient = own.grad
    return [LayerTime(*both) for both in zip(forward, reversed(backward), strict=True)]


def time_transfer(like: Tensor, world: World, *, repeats: int = 5) -> float:
    """Seconds of a message as large as `like` between two ranks; the same on every rank.

    Half the median of there and back between the first two of all ranks, after a first round that
    is not counted. All ranks call it.

    Comm: 2 (1 + `repeats`) messages between these, and a broadcast of one number.
    """
    message, seconds = torch.zeros(like.shape, dtype=like.dtype), []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        for sender in (0, 1):
            if world.rank == sender:
                dist.send(message, 1 - sender)
            elif world.rank == 1 - sender:
                dist.recv(message, sender)
        seconds.append((time.perf_counter() - start) / 2)
    found = torch.tensor(statistics.median(seconds[1:]), dtype=torch.float64)
    dist.broadcast(found, 0)
    return found.item()


def times_of_stages(
    times: Sequence[LayerTime], cut: Sequence[range], transfer: float = 0.0
) -> Times:
    """What the simulator takes: the sums of each stage's layers, for backwards that are not split.

    `transfer` is how long one message between two stages takes, in seconds.
    """
    return Times(
        forward=[sum(times[layer].forward for layer in stage) for stage in cut],
        backward_input=[sum(times[layer].backward for layer in stage) for stage in cut],
        backward_weight=[0.0] * len(cut),
        transfer=transfer,
    )
