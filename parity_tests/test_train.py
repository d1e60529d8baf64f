"""Trainer: evaluation is exact and changes nothing; what is not finite stops every rank alike."""

import dataclasses
import math
from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dtensor_llm import data
from dtensor_llm.config import Config
from dtensor_llm.train import StepResult, Trainer, TrainingError, Watcher, train
from dtensor_llm.worlds import World, threads
from parity_tests.harness import SECONDS, batches_for, small_config
from reference.model import ModelOptions, initial_weights
from reference.training import evaluate as evaluate_reference
from reference.training import options_from

MESHES = ["1x1x1", "1x1x2", "1x2x1", "2x2x2"]
BOUND = 1e-12


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> data.Dataset:
    """Random token ids below 61."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(61, (5000,), generator=generator)
    path = tmp_path_factory.mktemp("data") / "ids.bin"
    path.write_bytes(array("H", ids.tolist()).tobytes())
    corpus = data.load([str(path)], seq_len=8, global_batch_size=8, vocab_size=61)
    assert len(corpus.validation) > 19
    return corpus


def on_every_rank(config: Config, main: Callable[[World], Any]) -> list[Any]:
    return threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS)


# Evaluation


@pytest.mark.parametrize("max_samples", [19, 5])
@pytest.mark.parametrize("mesh", MESHES)
def test_evaluation_is_the_mean_over_all_tokens(
    mesh: str, max_samples: int, corpus: data.Dataset
) -> None:
    config = small_config(mesh, dropout=0.5)

    def main(world: World) -> tuple[float, int]:
        trainer = Trainer(config, world)
        return trainer.evaluate(corpus.evaluation_batches(8, trainer.samples, max_samples))

    results = on_every_rank(config, main)
    options = options_from(ModelOptions, dataclasses.asdict(config.model))
    weights = initial_weights(options, config.train.seed, torch.float64)
    whole = [(b.tokens, b.labels) for b in corpus.evaluation_batches(8, None, max_samples)]
    total, count = evaluate_reference(dataclasses.asdict(config.model), weights, whole)
    assert count == 8 * max_samples
    assert set(results) == {results[0]}, "every rank knows the same number"
    loss, num_tokens = results[0]
    assert num_tokens == count
    assert loss == pytest.approx(total / count, rel=BOUND)


def test_evaluation_of_one_token() -> None:
    config = small_config()
    batch = batches_for(config).batch(0)
    labels = torch.full_like(batch.labels, data.IGNORED_LABEL)
    labels[3, 2] = 7
    one = data.Batch(batch.tokens, labels, batch.sample_ids)

    def main(world: World) -> tuple[float, int]:
        return Trainer(config, world).evaluate(iter([one]))

    options = options_from(ModelOptions, dataclasses.asdict(config.model))
    weights = initial_weights(options, config.train.seed, torch.float64)
    model = dataclasses.asdict(config.model)
    total, count = evaluate_reference(model, weights, [(one.tokens, labels)])
    assert count == 1
    assert on_every_rank(config, main) == [(pytest.approx(total, rel=BOUND), 1)]


def test_nothing_to_evaluate_is_no_division_by_zero() -> None:
    config = small_config("1x1x2")
    results = on_every_rank(config, lambda world: Trainer(config, world).evaluate(iter([])))
    assert results == [(0.0, 0)] * 2


class Seen(Watcher):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.results: list[StepResult] = []
        self.evaluated: list[int] = []
        self.num_tokens: set[int] = set()

    def on_step(self, result: StepResult) -> None:
        self.results.append(result)

    def on_evaluation(self, steps_done: int, loss: float, num_tokens: int) -> None:
        assert loss > 0
        self.evaluated.append(steps_done)
        self.num_tokens.add(num_tokens)


@pytest.mark.parametrize("mesh", ["1x1x1", "1x2x2"])
def test_evaluation_does_not_change_training(mesh: str, corpus: data.Dataset) -> None:
    """Before the first step and after each: the same bits as without."""
    runs = []
    for eval_every in (0, 1):
        config = small_config(mesh, dropout=0.1, eval_every=eval_every, eval_samples=10)

        def main(world: World, config: Config = config) -> tuple[list[Any], dict[str, Tensor]]:
            trainer = Trainer(config, world)
            seen = Seen()
            train(trainer, corpus, [seen])
            assert seen.evaluated == ([0, 1, 2] if config.train.eval_every else [])
            assert seen.num_tokens <= {10 * config.model.seq_len}
            assert [result.step for result in seen.results] == [0, 1]
            return seen.results, {
                n: shard.detach() for n, shard in trainer.optimizer.shards.items()
            }

        runs.append(on_every_rank(config, main))
    for (results, weights), (expected_results, expected_weights) in zip(*runs, strict=True):
        assert results == expected_results
        for name, weight in weights.items():
            assert weight.equal(expected_weights[name]), name


# What is not finite


def bad_number_in(
    config: Config, rank: int, name: str, value: float
) -> list[tuple[str, dict[str, Tensor], dict[str, Tensor]]]:
    """Each rank's message, and weights before and after a step in which one gradient is bad."""

    def main(world: World) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
        trainer = Trainer(config, world)
        shards = trainer.optimizer.shards
        own_sum_of_squares = trainer.own_sum_of_squares

        def poisoned() -> Tensor:
            if world.rank == rank:
                spoiled = torch.zeros_like(shards[name])
                spoiled.view(-1)[-1] = value
                shards[name].grad = spoiled
            return own_sum_of_squares()

        trainer.own_sum_of_squares = poisoned  # type: ignore[method-assign] # on purpose
        before = {n: shard.detach().clone() for n, shard in shards.items()}
        batch = batches_for(config).batch(0, trainer.samples)
        with pytest.raises(TrainingError) as raised:
            trainer.step(4, batch.tokens, batch.labels)
        return str(raised.value), before, {n: shard.detach() for n, shard in shards.items()}

    return on_every_rank(config, main)


@pytest.mark.parametrize(
    ("mesh", "rank", "name", "value"),
    [
        ("1x1x1", 0, "blocks.0.mlp.up.weight", math.nan),
        ("1x1x2", 1, "blocks.0.mlp.up.weight", -math.inf),
        ("2x2x2", 5, "blocks.1.mlp.up.weight", math.nan),
        # Held by both tp ranks, and the second one does not count it in the norm.
        ("2x1x1", 1, "final_norm.weight", math.nan),
        ("2x1x1", 1, "final_norm.weight", math.inf),
        ("dp_replicate=2", 1, "blocks.0.mlp.up.weight", math.nan),
        # The last stage's copy of the tied embedding.
        ("1x2x1", 1, "token_embedding.weight", math.inf),
    ],
)
def test_bad_gradient_of_one_rank_stops_all(mesh: str, rank: int, name: str, value: float) -> None:
    for message, before, after in bad_number_in(small_config(mesh), rank, name, value):
        assert message.startswith("step 5: loss 4.")
        assert f"not finite first on rank {rank}, gradient of {name}; " in message
        for weight_name, weight in after.items():
            assert weight.equal(before[weight_name]), weight_name


def test_bad_weight_of_one_rank_stops_all() -> None:
    """Gathered by its peers, it spoils the loss itself."""
    config = small_config("2x2x2")

    def main(world: World) -> str:
        trainer = Trainer(config, world)
        if world.rank == 3:
            with torch.no_grad():
                trainer.optimizer.shards["blocks.0.mlp.up.weight"].fill_(math.nan)
        batch = batches_for(config).batch(0, trainer.samples)
        with pytest.raises(TrainingError) as raised:
            trainer.step(0, batch.tokens, batch.labels)
        return str(raised.value)

    messages = on_every_rank(config, main)
    assert len(set(messages)) == 1
    assert messages[0].startswith("step 1: loss nan, gradient norm nan; not finite first on rank 0")


@pytest.mark.parametrize("wrong", ["tokens", "labels"])
def test_other_rows_than_this_ranks_are_refused(wrong: str) -> None:
    config = small_config("1x1x2")

    def main(world: World) -> str:
        trainer = Trainer(config, world)
        batch, whole = (batches_for(config).batch(0, rows) for rows in (trainer.samples, None))
        given = {"tokens": batch.tokens, "labels": batch.labels, wrong: getattr(whole, wrong)}
        with pytest.raises(ValueError, match="not this rank's part of the batch") as raised:
            trainer.step(0, **given)
        return str(raised.value)

    first, second = on_every_rank(config, main)
    assert first.endswith("take the rows 0 to 3 (trainer.samples)")
    assert second.endswith("take the rows 4 to 7 (trainer.samples)")
