"""Memory: what lives at rest and at the peak of a step is what the closed form says, exactly."""

import gc
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch

from dtensor_llm.config import Config
from dtensor_llm.planner.contract import first_steps, place_of
from dtensor_llm.planner.live_bytes import OTHER, LiveBytes, name_lasting, watch_step
from dtensor_llm.planner.memory import (
    BUFFERS,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    Roles,
    at_peak,
    at_rest,
    model_states,
)
from dtensor_llm.planner.parameters import Place
from dtensor_llm.planner.pipeline_costs import schedule_of
from dtensor_llm.schedules.actions import receiver
from dtensor_llm.schedules.kinds import NAMES
from dtensor_llm.train import Trainer
from dtensor_llm.worlds import World, threads
from parity_tests.covering import covering_cases
from parity_tests.harness import LLAMA, ROOT, SECONDS, batches_for, small_config

# Rajbhandari et al., arXiv 1910.02054, table 1: GB a device by data-parallel ranks, for a model of
# so many billions of parameters: stage 1, 2 and 3. The paper rounds here and cuts off there.
TABLE_1 = {
    7.5: {
        1: (120, 120, 120),
        4: (52.5, 41.3, 30),
        16: (35.6, 21.6, 7.5),
        64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47),
        1024: (30.1, 15.1, 0.12),
    },
    128: {
        1: (2048, 2048, 2048),
        4: (896, 704, 512),
        16: (608, 368, 128),
        64: (536, 284, 32),
        256: (518, 263, 8),
        1024: (513, 257, 2),
    },
    1000: {
        1: (16000, 16000, 16000),
        4: (7000, 5500, 4000),
        16: (4750, 2875, 1000),
        64: (4187, 2218, 250),
        256: (4046, 2054, 62.5),
        1024: (4011, 2013, 15.6),
    },
}
MIXED_PRECISION = Roles(weights=2, gradients=2, optimizer=12)


@pytest.mark.parametrize("billions", TABLE_1)
def test_gives_table_1_of_the_zero_paper(billions: float) -> None:
    elements = Fraction(billions)
    for dp, published in TABLE_1[billions].items():
        assert model_states(0, elements, elements / dp, MIXED_PRECISION).total == 16 * elements
        for stage, expected in enumerate(published, start=1):
            found = model_states(stage, elements, elements / dp, MIXED_PRECISION).total
            last_digit = 10.0 ** -len(str(expected).partition(".")[2])
            assert abs(float(found) - expected) < last_digit, f"stage {stage}, dp {dp}"


@dataclass(frozen=True)
class Measured:
    """Bytes of one step of a rank; `rest` before and after it."""

    place: Place
    rest: tuple[Roles, Roles]
    peak: Roles
    buffers: int
    other: int


def measure(config: Config, world: World) -> Measured:
    def rest() -> Roles:
        now = live.now()
        assert now.get(GATHERED, 0) == now.get(BUFFERS, 0) == 0
        return Roles(now[WEIGHTS], now[GRADIENTS], now.get(OPTIMIZER, 0))

    batches = batches_for(config)
    with LiveBytes() as live:
        trainer = Trainer(config, world)
        batch, last = batches.batch(0, trainer.samples), first_steps(config)
        for step in range(last):
            trainer.step(step, batch.tokens, batch.labels)
        watch_step(live, trainer)
        before = rest()
        live.restart()
        trainer.step(last, batch.tokens, batch.labels)
        name_lasting(live, trainer)
        peak = Roles(live.peak(WEIGHTS, GATHERED), live.peak(GRADIENTS), live.peak(OPTIMIZER))
        rests = before, rest()
    return Measured(place_of(trainer.mesh), rests, peak, live.peak(BUFFERS), live.peak(OTHER))


def measure_all(config: Config) -> list[Measured]:
    main = partial(measure, config)
    return threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS)


FIVE = {"layers": 5, "micro_batch_size": 1}
ONE = {"layers": 5, "micro_batch_size": 4}
FOUR = {"layers": 4, "micro_batch_size": 2}
TWELVE = {"global_batch_size": 12, "micro_batch_size": 2}
FILE, FILED = (
    str(ROOT / "parity_tests" / "schedule_of_two_ranks.csv"),
    {"layers": 5, "global_batch_size": 6},
)
DDP = {"zero": 0, "ddp": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "zero 1": ("1x1x2", {"zero": 1, "layers": 3}),
    "zero 1, microbatches": ("1x1x4", {"zero": 1, "micro_batch_size": 1}),
    "zero 2": ("1x1x2", {"zero": 2, "layers": 3}),
    "zero 2, uneven rows": ("1x1x3", {"zero": 2, "global_batch_size": 6}),
    "zero 2, large vocabulary": ("1x1x2", {"zero": 2, "vocab_size": 999}),
    "zero 2, microbatches": ("1x1x2", {"zero": 2, "micro_batch_size": 1}),
    "zero 3, deferred": (
        "1x1x2",
        {"zero": 3, "micro_batch_size": 1, "defer_reduce": True, "layers": 3},
    ),
    "zero 2, deferred": ("1x1x2", {"zero": 2, "micro_batch_size": 1, "defer_reduce": True}),
    "hybrid, zero 2": ("dp_replicate=2,dp_shard=2", {"zero": 2, "micro_batch_size": 1}),
    "copies alone, zero 1": ("dp_replicate=2", {"zero": 1}),
    "copies alone, zero 1, microbatches": ("dp_replicate=2", {"zero": 1, "micro_batch_size": 1}),
    "copies alone, zero 2, deferred": (
        "dp_replicate=2",
        {"zero": 2, "micro_batch_size": 1, "defer_reduce": True, "tied_embeddings": False},
    ),
    "copies alone, zero 2, tp": ("tp=2,dp_replicate=2", {"zero": 2}),
    "copies alone, zero 1, pipeline": ("pp=2,dp_replicate=2", {"zero": 1}),
    "copies alone, zero 2, pipeline": (
        "pp=2,dp_replicate=2",
        {"zero": 2, "schedule": "gpipe", "micro_batch_size": 4, "layers": 3},
    ),
    "copies alone, zero 1, stages in a V": (
        "pp=2,dp_replicate=2",
        {"zero": 1, "schedule": "zbv", **FOUR, "stages_per_rank": 2},
    ),
    "pipeline, zero 1": ("1x2x2", {"zero": 1}),
    "pipeline, zero 2": ("1x2x2", {"zero": 2, "layers": 3}),
    "2x1x2, zero 1": ("2x1x2", {"zero": 1}),
    "overlapped": ("2x1x1", {"async_tp": True}),
    "overlapped, zero 1": ("2x1x2", {"async_tp": True, "zero": 1}),
    "overlapped, zero 2": (
        "2x1x2",
        {"async_tp": True, "zero": 2, "micro_batch_size": 2, "mlp": "swiglu", "bias": False},
    ),
    "overlapped, zero 2, parallel blocks": (
        "2x1x2",
        {"async_tp": True, "zero": 2, "micro_batch_size": 2, "parallel_block": True},
    ),
    "overlapped, zero 3": ("2x1x2", {"async_tp": True, "zero": 3, "layers": 3}),
    "overlapped, pipeline": ("2x2x1", {"async_tp": True}),
    "ddp": ("1x1x2", {"zero": 0, "ddp": True, "micro_batch_size": 1}),
    "ddp, one microbatch": ("1x1x2", {"zero": 0, "ddp": True}),
    "ddp, copies": ("1x1x2", {"zero": 0, "ddp": True, "ddp_bucket_view": False}),
    "one rank": ("1x1x1", {"micro_batch_size": 4}),
    "tp": ("4x1x1", {}),
    "data parallel": ("1x1x2", {"zero": 0}),
    "data parallel, microbatches": ("1x1x2", {"zero": 0, "micro_batch_size": 1}),
    "zero 3": ("1x1x2", {"layers": 3}),
    "zero 3, microbatches": ("1x1x4", {"micro_batch_size": 1}),
    "zero 3, uneven rows": ("1x1x3", {"global_batch_size": 6}),
    "zero 3, rows for some ranks": ("1x1x4", {"vocab_size": 5}),
    "zero 3, large vocabulary": ("1x1x2", {"vocab_size": 999}),
    "zero 3, large vocabulary, microbatches": ("1x1x2", {"vocab_size": 999, "micro_batch_size": 1}),
    "zero 3 of copies alone": ("dp_replicate=2", {"zero": 3, "micro_batch_size": 2}),
    "hybrid": ("dp_replicate=2,dp_shard=2", {}),
    "hybrid, microbatches": ("dp_replicate=2,dp_shard=2", {"micro_batch_size": 1}),
    "pipeline": ("1x4x1", {"layers": 5, "micro_batch_size": 2}),
    "pipeline, replicated": ("1x2x2", {"zero": 0, "schedule": "gpipe"}),
    "pipeline, zero 3": ("1x2x2", {"layers": 4}),
    "pipeline, zero 3, middle stages": ("1x3x2", {"layers": 3, **TWELVE}),
    "pipeline, by hand": (
        "2x2x2",
        {"layers": 3, "stage_layers": "1,2", "vocab_size": 57, "micro_batch_size": 2},
    ),
    "pipeline, embedding alone": ("1x2x2", {"stage_layers": "0,2", "zero": 1}),
    "pipeline, embedding alone, zero 2": ("1x2x2", {"stage_layers": "0,2", "zero": 2}),
    "pipeline, head alone": ("1x2x2", {"stage_layers": "2,0", "zero": 2, "micro_batch_size": 1}),
    "pipeline, head alone, zero 3": (
        "1x2x2",
        {"stage_layers": "2,0", "reshard_after_forward": True},
    ),
    "pipeline, head alone, ddp": ("1x2x2", {"stage_layers": "2,0", "zero": 0, "ddp": True}),
    "pipeline, both alone": ("1x3x2", {"stage_layers": "0,2,0", **TWELVE}),
    "pipeline, both alone, replicated": (
        "1x3x2",
        {"stage_layers": "0,2,0", **TWELVE, "zero": 0},
    ),
    "2x2x2": ("2x2x2", {"vocab_size": 57}),
    "zero 3, not freed": ("1x1x2", {"reshard_after_forward": False, "micro_batch_size": 1}),
    "zero 3, gathered ahead": ("1x1x2", {"layers": 4, "prefetch_depth": 2}),
    "zero 3, not gathered ahead": ("1x1x2", {"layers": 4, "prefetch_depth": 0}),
    "pipeline, freed": ("1x2x2", {"reshard_after_forward": True, "layers": 3}),
    "grid": ("tp=2x2", {}),
    "grid, zero 0": ("tp=2x2,dp=2", {"zero": 0, "layers": 1, "tied_embeddings": False}),
    "grid, zero 1": ("tp=2x2,dp=2", {"zero": 1, "tied_embeddings": False}),
    "grid, zero 2": ("tp=2x2,dp=2", {"zero": 2, "micro_batch_size": 1}),
    "grid, zero 2, untied": (
        "tp=2x2,dp=2",
        {"zero": 2, "micro_batch_size": 1, "tied_embeddings": False, "vocab_size": 57},
    ),
    "grid, zero 3": ("tp=2x2,dp=2", {"vocab_size": 57}),
    "hybrid and tp": ("dp_replicate=2,dp_shard=2,tp=2", {}),
    "interleaved 1f1b, replicated": ("1x2x2", {"schedule": "interleaved-1f1b", **FIVE, "zero": 0}),
    "interleaved 1f1b, ddp": ("1x2x2", {"schedule": "interleaved-1f1b", **FIVE, **DDP}),
    "interleaved 1f1b, zero 1": ("1x2x2", {"schedule": "interleaved-1f1b", **FIVE, "zero": 1}),
    "interleaved 1f1b, zero 2": ("1x2x2", {"schedule": "interleaved-1f1b", **FIVE, "zero": 2}),
    "interleaved 1f1b, zero 3": ("1x2x2", {"schedule": "interleaved-1f1b", **FIVE}),
    "looped bfs, zero 3": ("1x2x2", {"schedule": "looped-bfs", **FIVE}),
    "looped bfs, zero 2, one microbatch": ("1x2x2", {"schedule": "looped-bfs", **ONE, "zero": 2}),
    "four stages a rank, zero 3": (
        "1x2x2",
        {"schedule": "interleaved-1f1b", **FOUR, "layers": 8, "stages_per_rank": 4},
    ),
    "interleaved zero bubble, zero 2": (
        "1x2x2",
        {"schedule": "interleaved-zero-bubble", **FIVE, "zero": 2},
    ),
    "interleaved zero bubble, zero 3": ("1x2x2", {"schedule": "interleaved-zero-bubble", **FIVE}),
    "zbv": ("1x4x1", {"schedule": "zbv", "layers": 9, "micro_batch_size": 1}),
    "zbv, replicated": ("1x2x2", {"schedule": "zbv", **FIVE, "zero": 0}),
    "zbv, zero 1": ("1x2x2", {"schedule": "zbv", **FIVE, "zero": 1}),
    "zbv, zero 2": ("1x2x2", {"schedule": "zbv", **FIVE, "zero": 2}),
    "zbv, zero 3": ("2x2x2", {"schedule": "zbv", **FOUR}),
    "zbv, zero 3, untied": ("1x2x2", {"schedule": "zbv", **FOUR, "tied_embeddings": False}),
    "zbv, zero 2, one microbatch": ("1x2x2", {"schedule": "zbv", **ONE, "zero": 2}),
    "dualpipev, zero 2": ("1x2x2", {"schedule": "dualpipev", **FIVE, "zero": 2}),
    "dualpipev, zero 3": ("1x2x2", {"schedule": "dualpipev", **FIVE}),
    "from a file, zero 1": ("1x2x2", {"schedule_csv": FILE, **FILED, "zero": 1}),
    "from a file, zero 2": ("1x2x2", {"schedule_csv": FILE, **FILED, "zero": 2}),
    "from a file, zero 3": ("1x2x2", {"schedule_csv": FILE, **FILED}),
}


@pytest.mark.parametrize("case", covering_cases(CASES))
def test_measured_is_predicted(case: str) -> None:
    mesh, values = CASES[case]
    hold_to_closed_form(small_config(mesh, **values))


@pytest.mark.parametrize("mesh", ["4x1x1", "1x1x3", "dp_replicate=2,dp_shard=2", "1x2x2", "2x1x2"])
def test_measured_is_predicted_for_the_other_family(mesh: str) -> None:
    """Whose head, untied, is large and has its gradient first; its MLP has three matrices."""
    hold_to_closed_form(small_config(mesh, global_batch_size=12, micro_batch_size=2, **LLAMA))


@pytest.mark.covering(1)
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize(
    "training",
    [{"optimizer": "sgd"}, {"optimizer": "sgd", "momentum": 0.0}, {"dtype": "bfloat16"}],
    ids=str,
)
def test_measured_is_predicted_for_other_training(zero: int, training: dict[str, Any]) -> None:
    hold_to_closed_form(small_config("2x1x2", zero=zero, **training))


def hold_to_closed_form(config: Config) -> None:
    for rank in measure_all(config):
        predicted = at_rest(config, rank.place)
        assert rank.rest == (predicted, predicted), rank.place
        assert rank.peak == at_peak(config, rank.place), rank.place


def test_states_fall_stage_by_stage() -> None:
    """At rest stage 1 holds what stage 2 does; in the step, whole gradients of all microbatches."""
    configs = (small_config("1x1x2", zero=zero, micro_batch_size=2, layers=5) for zero in range(4))
    for ranks in zip(*map(measure_all, configs), strict=True):
        rest = [rank.rest[1].total for rank in ranks]
        peak = [rank.peak.total for rank in ranks]
        assert rest[0] > rest[1] == rest[2] > rest[3]
        assert peak[0] > peak[1] > peak[2] > peak[3]
        assert 2 * rest[3] < 1.02 * rest[0], "one of 2 parts, padding and counters aside"


def test_activations_are_those_of_the_schedule() -> None:
    """GPipe holds those of 8 microbatches, 1F1B of 2 on the first stage and of 1 on the last."""
    gpipe, one_f_one_b = (
        measure_all(small_config("1x2x1", schedule=schedule, micro_batch_size=1, seq_len=64))
        for schedule in ("gpipe", "1f1b")
    )
    assert gpipe[0].other > 2.5 * one_f_one_b[0].other
    assert one_f_one_b[0].other > 1.2 * one_f_one_b[1].other


@pytest.mark.parametrize("name", NAMES)
def test_steps_leave_nothing_behind(name: str) -> None:
    """Not even until a garbage collection. A float32 counter of a gradient comes and goes."""
    config = small_config("1x2x1", schedule=name, **FOUR)

    def main(world: World) -> list[int]:
        batches, held = batches_for(config), []
        with LiveBytes() as live:
            trainer = Trainer(config, world)
            batch = batches.batch(0, trainer.samples)
            for step in range(3):
                trainer.evaluate(iter([batch]))
                trainer.step(step, batch.tokens, batch.labels)
                live.restart()
                held.append(sum(live.now().values()))
        return held

    gc.disable()
    try:
        ranks = threads.run(2, main, timeout=SECONDS)
    finally:
        gc.enable()
    for held in ranks:
        assert max(held) - min(held) < 64, held


def test_activations_of_1f1b_do_not_grow_with_the_microbatches() -> None:
    """But for the batch itself: tokens, labels and places of each sequence."""

    def peaks(m: int) -> list[int]:
        sizes = {"global_batch_size": m, "micro_batch_size": 1}
        return [rank.other for rank in measure_all(small_config("1x2x1", **sizes))]

    for few, many in zip(peaks(8), peaks(16), strict=True):
        assert many - few <= 8 * (2 * 8 + 4) * 8, "int64 numbers of 8 sequences of 8 tokens"


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_keeps_no_more_than_is_on_its_way(name: str) -> None:
    """Beside the batch and the losses: what a rank sends, till torch waits for it.

    With 1F1B that is at once, with the others at the end.
    """

    def of(m: int) -> Config:
        batch = {"global_batch_size": m, "micro_batch_size": 1}
        return small_config("1x2x1", schedule=name, layers=5, **batch)

    def peaks(config: Config) -> list[int]:
        def main(world: World) -> int:
            with LiveBytes() as live:
                trainer = Trainer(config, world)
                batch = batches_for(config).batch(0, trainer.samples)
                trainer.evaluate(iter([batch]))
                name_lasting(live, trainer)
                live.restart()
                trainer.evaluate(iter([batch]))
            return live.peak(OTHER)

        return threads.run(2, main, timeout=SECONDS)

    few, many = of(4), of(16)
    schedule, model = schedule_of(many), many.model
    for rank, grown in enumerate(b - a for a, b in zip(peaks(few), peaks(many), strict=True)):
        forwards = [action for action in schedule.actions(rank) if action.kind == "F"]
        sent = sum(receiver(action, schedule.rank_of_stage) is not None for action in forwards)
        sent *= 12 * model.seq_len * model.width * 8 // 16 if name != "1f1b" else 0
        assert grown <= sent + 12 * (2 * model.seq_len + 4) * 8, "int64 numbers of 12 sequences"


def test_buffers_are_those_of_data_parallelism() -> None:
    """Flat copies of blocks, to send them at once: no rank has them without dp."""
    (alone, *_), (sharded, *_) = (measure_all(small_config(m)) for m in ("2x1x1", "2x1x2"))
    assert (alone.buffers, sharded.buffers > 0) == (0, True)


def test_live_bytes_counts_storages_once_and_while_they_live() -> None:
    with LiveBytes() as live:
        weight = torch.zeros(100)  # 400 bytes
        view = weight[10:20].reshape(2, 5)
        live.name(WEIGHTS, [view])
        assert live.now() == {WEIGHTS: 400}
        large = torch.ones(1000) + weight.sum()
        assert live.peak(OTHER) >= 8000, "the ones and the sum"
        live.restart()
        assert live.now() == {WEIGHTS: 400, OTHER: 4000}
        del weight
        assert live.now()[WEIGHTS] == 400, "its view lives"
        view.untyped_storage().resize_(0)
        large.add_(1)
        live.name(GRADIENTS, [large])
        assert live.now() == {GRADIENTS: 4000}
        assert (live.peak(WEIGHTS), live.peak(WEIGHTS, GRADIENTS)) == (400, 4400)
        del large
        assert live.now() == {}
