"""Data parallelism: equal to its reference and to one device, however the tokens fall on ranks."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from dtensor_llm.config import Config
from dtensor_llm.mesh import parse_mesh
from dtensor_llm.model import GPT
from dtensor_llm.parallel import data_parallel
from dtensor_llm.parallel.data_parallel import replicate
from dtensor_llm.parity import Report
from dtensor_llm.train import Trainer
from dtensor_llm.worlds import World, threads
from dtensor_llm.worlds.processes_spawn import spawn
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
from reference import data_parallel as reference


@pytest.mark.parametrize(("dp", "micro_batch_size"), [(2, 4), (4, 1)])
def test_equals_its_reference(dp: int, micro_batch_size: int) -> None:
    config = small_config(f"1x1x{dp}", zero=0, dropout=0.1, micro_batch_size=micro_batch_size)
    strategy = partial(reference.loss_and_gradients, dp=dp, microbatches=config.microbatches)
    report = strategy_parity(config, strategy)
    assert report.passed, report


@pytest.mark.covering(1)
@pytest.mark.parametrize("mask", ["none", "even", "uneven"])
@pytest.mark.parametrize("mesh", ["1x1x2", "1x1x8", "dp_replicate=2,dp_shard=2"])
def test_equals_one_device(mesh: str, mask: str) -> None:
    report = parity(small_config(mesh, zero=0), mask)
    assert report.passed, report


DDP_OPTIONS: dict[str, dict[str, Any]] = {
    "one bucket": {},
    "small buckets": {"ddp_bucket_mb": 0.01},
    "buckets copied": {"ddp_bucket_mb": 0.01, "ddp_bucket_view": False},
    "static graph": {"ddp_bucket_mb": 0.01, "ddp_static_graph": True},
    "static graph, copied": {"ddp_static_graph": True, "ddp_bucket_view": False},
}


def ddp_config(mesh: str, **values: Any) -> Config:
    """With several microbatches, unless the graph is static."""
    sizes = parse_mesh(mesh, None)
    is_static = values.get("ddp_static_graph", False)
    how = {"micro_batch_size": 8 // sizes.dp if is_static else 1}
    how |= {"schedule": "gpipe" if is_static else "1f1b"}
    return small_config(mesh, zero=0, ddp=True, **how | values)


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", DDP_OPTIONS)
@pytest.mark.parametrize("mesh", ["1x1x2", "1x1x8", "1x2x2", "dp_replicate=2,dp_shard=2"])
def test_ddp_equals_one_device(mesh: str, options: str) -> None:
    report = parity(ddp_config(mesh, **DDP_OPTIONS[options]))
    assert report.passed, report


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mesh", ["1x1x2", "1x2x2"])
def test_ddp_of_other_models_equals_one_device(mesh: str, tied: bool) -> None:
    family = LLAMA | {"tied_embeddings": tied}
    report = parity(ddp_config(mesh, optimizer="sgd", ddp_bucket_mb=0.01, dropout=0.1, **family))
    assert report.passed, report


@pytest.mark.parametrize(("dp", "micro_batch_size"), [(2, 4), (4, 1)])
def test_ddp_equals_its_reference(dp: int, micro_batch_size: int) -> None:
    config = ddp_config(f"1x1x{dp}", dropout=0.1, micro_batch_size=micro_batch_size)
    strategy = partial(reference.loss_and_gradients, dp=dp, microbatches=config.microbatches)
    report = strategy_parity(config, strategy)
    assert report.passed, report


def check_rank(config: Config, world: World) -> Report:
    torch.set_num_threads(1)
    reference_run = world.share(lambda: reference_for(config))
    return train_and_compare(config, reference_run, batches_for(config), world)


@pytest.mark.parametrize(
    "config",
    [
        ddp_config("1x1x2", ddp_bucket_mb=0.01),
        ddp_config("1x2x2"),
        ddp_config("1x1x2", ddp_static_graph=True),
        small_config("1x1x2", zero=1, micro_batch_size=1),
        small_config("2x1x2", zero=2, micro_batch_size=1),
        small_config("dp_replicate=2,dp_shard=2", zero=2, micro_batch_size=1),
    ],
    ids=["ddp", "ddp and pp", "ddp, static graph", "zero 1", "zero 2 and tp", "zero 2, hybrid"],
)
def test_equals_one_device_as_processes(config: Config) -> None:
    """Where messages really are on their way while the ranks compute."""
    for report in spawn(
        config.parallel.mesh.num_ranks, partial(check_rank, config), timeout=SECONDS
    ):
        assert report.passed, report


def test_ddp_is_told_its_options() -> None:
    config = ddp_config("1x1x2", ddp_bucket_mb=0.5, ddp_bucket_view=False, ddp_static_graph=True)

    def main(world: World) -> None:
        module = Trainer(config, world).parallel.modules[0]
        assert isinstance(module, DistributedDataParallel)
        assert module.bucket_bytes_cap == 2**19
        assert not module.gradient_as_bucket_view
        assert module.static_graph

    threads.run(2, main, timeout=SECONDS)


@pytest.mark.parametrize("bucket_view", [True, False])
def test_gradients_are_views_of_buckets(bucket_view: bool) -> None:
    config = ddp_config("1x1x2", ddp_bucket_view=bucket_view)

    def main(world: World) -> int:
        trainer = Trainer(config, world)
        batch = batches_for(config).batch(0, trainer.samples)
        trainer.compute_gradients(0, batch.tokens, batch.labels)
        gradients = [weight.grad for weight in trainer.optimizer.weights.values()]
        return len({x.untyped_storage().data_ptr() for x in gradients if x is not None})

    num_weights = len(GPT(config.model).weights())
    assert threads.run(2, main, timeout=SECONDS) == [1 if bucket_view else num_weights] * 2


def test_one_reduction_a_step_however_many_microbatches() -> None:
    """The gradients of a replicated model stay local until the last microbatch."""
    config = small_config("1x1x2", zero=0, micro_batch_size=1)

    def main(world: World) -> list[bool]:
        trainer = Trainer(config, world)
        batch = batches_for(config).batch(0, trainer.samples)
        choices = []
        choose = trainer.choose_reduction

        def record(*, is_last: bool) -> None:
            choose(is_last=is_last)
            choices.append(any(p.grad is not None for p in trainer.model.parameters()))

        trainer.choose_reduction = record
        trainer.step(0, batch.tokens, batch.labels)
        return choices

    # A parameter has its gradient once it is reduced: before the last microbatch none has one.
    assert threads.run(2, main, timeout=SECONDS) == [[False] * 4] * 2


def test_rank_without_a_valid_token() -> None:
    """All labels of the first rank are ignored: it adds zeros to what the others have."""
    config = small_config("1x1x8")
    batches = batches_for(config)
    assert (batches.batch(0, slice(0, 1)).labels == -100).all()
    report = parity(config)
    assert report.passed, report


def test_batch_without_a_valid_token_changes_nothing() -> None:
    config = small_config("1x1x2")

    def main(world: World) -> None:
        trainer = Trainer(config, world)
        batch = batches_for(config).batch(0, trainer.samples)
        before = {name: shard.clone() for name, shard in trainer.optimizer.shards.items()}
        result = trainer.step(0, batch.tokens, batch.labels.fill_(-100))
        assert (result.loss, result.num_tokens, result.gradient_norm) == (0.0, 0, 0.0)
        for name, shard in trainer.optimizer.shards.items():
            assert shard.equal(before[name]), name

    threads.run(2, main, timeout=SECONDS)


def test_blocks_get_their_memory_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is replicated, in a bucket of its own, as soon as it has memory; then what is left."""
    with torch.device("meta"):
        model = GPT(small_config(layers=2).model)
    names = {id(module): name for name, module in model.named_modules()}
    wrapped: list[tuple[str, list[str]]] = []

    def record(module: nn.Module, *, mesh: DeviceMesh) -> nn.Module:
        without_memory = [name for name, p in model.named_parameters() if p.is_meta]
        wrapped.append((names[id(module)], without_memory))
        return replicate(module, mesh=mesh)

    def main(world: World) -> None:
        mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp",))
        data_parallel.apply(model, mesh, world.device)

    monkeypatch.setattr(data_parallel, "replicate", record)
    threads.run(1, main, timeout=SECONDS)
    assert [name for name, _ in wrapped] == ["blocks.0", "blocks.1", ""]
    for index, (_, without_memory) in enumerate(wrapped):
        blocks = {name.split(".")[1] for name in without_memory if name.startswith("blocks.")}
        assert blocks == {str(later) for later in range(index + 1, 2)}
    assert wrapped[-1][1] == [], "the embeddings and the last norm got theirs at the end"
