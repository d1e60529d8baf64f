"""The reference training loop against torch's optimizers, schedule by schedule and rule by rule."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from reference import training
from reference.model import Dropout, Model, ModelOptions, Weights, initial_weights, num_valid
from reference.training import (
    Batch,
    Run,
    TrainingOptions,
    decays,
    evaluate,
    learning_rate,
    loss_and_gradients,
    train,
)

MODEL = {
    "vocab_size": 31,
    "width": 16,
    "heads": 2,
    "layers": 2,
    "seq_len": 8,
    "init_std": 0.1,
    "unknown to the reference": 1,
}
TRAINING = {
    "steps": 6,
    "lr": 1e-3,
    "warmup_steps": 2,
    "clip_grad": 0.5,
    "seed": 3,
    "dtype": "float64",
    "micro_batch_size": 1,
}


def batches(count: int, size: int = 4) -> list[Batch]:
    """Random tokens; a third of the labels is ignored, all of the first sequence's."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        tokens = torch.randint(31, (size, 8), generator=generator)
        labels = torch.randint(31, (size, 8), generator=generator)
        labels[torch.rand(size, 8, generator=generator) < 0.3] = -100
        labels[0] = -100
        made.append((tokens, labels))
    return made


def errors(found: Weights, expected: Weights) -> dict[str, float]:
    """Of each tensor the largest difference, relative to the largest number of all tensors."""
    assert found.keys() == expected.keys()
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    return {n: float((found[n] - tensor).abs().max()) / scale for n, tensor in expected.items()}


def assert_equal_runs(found: Run, expected: Run, bound: float) -> None:
    for name in ("losses", "gradient_norms", "learning_rates"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=bound, abs=bound)
    assert found.tokens == expected.tokens
    for quantity in ("weights", "gradients", "exp_avg", "exp_avg_sq", "momentum"):
        if getattr(expected, quantity):
            largest = errors(getattr(found, quantity), getattr(expected, quantity))
            assert max(largest.values()) <= bound, (quantity, largest)


def train_with_torch(how: dict[str, Any], data: list[Batch]) -> tuple[Run, torch.optim.Optimizer]:
    """The same loop around torch's optimizer, clipping and scheduler."""
    options = TrainingOptions(**how)
    model_options = training.options_from(ModelOptions, MODEL)
    weights = initial_weights(model_options, options.seed, torch.float64)
    groups = [
        {
            "params": [w for name, w in weights.items() if decays(name) is wanted],
            "weight_decay": options.weight_decay if wanted else 0.0,
        }
        for wanted in (True, False)
    ]
    optimizer: torch.optim.Optimizer
    if options.optimizer == "adamw":
        betas = (options.beta1, options.beta2)
        optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=betas, eps=options.eps)
    else:
        optimizer = torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum)
    run = Run(weights)
    for step, (tokens, labels) in enumerate(data):
        model = Model(model_options, weights)
        loss, gradients = loss_and_gradients(model, tokens, labels, Dropout(options.seed, step))
        for name, weight in weights.items():
            weight.grad = gradients[name]
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), options.clip_grad or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, step)
        optimizer.step()
        run.losses.append(loss)
        run.gradient_norms.append(float(norm))
    return run, optimizer


@pytest.mark.parametrize("clip_grad", [0.5, None])
@pytest.mark.parametrize(("optimizer", "momentum"), [("adamw", 0.0), ("sgd", 0.9), ("sgd", 0.0)])
def test_equals_the_optimizers_of_torch(
    optimizer: str, momentum: float, clip_grad: float | None
) -> None:
    how = {
        "steps": 6,
        "lr": 1e-3,
        "warmup_steps": 2,
        "seed": 3,
        "dtype": "float64",
        "optimizer": optimizer,
        "momentum": momentum,
        "clip_grad": clip_grad,
    }
    data = batches(6)
    run = train(MODEL, how, data)
    expected, torch_optimizer = train_with_torch(how, data)
    assert run.losses == pytest.approx(expected.losses, rel=1e-12)
    assert run.gradient_norms == pytest.approx(expected.gradient_norms, rel=1e-12)
    assert max(errors(run.weights, expected.weights).values()) < 1e-12
    for ours, theirs in (
        ("exp_avg", "exp_avg"),
        ("exp_avg_sq", "exp_avg_sq"),
        ("momentum", "momentum_buffer"),
    ):
        state = {n: torch_optimizer.state[w].get(theirs) for n, w in expected.weights.items()}
        if state["final_norm.weight"] is None:
            assert getattr(run, ours) == {}
        else:
            assert max(errors(getattr(run, ours), state).values()) < 1e-12


def test_which_weights_decay() -> None:
    names = initial_weights(
        ModelOptions(layers=1, tied_embeddings=False), seed=0, dtype=torch.float32
    )
    assert [name for name in names if decays(name)] == [
        "token_embedding.weight",
        "position_embedding.weight",
        "blocks.0.attention.query.weight",
        "blocks.0.attention.key.weight",
        "blocks.0.attention.value.weight",
        "blocks.0.attention.output.weight",
        "blocks.0.mlp.up.weight",
        "blocks.0.mlp.down.weight",
        "head.weight",
    ]


def test_learning_rates_by_hand() -> None:
    how = TrainingOptions(steps=8, lr=1.0, warmup_steps=4, min_lr_ratio=0.2)
    cosine = [0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * part)) for part in (0, 0.25, 0.5, 0.75)]
    expected = [0.25, 0.5, 0.75, 1.0, *cosine]
    assert [learning_rate(how, step) for step in range(8)] == pytest.approx(expected, rel=1e-15)
    assert learning_rate(how, 8) == pytest.approx(0.2)


def test_learning_rate_equals_the_schedulers_of_torch() -> None:
    how = TrainingOptions(steps=20, lr=3e-3, warmup_steps=5, min_lr_ratio=0.1)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=how.lr)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 5, 1.0, total_iters=4)
    for step in range(5):
        assert learning_rate(how, step) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        warmup.step()
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 15, eta_min=how.lr * 0.1)
    for step in range(5, 20):
        assert learning_rate(how, step) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        cosine.step()


@pytest.mark.parametrize("limit", [0.1, 1e6])
def test_clipping_equals_that_of_torch(limit: float) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = {n: torch.randn(5, 7, generator=generator, dtype=torch.float64) for n in "abc"}
    weights = [torch.zeros(5, 7, dtype=torch.float64) for _ in "abc"]
    for weight, gradient in zip(weights, gradients.values(), strict=True):
        weight.grad = gradient.clone()
    expected_norm = torch.nn.utils.clip_grad_norm_(weights, limit)
    norm = training.gradient_norm(gradients)
    training.clip(gradients, norm, limit)
    assert norm == pytest.approx(float(expected_norm), rel=1e-14)
    for weight, gradient in zip(weights, gradients.values(), strict=True):
        torch.testing.assert_close(gradient, weight.grad, rtol=1e-14, atol=0)


@pytest.mark.parametrize("limit", [None, 0.0, -1.0])
def test_no_limit_no_clipping(limit: float | None) -> None:
    gradients = {"a": torch.full((3,), 100.0)}
    training.clip(gradients, 173.2, limit)
    assert gradients["a"].tolist() == [100.0] * 3


@pytest.mark.parametrize("microbatches", [1, 2])
def test_one_normalizer_for_uneven_microbatches(
    microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss sum of 3 over 1 token and one of 12 over 6 tokens make 15/7, not (3 + 2) / 2."""

    def given_sums(logits: Tensor, labels: Tensor) -> Tensor:
        sums = {1: 3.0, 6: 12.0}
        return logits.sum() * 0 + sum(sums[num_valid(row)] for row in labels)

    monkeypatch.setattr(training, "loss_sum", given_sums)
    labels = torch.full((2, 8), -100)
    labels[0, :1] = labels[1, :6] = 5
    options = training.options_from(ModelOptions, MODEL)
    model = Model(options, initial_weights(options, 0, torch.float64))
    loss, _ = loss_and_gradients(model, labels.clamp(min=0), labels, microbatches=microbatches)
    assert loss == pytest.approx(15 / 7, rel=1e-15)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("microbatches", "reverse"), [(2, False), (4, False), (4, True)])
def test_microbatches_change_nothing(microbatches: int, reverse: bool, dropout: float) -> None:
    model, data = {**MODEL, "dropout": dropout}, batches(3)
    whole = train(model, TRAINING, data)
    pieces = train(model, TRAINING, data, microbatches=microbatches, reverse=reverse)
    assert_equal_runs(pieces, whole, 1e-13)


def test_the_reversed_control_rounds_otherwise() -> None:
    forwards = train(MODEL, TRAINING, batches(2), microbatches=4)
    backwards = train(MODEL, TRAINING, batches(2), microbatches=4, reverse=True)
    assert any(not torch.equal(w, backwards.weights[n]) for n, w in forwards.weights.items())


def test_pieces_must_be_equal() -> None:
    with pytest.raises(ValueError, match="4 sequences cannot be cut into 3 equal pieces"):
        train(MODEL, TRAINING, batches(1), microbatches=3)


def test_dropout_is_reproducible_and_depends_on_seed_and_step() -> None:
    model, batch = {**MODEL, "dropout": 0.2}, batches(1)
    still = {**TRAINING, "lr": 0.0}
    first, again = train(model, still, batch * 3), train(model, still, batch * 3)
    assert first.losses == again.losses
    assert len(set(first.losses)) == 3
    assert train(model, {**still, "seed": 4}, batch).losses[0] != first.losses[0]
    assert len(set(train(MODEL, still, batch * 3).losses)) == 1


def test_a_batch_without_labels_moves_nothing() -> None:
    (tokens, labels), *_ = data = batches(2)
    empty = (tokens, torch.full_like(labels, -100))
    run = train(MODEL, TRAINING, [data[0], empty, data[1]])
    assert run.losses[1] == run.gradient_norms[1] == run.tokens[1] == 0
    assert run.optimizer.updates == 2
    before = train(MODEL, TRAINING, [data[0]])
    after = train(MODEL, TRAINING, [data[0], empty])
    for name, weight in before.weights.items():
        assert torch.equal(after.weights[name], weight)
        assert torch.equal(after.exp_avg[name], before.exp_avg[name])


def test_a_perturbation_is_felt() -> None:
    def plant(step: int, _weights: Weights, gradients: Weights) -> None:
        if step == 1:
            gradients["final_norm.weight"].mul_(2)

    clean = train(MODEL, TRAINING, batches(3))
    wrong = train(MODEL, TRAINING, batches(3), perturb=plant)
    assert wrong.gradient_norms[0] == clean.gradient_norms[0]
    assert wrong.gradient_norms[1] > clean.gradient_norms[1]
    assert errors(wrong.weights, clean.weights)["final_norm.weight"] > 1e-6


def test_gradients_are_kept_before_clipping() -> None:
    run = train(MODEL, TRAINING, batches(3), tensors_of=(0, 2))
    assert list(run.tensors_at) == [0, 2]
    assert run.gradients is run.tensors_at[0]["gradient"]
    for step, tensors in run.tensors_at.items():
        norm = training.gradient_norm(tensors["gradient"])
        assert norm == pytest.approx(run.gradient_norms[step])
    assert run.gradient_norms[0] > TRAINING["clip_grad"]


def test_evaluation_sums_over_any_batches() -> None:
    tokens, labels = batches(1)[0]
    weights = train(MODEL, TRAINING, batches(1)).weights
    model = {**MODEL, "dropout": 0.5}
    total, count = evaluate(model, weights, [(tokens, labels)])
    halves = evaluate(model, weights, [(tokens[:1], labels[:1]), (tokens[1:], labels[1:])])
    assert count == halves[1] == num_valid(labels)
    assert halves[0] == pytest.approx(total, rel=1e-14)
    options = training.options_from(ModelOptions, MODEL)
    assert total / count == pytest.approx(
        loss_and_gradients(Model(options, weights), tokens, labels)[0], rel=1e-14
    )


def test_training_learns() -> None:
    run = train(MODEL, {**TRAINING, "steps": 40, "lr": 1e-2}, batches(1) * 40)
    assert run.losses[0] == pytest.approx(math.log(31), rel=0.1)
    assert run.losses[-1] < run.losses[0] / 4


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 5e-2)])
def test_other_precisions(dtype: str, bound: float) -> None:
    exact = train(MODEL, TRAINING, batches(3))
    run = train(MODEL, {**TRAINING, "dtype": dtype}, batches(3))
    for tensors in (run.weights, run.gradients, run.exp_avg, run.exp_avg_sq):
        assert {tensor.dtype for tensor in tensors.values()} == {getattr(torch, dtype)}
    assert run.losses == pytest.approx(exact.losses, rel=bound)
    assert run.losses != exact.losses


def test_options_come_from_any_dataclass_with_more_fields() -> None:
    @dataclasses.dataclass
    class LibraryConfig:
        steps: int = 7
        global_batch_size: int = 64

    options = training.options_from(TrainingOptions, dataclasses.asdict(LibraryConfig()))
    assert options == TrainingOptions(steps=7)
