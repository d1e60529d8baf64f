"""Training on one device: the loop that every mesh has to equal. No optimizer of torch is used.

One step of a global batch:

    loss        sum of the token losses / number of valid labels in the global batch
    gradients   of that loss; microbatches add theirs up, each divided by the same number
    norm        square root of the sum of squares over all parameters, a tied weight once
    clipping    gradients times min(1, clip_grad / (norm + 1e-6))
    update      AdamW, or SGD with momentum, at the learning rate of the step
    no label    in the global batch: loss 0, nothing moves

In bfloat16 weights, gradients and optimizer state are all bfloat16.

Papers: Loshchilov and Hutter, arXiv 1711.05101, algorithm 2 (AdamW; as torch.optim has it, the
decay is multiplied by the learning rate); arXiv 1608.03983 (the cosine).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from reference.model import (
    Dropout,
    Model,
    ModelOptions,
    Watch,
    Weights,
    forward,
    initial_weights,
    loss_sum,
    num_valid,
    seen,
    watching,
    widen,
)

Batch = tuple[Tensor, Tensor]
Gradients = dict[str, Tensor]
Perturb = Callable[[int, Weights, Gradients], None]
OptionsT = TypeVar("OptionsT")


@dataclass(frozen=True)
class TrainingOptions:
    """How to train; `steps` sets the length of the learning-rate schedule."""

    steps: int
    lr: float = 1e-3
    weight_decay: float = 0.1
    warmup_steps: int = 0
    clip_grad: float | None = 1.0
    seed: int = 0
    optimizer: Literal["adamw", "sgd"] = "adamw"
    momentum: float = 0.9
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    min_lr_ratio: float = 0.1
    dtype: str = "float32"


@dataclass
class OptimizerState:
    """What the optimizer remembers, by name of parameter; empty where it has no use for it."""

    updates: int = 0
    exp_avg: Weights = field(default_factory=dict)
    exp_avg_sq: Weights = field(default_factory=dict)
    momentum: Weights = field(default_factory=dict)


@dataclass
class Run:
    """What a training run came to: one entry a step, and the state after the last step.

    `tensors_at` has, for each step asked for, what it made, by quantity: the gradient before
    clipping, and after the update the weight and exp_avg, exp_avg_sq or momentum.
    """

    weights: Weights
    optimizer: OptimizerState = field(default_factory=OptimizerState)
    losses: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    tensors_at: dict[int, dict[str, Weights]] = field(default_factory=dict)

    @property
    def gradients(self) -> Gradients:
        """The gradients of the first of the steps asked for; empty if none was."""
        return self.tensors_at[min(self.tensors_at)]["gradient"] if self.tensors_at else {}

    @property
    def exp_avg(self) -> Weights:
        return self.optimizer.exp_avg

    @property
    def exp_avg_sq(self) -> Weights:
        return self.optimizer.exp_avg_sq

    @property
    def momentum(self) -> Weights:
        return self.optimizer.momentum


def train(
    model: Mapping[str, Any],
    training: Mapping[str, Any],
    batches: Sequence[Batch],
    *,
    tensors_of: Sequence[int] | None = None,
    microbatches: int = 1,
    reverse: bool = False,
    perturb: Perturb | None = None,
    watch: Mapping[int, Watch] | None = None,
) -> Run:
    """Train from initial weights, one step for each batch.

    Args:
        model: values for ModelOptions; keys that it lacks are ignored.
        training: values for TrainingOptions; keys that it lacks are ignored.
        batches: for each step the global batch: tokens and labels, both int64 b t; label [i, j] is
            the token after token [i, j], -100 where it does not count.
        tensors_of: the steps, from 0, whose tensors to keep; None keeps those of all.
        microbatches: accumulate over so many equal pieces of each batch.
        reverse: take the pieces from last to first. The rounding differs, nothing else: the
            control for what float64 can tell apart.
        perturb: called with (step, weights, gradients) before the norm is taken; may change both
            in place, to plant a fault.
        watch: by step, from 0, who is told every weight before it and every value on the way from
            tokens to loss: see `reference.model.seen`. With one microbatch each name comes once.
    """
    how = options_from(TrainingOptions, training)
    options = options_from(ModelOptions, model)
    weights = initial_weights(options, how.seed, getattr(torch, how.dtype))
    run = Run(weights)
    for step, (tokens, labels) in enumerate(batches):
        with watching((watch or {}).get(step)):
            loss, gradients = loss_and_gradients(
                Model(options, {name: seen(name, weight) for name, weight in weights.items()}),
                tokens,
                labels,
                Dropout(how.seed, step),
                microbatches=microbatches,
                reverse=reverse,
            )
        if perturb is not None:
            perturb(step, weights, gradients)
        run.losses.append(loss)
        run.tokens.append(num_valid(labels))
        run.gradient_norms.append(gradient_norm(gradients))
        run.learning_rates.append(learning_rate(how, step))
        unclipped = copied(gradients)
        if run.tokens[-1] > 0:
            clip(gradients, run.gradient_norms[-1], how.clip_grad)
            update(weights, gradients, run.optimizer, how, run.learning_rates[-1])
        if tensors_of is None or step in tensors_of:
            run.tensors_at[step] = {"gradient": unclipped, **state_of(run)}
    return run


def state_of(run: Run) -> dict[str, Weights]:
    """A copy of weights and optimizer state, by quantity; only what the optimizer has."""
    optimizer = run.optimizer
    tensors = {
        "weight": run.weights,
        "exp_avg": optimizer.exp_avg,
        "exp_avg_sq": optimizer.exp_avg_sq,
        "momentum": optimizer.momentum,
    }
    return {quantity: copied(named) for quantity, named in tensors.items() if named}


def copied(tensors: Weights) -> Weights:
    return {name: x.clone() for name, x in tensors.items()}


def evaluate(
    model: Mapping[str, Any], weights: Weights, batches: Sequence[Batch]
) -> tuple[float, int]:
    """Sum of the token losses and number of valid labels over all batches, without dropout."""
    evaluated = Model(options_from(ModelOptions, model), weights)
    with torch.no_grad():
        total = sum(
            float(loss_sum(forward(evaluated, tokens), labels)) for tokens, labels in batches
        )
    return total, sum(num_valid(labels) for _, labels in batches)


def loss_and_gradients(
    model: Model,
    tokens: Tensor,
    labels: Tensor,
    dropout: Dropout | None = None,
    *,
    microbatches: int = 1,
    reverse: bool = False,
) -> tuple[float, Gradients]:
    """The mean loss of a global batch and its gradient; what every strategy must find again."""
    weights = leaves(model.weights)
    total = max(1, num_valid(labels))
    pieces = list(split_batch(tokens, labels, dropout, microbatches))
    loss = 0.0
    for own_tokens, own_labels, own_dropout in reversed(pieces) if reverse else pieces:
        logits = forward(Model(model.options, weights), own_tokens, own_dropout)
        own_loss = loss_sum(logits, own_labels) / total
        own_loss.backward()
        loss += own_loss.item()
    return loss, gradients_of_leaves(weights)


def split_batch(
    tokens: Tensor, labels: Tensor, dropout: Dropout | None, count: int
) -> Iterator[tuple[Tensor, Tensor, Dropout | None]]:
    """Cut a batch into equal pieces; each keeps its sequences' places in the global batch."""
    if len(tokens) % count:
        raise ValueError(f"{len(tokens)} sequences cannot be cut into {count} equal pieces")
    size = len(tokens) // count
    for start in range(0, len(tokens), size):
        own = slice(start, start + size)
        yield tokens[own], labels[own], dropout and dropout.starting_at(start)


def leaves(weights: Weights) -> Weights:
    """Copies that gather their own gradients: a device's own weights."""
    return {name: w.detach().clone().requires_grad_() for name, w in weights.items()}


def gradients_of_leaves(weights: Weights) -> Gradients:
    """What backward passes have added up, zero where none reached the weight."""
    return {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in weights.items()}


def gradient_norm(gradients: Gradients) -> float:
    return math.sqrt(sum(float(widen(g).square().sum()) for g in gradients.values()))


def clip(gradients: Gradients, norm: float, limit: float | None) -> None:
    """Scale gradients down, in place, to a norm of at most `limit`; None and 0 are no limit."""
    if limit is None or limit <= 0:
        return
    for gradient in gradients.values():
        gradient.mul_(min(1.0, limit / (norm + 1e-6)))


def learning_rate(how: TrainingOptions, step: int) -> float:
    """Linear over the first warmup_steps, then half a cosine down to min_lr_ratio of the peak."""
    if step < how.warmup_steps:
        return how.lr * (step + 1) / how.warmup_steps
    progress = (step - how.warmup_steps) / max(1, how.steps - how.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return how.lr * (how.min_lr_ratio + (1 - how.min_lr_ratio) * cosine)


def decays(name: str) -> bool:
    """Weight decay is for the weights of linears and embeddings."""
    return name.endswith(".weight") and "norm" not in name


def update(
    weights: Weights, gradients: Gradients, state: OptimizerState, how: TrainingOptions, lr: float
) -> None:
    """One step of the optimizer, in place."""
    state.updates += 1
    for name, weight in weights.items():
        decay = how.weight_decay if decays(name) else 0.0
        if how.optimizer == "adamw":
            _adamw(name, weight, gradients[name], state, how, lr, decay)
        else:
            _sgd(name, weight, gradients[name], state, how, lr, decay)


def _adamw(
    name: str,
    weight: Tensor,
    gradient: Tensor,
    state: OptimizerState,
    how: TrainingOptions,
    lr: float,
    decay: float,
) -> None:
    mean = state.exp_avg.setdefault(name, torch.zeros_like(weight))
    square = state.exp_avg_sq.setdefault(name, torch.zeros_like(weight))
    mean.mul_(how.beta1).add_(gradient * (1 - how.beta1))
    square.mul_(how.beta2).add_(gradient.square() * (1 - how.beta2))
    # Both averages start at zero; these undo their pull towards it.
    true_mean = mean / (1 - how.beta1**state.updates)
    true_square = square / (1 - how.beta2**state.updates)
    weight -= lr * (decay * weight + true_mean / (true_square.sqrt() + how.eps))


def _sgd(
    name: str,
    weight: Tensor,
    gradient: Tensor,
    state: OptimizerState,
    how: TrainingOptions,
    lr: float,
    decay: float,
) -> None:
    slope = gradient + decay * weight
    if how.momentum:
        velocity = state.momentum.get(name)
        slope = slope if velocity is None else how.momentum * velocity + slope
        state.momentum[name] = slope
    weight -= lr * slope


def options_from(kind: type[OptionsT], values: Mapping[str, Any]) -> OptionsT:
    """A dataclass from those of the values that it has a field for."""
    names = {entry.name for entry in fields(kind)}  # type: ignore[arg-type]  # no bound for dataclasses
    return kind(**{name: value for name, value in values.items() if name in names})
