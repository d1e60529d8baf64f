"""Pipeline parallelism: equal to its reference and to one device; layers and ties."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from dtensor_llm.config import Config
from dtensor_llm.parallel import pipeline_parallel
from dtensor_llm.stages import layers_of_stages
from dtensor_llm.train import Trainer
from dtensor_llm.worlds import World, WorldError, threads
from parity_tests.harness import (
    LLAMA,
    SECONDS,
    batches_for,
    parity,
    small_config,
    strategy_parity,
)
from reference import pipeline_parallel as reference


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("pp", [2, 4])
def test_equals_its_reference(schedule: str, pp: int) -> None:
    config = small_config(f"1x{pp}x1", schedule=schedule, layers=5, dropout=0.1)
    strategy = partial(
        reference.loss_and_gradients,
        stages=pp,
        microbatches=config.microbatches,
        schedule=schedule,
    )
    report = strategy_parity(config, strategy)
    assert report.passed, report


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", [{}, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("1x2x1", {"schedule": "1f1b", "micro_batch_size": 1}),
        ("1x4x1", {"schedule": "1f1b", "layers": 6}),
        ("1x4x1", {"schedule": "gpipe", "layers": 4, "micro_batch_size": 8}),
        ("1x8x1", {"schedule": "gpipe", "layers": 8, "micro_batch_size": 4}),
        ("2x2x2", {"schedule": "1f1b", "zero": 0}),
    ],
)
def test_equals_one_device(
    mesh: str, options: dict[str, object], family: dict[str, object]
) -> None:
    report = parity(small_config(mesh, **options, **family))
    assert report.passed, report


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batch_size", [1, 2], ids=["m=8", "m=4"])
def test_stages_act_in_the_order_of_the_reference(micro_batch_size: int, schedule: str) -> None:
    """GPipe holds all microbatches at once, 1F1B no more than it must."""
    config = small_config("1x4x1", layers=4, schedule=schedule, micro_batch_size=micro_batch_size)

    def main(world: World) -> list[str]:
        trainer = Trainer(config, world)
        stage = trainer.parallel.schedule._stage
        acted: list[str] = []

        def record(kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(microbatch: int, *args: Any, **kwargs: Any) -> Any:
                acted.append(f"{world.rank}{kind}{microbatch}")
                return method(microbatch, *args, **kwargs)

            return wrapper

        stage.forward_one_chunk = record("F", stage.forward_one_chunk)
        stage.backward_one_chunk = record("B", stage.backward_one_chunk)
        batch = batches_for(config).batch(0, trainer.samples)
        trainer.compute_gradients(0, batch.tokens, batch.labels)
        return acted

    for stage, acted in enumerate(threads.run(4, main, timeout=SECONDS)):
        expected = reference.actions(schedule, stage, 4, config.microbatches)
        assert acted == [str(action) for action in expected]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("split", [(1, 3, 1), (0, 5, 0), (2, 3, 0), (0, 1, 4)], ids=str)
def test_any_cut_equals_its_reference(schedule: str, split: tuple[int, ...]) -> None:
    config = small_config(
        "1x3x1",
        schedule=schedule,
        layers=5,
        dropout=0.1,
        global_batch_size=12,
        stage_layers=",".join(map(str, split)),
    )
    strategy = partial(
        reference.loss_and_gradients,
        stages=3,
        microbatches=config.microbatches,
        schedule=schedule,
        counts=split,
    )
    report = strategy_parity(config, strategy)
    assert report.passed, report


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", [{}, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("1x2x1", {"stage_layers": "1,4", "micro_batch_size": 1}),
        ("1x2x1", {"stage_layers": "0,5", "schedule": "gpipe"}),
        ("1x4x1", {"stage_layers": "auto", "vocab_size": 999}),
        ("2x2x1", {"stage_layers": "5,0", "gather_again": True}),
        ("2x2x1", {"stage_layers": "0,5", "sequence_parallel": False}),
        ("2x2x2", {"stage_layers": "4,1"}),
        ("2x2x2", {"stage_layers": "0,5", "parallel_block": True}),
        ("1x2x2", {"stage_layers": "5,0", "zero": 0}),
        ("1x2x2", {"stage_layers": "0,5", "zero": 0, "ddp": True}),
        ("2x2x2", {"stage_layers": "2,3", "zero": 1}),
        ("1x2x2", {"stage_layers": "0,5", "zero": 2}),
        ("1x2x2", {"stage_layers": "5,0", "reshard_after_forward": True, "prefetch_depth": 2}),
        ("1x2x2", {"stage_layers": "0,5", "offload": "weights"}),
    ],
)
def test_any_cut_equals_one_device(
    mesh: str, options: dict[str, object], family: dict[str, object]
) -> None:
    report = parity(small_config(mesh, layers=5, **family | options))
    assert report.passed, report


@pytest.mark.covering(1)
@pytest.mark.parametrize("split", ["0,3", "3,0", "1,2"])
@pytest.mark.parametrize("tied", [True, False])
def test_any_cut_on_a_grid_equals_one_device(split: str, tied: bool) -> None:
    report = parity(small_config("tp=2x2,pp=2", layers=3, stage_layers=split, tied_embeddings=tied))
    assert report.passed, report


def test_a_block_that_no_stage_holds_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(config: Config) -> tuple[range, ...]:
        first, last = layers_of_stages(config)
        return first, last[1:]

    monkeypatch.setattr(pipeline_parallel, "layers_of_stages", forgetful)
    with pytest.raises(WorldError, match=r"no rank holds the gradient of blocks\.1\."):
        parity(small_config("1x2x1", layers=4, stage_layers="1,3"))


def test_tied_copies_stay_bitwise_equal() -> None:
    config = small_config("1x2x2", steps=5)

    def main(world: World) -> list[torch.Tensor]:
        trainer = Trainer(config, world)
        copies = []
        for step in range(config.train.steps):
            batch = batches_for(config).batch(step, trainer.samples)
            trainer.step(step, batch.tokens, batch.labels)
            copies.append(trainer.optimizer.shards["token_embedding.weight"].detach().clone())
        return copies

    first_0, first_1, last_0, last_1 = threads.run(4, main, timeout=SECONDS)
    for stage_0, stage_1 in [(first_0, last_0), (first_1, last_1)]:
        assert all(a.equal(b) for a, b in zip(stage_0, stage_1, strict=True))
    assert not first_0[0].equal(first_0[-1]), "the embedding did not train"
