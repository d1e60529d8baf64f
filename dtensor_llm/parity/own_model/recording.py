"""Records, in one step, the output of every module, its gradient, and those of the weights."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dtensor_llm.parity.own_model.task import Task, tensors_in
from dtensor_llm.parity.own_model.training import canonical, own_gradients, run_ranks, train, whole
from dtensor_llm.worlds import World

Key = tuple[str, int]
"""A module's name, and which of its tensors, counted over all its calls."""


@dataclass
class Recording:
    """What one device or one rank has in one step: whole tensors, or a rank's own part.

    Args:
        model: whose modules are watched.
        step: which, counted from 0.
        outputs: of every module.
        gradients: of the outputs.
        weights: the gradients of the parameters, each with the number 0.
    """

    model: nn.Module
    step: int
    outputs: dict[Key, Tensor] = field(default_factory=dict)
    gradients: dict[Key, Tensor] = field(default_factory=dict)
    weights: dict[Key, Tensor] = field(default_factory=dict)
    is_on: bool = False
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, module in self.model.named_modules():
            module.register_forward_hook(self.hook(canonical(name)))

    def hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def record(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
            if not self.is_on:
                return
            for x in tensors_in(outputs):
                key = (name, self.counts.setdefault(name, 0))
                self.counts[name] += 1
                self.outputs[key] = whole(x).clone()
                if x.requires_grad:
                    x.register_hook(self.keep_gradient(key))

        return record

    def keep_gradient(self, key: Key) -> Callable[[Tensor], None]:
        def keep(gradient: Tensor) -> None:
            self.gradients[key] = whole(gradient).clone()

        return keep

    def loss(self, task: Task) -> Callable[[nn.Module, Any], Tensor]:
        """The task's, recording in the step that is asked for: it is called once a step."""
        calls = 0

        def loss(model: nn.Module, batch: Any) -> Tensor:
            nonlocal calls
            self.is_on, calls = calls == self.step, calls + 1
            try:
                return task.loss(model, batch)
            finally:
                self.is_on = False  # what is computed again for the backward pass counts once

        return loss

    def on_gradients(self, step: int, _: Tensor) -> None:
        if step == self.step:
            own = own_gradients(self.model)
            self.weights = {(name, 0): whole(x).clone() for name, x in own.items()}

    def on_step(self, step: int) -> None:
        pass


def record(task: Task, step: int) -> tuple[Recording, list[Recording]]:
    """Of one device and of every rank."""
    steps = task.batches[: step + 1]
    model = copy.deepcopy(task.model)
    alone = Recording(model, step)
    optimizer = task.make_optimizer(model.parameters())
    train(model, optimizer, steps, alone.loss(task), alone)

    def on_rank(
        world: World, model: nn.Module, optimizer: torch.optim.Optimizer, at: Callable[[str], None]
    ) -> Recording:
        recording = Recording(model, step)
        batches = [task.own_batch(batch, world.rank) for batch in steps]
        train(model, optimizer, batches, recording.loss(task), recording, at)
        return recording

    return alone, run_ranks(task, on_rank)
