"""The reference of ZeRO trains as one device, and holds what its table says."""

import pytest
import torch

from parity_tests.test_reference_strategies import largest_error, make_batch, make_model
from reference import (
    training,
    zero,
)
from reference.model import Model, initial_weights
from reference.training import TrainingOptions


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("optimizer", "dp"), [("adamw", 2), ("adamw", 16), ("sgd", 4)])
def test_zero_trains_as_one_device(optimizer: str, dp: int, stage: int) -> None:
    options = make_model(dropout=0.1).options
    how = TrainingOptions(
        steps=4, lr=1e-3, clip_grad=0.1, seed=3, optimizer=optimizer, dtype="float64"
    )
    tokens, labels = make_batch()
    data = [make_batch(seed=1), (tokens, torch.full_like(labels, -100)), make_batch(seed=2)]
    expected = training.train(vars(options), vars(how), data)
    model = Model(options, initial_weights(options, how.seed, torch.float64))
    run = zero.train_steps(model, data, how, dp=dp, stage=stage, microbatches=16 // dp)
    assert run.losses == pytest.approx(expected.losses, rel=1e-12)
    assert run.gradient_norms == pytest.approx(expected.gradient_norms, rel=1e-12)
    assert run.tokens == expected.tokens
    assert run.learning_rates == expected.learning_rates
    largest = max(float(weight.abs().max()) for weight in expected.weights.values())
    for name, weight in expected.weights.items():
        assert (run.weights[name] - weight).abs().max() <= 1e-12 * largest, name
    for found, state in (
        (run.exp_avg, expected.exp_avg),
        (run.exp_avg_sq, expected.exp_avg_sq),
        (run.momentum, expected.momentum),
    ):
        assert not state or largest_error(found, state) <= 1e-12


@pytest.mark.parametrize("dp", [2, 4])
def test_zero_holds_what_its_table_says(dp: int) -> None:
    """In elements, where dp divides every number of rows: the 64 of the vocabulary and others."""
    model = make_model(vocab_size=64)
    all_of_it = sum(weight.numel() for weight in model.weights.values())
    tokens, labels = make_batch(64)
    how = TrainingOptions(steps=1, lr=1e-3, seed=3, dtype="float64")
    part = all_of_it // dp
    for stage, weights, gradients in (
        (1, all_of_it, all_of_it),
        (2, all_of_it, part),
        (3, part, part),
    ):
        ranks = zero.start(model.weights, dp, stage)
        pieces = zero.pieces_of(tokens, labels, None, dp, 2)
        _, owned = zero.STAGES[stage](ranks, model.options, pieces, 1)
        zero.optimizer_step(ranks, owned, how, 1e-3, stage)
        for rank in ranks:
            assert sum(x.numel() for x in rank.weights.values()) == weights
            assert sum(x.numel() for x in rank.gradients.values()) == gradients
            assert sum(x.numel() for x in rank.state.exp_avg.values()) == part


def test_zero_cuts_rows_and_leaves_the_last_ranks_fewer() -> None:
    shards = zero.shard({"a": torch.arange(5), "b": torch.arange(12)}, dp=4)
    assert [[own[name].tolist() for own in shards] for name in "ab"] == [
        [[0, 1], [2, 3], [4], []],
        [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]],
    ]
