"""ZeRO stage 3: equal to its reference and to one device, on uneven shards; memory is divided."""

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from dtensor_llm.model import GPT
from dtensor_llm.parallel import zero
from dtensor_llm.plan import local_tensor
from dtensor_llm.train import Trainer
from dtensor_llm.worlds import World, threads
from parity_tests.harness import (
    LLAMA,
    SECONDS,
    batches_for,
    parity,
    parity_with,
    small_config,
    strategy_parity,
)
from reference import zero as reference
from reference.model import Model, ModelOptions, initial_weights
from reference.training import TrainingOptions, options_from


@pytest.mark.parametrize("dp", [2, 4])
def test_gradients_equal_its_reference(dp: int) -> None:
    config = small_config(f"1x1x{dp}", dropout=0.1)
    report = strategy_parity(config, partial(reference.loss_and_gradients, dp=dp))
    assert report.passed, report


def test_training_equals_its_reference() -> None:
    """AdamW on the shards of the reference against AdamW on those of the mesh."""
    config = small_config("1x1x4")
    options = options_from(ModelOptions, dataclasses.asdict(config.model))
    how = options_from(TrainingOptions, dataclasses.asdict(config.train))
    model = Model(options, initial_weights(options, config.train.seed, torch.float64))
    batches = [batches_for(config).batch(step) for step in range(config.train.steps)]
    run = reference.train_steps(model, [(b.tokens, b.labels) for b in batches], how, dp=4)
    report = parity_with(config, run)
    assert report.passed, report


@pytest.mark.parametrize("family", [{}, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("mesh", ["1x1x2", "1x1x8", "dp_replicate=2,dp_shard=2", "2x1x2"])
def test_equals_one_device(mesh: str, family: dict[str, object]) -> None:
    report = parity(small_config(mesh, micro_batch_size=1, **family))
    assert report.passed, report


def test_every_element_has_one_owner() -> None:
    """Weights and moments at rest divide by dp: the local numels add up to the model's."""
    config = small_config("1x1x4")

    def main(world: World) -> tuple[int, int]:
        trainer = Trainer(config, world)
        batch = batches_for(config).batch(0, trainer.samples)
        trainer.step(0, batch.tokens, batch.labels)
        shards = trainer.optimizer.shards
        states = [trainer.optimizer.state(name) for name in shards]
        moments = sum(s[key].numel() for s in states for key in ("exp_avg", "exp_avg_sq") if s)
        return sum(shard.numel() for shard in shards.values()), moments

    owned = threads.run(4, main, timeout=SECONDS)
    assert sum(weights for weights, _ in owned) == config.model.num_parameters
    assert sum(moments for _, moments in owned) == 2 * config.model.num_parameters


def is_sharded(block: nn.Module) -> bool:
    return all(local_tensor(p).numel() < p.numel() for p in block.parameters())


def is_whole(block: nn.Module) -> bool:
    return all(local_tensor(p).numel() == p.numel() for p in block.parameters())


def test_only_the_block_that_computes_is_whole() -> None:
    config = small_config("1x1x2", layers=3)

    def main(world: World) -> None:
        trainer = Trainer(config, world)
        blocks = list(trainer.model.blocks.values())
        computed: list[nn.Module] = []

        def check(block: nn.Module, _: object) -> None:
            assert is_whole(block)
            assert all(is_sharded(other) for other in computed)
            computed.append(block)

        for block in blocks:
            block.register_forward_pre_hook(check)
        batch = batches_for(config).batch(0, trainer.samples)
        trainer.model(batch.tokens, batch.sample_ids)
        assert computed == blocks
        assert all(is_sharded(block) for block in blocks)

    threads.run(2, main, timeout=SECONDS)


def test_blocks_get_their_memory_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = GPT(small_config(layers=3).model)
    without_memory: list[list[str]] = []

    def record(module: nn.Module, *, mesh: DeviceMesh, **options: Any) -> FSDPModule:
        blocks = model.blocks.items()
        without_memory.append([n for n, b in blocks if any(p.is_meta for p in b.parameters())])
        return fully_shard(module, mesh=mesh, **options)

    def main(world: World) -> None:
        mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp_shard",))
        zero.apply(model, mesh, world.device)

    monkeypatch.setattr(zero, "fully_shard", record)
    threads.run(1, main, timeout=SECONDS)
    assert without_memory == [["1", "2"], ["2"], [], []]


def test_every_microbatch_reduces_its_gradients() -> None:
    """So that no rank keeps whole gradients from one microbatch to the next."""
    config = small_config("1x1x2", micro_batch_size=1)

    def main(world: World) -> list[bool]:
        trainer = Trainer(config, world)
        weights = trainer.optimizer.weights.values()
        reduced: list[bool] = []

        def record(*_: object) -> None:
            reduced.append(all(weight.grad is not None for weight in weights))

        trainer.model.register_forward_pre_hook(record)
        batch = batches_for(config).batch(0, trainer.samples)
        trainer.compute_gradients(0, batch.tokens, batch.labels)
        return reduced

    assert threads.run(2, main, timeout=SECONDS) == [[False, True, True, True]] * 2
