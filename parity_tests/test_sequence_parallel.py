"""Sequence parallelism: equal to its reference and to one device; its gradients are Partial."""

import sys
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

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
from reference import sequence_parallel as reference


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", [{}, LLAMA], ids=["gpt2", "llama"])
def test_equals_its_reference(tp: int, family: dict[str, object]) -> None:
    config = small_config(f"{tp}x1x1", dropout=0.1, **family)
    report = strategy_parity(config, partial(reference.loss_and_gradients, tp=tp))
    assert report.passed, report


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", [{}, LLAMA], ids=["gpt2", "llama"])
def test_parallel_blocks_equal_their_reference(tp: int, family: dict[str, object]) -> None:
    config = small_config(f"{tp}x1x1", dropout=0.1, parallel_block=True, **family)
    report = strategy_parity(config, partial(reference.loss_and_gradients, tp=tp))
    assert report.passed, report


@pytest.mark.parametrize("mesh", ["2x1x1", "8x1x1", "2x1x2", "2x2x1"])
def test_equals_one_device(mesh: str) -> None:
    report = parity(small_config(mesh, dropout=0.1))
    assert report.passed, report


def test_only_what_meets_own_tokens_has_partial_gradients() -> None:
    """Norms, positions and row biases: equal on all ranks once they have been summed."""
    config = small_config("2x1x1")

    def main(world: World) -> tuple[set[str], dict[str, Tensor], dict[str, Tensor]]:
        trainer = Trainer(config, world)
        batch = batches_for(config).batch(0, trainer.samples)
        trainer.model.train()
        trainer.forward_backward(batch.tokens, batch.labels, batch.labels.new_tensor(1))
        gradients = trainer.optimizer.take_gradients()
        before = {name: x.clone() for name, x in gradients.items()}
        trainer.parallel.finalize_gradients(gradients)
        return set(partial_gradients(trainer.model)), before, gradients

    results = threads.run(2, main, timeout=SECONDS)
    expected = {"position_embedding.weight", "final_norm.weight", "final_norm.bias"}
    for layer in range(config.model.layers):
        for module in ("attention_norm", "mlp_norm"):
            expected |= {f"blocks.{layer}.{module}.{kind}" for kind in ("weight", "bias")}
        expected |= {f"blocks.{layer}.{m}.bias" for m in ("attention.output", "mlp.down")}
    (partial_names, before, after), (_, other_before, other_after) = results
    assert partial_names == expected
    for name in before:
        if name in expected:
            assert after[name].equal(before[name] + other_before[name]), name
            assert after[name].equal(other_after[name]), name
        else:
            assert after[name].equal(before[name]), name


@pytest.mark.parametrize("zero", [0, 3])
def test_partial_gradients_are_summed_once_a_step(
    zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of microbatches, and in shards where dp has them."""
    summed: list[int] = []
    all_reduce = dist.all_reduce

    def counted(x: Tensor, *args: Any, group: dist.ProcessGroup | None = None, **kw: Any) -> Any:
        if sys._getframe(2).f_code.co_name == "reduce_partial_gradients":
            summed.append(x.numel())
        return all_reduce(x, *args, group=group, **kw)

    monkeypatch.setattr(dist, "all_reduce", counted)
    config = small_config("2x1x2", zero=zero, micro_batch_size=1)

    def main(world: World) -> None:
        trainer = Trainer(config, world)
        batch = batches_for(config).batch(0, trainer.samples)
        trainer.step(0, batch.tokens, batch.labels)

    threads.run(4, main, timeout=SECONDS)
    d, t, layers = config.model.width, config.model.seq_len, config.model.layers
    whole = t * d + 2 * d + layers * 6 * d
    assert summed == [whole // 2 if zero == 3 else whole] * 4
