"""Faults of random numbers: initial weights and dropout that depend on the mesh, or repeat."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtensor_llm import initialize, parallelize, rng, train
from dtensor_llm.config import ModelConfig
from dtensor_llm.model import GPT, Dropout
from dtensor_llm.parallel import pipeline_parallel
from parity_tests.faults.checks import check_evaluation
from parity_tests.faults.fault import fault

planted = partial(fault, "randomness")


def filling(
    weights: Callable[[GPT], Mapping[str, nn.Parameter]] = GPT.weights,
    config: Callable[[GPT], ModelConfig] = lambda model: model.config,
) -> Any:
    """`initialize` that is told other names, or another configuration."""
    fill = parallelize.initialize

    def wrong(model: GPT, seed: int) -> None:
        told = SimpleNamespace(
            weights=lambda: weights(model), copies=model.copies, config=config(model)
        )
        fill(told, seed)  # type: ignore[arg-type] # what it reads of a GPT

    return patch.object(parallelize, "initialize", wrong)


def numbered_within_the_stage(model: GPT, name: str) -> str:
    """`blocks.5.mlp` is `blocks.1.mlp` where the stage begins with block 4."""
    first = min(map(int, model.blocks))
    return re.sub(r"(?<=blocks\.)\d+", lambda number: str(int(number[0]) - first), name)


@planted(
    "zero",
    "1x1x2",
    "loss",
    sabotaged="token_embedding",
    symptom="The rows of every weight repeat after 1/dp of them; the model is as good as smaller.",
)
def every_rank_draws_the_first_shard() -> Iterator[None]:
    """Each rank fills its shard with the numbers that belong to the first one."""
    where = initialize.local_slice

    def first(x: Tensor) -> tuple[slice, ...]:
        return tuple(slice(0, s.stop - s.start) for s in where(x))

    with patch.object(initialize, "local_slice", first):
        yield


@planted(
    "data_parallel",
    "1x1x2",
    "loss",
    sabotaged="token_embedding",
    symptom="The ranks train different models on one gradient; the saved one is the first rank's.",
    zero=0,
)
def replicas_start_unequal() -> Iterator[None]:
    """Each data-parallel rank draws its copy of the weights from a seed of its own."""
    fill = parallelize.initialize

    def wrong(model: GPT, seed: int) -> None:
        fill(model, seed + dist.get_rank())

    with patch.object(parallelize, "initialize", wrong):
        yield


@planted(
    "pipeline_parallel",
    "1x2x1",
    "loss",
    sabotaged="blocks.1.*",
    symptom="Block k of every stage begins with the same weights.",
)
def stages_repeat_their_weights() -> Iterator[None]:
    """Layers are numbered within the stage where their weights are drawn."""

    def weights(model: GPT) -> dict[str, nn.Parameter]:
        return {numbered_within_the_stage(model, n): p for n, p in model.weights().items()}

    with filling(weights):
        yield


@planted(
    "pipeline_parallel",
    "1x2x1",
    "loss",
    sabotaged="blocks.*",
    symptom="The residual stream grows with the number of stages; deep models diverge early.",
)
def residual_deviation_of_the_stage() -> Iterator[None]:
    """The scale of residual projections counts the layers of the stage, not of the model."""

    def config(model: GPT) -> ModelConfig:
        return replace(model.config, layers=len(model.blocks))

    with filling(config=config):
        yield


@planted(
    "pipeline_parallel",
    "1x2x1",
    "loss",
    sabotaged="head",
    symptom="Embedding and head are called tied, and are not; nothing else is to be seen.",
    tied_embeddings=True,
)
def tied_copies_start_unequal() -> Iterator[None]:
    """The last stage draws its copy of the tied embedding under the name of the head."""
    with filling(lambda model: dict(model.named_parameters())):
        yield


@planted(
    "sequence_parallel",
    "2x1x1",
    "loss",
    sabotaged="embedding_dropout",
    symptom="Nothing: the loss is that of another mask, and dropout works half as well.",
    dropout=0.2,
)
def dropout_mask_repeated_by_every_rank() -> Iterator[None]:
    """The tp ranks drop the same elements of their different shards."""
    shard = Dropout.shard

    def first(self: Dropout, dim: int, _: int, count: int) -> None:
        shard(self, dim, 0, count)

    with patch.object(Dropout, "shard", first):
        yield


@planted(
    "tensor_parallel",
    "2x1x1",
    "loss",
    sabotaged="embedding_dropout",
    symptom="Activations that should be equal on all tp ranks are not, and gradients are of no "
    "function at all.",
    sequence_parallel=False,
    dropout=0.2,
)
def dropout_differs_between_tp_ranks() -> Iterator[None]:
    """The seed of dropout has the rank in it, also where all tp ranks hold the same activations."""
    choose = GPT.set_dropout

    def wrong(self: GPT, *, seed: int, step: int) -> None:
        choose(self, seed=seed + dist.get_rank(), step=step)

    with patch.object(GPT, "set_dropout", wrong):
        yield


@planted(
    "data_parallel",
    "1x1x2",
    "loss",
    sabotaged="embedding_dropout",
    symptom="Nothing: the loss is that of another mask.",
    dropout=0.2,
)
def dropout_mask_repeated_over_dp() -> Iterator[None]:
    """Every data-parallel rank takes its sequences for the first of the global batch."""

    def wrong(self: train.Trainer, device: torch.device) -> Tensor:
        return torch.arange(self.samples.stop - self.samples.start, device=device)

    with patch.object(train.Trainer, "places", wrong):
        yield


@planted(
    "train",
    "1x1x1",
    "loss",
    sabotaged="embedding_dropout",
    symptom="Nothing: the loss is that of another mask, and changes with the microbatch's size.",
    dropout=0.2,
    micro_batch_size=2,
)
def dropout_mask_repeated_by_every_microbatch() -> Iterator[None]:
    """Each microbatch draws the mask of the first."""
    cut = train.Trainer.microbatches

    def wrong(self: train.Trainer, *batch: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        pieces = list(cut(self, *batch))
        return ((x, y, pieces[0][2]) for x, y, _ in pieces)

    with patch.object(train.Trainer, "microbatches", wrong):
        yield


@planted(
    "train",
    "1x1x1",
    "loss",
    "step",
    sabotaged="embedding_dropout",
    symptom="The first step is right; then a fixed part of the network never trains.",
    dropout=0.2,
)
def dropout_mask_never_changes() -> Iterator[None]:
    """The key of dropout lacks the step."""
    choose = GPT.set_dropout

    def wrong(self: GPT, *, seed: int, step: int) -> None:
        choose(self, seed=seed, step=0 * step)

    with patch.object(GPT, "set_dropout", wrong):
        yield


@planted(
    "model",
    "2x1x1",
    "loss",
    sabotaged="embedding_dropout",
    symptom="Nothing: whole columns of the residual stream are dropped in every layer at once.",
    dropout=0.2,
)
def dropout_sites_share_a_stream() -> Iterator[None]:
    """All sites draw from one stream, so that masks of one shape are equal."""
    build = Dropout.__init__

    def wrong(self: Dropout, _: str, rate: float, shape: tuple[int, ...]) -> None:
        build(self, "dropout", rate, shape)

    with patch.object(Dropout, "__init__", wrong):
        yield


@planted(
    "pipeline_parallel",
    "1x2x1",
    "loss",
    sabotaged="blocks.1.*",
    symptom="Nothing: block k of every stage drops what block k of the others drops.",
    dropout=0.2,
)
def dropout_sites_numbered_within_the_stage() -> Iterator[None]:
    """The name of a dropout site has the layer's number in its stage."""
    build = pipeline_parallel.build_stages

    def wrong(*args: Any) -> GPT:
        stage = build(*args)
        for module in stage.modules():
            if isinstance(module, Dropout):
                module.site = numbered_within_the_stage(stage, module.site)
        return stage

    with patch.object(pipeline_parallel, "build_stages", wrong):
        yield


@planted(
    "model",
    "1x1x1",
    "loss",
    sabotaged="embedding_dropout",
    symptom="Evaluation is far better than training, or worse: activations are larger there.",
    dropout=0.2,
)
def kept_elements_not_scaled() -> Iterator[None]:
    """What dropout keeps is not divided by 1 - rate."""
    draw = rng.keep_mask

    def wrong(*args: Any) -> Tensor:
        return draw(*args).sign()

    with patch.object(rng, "keep_mask", wrong):
        yield


@planted(
    "model",
    "2x1x1",
    "evaluation loss",
    sabotaged="embedding_dropout",
    symptom="The validation loss is too high, and falls when dropout is switched off.",
    check=check_evaluation,
    dropout=0.2,
)
def dropout_during_evaluation() -> Iterator[None]:
    """The model is left in training mode where it is evaluated."""
    with patch.object(GPT, "eval", lambda self: self):
        yield
