"""ZeRO: every stage equal to its reference and to one device, on uneven shards and in pipelines."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from dtensor_llm import buckets
from dtensor_llm.buckets import Bucket
from dtensor_llm.config import Config
from dtensor_llm.model import GPT
from dtensor_llm.parallel import zero
from dtensor_llm.plan import Part, local_tensor
from dtensor_llm.planner.parameters import Place, groups, owned_shape, padded_numel, tp_shape
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
from parity_tests.test_costs import place_of
from reference import zero as reference
from reference.model import Model, ModelOptions, initial_weights
from reference.training import TrainingOptions, options_from

STAGES = [1, 2, 3]
MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dp", [2, 4])
def test_gradients_equal_its_reference(dp: int, stage: int) -> None:
    config = small_config(f"1x1x{dp}", zero=stage, micro_batch_size=1, dropout=0.1)
    strategy = partial(
        reference.loss_and_gradients, dp=dp, stage=stage, microbatches=config.microbatches
    )
    report = strategy_parity(config, strategy)
    assert report.passed, report


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_replicas_equal_its_reference(stage: int) -> None:
    """Three of them: two halves of a sum are the same in either order."""
    config = small_config(
        "dp_replicate=3,dp_shard=2",
        zero=stage,
        global_batch_size=12,
        micro_batch_size=1,
        dropout=0.1,
    )
    assert config.microbatches == 2
    strategy = partial(reference.loss_and_gradients, dp=2, stage=stage, microbatches=2, replicas=3)
    report = strategy_parity(config, strategy)
    assert report.passed, report


@pytest.mark.parametrize(("mesh", "replicas"), [("1x1x4", 1), ("dp_replicate=2,dp_shard=2", 2)])
@pytest.mark.parametrize("stage", STAGES)
def test_training_equals_its_reference(stage: int, mesh: str, replicas: int) -> None:
    """AdamW on the rows of the reference against AdamW on those of the mesh."""
    config = small_config(mesh, zero=stage, micro_batch_size=1)
    options = options_from(ModelOptions, dataclasses.asdict(config.model))
    how = options_from(TrainingOptions, dataclasses.asdict(config.train))
    model = Model(options, initial_weights(options, config.train.seed, torch.float64))
    batches = [batches_for(config).batch(step) for step in range(config.train.steps)]
    pairs = [(b.tokens, b.labels) for b in batches]
    run = reference.train_steps(
        model,
        pairs,
        how,
        dp=4 // replicas,
        stage=stage,
        microbatches=config.microbatches,
        replicas=replicas,
    )
    report = parity_with(config, run)
    assert report.passed, report


@pytest.mark.covering
@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("family", [{}, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("mesh", ["1x1x2", "1x1x8", "dp_replicate=2,dp_shard=2", "2x1x2"])
def test_equals_one_device(mesh: str, family: dict[str, object], zero: int) -> None:
    report = parity(small_config(mesh, zero=zero, micro_batch_size=1, **family))
    assert report.passed, report


@pytest.mark.covering
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("mesh", ["1x2x2", "2x2x2", "pp=2,dp_replicate=2,dp_shard=2"])
@pytest.mark.parametrize(("zero", "defer_reduce"), [(1, False), (2, False), (2, True), (3, True)])
def test_equals_one_device_in_a_pipeline(
    mesh: str, zero: int, defer_reduce: bool, schedule: str
) -> None:
    config = small_config(
        mesh, zero=zero, defer_reduce=defer_reduce, schedule=schedule, micro_batch_size=1
    )
    report = parity(config)
    assert report.passed, report


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("mesh", ["1x1x2", "dp_replicate=2", "dp_replicate=2,dp_shard=2", "2x1x2"])
def test_deferred_reduction_equals_one_device(mesh: str, zero: int) -> None:
    report = parity(small_config(mesh, zero=zero, defer_reduce=True, micro_batch_size=1))
    assert report.passed, report


@pytest.mark.parametrize(
    ("zero", "optimizer"),
    [
        *((stage, "adamw") for stage in (0, *STAGES)),
        *(pytest.param(stage, "sgd", marks=pytest.mark.full) for stage in (0, *STAGES)),
    ],
)
def test_stages_stay_equal_over_20_steps(zero: int, optimizer: str) -> None:
    config = small_config("1x1x2", zero=zero, optimizer=optimizer, steps=20, micro_batch_size=1)
    assert config.microbatches == 4 and config.train.lr == 1e-3
    report = parity(config)
    assert report.passed, report


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("mesh", ["1x1x4", "2x1x2", "1x2x2"])
def test_every_element_has_one_owner(mesh: str, zero: int) -> None:
    """What is reduced and updated divides by dp: no element is left out, and none is twice."""
    config = small_config(mesh, zero=zero, tied_embeddings=False)

    def main(world: World) -> list[tuple[str, Part]]:
        trainer = Trainer(config, world)
        batch = batches_for(config).batch(0, trainer.samples)
        trainer.step(0, batch.tokens, batch.labels)
        owned = trainer.optimizer.owned
        for name, part in owned.items():
            state = trainer.optimizer.state(name)
            for x in (trainer.optimizer.shards[name], *(state[key] for key in MOMENTS if state)):
                assert x.shape == torch.Size(s.stop - s.start for s in part.where)
        return [(name, part) for name, part in owned.items() if trainer.counts_here(name, part)]

    counted = {}
    for name, part in chain(*threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS)):
        counts = counted.setdefault(name, torch.zeros(part.shape))
        counts[part.where] += 1
    assert sum(counts.numel() for counts in counted.values()) == config.model.num_parameters
    assert all((counts == 1).all() for counts in counted.values())


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


@pytest.mark.parametrize("zero", [0, *STAGES])
def test_one_data_rank_has_nothing_to_share_out(zero: int) -> None:
    """No weight is wrapped, gathered or copied where every rank on dp is the only one."""

    def main(world: World) -> bool:
        parallel = Trainer(small_config("2x1x1", zero=zero), world).parallel
        return any(isinstance(x, FSDPModule) for x in parallel.model.modules())

    assert threads.run(2, main, timeout=SECONDS) == [False, False]


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
        zero.apply(model, mesh, world.device, reshard=True, prefetch=1, offload=None, overlap=True)

    monkeypatch.setattr(zero, "fully_shard", record)
    threads.run(1, main, timeout=SECONDS)
    assert without_memory == [["1", "2"], ["2"], [], []]


def local_gradients(trainer: Trainer) -> list[int]:
    """Elements of the gradients that the parameters hold, before each microbatch of a step."""
    weights = trainer.optimizer.weights.values()
    held: list[int] = []

    def record(*_: object) -> None:
        gradients = [local_tensor(w.grad) for w in weights if w.grad is not None]
        held.append(sum(x.numel() for x in gradients))

    trainer.model.register_forward_pre_hook(record)
    batch = batches_for(trainer.config).batch(0, trainer.samples)
    trainer.compute_gradients(0, batch.tokens, batch.labels)
    return held


@pytest.mark.parametrize(
    ("zero", "defer_reduce", "share"),
    [(1, False, 1.0), (2, False, 0.0), (2, True, 1.0), (3, False, 0.5), (3, True, 0.0)],
)
def test_gradients_held_by_parameters_between_microbatches(
    zero: int, defer_reduce: bool, share: float
) -> None:
    """Stage 1 holds them whole, stage 2 not at all: it adds up rows, apart. Stage 3 has rows; when
    deferred, torch holds whole ones where no parameter shows them."""
    sizes = {"vocab_size": 62, "micro_batch_size": 1}
    config = small_config("1x1x2", zero=zero, defer_reduce=defer_reduce, **sizes)
    held = threads.run(2, lambda world: local_gradients(Trainer(config, world)), timeout=SECONDS)
    assert held == [[0, *[int(share * config.model.num_parameters)] * 3]] * 2


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """Of the memory that the tensors are in; what several share counts once."""
    storages = [local_tensor(x).untyped_storage() for x in tensors if x is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def held_at_rest(config: Config, world: World) -> tuple[Place, tuple[int, int, int]]:
    """Bytes of weights, gradients and moments between two microbatches of the second step."""
    trainer = Trainer(config, world)
    optimizer, buckets = trainer.optimizer, trainer.optimizer.buckets
    batch = batches_for(config).batch(0, trainer.samples)
    trainer.step(0, batch.tokens, batch.labels)
    measured: list[tuple[int, int, int]] = []

    def gradients() -> Iterator[Tensor | None]:
        yield from (weight.grad for weight in optimizer.weights.values())
        yield from (bucket.total for bucket in buckets.buckets)
        for module in trainer.model.modules():
            # Private: torch shows whole gradients that wait for a later reduction nowhere else.
            group = module._get_fsdp_state()._fsdp_param_group if is_fsdp(module) else None
            for parameter in group.fsdp_params if group else ():
                yield parameter.unsharded_accumulated_grad
                yield parameter._unsharded_param.grad

    def measure(*_: object) -> None:
        buckets.finish()
        moments = [optimizer.state(name)[key] for name in optimizer.shards for key in MOMENTS]
        weights = bytes_of(optimizer.weights.values())
        measured.append((weights, bytes_of(gradients()), bytes_of(moments)))

    handle = trainer.model.register_forward_pre_hook(measure)
    trainer.step(1, batch.tokens, batch.labels)
    handle.remove()
    return place_of(trainer.mesh), measured[1]


def is_fsdp(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def expected_at_rest(config: Config, place: Place) -> tuple[int, int, int]:
    """In closed form: whole, or rows; those that are sent are padded to as many as rank 0's."""
    parallel, size = config.parallel, config.train.element_size
    parameters = [p for group in groups(config, place) for p in group.values()]
    whole = sum(math.prod(tp_shape(p, config, place)) for p in parameters)
    rows = sum(math.prod(owned_shape(p, config, place)) for p in parameters)
    padded = sum(padded_numel(p, config, place) for p in parameters) // parallel.mesh.dp_shard
    weights = padded if parallel.zero == 3 else whole
    held_whole = parallel.zero < 2 or parallel.defer_reduce
    gradients = whole if held_whole else padded
    return weights * size, gradients * size, 2 * rows * size


AT_REST = [(0, False), (1, False), (2, True), (2, False), (3, True), (3, False)]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("zero", "defer_reduce"), AT_REST)
@pytest.mark.parametrize("mesh", ["1x1x3", "dp_replicate=2,dp_shard=2", "2x1x2"])
def test_memory_at_rest_is_the_closed_form(mesh: str, zero: int, defer_reduce: bool) -> None:
    values = {"global_batch_size": 12, "micro_batch_size": 1}
    config = small_config(mesh, zero=zero, defer_reduce=defer_reduce, **values)
    main = partial(held_at_rest, config)
    for place, measured in threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS):
        assert measured == expected_at_rest(config, place), place


def test_memory_at_rest_falls_from_stage_to_stage() -> None:
    """On 4 ranks whose rows are even: 4, 2.5, 1.75 and 1 times the model, of AdamW's 4."""
    sizes = {"vocab_size": 64, "micro_batch_size": 1}
    configs = [small_config("1x1x4", zero=zero, **sizes) for zero in (0, 1, 2, 3)]
    model = configs[0].model.num_parameters * configs[0].train.element_size
    totals = [
        sum(threads.run(4, partial(held_at_rest, config), timeout=SECONDS)[0][1])
        for config in configs
    ]
    assert [total / model for total in totals] == [4.0, 2.5, 1.75, 1.0]


@pytest.mark.parametrize("zero", [1, 2])
def test_replicas_of_one_rank_each_reduce_over_replicas_alone(zero: int) -> None:
    config = small_config("dp_replicate=2", zero=zero, micro_batch_size=1)
    with patch.object(buckets, "ReduceScatter", side_effect=AssertionError("of one rank")):
        report = parity(config)
    assert report.passed, report


@pytest.mark.parametrize("tied", [True, False])
def test_a_bucket_is_a_block_or_what_is_left(tied: bool) -> None:
    config = small_config("1x1x2", zero=1, tied_embeddings=tied)

    def main(world: World) -> list[set[str]]:
        found = Trainer(config, world).optimizer.buckets.buckets
        return [{".".join(name.split(".")[:2]) for name in bucket.weights} for bucket in found]

    rest = {"token_embedding.weight", "position_embedding.weight", "final_norm.weight"}
    rest |= {"final_norm.bias"} | ({"head.weight"} if not tied else set())
    found = threads.run(2, main, timeout=SECONDS)[0]
    assert sorted(map(sorted, found)) == sorted([["blocks.0"], ["blocks.1"], sorted(rest)])


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("mesh", ["1x1x2", "1x2x2"])
def test_reductions_begin_before_the_backward_pass_ends(mesh: str, zero: int) -> None:
    """A block's message leaves while the gradients of the blocks before are still to come."""
    config = small_config(mesh, zero=zero, micro_batch_size=1, layers=4)

    def main(world: World) -> None:
        trainer = Trainer(config, world)
        buckets = trainer.optimizer.buckets.buckets
        arrived: list[list[int]] = []

        def watched(bucket: Bucket) -> Callable[[], None]:
            reduce = bucket.reduce

            def record() -> None:
                arrived.append([other.num_arrived for other in buckets])
                reduce()

            return record

        for bucket in buckets:
            bucket.reduce = watched(bucket)  # type: ignore[method-assign] # for this test
        batch = batches_for(config).batch(0, trainer.samples)
        trainer.compute_gradients(0, batch.tokens, batch.labels)
        total = [config.microbatches * len(bucket.weights) for bucket in buckets]
        assert len(arrived) == len(buckets) * (config.microbatches if zero == 2 else 1)
        assert all(seen != total for seen in arrived[:-1])
        assert arrived[-1] == total

    threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS)


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
