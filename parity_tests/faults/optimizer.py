"""Faults of the optimizer: losses and gradients are right until the weights have moved."""

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from dtensor_llm import optimizer, train
from dtensor_llm.config import TrainConfig
from dtensor_llm.optimizer import Optimizer
from parity_tests.faults.fault import fault

planted = partial(fault, "optimizer")


@planted(
    "optimizer",
    "1x1x2",
    "weight",
    "norm",
    sabotaged="*norm.* or *.bias",
    symptom="Norms shrink towards zero over thousands of steps.",
)
def norms_and_biases_decay() -> Iterator[None]:
    """Weight decay is applied to every parameter."""
    with patch.object(optimizer, "is_decayed", lambda _: True):
        yield


@planted(
    "optimizer",
    "1x1x1",
    "weight",
    sabotaged="update",
    symptom="Weights that meet small gradients are hardly decayed.",
    weight_decay=0.3,
)
def decay_joins_the_gradient() -> Iterator[None]:
    """Adam with an L2 term in place of AdamW: the decay is divided by the second moment too."""
    with patch.object(torch.optim, "AdamW", torch.optim.Adam):
        yield


@planted(
    "optimizer",
    "1x1x1",
    "weight",
    sabotaged="update",
    symptom="The first step is twice too large; later ones look right.",
)
def learning_rate_one_step_late() -> Iterator[None]:
    """The schedule counts from the step after."""
    right = train.learning_rate
    with patch.object(train, "learning_rate", lambda config, step: right(config, step + 1)):
        yield


@planted(
    "optimizer",
    "1x1x2",
    "weight",
    sabotaged="update",
    symptom="Warm-up and decay are dp times as fast: the run ends at the lowest rate early.",
)
def schedule_steps_on_every_rank() -> Iterator[None]:
    """The schedule counts a step for each rank."""
    right = train.learning_rate

    def wrong(config: TrainConfig, step: int) -> float:
        return right(config, step * dist.get_world_size())

    with patch.object(train, "learning_rate", wrong):
        yield


@planted(
    "optimizer",
    "1x1x2",
    "weight",
    sabotaged="update",
    symptom="The printed norm is right; the shards of one weight are clipped by other factors.",
    optimizer="sgd",
)
def each_rank_clips_by_its_own_norm() -> Iterator[None]:
    """Clipping takes the norm of the rank's own shards."""
    clip = train.clip_gradients

    def wrong(shards: list[nn.Parameter], largest_norm: float, _: float) -> None:
        own = optimizer.sum_of_squares([shard.grad for shard in shards if shard.grad is not None])
        clip(shards, largest_norm, own.sqrt().item())

    with patch.object(train, "clip_gradients", wrong):
        yield


@planted(
    "optimizer",
    "2x1x1",
    "exp_avg",
    sabotaged="update",
    symptom="Adam hides it until the day of the spike, which is not clipped.",
)
def gradients_never_clipped() -> Iterator[None]:
    """The norm is printed, and nothing is scaled."""
    with patch.object(train, "clip_gradients", lambda *_: None):
        yield


@planted(
    "optimizer",
    "1x1x2",
    "exp_avg",
    sabotaged="update",
    symptom="Each gradient element is cut by itself: the direction changes, and the loss hardly.",
)
def elements_clipped_one_by_one() -> Iterator[None]:
    """Clipping by value where clipping by norm is meant."""

    def wrong(shards: list[nn.Parameter], largest_norm: float, _: float) -> None:
        nn.utils.clip_grad_value_(shards, largest_norm / 100)

    with patch.object(train, "clip_gradients", wrong):
        yield


@planted(
    "zero",
    "1x1x2",
    "loss",
    sabotaged="token_embedding",
    symptom="The loss never falls, and no gradient is zero.",
)
def optimizer_steps_on_copies() -> Iterator[None]:
    """The optimizer's tensors are copies of the weights: the model is stale after every step."""
    local = optimizer.local_tensor
    with patch.object(optimizer, "local_tensor", lambda x: local(x).clone()):
        yield


@planted(
    "optimizer",
    "1x1x1",
    "gradient norm",
    "step 2",
    sabotaged="gradient",
    symptom="The norm grows from step to step; a running sum of all batches is followed.",
)
def gradients_not_zeroed() -> Iterator[None]:
    """The gradients of the step before are added to."""
    with patch.object(Optimizer, "zero_grad", lambda _: None):
        yield


@planted(
    "optimizer",
    "1x1x1",
    "weight",
    sabotaged="update",
    symptom="The first step is right; then the steps of Adam are too large for a while.",
)
def step_count_forgotten() -> Iterator[None]:
    """Adam's bias correction takes every step for the first one, as after a careless resume."""
    step = Optimizer.step

    def wrong(self: Optimizer, learning_rate: float) -> None:
        for state in self.torch_optimizer.state.values():
            state["step"].zero_()
        step(self, learning_rate)

    with patch.object(Optimizer, "step", wrong):
        yield


@planted(
    "optimizer",
    "1x1x1",
    "exp_avg",
    "attention",
    sabotaged="blocks.0.attention.key.weight or blocks.0.attention.value.weight",
    symptom="After a resume the loss goes up a little and comes down again.",
)
def moments_of_another_weight() -> Iterator[None]:
    """State that is restored by position: of two weights of one shape, each gets the other's."""
    step = Optimizer.step

    def wrong(self: Optimizer, learning_rate: float) -> None:
        step(self, learning_rate)
        state = self.torch_optimizer.state
        a, b = (self.shards[f"blocks.0.attention.{name}.weight"] for name in ("key", "value"))
        state[a], state[b] = state[b], state[a]

    with patch.object(Optimizer, "step", wrong):
        yield


@planted(
    "zero",
    "1x1x2",
    "exp_avg",
    "mlp",
    sabotaged="blocks.*.mlp.*.weight",
    symptom="A resumed run needs some steps to find back to its loss, whatever mesh wrote it.",
)
def moments_of_another_shard() -> Iterator[None]:
    """After the first step the moments of the MLP's weights are those of the next rank's rows."""
    step = Optimizer.step

    def wrong(self: Optimizer, learning_rate: float) -> None:
        is_first = not self.torch_optimizer.state
        step(self, learning_rate)
        for name in self.shards:
            if is_first and name.endswith(("up.weight", "down.weight")):
                own = self.state(name)["exp_avg"]
                parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, own)
                own.copy_(parts[dist.get_rank() - 1])

    with patch.object(Optimizer, "step", wrong):
        yield


@planted(
    "optimizer",
    "1x1x1",
    "weight",
    sabotaged="update",
    symptom="SGD is slower to pick up speed: the effective learning rate is a tenth.",
    optimizer="sgd",
)
def momentum_dampened() -> Iterator[None]:
    """SGD's new gradients are multiplied by 1 - momentum, as Adam's are."""
    make = torch.optim.SGD

    def wrong(groups: Any, *, momentum: float, **options: Any) -> torch.optim.SGD:
        return make(groups, momentum=momentum, dampening=momentum, **options)

    with patch.object(torch.optim, "SGD", wrong):
        yield


@planted(
    "optimizer",
    "1x1x1",
    "exp_avg_sq",
    sabotaged="update",
    symptom="The second moment follows the wrong horizon: steps are noisier or slower.",
)
def decay_rates_exchanged() -> Iterator[None]:
    """The two decay rates of Adam are given in the wrong order."""
    make = torch.optim.AdamW

    def wrong(groups: Any, *, betas: tuple[float, float], **options: Any) -> torch.optim.AdamW:
        return make(groups, betas=betas[::-1], **options)

    with patch.object(torch.optim, "AdamW", wrong):
        yield
