"""Learning rate, decay groups, the gradient norm over any mix of placements, clipping, stepping."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dtensor_llm.config import Config, TrainConfig
from dtensor_llm.model import GPT
from dtensor_llm.optimizer import (
    Optimizer,
    clip_gradients,
    is_decayed,
    learning_rate,
    make_optimizer,
    sum_of_squares,
)
from dtensor_llm.plan import local_tensor
from dtensor_llm.train import Trainer
from dtensor_llm.worlds import World, threads
from parity_tests.harness import LLAMA, SECONDS, batches_for, parity, small_config
from reference.model import ModelOptions, initial_weights
from reference.training import options_from

MESHES = [
    "1x1x1",
    "2x1x1",
    "1x2x1",
    "1x1x2",
    "1x1x8",
    "2x1x2",
    "2x2x2",
    "dp_replicate=2,dp_shard=2",
    "tp=2,dp_replicate=2,dp_shard=2",
]
BOUND = 1e-12


# Learning rate


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 1.0),  # warm-up: the steps are thirds of the peak
        (1, 2.0),
        (2, 3.0),
        (3, 3.0),  # the cosine begins at the peak
        (4, 0.3 + 2.7 * (1 + math.sqrt(0.5)) / 2),
        (5, 0.3 + 2.7 / 2),
        (6, 0.3 + 2.7 * (1 - math.sqrt(0.5)) / 2),
    ],
)
def test_learning_rate(step: int, expected: float) -> None:
    config = TrainConfig(steps=7, lr=3.0, warmup_steps=3, min_lr_ratio=0.1)
    assert learning_rate(config, step) == pytest.approx(expected, rel=1e-15)


def test_learning_rate_with_other_settings() -> None:
    by_default = TrainConfig(steps=100, lr=1.0)
    assert [learning_rate(by_default, step) for step in (0, 8, 9, 10)] == [0.1, 0.9, 1.0, 1.0]
    at_once = TrainConfig(steps=4, lr=1.0, warmup_steps=0, min_lr_ratio=0.0)
    assert [learning_rate(at_once, step) for step in (0, 2)] == [1.0, 0.5]
    never_there = TrainConfig(steps=2, lr=1.0, warmup_steps=8)
    assert [learning_rate(never_there, step) for step in (0, 1)] == [0.125, 0.25]
    just_there = TrainConfig(steps=3, lr=1.0, warmup_steps=3)
    assert [learning_rate(just_there, step) for step in (1, 2, 3)] == [2 / 3, 1.0, 1.0]
    constant = TrainConfig(steps=9, lr=1.0, warmup_steps=0, min_lr_ratio=1.0)
    assert {learning_rate(constant, step) for step in range(9)} == {1.0}


# Weight decay


def decay_of(optimizer: Optimizer) -> dict[str, float]:
    """Weight decay by name of parameter, as torch's optimizer has it."""
    names = {id(shard): name for name, shard in optimizer.shards.items()}
    groups = optimizer.torch_optimizer.param_groups
    return {names[id(p)]: group["weight_decay"] for group in groups for p in group["params"]}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("family", [{}, LLAMA], ids=["gpt2", "llama"])
def test_matrices_decay_and_norms_and_biases_do_not(family: dict[str, Any], optimizer: str) -> None:
    config = small_config(optimizer=optimizer, weight_decay=0.25, **family)
    model = GPT(config.model)
    matrices = {name for name, weight in model.weights().items() if weight.ndim == 2}
    expected = {name: 0.25 if name in matrices else 0.0 for name in model.weights()}
    assert decay_of(Optimizer(model, config.train)) == expected
    assert {name for name in expected if is_decayed(name)} == matrices
    assert "final_norm.weight" in expected.keys() - matrices


# Gradient norm


def on_every_rank(config: Config, main: Callable[[World], Any]) -> list[Any]:
    return threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [(mesh, {}) for mesh in MESHES]
    + [(mesh, {"zero": 0}) for mesh in ("1x1x2", "2x1x2", "tp=2,dp_replicate=2,dp_shard=2")]
    + [("2x2x2", LLAMA)],
)
def test_norm_counts_every_element_once(mesh: str, options: dict[str, Any]) -> None:
    """The norm of one device, where the gradients are the initial weights plus one."""
    config = small_config(mesh, **options)
    model = options_from(ModelOptions, dataclasses.asdict(config.model))
    whole = initial_weights(model, config.train.seed, torch.float64)
    expected = sum((weight + 1).square().sum().item() for weight in whole.values())

    def main(world: World) -> float:
        trainer = Trainer(config, world)
        for shard in trainer.optimizer.shards.values():
            shard.grad = shard.detach() + 1
        _, squares = trainer.sum_over_ranks(torch.zeros(()), trainer.own_sum_of_squares())
        return squares.item()

    found = on_every_rank(config, main)
    assert set(found) == {found[0]}
    assert found[0] == pytest.approx(expected, rel=BOUND)


def test_the_meshes_above_mix_every_kind_of_placement() -> None:
    def kinds(mesh: str) -> set[object]:
        def main(world: World) -> set[object]:
            weights = Trainer(small_config(mesh), world).optimizer.weights.values()
            placed = [w.placements if isinstance(w, DTensor) else ("plain",) for w in weights]
            return {p if isinstance(p, str) else type(p) for group in placed for p in group}

        return on_every_rank(small_config(mesh), main)[0]

    assert kinds("1x2x1") == {"plain"}
    assert kinds("2x1x1") == {Replicate, Shard}
    assert kinds("tp=2,dp_replicate=2,dp_shard=2") == {Replicate, Shard, _StridedShard}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_squares_add_up_in_float64(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = ((500, 2), (0, 3), (37,), (2**20,))  # of the last, torch's sum in float32 is 2e-5 off
    tensors = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    expected = sum(x.double().square().sum().item() for x in tensors)
    found = sum_of_squares(tensors)
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(expected, rel=BOUND)
    assert sum_of_squares([]).item() == 0.0


# Clipping


@pytest.mark.parametrize(
    ("largest", "factor"),
    [*((x, x / (5.0 + 1e-6)) for x in (1.0, 2.5, 5.0)), (5.1, 1.0), (0.0, 1.0)],
)
def test_clipping(largest: float, factor: float) -> None:
    """Down to the largest norm, never up; zero switches it off."""
    shards = [nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(2)]
    shards[0].grad = torch.tensor([3.0, 0.0], dtype=torch.float64)
    clip_gradients(shards, largest, norm=5.0)  # of the whole model: the 4 is on another rank
    assert shards[0].grad.tolist() == [pytest.approx(3.0 * factor, rel=1e-15), 0.0]
    assert shards[1].grad is None


# Stepping


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_more_ranks_than_rows(optimizer: str) -> None:
    """4 rows of the position embedding on 8 ranks: half of them own nothing, and step nothing."""
    config = small_config("1x1x8", seq_len=4, optimizer=optimizer)

    def rows(world: World) -> int:
        return len(Trainer(config, world).optimizer.shards["position_embedding.weight"])

    assert on_every_rank(config, rows) == [1, 1, 1, 1, 0, 0, 0, 0]
    report = parity(config)
    assert report.passed, report


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_rank_that_owns_no_element(optimizer: str) -> None:
    """8 ranks take 2 elements of 12 each: none is left for the last two."""
    sizes = {"vocab_size": 12, "width": 12, "heads": 3, "ffn_width": 12, "seq_len": 2}
    report = parity(small_config("1x1x8", optimizer=optimizer, **sizes))
    assert report.passed, report


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_sgd_steps_every_element(dtype: str) -> None:
    """Fused, torch 2.13 steps only the last few elements of a bfloat16 tensor of 16 or more."""
    weight = nn.Parameter(torch.zeros(100, dtype=getattr(torch, dtype)))
    config = TrainConfig(optimizer="sgd", lr=1.0, momentum=0.5, dtype=dtype)
    optimizer = make_optimizer([{"params": [weight], "weight_decay": 0.0}], config)
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.tolist() == [-(1.0 + 1.5)] * 100
    assert optimizer.state[weight]["momentum_buffer"].tolist() == [1.5] * 100


@pytest.mark.parametrize(("mesh", "momentum"), [("1x1x1", 0.0), ("2x1x2", 0.9), ("1x2x1", 0.9)])
def test_sgd_equals_one_device(mesh: str, momentum: float) -> None:
    report = parity(small_config(mesh, optimizer="sgd", momentum=momentum, lr=1e-2))
    assert report.passed, report
    assert ("momentum" in {row.quantity for row in report.rows}) == (momentum > 0)


def test_large_eps_equals_one_device() -> None:
    report = parity(small_config("1x1x1", eps=1e-3))
    assert report.passed, report


@pytest.mark.parametrize("mesh", ["1x1x1", "2x1x2", "tp=2,dp_replicate=2,dp_shard=2", "1x2x2"])
def test_shards_are_the_models_own_memory(mesh: str) -> None:
    """After any number of steps: the optimizer's parameters and the model's never part."""
    config = small_config(mesh)

    def main(world: World) -> None:
        trainer = Trainer(config, world)
        for step in range(2):
            batch = batches_for(config).batch(step, trainer.samples)
            trainer.step(step, batch.tokens, batch.labels)
            held = trainer.model.weights()
            assert held.keys() == trainer.optimizer.shards.keys()
            for name, shard in trainer.optimizer.shards.items():
                part = local_tensor(held[name])
                assert part.shape == shard.shape, name
                assert part.data_ptr() == shard.data_ptr(), name

    on_every_rank(config, main)


def test_steps_of_a_shard_are_those_of_torch() -> None:
    """The learning rate of the call holds, and the state is kept by the parameter's name."""
    model = GPT(small_config().model).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(0.5)
    optimizer = Optimizer(model, TrainConfig(lr=1.0, weight_decay=0.1))
    name = "blocks.0.mlp.up.weight"
    weights = [nn.Parameter(x.detach().clone()) for x in optimizer.shards.values()]
    decayed = [p for p, n in zip(weights, optimizer.shards, strict=True) if is_decayed(n)]
    others = [p for p, n in zip(weights, optimizer.shards, strict=True) if not is_decayed(n)]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]
    torchs = torch.optim.AdamW(groups, lr=0.25, betas=(0.9, 0.95))
    for factor in (1.0, -2.0):
        for weight, copy in zip(model.weights().values(), weights, strict=True):
            weight.grad = torch.full_like(weight, factor)
            copy.grad = torch.full_like(copy, factor)
        optimizer.take_gradients()
        optimizer.step(0.25)
        torchs.step()
    for (own_name, shard), copy in zip(optimizer.shards.items(), weights, strict=True):
        torch.testing.assert_close(shard, copy, rtol=BOUND, atol=BOUND, msg=own_name)
    assert set(optimizer.state(name)) == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.state(name)["exp_avg"].shape == optimizer.shards[name].shape
    optimizer.zero_grad()
    assert all(weight.grad is None for weight in model.parameters())
    assert all(shard.grad is None for shard in optimizer.shards.values())


def test_parameter_without_a_gradient_is_an_error() -> None:
    optimizer = Optimizer(GPT(small_config().model), TrainConfig())
    with pytest.raises(AssertionError, match=r"token_embedding\.weight has no gradient"):
        optimizer.take_gradients()
