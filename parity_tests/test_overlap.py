"""Products beside the exchange of what they take or give: the same numbers, kept tensors, bytes."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._symmetric_memory import (
    _fused_all_gather_matmul_fallback,
    _fused_matmul_reduce_scatter_fallback,
)

from dtensor_llm import overlap
from dtensor_llm.config import Config
from dtensor_llm.parity import Report
from dtensor_llm.planner.contract import first_steps, place_of
from dtensor_llm.planner.costs import step_traffic
from dtensor_llm.planner.recorder import CommRecorder
from dtensor_llm.planner.traffic import merged
from dtensor_llm.train import Trainer
from dtensor_llm.worlds import World, exchange, symmetric_memory, threads
from dtensor_llm.worlds.processes_spawn import spawn
from parity_tests.covering import covering_cases
from parity_tests.harness import (
    LLAMA,
    SECONDS,
    batches_for,
    parity,
    reference_for,
    small_config,
    strategy_parity,
    train_and_compare,
)
from parity_tests.test_sequence_parallel import saved_bytes
from reference import sequence_parallel as reference

ODD: dict[str, Any] = {"heads": 6, "width": 42, "ffn_width": 33, "seq_len": 9, "vocab_size": 61}
"""Three ranks with three tokens each, of seven elements a head."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "two": ("2x1x1", {}),
    "three, odd sizes": ("3x1x1", ODD),
    "three, odd sizes, llama": ("3x1x1", ODD | LLAMA | {"kv_heads": 3, "width": 60}),
    "four": ("4x1x1", {"vocab_size": 57}),
    "four, llama": ("4x1x1", LLAMA),
    "fused": ("2x1x1", {"fused_qkv": True, "kv_heads": 4}),
    "grouped queries": ("2x1x1", {"kv_heads": 2}),
    "copied heads": ("4x1x1", {"kv_heads": 2}),
    "parallel blocks": ("4x1x1", {"parallel_block": True}),
    "parallel blocks, llama": ("2x1x2", {"parallel_block": True, **LLAMA}),
    "gathered again": ("2x1x2", {"gather_again": True, "micro_batch_size": 2}),
    "gathered again, parallel blocks": ("3x1x1", {"gather_again": True, "parallel_block": True}),
    "accumulation": ("2x1x1", {"micro_batch_size": 2}),
    "pipeline": ("2x2x1", {"micro_batch_size": 1}),
    "2x2x2": ("2x2x2", {"vocab_size": 57}),
    "zero 0": ("2x1x2", {"zero": 0, "micro_batch_size": 2}),
    "zero 1": ("2x1x2", {"zero": 1, "micro_batch_size": 2}),
    "zero 2": ("2x1x2", {"zero": 2, "micro_batch_size": 2}),
    "zero 3": ("2x1x2", {"zero": 3, "micro_batch_size": 2}),
    "hybrid": ("dp_replicate=2,dp_shard=2,tp=2", {}),
    "weights on the host": ("2x1x2", {"offload": "weights"}),
    "untied": ("2x1x1", {"tied_embeddings": False, "optimizer": "sgd"}),
}


def overlapped(mesh: str, **options: Any) -> Config:
    return small_config(mesh, async_tp=True, **options)


@pytest.mark.parametrize("case", covering_cases(CASES))
def test_equals_one_device(case: str) -> None:
    mesh, options = CASES[case]
    sizes = ODD if mesh.startswith("3") else {}
    report = parity(overlapped(mesh, dropout=0.1, **sizes | options))
    assert report.passed, report


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", [{}, LLAMA], ids=["gpt2", "llama"])
def test_equals_its_reference(tp: int, family: dict[str, Any]) -> None:
    """Which computes and adds up the same parts, in the same order."""
    strategy = partial(reference.loss_and_gradients, tp=tp, overlapped=True)
    report = strategy_parity(overlapped(f"{tp}x1x1", dropout=0.1, **family), strategy)
    assert report.passed, report


@pytest.mark.parametrize("options", [{}, {"parallel_block": True}, LLAMA], ids=str)
@pytest.mark.parametrize("again", [False, True])
def test_keeps_what_is_kept_without_it(
    again: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one_by_one, beside = (
        saved_bytes(small_config("2x1x1", gather_again=again, async_tp=a, **options), monkeypatch)
        for a in (False, True)
    )
    assert beside == one_by_one


# Who waits for whom


def test_computes_while_parts_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one layer: what rank 0 of 3 does, in order."""
    events: list[str] = []

    def tell(text: str) -> None:
        if dist.get_rank() == 0:
            events.append(text)

    watch_exchanges(monkeypatch, tell)
    config = overlapped("3x1x1", layers=1, fused_qkv=True, **ODD)

    def main(world: World) -> None:
        trainer = Trainer(config, world)
        batch = batches_for(config).batch(0, trainer.samples)
        trainer.step(0, batch.tokens, batch.labels)

    threads.run(3, main, timeout=SECONDS)
    into = ["gather", "multiply 0", "arrived 1", "multiply 1", "arrived 2", "multiply 2"]
    out = ["scatter", "multiply 1", "send 1", "multiply 2", "send 2", "multiply 0", "sum"]
    back_into = ["scatter", "send 1", "send 2", "weights", "sum"]
    embedding = ["scatter", "send 1", "send 2", "sum"]
    forward = [*embedding, *into, *out, *into, *out, *into]
    backward = [*back_into, *into, *back_into, *into, *back_into, "gather", "arrived 1"]
    assert events == [*forward, *backward, "arrived 2"]


def watch_exchanges(monkeypatch: pytest.MonkeyPatch, tell: Callable[[str], None]) -> None:
    """Let `tell` know of each beginning and end of an exchange, and of the products between."""
    multiply, gradients = overlap.multiply, overlap.parameter_gradients

    class Gather(exchange.AllGather):
        def __init__(self, *args: Any) -> None:
            tell("gather")
            super().__init__(*args)

        def arrivals(self) -> Iterator[int]:
            for peer in super().arrivals():
                tell(f"arrived {peer}")
                yield peer

    class Scatter(exchange.ReduceScatter):
        def __init__(self, *args: Any) -> None:
            tell("scatter")
            super().__init__(*args)

        def send(self, peer: int) -> None:
            tell(f"send {peer}")
            super().send(peer)

        def wait(self) -> Tensor:
            tell("sum")
            return super().wait()

    def told(x: Tensor, matrix: Tensor, out: Tensor, *others: Any) -> None:
        start = out.storage_offset() // out.stride(1) % ODD["seq_len"]
        tell(f"multiply {start // (ODD['seq_len'] // 3)}")
        multiply(x, matrix, out, *others)

    def told_gradients(*args: Any) -> Any:
        tell("weights")
        return gradients(*args)

    for module in (overlap, exchange):
        monkeypatch.setattr(module, "AllGather", Gather)
        monkeypatch.setattr(module, "ReduceScatter", Scatter)
    monkeypatch.setattr(overlap, "multiply", told)
    monkeypatch.setattr(overlap, "parameter_gradients", told_gradients)


def test_gradient_of_whoever_else_takes_the_tokens_counts() -> None:
    """The gathered tokens are given out, too: they are no dead end."""

    def main(world: World) -> tuple[Tensor, Tensor]:
        group = dist.group.WORLD
        generator = torch.Generator().manual_seed(world.rank)
        x = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        weight = torch.ones(5, 4, dtype=torch.float64)
        factor = 1.0 + world.rank
        whole, y = overlap._GatherAndMultiply.apply(x, 1, group, False, weight, None)
        (whole.sum() * factor + y.sum()).backward()
        alone = x.grad
        x.grad = None
        whole, y = overlap._GatherAndMultiply.apply(x, 1, group, False, weight, None)
        whole.sum().backward()
        assert alone is not None and x.grad is not None
        return alone, x.grad

    for both, of_whole in threads.run(2, main, timeout=SECONDS):
        assert torch.equal(both, torch.full_like(both, 1.0 + 2.0 + 2 * 5))
        assert torch.equal(of_whole, torch.full_like(of_whole, 2.0))


# Between processes


def compared(config: Config, prepare: Callable[[], None], world: World) -> tuple[Report, bool]:
    """The report, and whether a step was seen to communicate what the closed form says."""
    prepare()
    report = train_and_compare(config, reference_for(config), batches_for(config), world)
    trainer = Trainer(config, world)
    batch, last = batches_for(config).batch(0, trainer.samples), first_steps(config)
    for step in range(last):
        trainer.step(step, batch.tokens, batch.labels)
    with CommRecorder(trainer.mesh) as recorder:
        trainer.step(last, batch.tokens, batch.labels)
    return report, merged(recorder.calls) == step_traffic(config, place_of(trainer.mesh))


def message_for_each_run() -> None:
    """However short: as for the long ones of a large model."""
    exchange.LEAST_MESSAGE = 1


def nothing() -> None:
    pass


def share_memory() -> None:
    """However little: as for the large parts of a large model."""
    exchange.LEAST_SHARED = 1


@pytest.mark.covering
@pytest.mark.parametrize("prepare", [nothing, message_for_each_run, share_memory])
@pytest.mark.parametrize("mesh", ["2x1x1", "3x1x1"])
@pytest.mark.parametrize("async_tp", [False, True])
def test_equals_one_device_in_processes(
    async_tp: bool, mesh: str, prepare: Callable[[], None]
) -> None:
    sizes = ODD if mesh == "3x1x1" else {}
    config = small_config(mesh, async_tp=async_tp, dropout=0.1, gather_again=True, **sizes)
    ranks = config.parallel.mesh.num_ranks
    for report, is_predicted in spawn(ranks, partial(compared, config, prepare), timeout=SECONDS):
        assert report.passed, report
        assert is_predicted


@cache
def compute_on_the_cpu() -> None:
    """What torch's operators for CUDA do, as torch computes it on other devices."""
    symmetric_memory.operator("fused_all_gather_matmul")
    library.impl("fused_all_gather_matmul", _fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", _fused_matmul_reduce_scatter_fallback, "CPU")


library = torch.library.Library("symm_mem", "IMPL")


def fuse() -> None:
    compute_on_the_cpu()
    overlap.is_fused = lambda _: True


@pytest.mark.covering(1)
@pytest.mark.parametrize("run", [threads.run, spawn], ids=["threads", "processes"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fused_qkv": True, "gather_again": True, "micro_batch_size": 4},
        {"parallel_block": True, **LLAMA},
    ],
    ids=str,
)
def test_operators_of_cuda_are_called_as_they_want(
    options: dict[str, Any], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "is_fused", overlap.is_fused)  # and what it was comes back
    config = overlapped("2x1x1", dropout=0.1, **options)
    for report, is_predicted in run(2, partial(compared, config, fuse), timeout=SECONDS):
        assert report.passed, report
        assert is_predicted


def test_another_torch_is_refused() -> None:
    with patch.object(symmetric_memory, "DEFINED_BY", "torch.distributed._elsewhere"):
        symmetric_memory.operator.cache_clear()
        with pytest.raises(NotImplementedError, match="leaving --async-tp out would do"):
            symmetric_memory.operator("fused_all_gather_matmul")
    with pytest.raises(NotImplementedError, match="has no symm_mem::nothing_like_it"):
        symmetric_memory.operator("nothing_like_it")
