"""Sequence parallelism: equal to its reference and to one device; its gradients are Partial."""

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dtensor_llm import collectives, plan
from dtensor_llm.collectives import GatheredAgain
from dtensor_llm.config import Config
from dtensor_llm.plan import local_tensor, partial_gradients
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


@pytest.mark.covering
@pytest.mark.parametrize("parallel_block", [False, True])
@pytest.mark.parametrize("mesh", ["4x1x1", "2x1x2", "2x2x2"])
@pytest.mark.parametrize("family", [{}, LLAMA], ids=["gpt2", "llama"])
def test_gathered_again_equals_one_device(
    family: dict[str, object], mesh: str, parallel_block: bool
) -> None:
    options = {"gather_again": True, "parallel_block": parallel_block, "dropout": 0.1}
    report = parity(small_config(mesh, micro_batch_size=2, **options, **family))
    assert report.passed, report


def saved_bytes(config: Config, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What each rank keeps of activations between the two passes, each memory counted once."""
    own = threading.local()  # of a rank's thread

    def keep(packed: Any) -> Any:
        x = packed[0].shard if isinstance(packed, tuple) else packed
        own.kept[x.untyped_storage().data_ptr()] = x
        return packed

    def seen(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Any:
        return saved_tensors_hooks(lambda x: keep(pack(x)), unpack)

    def main(world: World) -> int:
        trainer = Trainer(config, world)
        batch, own.kept = batches_for(config).batch(0, trainer.samples), {}
        with saved_tensors_hooks(keep, lambda x: x):
            logits = trainer.model(batch.tokens, trainer.places(world.device))
        assert logits.requires_grad
        weights = [local_tensor(x).untyped_storage() for x in trainer.model.parameters()]
        for storage in weights:
            own.kept.pop(storage.data_ptr(), None)
        return sum(x.untyped_storage().nbytes() for x in own.kept.values())

    with monkeypatch.context() as patched:
        patched.setattr(plan, "saved_tensors_hooks", seen)
        return threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS)


@pytest.mark.covering
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", [{}, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("parallel_block", [False, True])
def test_gathered_again_keeps_shards_of_what_the_linears_share(
    parallel_block: bool, family: dict[str, object], tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1/tp of the input of each attention and MLP, or parallel block, and of the head."""
    kept, again = (
        saved_bytes(
            small_config(f"{tp}x1x1", parallel_block=parallel_block, gather_again=again, **family),
            monkeypatch,
        )
        for again in (False, True)
    )
    model = small_config().model
    inputs = model.layers * (1 if parallel_block else 2) + 1
    whole = 8 * model.seq_len * model.width * 8  # b t d numbers of 8 bytes
    assert [a - b for a, b in zip(kept, again, strict=True)] == [
        inputs * whole * (tp - 1) // tp
    ] * tp


def test_second_gather_runs_beside_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins before the gradient of what its module gives out is gathered, and ends after."""
    events: list[str] = []
    start, gathered, move = GatheredAgain.start, GatheredAgain.gathered, collectives.move

    def told(name: str, function: Callable[..., Any], *args: Any) -> Any:
        if dist.get_rank() == 0:
            events.append(name)
        return function(*args)

    monkeypatch.setattr(GatheredAgain, "start", lambda *args: told("start", start, *args))
    monkeypatch.setattr(GatheredAgain, "gathered", lambda *args: told("wait", gathered, *args))
    monkeypatch.setattr(collectives, "move", lambda *args: told("move", move, *args))
    config = small_config("2x1x1", gather_again=True, fused_qkv=True, layers=1)

    def main(world: World) -> None:
        trainer = Trainer(config, world)
        batch = batches_for(config).batch(0, trainer.samples)
        trainer.step(0, batch.tokens, batch.labels)

    threads.run(2, main, timeout=SECONDS)
    backward = events[events.index("start") :]
    head, mlp, attention = ["start", "wait", "move"], *[["start", "move", "wait", "move"]] * 2
    assert backward == [*head, *mlp, *attention, "move"]


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
