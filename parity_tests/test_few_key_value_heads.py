"""Fewer key and value heads than tp ranks: copies that start, learn and count as one weight."""

from functools import partial
from typing import Any

import pytest
from torch import Tensor

from dtensor_llm.mesh import TP_COPIES
from dtensor_llm.parallel import tensor_parallel
from dtensor_llm.plan import partial_gradients
from dtensor_llm.train import Trainer
from dtensor_llm.worlds import World, threads
from parity_tests.harness import (
    LLAMA,
    SECONDS,
    batches_for,
    parity,
    small_config,
    strategy_parity,
)
from reference import sequence_parallel as reference_with_tokens_sharded
from reference import tensor_parallel as reference

FEW = LLAMA | {"bias": True, "dropout": 0.1}


@pytest.mark.covering(1)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("tp", "kv_heads"), [(2, 1), (4, 2), (4, 1), (8, 2)])
def test_equals_its_reference(tp: int, kv_heads: int, sequence_parallel: bool) -> None:
    options = FEW | {"kv_heads": kv_heads, "sequence_parallel": sequence_parallel}
    strategy = reference_with_tokens_sharded if sequence_parallel else reference
    config = small_config(f"{tp}x1x1", **options)
    report = strategy_parity(config, partial(strategy.loss_and_gradients, tp=tp))
    assert report.passed, report


@pytest.mark.parametrize(
    ("mesh", "kv_heads", "zero"),
    [
        ("4x1x2", 2, 0),
        ("4x1x4", 1, 3),
        ("2x2x2", 1, 3),
        ("4x2x1", 2, 3),
        ("tp=4,dp_replicate=2,dp_shard=2", 2, 3),
    ],
)
def test_equals_one_device(mesh: str, kv_heads: int, zero: int) -> None:
    """A head is of 3 rows: dp divides them unevenly, and by 4 leaves a rank without any."""
    options = {"kv_heads": kv_heads, "zero": zero, "width": 24, "micro_batch_size": 1}
    report = parity(small_config(mesh, **options))
    assert report.passed, report


@pytest.mark.parametrize("mesh", ["4x1x1", "4x1x2", "4x2x1"])
def test_copies_are_equal_to_the_bit_and_counted_once(mesh: str) -> None:
    config = small_config(mesh, kv_heads=2)
    batches = batches_for(config)

    def main(world: World) -> tuple[list[dict[str, Tensor]], int]:
        trainer = Trainer(config, world)
        copied = partial_gradients(trainer.model, TP_COPIES)
        seen = []
        for step in range(config.train.steps):
            parts = {name: trainer.optimizer.shards[name].detach().clone() for name in copied}
            seen.append(parts)
            batch = batches.batch(step, trainer.samples)
            trainer.step(step, batch.tokens, batch.labels)
        seen.append({name: trainer.optimizer.shards[name].detach() for name in copied})
        owned = trainer.optimizer.owned.items()
        return seen, sum(part.numel for name, part in owned if trainer.counts_here(name, part))

    results = threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS)
    # tp ranks are neighbours: the first two hold the first head, the other two the second.
    for first in range(0, len(results), 2):
        (own, _), (other, _) = results[first : first + 2]
        for a, b in zip(own, other, strict=True):
            assert a
            assert a.keys() == b.keys()
            assert all(a[name].equal(b[name]) for name in a)
        assert not any(x.equal(own[0][name]) for name, x in own[-1].items())
    key = "blocks.0.attention.key.weight"
    assert not results[0][0][0][key].equal(results[2][0][0][key])
    assert sum(counted for _, counted in results) == config.model.num_parameters


@pytest.mark.parametrize("zero", [0, 3])
def test_copied_gradients_are_summed_once_a_step(
    zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one buffer, of what is left after dp: biases too."""
    summed: list[tuple[int, int]] = []
    add_up = tensor_parallel.sum_in_one_buffer

    def counted(parts: list[Tensor], group: Any, device: str) -> None:
        summed.append((group.size(), sum(part.numel() for part in parts)))
        add_up(parts, group, device)

    monkeypatch.setattr(tensor_parallel, "sum_in_one_buffer", counted)
    config = small_config("4x1x2", kv_heads=1, zero=zero, micro_batch_size=1)

    def main(world: World) -> None:
        trainer = Trainer(config, world)
        batch = batches_for(config).batch(0, trainer.samples)
        trainer.step(0, batch.tokens, batch.labels)

    threads.run(8, main, timeout=SECONDS)
    d, k = config.model.width, config.model.head_size
    whole = config.model.layers * 2 * (d * k + k)
    assert summed == [(4, whole // 2 if zero == 3 else whole)] * 8
