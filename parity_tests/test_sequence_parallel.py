"""Sequence parallelism: equal to its reference and to one device; its gradients are Partial."""

from functools import partial

import pytest
from torch.distributed.tensor import DTensor

from dtensor_llm.parallel import sequence_parallel
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


@pytest.mark.parametrize("mesh", ["2x1x1", "8x1x1", "2x1x2", "2x2x1"])
def test_equals_one_device(mesh: str) -> None:
    report = parity(small_config(mesh, dropout=0.1))
    assert report.passed, report


def test_only_what_meets_own_tokens_has_partial_gradients() -> None:
    """Norms, positions and row biases; and after the reduction none."""
    config = small_config("2x1x1")

    def main(world: World) -> tuple[set[str], set[str]]:
        trainer = Trainer(config, world)
        batch = batches_for(config).batch(0, trainer.samples)
        trainer.model.train()
        trainer.forward_backward(batch.tokens, batch.labels, batch.labels.new_tensor(1))
        before = partial_gradients(trainer)
        sequence_parallel.reduce_partial_gradients(trainer.model, trainer.mesh["tp"])
        return before, partial_gradients(trainer)

    before, after = threads.run(2, main, timeout=SECONDS)[0]
    expected = {"position_embedding.weight", "final_norm.weight", "final_norm.bias"}
    for layer in range(config.model.layers):
        for module in ("attention_norm", "mlp_norm"):
            expected |= {f"blocks.{layer}.{module}.{kind}" for kind in ("weight", "bias")}
        expected |= {f"blocks.{layer}.{m}.bias" for m in ("attention.output", "mlp.down")}
    assert before == expected
    assert after == set()


def partial_gradients(trainer: Trainer) -> set[str]:
    return {
        name
        for name, weight in trainer.model.weights().items()
        if isinstance(weight.grad, DTensor) and weight.grad.placements[0].is_partial()
    }
