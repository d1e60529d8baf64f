"""Communication: what a step is seen to communicate is what the closed form says, to the byte."""

from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import pytest

from dtensor_llm.config import Config
from dtensor_llm.plan import local_tensor
from dtensor_llm.planner.contract import first_steps, place_of
from dtensor_llm.planner.costs import activation, data_parallel_gradients, step_traffic
from dtensor_llm.planner.parameters import Place, groups, owned_shape, rest_shape
from dtensor_llm.planner.recorder import CommRecorder
from dtensor_llm.planner.traffic import Traffic, merged
from dtensor_llm.train import Trainer
from dtensor_llm.worlds import World, threads
from dtensor_llm.worlds.processes_spawn import spawn
from parity_tests.covering import covering_cases
from parity_tests.harness import LLAMA, ROOT, SECONDS, batches_for, small_config

FIVE = {"layers": 5, "micro_batch_size": 1}
FOUR = {"layers": 4, "micro_batch_size": 2}
TWO = {"micro_batch_size": 2}
FILE = str(ROOT / "parity_tests" / "schedule_of_two_ranks.csv")
THREES = {"heads": 6, "width": 24, "ffn_width": 33, "seq_len": 9, "vocab_size": 58}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fused": ("2x1x2", {"fused_qkv": True}),
    "parallel blocks, tp": ("2x1x1", {"parallel_block": True, "sequence_parallel": False}),
    "parallel blocks": ("2x2x2", {"parallel_block": True, **TWO}),
    "gathered again": ("2x1x1", {"gather_again": True, "micro_batch_size": 2}),
    "gathered again, 2x2x2": ("2x2x2", {"gather_again": True, "fused_qkv": True, **TWO}),
    "gathered again, parallel blocks": ("2x1x2", {"gather_again": True, "parallel_block": True}),
    "overlapped": ("2x1x1", {"async_tp": True, "micro_batch_size": 2}),
    "overlapped, split backward": (
        "2x2x1",
        {"async_tp": True, "schedule": "zbv", **FOUR},
    ),
    "overlapped, split backward, parallel blocks": (
        "2x2x1",
        {
            "async_tp": True,
            "schedule": "interleaved-zero-bubble",
            **FOUR,
            "parallel_block": True,
            "gather_again": True,
        },
    ),
    "overlapped, copied heads": ("4x1x2", {"async_tp": True, "kv_heads": 2}),
    "overlapped, 2x2x2": (
        "2x2x2",
        {"async_tp": True, "gather_again": True, "fused_qkv": True, **TWO},
    ),
    "overlapped, parallel blocks": ("3x1x1", {"async_tp": True, "parallel_block": True, **THREES}),
    "nothing to gather again": ("2x1x1", {"gather_again": True, "sequence_parallel": False}),
    "copied heads": ("4x1x2", {"kv_heads": 2, "micro_batch_size": 2}),
    "copied heads, one": ("4x2x1", {"kv_heads": 1, "zero": 0}),
    "one rank": ("1x1x1", {}),
    "tp": ("4x1x1", {"sequence_parallel": False}),
    "tp, uneven vocabulary": ("4x1x1", {"vocab_size": 57}),
    "sp": ("2x1x1", {}),
    "sp, microbatches": ("2x1x1", {"micro_batch_size": 2}),
    "data parallel": ("1x1x4", {"zero": 0}),
    "data parallel, microbatches": ("1x1x2", {"zero": 0, "micro_batch_size": 1}),
    "zero 3": ("1x1x4", {}),
    "zero 3, uneven rows": ("1x1x3", {"global_batch_size": 6}),
    "zero 3, rows for some ranks": ("1x1x4", {"vocab_size": 5}),
    "zero 3, microbatches": ("1x1x2", {"micro_batch_size": 1}),
    "zero 3, kept for backward": (
        "1x1x3",
        {"reshard_after_forward": False, "micro_batch_size": 2, "global_batch_size": 12},
    ),
    "zero 3, gathered far ahead": ("1x1x2", {"prefetch_depth": 2, "layers": 4}),
    "zero 3, weights on the host": ("1x1x2", {"offload": "weights", "micro_batch_size": 1}),
    "one rank, weights on the host": ("1x1x1", {"offload": "weights"}),
    "optimizer on the host": ("2x1x2", {"offload": "optimizer", "zero": 0}),
    "zero 3 of copies alone": ("dp_replicate=2", {"micro_batch_size": 2}),
    "hybrid": ("dp_replicate=2,dp_shard=2", {"micro_batch_size": 1}),
    "hybrid, replicated": ("dp_replicate=2,dp_shard=2", {"zero": 0}),
    "zero 1": ("1x1x4", {"zero": 1, "micro_batch_size": 1}),
    "zero 2, uneven rows": ("1x1x3", {"zero": 2, "global_batch_size": 6, "micro_batch_size": 1}),
    "zero 2, rows for some ranks": ("1x1x4", {"zero": 2, "vocab_size": 5}),
    "zero 2, deferred": ("1x1x2", {"zero": 2, "micro_batch_size": 1, "defer_reduce": True}),
    "zero 3, deferred": ("1x1x2", {"micro_batch_size": 1, "defer_reduce": True}),
    "zero 1 of copies alone": ("dp_replicate=2", {"zero": 1, "micro_batch_size": 2}),
    "hybrid, zero 2": ("dp_replicate=2,dp_shard=2", {"zero": 2, "micro_batch_size": 1}),
    "hybrid, deferred": (
        "dp_replicate=2,dp_shard=2",
        {"micro_batch_size": 1, "defer_reduce": True},
    ),
    "2x2x2, zero 1": ("2x2x2", {"zero": 1, "vocab_size": 57, **TWO}),
    "hybrid and pp, zero 2": ("dp_replicate=2,dp_shard=2,pp=2", {"zero": 2}),
    "2x2x2, zero 2": (
        "2x2x2",
        {"zero": 2, "schedule": "gpipe", "sequence_parallel": False, **TWO},
    ),
    "ddp": ("1x1x2", {"zero": 0, "ddp": True, "micro_batch_size": 1}),
    "ddp, small buckets": ("1x1x4", {"zero": 0, "ddp": True, "ddp_bucket_mb": 0.03}),
    "ddp, smallest buckets": ("1x1x2", {"zero": 0, "ddp": True, "ddp_bucket_mb": 1e-6}),
    "ddp, hybrid": ("dp_replicate=2,dp_shard=2", {"zero": 0, "ddp": True, "ddp_bucket_mb": 0.02}),
    "ddp, static graph": (
        "1x1x2",
        {"zero": 0, "ddp": True, "ddp_static_graph": True, "ddp_bucket_mb": 0.01},
    ),
    "ddp and pp": ("1x2x2", {"zero": 0, "ddp": True, "ddp_bucket_mb": 0.02, "layers": 3}),
    "pipeline": ("1x4x1", {"layers": 5}),
    "pipeline, by hand": (
        "2x2x2",
        {"layers": 3, "stage_layers": "1,2", "vocab_size": 57, **TWO},
    ),
    "pipeline, embedding alone": ("2x2x2", {"stage_layers": "0,2", "zero": 1, **TWO}),
    "pipeline, head alone": ("1x2x2", {"stage_layers": "2,0", "zero": 2}),
    "pipeline, both alone": (
        "1x3x2",
        {"stage_layers": "0,2,0", "global_batch_size": 12, **TWO},
    ),
    "pipeline, by cost": (
        "1x4x1",
        {"layers": 5, "stage_layers": "auto", "vocab_size": 999, **TWO},
    ),
    "grid and pp, embedding alone": ("tp=2x2,pp=2", {"stage_layers": "0,2", **TWO}),
    "ddp and pp, head alone": (
        "1x2x2",
        {"zero": 0, "ddp": True, "ddp_bucket_mb": 0.02, "stage_layers": "2,0"},
    ),
    "pipeline, gpipe": ("1x2x1", {"schedule": "gpipe", "micro_batch_size": 8}),
    "2x2x2": ("2x2x2", {"vocab_size": 57}),
    "4x1x2": ("4x1x2", {}),
    "1x4x2": ("1x4x2", {"layers": 4}),
    "2x1x3, uneven": ("2x1x3", {"ffn_width": 50, "global_batch_size": 12}),
    "2x2x1, microbatches": ("2x2x1", {"micro_batch_size": 1}),
    "2x2x2, replicated": ("2x2x2", {"zero": 0, "schedule": "gpipe"}),
    "2x2x2, freed after forward": ("2x2x2", {"reshard_after_forward": True, **TWO}),
    "gpipe, freed after forward": (
        "1x2x2",
        {"reshard_after_forward": True, "schedule": "gpipe", "micro_batch_size": 1},
    ),
    "1x2x3": ("1x2x3", {"global_batch_size": 12}),
    "hybrid and tp": ("dp_replicate=2,dp_shard=2,tp=2", {}),
    "hybrid and tp, replicated": ("dp_replicate=2,dp_shard=2,tp=2", {"zero": 0}),
    "grid": ("tp=2x2", {}),
    "grid, microbatches": ("tp=2x2", {"micro_batch_size": 1, "vocab_size": 62, "seq_len": 7}),
    "grid of nine, uneven": (
        "tp=3x3",
        {"heads": 6, "kv_heads": None, "width": 36, "ffn_width": 33, "global_batch_size": 9},
    ),
    "grid and zero 3": ("tp=2x2,dp=2", {"micro_batch_size": 1}),
    "grid, replicated": ("tp=2x2,dp=2", {"zero": 0}),
    "grid and zero 1": ("tp=2x2,dp=2", {"zero": 1, "micro_batch_size": 1}),
    "grid and zero 2": ("tp=2x2,dp=2", {"zero": 2, "micro_batch_size": 1}),
    "grid and hybrid": ("tp=2x2,dp_replicate=2,dp_shard=2", {}),
    "grid and pp": ("tp=2x2,pp=2", {}),
    "grid, pp and dp": ("tp=2x2,pp=2,dp=2", {"schedule": "gpipe"}),
    "hybrid and pp": ("dp_replicate=2,dp_shard=2,pp=2", {"schedule": "gpipe"}),
    "interleaved 1f1b": ("1x2x2", {"schedule": "interleaved-1f1b", **FIVE}),
    "interleaved 1f1b, freed after forward": (
        "1x2x2",
        {"schedule": "interleaved-1f1b", **FIVE, "reshard_after_forward": True},
    ),
    "interleaved 1f1b, ddp": (
        "1x2x2",
        {"schedule": "interleaved-1f1b", **FIVE, "zero": 0, "ddp": True, "ddp_bucket_mb": 0.02},
    ),
    "interleaved 1f1b, four stages a rank": (
        "1x2x2",
        {"schedule": "interleaved-1f1b", **TWO, "layers": 8, "stages_per_rank": 4},
    ),
    "looped bfs, four stages a rank, freed after forward": (
        "1x2x2",
        {
            "schedule": "looped-bfs",
            **TWO,
            "layers": 8,
            "stages_per_rank": 4,
            "reshard_after_forward": True,
        },
    ),
    "looped bfs": ("1x4x1", {"schedule": "looped-bfs", "layers": 9, "micro_batch_size": 4}),
    "interleaved zero bubble, zero 2": (
        "1x2x2",
        {"schedule": "interleaved-zero-bubble", **FIVE, "zero": 2},
    ),
    "interleaved zero bubble, grid": (
        "tp=2x2,pp=2",
        {"schedule": "interleaved-zero-bubble", **FOUR},
    ),
    "interleaved zero bubble, five stages a rank": (
        "1x2x2",
        {"schedule": "interleaved-zero-bubble", **TWO, "layers": 10, "stages_per_rank": 5},
    ),
    "zbv": ("1x4x1", {"schedule": "zbv", "layers": 9, "micro_batch_size": 1}),
    "zbv, replicated": ("1x2x2", {"schedule": "zbv", **FIVE, "zero": 0}),
    "zbv, zero 1": ("1x2x2", {"schedule": "zbv", **FIVE, "zero": 1}),
    "zbv, zero 2": ("1x2x2", {"schedule": "zbv", **FIVE, "zero": 2}),
    "zbv, zero 3": ("2x2x2", {"schedule": "zbv", **FOUR}),
    "zbv, untied": ("2x2x1", {"schedule": "zbv", **FOUR, "tied_embeddings": False}),
    "zbv, gathered again": ("2x2x1", {"schedule": "zbv", **FOUR, "gather_again": True}),
    "zbv, hybrid": ("dp_replicate=2,dp_shard=2,pp=2", {"schedule": "zbv", **FIVE, "zero": 2}),
    "zbv, weights on the host": ("1x2x2", {"schedule": "zbv", **FIVE, "offload": "weights"}),
    "dualpipev, grid": ("tp=2x2,pp=2", {"schedule": "dualpipev", **FIVE, "norm": "rmsnorm"}),
    "dualpipev": ("1x2x2", {"schedule": "dualpipev", **FIVE}),
    "from a file": ("1x2x2", {"schedule_csv": FILE, **FIVE, "global_batch_size": 6}),
    "from a file, freed after forward": (
        "1x2x2",
        {"schedule_csv": FILE, **FIVE, "global_batch_size": 6, "reshard_after_forward": True},
    ),
}


@dataclass(frozen=True)
class Recorded:
    """What one rank is seen to communicate in a later step, call by call."""

    place: Place
    calls: list[Traffic]


def record(config: Config, cls: type[Trainer], world: World) -> Recorded:
    trainer, batches = cls(config, world), batches_for(config)
    batch = batches.batch(0, trainer.samples)
    for step in range(first_steps(config)):
        trainer.step(step, batch.tokens, batch.labels)
    with CommRecorder(trainer.mesh) as recorder:
        trainer.step(first_steps(config), batch.tokens, batch.labels)
    assert recorder.table() == merged(recorder.calls)
    return Recorded(place_of(trainer.mesh), recorder.calls)


def record_all(config: Config, cls: type[Trainer] = Trainer) -> list[Recorded]:
    main = partial(record, config, cls)
    return threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS)


def hold_to_closed_form(config: Config) -> None:
    for rank in record_all(config):
        assert merged(rank.calls) == step_traffic(config, rank.place), rank.place


@pytest.mark.parametrize("case", covering_cases(CASES))
def test_counted_is_predicted(case: str) -> None:
    mesh, values = CASES[case]
    hold_to_closed_form(small_config(mesh, **values))


@pytest.mark.parametrize(
    "case",
    [
        "tp",
        "sp",
        "zero 3, uneven rows",
        "hybrid",
        "pipeline",
        "pipeline, embedding alone",
        "pipeline, both alone",
        "2x2x2",
    ],
)
def test_counted_is_predicted_for_the_other_family(case: str) -> None:
    mesh, values = CASES[case]
    hold_to_closed_form(small_config(mesh, **LLAMA | values))


@pytest.mark.covering(1)
@pytest.mark.parametrize("mesh", ["2x2x2", "dp_replicate=2,dp_shard=2,tp=2", "tp=2x2,dp=2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_counted_is_predicted_in_every_dtype(mesh: str, dtype: str) -> None:
    hold_to_closed_form(small_config(mesh, dtype=dtype))


# Of each set of axes the table above has a case with tied embeddings.
@pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.full), False])
@pytest.mark.parametrize("mesh", ["1x2x2", "2x2x1", "1x1x2", "tp=2x2,pp=2"])
def test_counted_is_predicted_tied_and_untied(mesh: str, tied: bool) -> None:
    hold_to_closed_form(small_config(mesh, tied_embeddings=tied, micro_batch_size=1))


@pytest.mark.parametrize(
    "case",
    [
        *("hybrid and tp", "grid", "overlapped", "zbv, zero 2"),
        *(
            pytest.param(case, marks=pytest.mark.full)
            for case in ("1x2x3", "2x2x2", "overlapped, 2x2x2", "hybrid, replicated", "dualpipev")
        ),
    ],
)
def test_processes_and_threads_record_the_same_calls(case: str) -> None:
    """In the same order, on every rank: of torch's own groups a dispatch mode sees them."""
    mesh, values = CASES[case]
    config = small_config(mesh, **values)
    size = config.parallel.mesh.num_ranks
    main = partial(record, config, Trainer)
    assert spawn(size, main, timeout=SECONDS) == record_all(config)


def test_sharded_tokens_send_no_more_bytes_unless_gathered_again() -> None:
    """Gathered again: two all-gathers more for each block, and one for the head."""
    options = {"sequence_parallel": False}, {}, {"async_tp": True}, {"gather_again": True}
    sizes = {"global_batch_size": 4, "micro_batch_size": 2}
    configs = [small_config("4x1x1", **sizes, **each) for each in options]
    whole, m = activation(configs[0]), configs[0].microbatches
    sent = [
        sum(call.wire for call in record_all(config)[0].calls if call.payload == whole)
        for config in configs
    ]
    more = m * (2 * configs[0].model.layers + 1) * Fraction(3, 4) * whole
    assert sent == [sent[0]] * 3 + [sent[0] + more]
    assert sent[0] == m * (4 * configs[0].model.layers + 2) * Fraction(6, 4) * whole


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_parallel_blocks_exchange_half_as_often(sequence_parallel: bool) -> None:
    """Two all-reduces a block and microbatch instead of four, or two pairs: of b t d numbers."""
    counts = {}
    for parallel in (False, True):
        values = {"sequence_parallel": sequence_parallel, "parallel_block": parallel}
        config = small_config("2x1x1", micro_batch_size=4, **values)
        whole = activation(config)
        calls = [call for call in record_all(config)[0].calls if call.payload == whole]
        # Beyond the blocks: the embedding is left once, the head entered once, there and back.
        outside = (4 if sequence_parallel else 2) * config.microbatches
        counts[parallel] = (len(calls) - outside) / config.microbatches / config.model.layers
    assert counts == {False: 8, True: 4} if sequence_parallel else {False: 4, True: 2}


class ReducesEachMicrobatch(Trainer):
    def choose_reduction(self, *, is_last: bool) -> None:  # noqa: ARG002 - that is the point
        super().choose_reduction(is_last=True)


def test_one_reduction_a_step_moves_an_eighth() -> None:
    """Of the gradient bytes of reducing each of 8 microbatches; both are counted."""
    config = small_config("1x1x2", zero=0, layers=1, global_batch_size=16, micro_batch_size=1)
    assert config.microbatches == 8
    once, each = (record_all(config, cls)[0] for cls in (Trainer, ReducesEachMicrobatch))
    # The first call counts the tokens, the last one sums loss and norm.
    (gradients,) = merged(once.calls[1:-1])
    assert gradients == merged(data_parallel_gradients(config, once.place))[0]
    assert merged(each.calls[1:-1]) == [gradients.times(8)]


@pytest.mark.covering
@pytest.mark.parametrize("family", [{}, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize(
    "mesh", ["2x2x2", "4x1x2", "2x1x4", "dp_replicate=2,dp_shard=2,pp=2", "tp=2x2,dp=2"]
)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "heads", [{}, {"fused_qkv": True, "parallel_block": True}, {"kv_heads": 2}]
)
def test_shapes_are_those_of_the_model(
    mesh: str, zero: int, family: dict[str, Any], heads: dict[str, Any]
) -> None:
    config = small_config(mesh, zero=zero, layers=3, width=48, ffn_width=52, **family | heads)

    def main(world: World) -> None:
        trainer = Trainer(config, world)
        place = place_of(trainer.mesh)
        weights = trainer.optimizer.weights
        predicted = [p for group in groups(config, place) for p in group.values()]
        found = [tuple(shard.shape) for shard in trainer.optimizer.shards.values()]
        assert sorted(owned_shape(p, config, place) for p in predicted) == sorted(found)
        held = [tuple(local_tensor(weight).shape) for weight in weights.values()]
        assert sorted(rest_shape(p, config, place) for p in predicted) == sorted(held)
        assert sorted(p.shape for p in predicted) == sorted(
            tuple(w.shape) for w in weights.values()
        )

    threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS)
