"""ZeRO stage 3 with --reshard-after-forward and --prefetch-depth: what is gathered, and when."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from dtensor_llm.collectives import SummingReduceScatter
from dtensor_llm.config import Config
from dtensor_llm.plan import local_tensor
from dtensor_llm.train import Trainer
from dtensor_llm.worlds import World, threads
from parity_tests.harness import LLAMA, SECONDS, batches_for, parity, small_config

ROOT = "root"


@dataclass
class Sequence:
    """What one rank did, and with what: a block or root.

    gather (an all-gather begins), arrived (it has been waited for), reduce (a reduction begins),
    summed (it has been waited for), forward, backward.
    """

    events: list[tuple[str, str]] = field(default_factory=list)
    gathered_bytes: int = 0

    def count(self, what: str, where: str) -> int:
        return self.events.count((what, where))


def owner_of(parameters: list[Any]) -> str:
    """The block whose parameters these are; root for those in no block."""
    parts = parameters[0]._param_fqn.split(".")
    return parts[1] if parts[0] == "blocks" else ROOT


@contextmanager
def recorded(rank: int = 0) -> Iterator[Sequence]:
    """The all-gathers and reductions of weights, of the one rank."""
    seen = Sequence()
    gather, reduce = _fsdp_param_group.foreach_all_gather, _fsdp_param_group.foreach_reduce
    copy_out, wait = _fsdp_param_group.foreach_all_gather_copy_out, SummingReduceScatter.wait
    reduced: list[str] = []  # and not waited for

    def seen_gather(parameters: list[Any], *args: Any) -> Any:
        result = gather(parameters, *args)
        if dist.get_rank() == rank:
            seen.events.append(("gather", owner_of(parameters)))
            if result.all_gather_work is None:
                seen.events.append(("arrived", owner_of(parameters)))
            seen.gathered_bytes += result.all_gather_output.nbytes
        return result

    def seen_copy_out(result: Any, parameters: list[Any], *args: Any) -> None:
        if dist.get_rank() == rank and result.all_gather_work is not None:
            seen.events.append(("arrived", owner_of(parameters)))
        copy_out(result, parameters, *args)

    def seen_reduce(parameters: list[Any], *args: Any) -> Any:
        if dist.get_rank() == rank:
            seen.events.append(("reduce", owner_of(parameters)))
            reduced.append(owner_of(parameters))
        return reduce(parameters, *args)

    def seen_wait(self: SummingReduceScatter) -> None:
        if dist.get_rank() == rank and self.on_its_way:
            seen.events.append(("summed", reduced.pop(0)))
        wait(self)

    with (
        patch.object(_fsdp_param_group, "foreach_all_gather", seen_gather),
        patch.object(_fsdp_param_group, "foreach_all_gather_copy_out", seen_copy_out),
        patch.object(_fsdp_param_group, "foreach_reduce", seen_reduce),
        patch.object(SummingReduceScatter, "wait", seen_wait),
    ):
        yield seen


def watch_blocks(trainer: Trainer, seen: Sequence) -> None:
    """Note when a block begins to compute, forward and backward."""

    def forward(name: str) -> None:
        seen.events.append(("forward", name))

    def backward(name: str, output: Tensor) -> None:
        output.register_hook(lambda _: seen.events.append(("backward", name)))

    for name, block in trainer.model.blocks.items():
        block.register_forward_pre_hook(lambda *_, name=name: forward(name))
        block.register_forward_hook(lambda _, __, output, name=name: backward(name, output))


def one_step(config: Config, rank: int = 0) -> Sequence:
    """What `rank` does in its second step: in the first a pipeline agrees on shapes."""
    batches = batches_for(config)
    with recorded(rank) as seen:

        def main(world: World) -> None:
            trainer = Trainer(config, world)
            batch = batches.batch(0, trainer.samples)
            trainer.step(0, batch.tokens, batch.labels)
            if world.rank == rank:
                seen.events.clear()
                seen.gathered_bytes = 0
                watch_blocks(trainer, seen)
            batch = batches.batch(1, trainer.samples)
            trainer.step(1, batch.tokens, batch.labels)

        threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS)
    return seen


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", [{}, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize(
    ("mesh", "reshard"),
    [
        ("1x1x2", False),
        ("1x1x3", False),
        ("1x2x2", True),
        ("2x2x2", True),
        ("dp_replicate=2,dp_shard=2,tp=2", False),
    ],
)
def test_equals_one_device(mesh: str, reshard: bool, family: dict[str, object]) -> None:
    """With what is not the default of the mesh."""
    batch = {"global_batch_size": 12} if mesh == "1x1x3" else {}
    options = {"micro_batch_size": 1, "reshard_after_forward": reshard, "layers": 3}
    report = parity(small_config(mesh, **options, **batch, **family))
    assert report.passed, report


@pytest.mark.covering(1)
@pytest.mark.parametrize("depth", [0, 2, 9])
@pytest.mark.parametrize("mesh", ["1x1x2", "2x1x2", "1x2x2"])
def test_any_depth_equals_one_device(mesh: str, depth: int) -> None:
    options = {"prefetch_depth": depth, "reshard_after_forward": True}
    report = parity(small_config(mesh, layers=4, micro_batch_size=1, **options))
    assert report.passed, report


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("m", [1, 4])
def test_gathers_of_accumulated_microbatches(m: int, reshard: bool) -> None:
    """A block twice a microbatch, or once; what is in no block once; every reduction at once."""
    config = small_config("1x1x2", micro_batch_size=4 // m, reshard_after_forward=reshard)
    seen = one_step(config)
    for block in ("0", "1"):
        assert seen.count("gather", block) == m * (2 if reshard else 1)
        assert seen.count("reduce", block) == m
    assert seen.count("gather", ROOT) == seen.count("reduce", ROOT) == m


@pytest.mark.covering
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stage", [0, 1])
def test_gathers_of_a_pipeline(stage: int, schedule: str, reshard: bool | None) -> None:
    """By default once a step, whatever the microbatches; with resharding at m + 1 turns."""
    m = 4
    config = small_config(
        "1x2x2", micro_batch_size=1, schedule=schedule, reshard_after_forward=reshard
    )
    assert config.microbatches == m
    seen = one_step(config, rank=2 * stage)
    assert seen.count("gather", str(stage)) == (m + 1 if reshard else 1)
    assert seen.count("gather", ROOT) == 1
    assert seen.count("reduce", str(stage)) == seen.count("reduce", ROOT) == 1


def test_default_with_a_pipeline_gathers_an_mth_of_the_bytes() -> None:
    def block_bytes(m: int, reshard: bool | None) -> int:
        """Without what is in no block, which is gathered once."""
        options = {"micro_batch_size": 8 // (2 * m), "reshard_after_forward": reshard}
        many = one_step(small_config("1x2x2", layers=4, **options))
        return many.gathered_bytes - root_bytes(config)

    config = small_config("1x2x2", layers=4)
    assert block_bytes(4, None) == block_bytes(2, None)
    assert block_bytes(4, True) == 5 * block_bytes(4, None)
    assert block_bytes(2, True) == 3 * block_bytes(4, None)


def root_bytes(config: Config) -> int:
    """Of the first stage, as gathered from two ranks: with padding to an even number of rows."""
    model = config.model
    rows = [model.vocab_size, model.seq_len]
    return sum(2 * -(-n // 2) * model.width * 8 for n in rows)


@pytest.mark.parametrize("depth", [0, 1, 2, 9])
def test_depth_decides_what_is_gathered_before_a_block_computes(depth: int) -> None:
    layers = 5
    seen = one_step(small_config("1x1x2", layers=layers, prefetch_depth=depth))
    turn = seen.events.index(("backward", str(layers - 1)))
    there: dict[str, dict[str, list[str]]] = {"forward": {}, "backward": {}}
    gathered: list[str] = []
    for what, where in seen.events:
        if what == "gather" and where != ROOT:
            gathered.append(where)
        elif what in there:
            there[what][where] = list(gathered)
    every = [str(block) for block in range(layers)]
    assert turn > 0
    for block in range(layers):
        ahead = every[: block + depth + 1]
        assert there["forward"][str(block)] == ahead
        back = every[::-1][: layers - block + depth]
        assert there["backward"][str(block)] == every + back


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_gathers_ahead_travel_while_a_block_computes(depth: int) -> None:
    """Begun before it computes, and not waited for until the block that they are for computes."""
    layers = 4
    travels: dict[str, dict[str, list[str]]] = {"forward": {}, "backward": {}}
    now: list[str] = []
    for what, where in one_step(small_config("1x1x2", layers=layers, prefetch_depth=depth)).events:
        if what == "gather":
            now.append(where)
        elif what == "arrived":
            now.remove(where)
        elif what in travels:
            travels[what][where] = list(now)
    every = [str(block) for block in range(layers)]
    for order, seen in ((every, travels["forward"]), (every[::-1], travels["backward"])):
        for turn, block in enumerate(order):
            assert seen[block] == order[turn + 1 : turn + 1 + depth], block


@pytest.mark.parametrize("m", [1, 2])
def test_sums_travel_while_the_next_block_computes(m: int) -> None:
    """Of the first microbatch; what is added to gradients that are there is waited for at once."""
    config = small_config("1x1x2", layers=3, micro_batch_size=4 // m)
    told = ("reduce", "summed", "backward")
    events = [event for event in one_step(config).events if event[0] in told]
    first, *others = [events[i * len(events) // m : (i + 1) * len(events) // m] for i in range(m)]
    assert first == [
        ("backward", "2"),
        ("reduce", "2"),
        ("backward", "1"),
        ("reduce", "1"),
        ("summed", "2"),
        ("backward", "0"),
        ("reduce", "0"),
        ("summed", "1"),
        ("reduce", ROOT),
        ("summed", "0"),
        ("summed", ROOT),
    ]
    for events in others:
        assert [what for what, _ in events] == [
            *["backward", "reduce", "summed"] * 3,
            *["reduce", "summed"],
        ]


def test_depth_does_not_change_the_bytes() -> None:
    sent = {
        one_step(small_config("1x1x2", layers=4, prefetch_depth=depth)).gathered_bytes
        for depth in (0, 1, 2, 9)
    }
    assert len(sent) == 1


def whole_blocks(trainer: Trainer) -> int:
    blocks = trainer.model.blocks.values()
    return sum(all(local_tensor(p).numel() == p.numel() for p in b.parameters()) for b in blocks)


@pytest.mark.parametrize(("reshard", "depth"), [(True, 0), (True, 2), (False, 0), (False, 2)])
def test_memory_that_gathered_weights_take(reshard: bool, depth: int) -> None:
    """One block and those ahead of it are whole; all that have computed if none is freed."""
    layers = 5
    config = small_config(
        "1x1x2", layers=layers, prefetch_depth=depth, reshard_after_forward=reshard
    )

    def main(world: World) -> tuple[list[int], int]:
        trainer = Trainer(config, world)
        whole: list[int] = []
        for block in trainer.model.blocks.values():
            block.register_forward_hook(lambda *_: whole.append(allocated_blocks(trainer)))
        batch = batches_for(config).batch(0, trainer.samples)
        trainer.compute_gradients(0, batch.tokens, batch.labels)
        return whole, allocated_blocks(trainer)

    # The hook runs when the block's own have been freed.
    freed = [i + 1 if reshard else 0 for i in range(layers)]
    expected = [min(layers, i + 1 + depth) - freed[i] for i in range(layers)]
    assert threads.run(2, main, timeout=SECONDS) == [(expected, 0)] * 2


def allocated_blocks(trainer: Trainer) -> int:
    """How many blocks have memory for gathered weights."""
    count = 0
    for block in trainer.model.blocks.values():
        assert isinstance(block, FSDPModule)
        (group,) = block._get_fsdp_state()._fsdp_param_groups
        buffers = [b for p in group.fsdp_params for b in p.all_gather_outputs]
        pending = group._all_gather_result is not None
        count += pending or any(b.untyped_storage().nbytes() for b in buffers)
    return count


@pytest.mark.parametrize("mesh", ["1x1x2", "1x2x2"])
def test_weights_are_shards_after_an_evaluation(mesh: str) -> None:
    """Else weights that change before the next one would not be seen by it."""
    config = small_config(mesh, reshard_after_forward=False)

    def main(world: World) -> list[float]:
        trainer = Trainer(config, world)
        batches = batches_for(config)
        losses: list[float] = []
        for _ in range(2):
            loss, _ = trainer.evaluate(iter([batches.batch(0, trainer.samples)]))
            losses.append(loss)
            assert allocated_blocks(trainer) == 0
            assert whole_blocks(trainer) == 0
            for shard in trainer.optimizer.shards.values():
                shard.data.mul_(1.01)
        return losses

    first, second = threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS)[0]
    assert first != second
