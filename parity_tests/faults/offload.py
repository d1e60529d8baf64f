"""Faults of weights and state that lie elsewhere: on the host, or gathered from other ranks."""

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from dtensor_llm.offload import HostOptimizerMemory
from dtensor_llm.optimizer import Optimizer, is_decayed
from dtensor_llm.parallel import zero
from parity_tests.faults.fault import fault

planted = partial(fault, "optimizer", "offload")


@planted(
    "1x1x2",
    "weight",
    "norm",
    sabotaged="*norm.* or *.bias",
    symptom="Norms and biases never move on the device; their moments on the host look alive.",
    offload="optimizer",
    steps=3,
)
def one_group_stays_on_the_host() -> Iterator[None]:
    """The new weights of the group without weight decay are not copied back."""

    @torch.no_grad()
    def wrong(self: HostOptimizerMemory) -> None:
        for name, twin in self.twins.items():
            if is_decayed(name):
                self.shards[name].copy_(twin)

    with patch.object(HostOptimizerMemory, "give_weights", wrong):
        yield


@planted(
    "1x1x2",
    "exp_avg",
    sabotaged="update",
    symptom="Training is a step late: a little worse, and worse the higher the rate.",
    offload="optimizer",
)
def gradients_read_before_they_arrive() -> Iterator[None]:
    """The host steps without waiting for the copy: its buffers hold the step before."""
    take = HostOptimizerMemory.take_gradients

    def wrong(self: HostOptimizerMemory) -> None:
        arrived = getattr(self, "arrived", {})
        take(self)
        current = {name: twin.grad for name, twin in self.twins.items()}
        for name, twin in self.twins.items():
            twin.grad = arrived.get(name, torch.zeros_like(twin))
        self.arrived = {name: x.clone() for name, x in current.items()}  # type: ignore[attr-defined, union-attr] # kept for the next step; there is one after take

    with patch.object(HostOptimizerMemory, "take_gradients", wrong):
        yield


@planted(
    "1x1x2",
    "exp_avg",
    sabotaged="update",
    symptom="Steps follow the newest gradient: the loss is noisier, as with smaller betas.",
    offload="optimizer",
)
def moments_of_the_step_before() -> Iterator[None]:
    """Of two host buffers for the moments, the one that the last step has not written is kept."""
    step = Optimizer.step

    def wrong(self: Optimizer, learning_rate: float) -> None:
        before = {
            name: {key: x.clone() for key, x in self.state(name).items()} for name in self.stepped
        }
        step(self, learning_rate)
        for name, old in before.items():
            for key, value in old.items():
                if key != "step":
                    self.state(name)[key].copy_(value)

    with patch.object(Optimizer, "step", wrong):
        yield


@planted(
    "1x1x2",
    "weight",
    sabotaged="update",
    symptom="The first loss is right; then the model is as good as untrained, at any rate.",
    offload="optimizer",
)
def host_weights_copied_before_they_were_loaded() -> Iterator[None]:
    """The host's copy of the weights is of the time before they were drawn, or restored."""

    @torch.no_grad()
    def wrong(self: HostOptimizerMemory) -> None:
        for twin in self.twins.values():
            twin.zero_()

    with patch.object(HostOptimizerMemory, "take_weights", wrong):
        yield


@fault(
    "forward",
    "zero",
    "1x1x2",
    "loss",
    sabotaged="token_embedding",
    symptom="The loss never falls: every step computes with the first weights.",
    reshard_after_forward=False,
)
def gathered_weights_outlive_the_step() -> Iterator[None]:
    """What was gathered is kept over the update, as if weights changed under it."""
    apply = zero.apply

    def wrong(model: Any, *args: Any, **options: Any) -> None:
        apply(model, *args, **options)
        model.set_reshard_after_backward(False)

    with patch.object(zero, "apply", wrong):
        yield
