"""Every pipeline schedule trains: several stages a rank, split backwards, orders of your own."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dtensor_llm.pipeline import live_microbatches, placement, splits_backward
from dtensor_llm.plan import local_tensor
from dtensor_llm.planner.memory import at_rest
from dtensor_llm.planner.parameters import Place
from dtensor_llm.planner.pipeline_costs import schedule_of
from dtensor_llm.planner.placements import plan_stages
from dtensor_llm.schedules.csv_files import write_csv
from dtensor_llm.schedules.kinds import LOOP, NAMES, SPLIT, V_SHAPED
from dtensor_llm.train import Trainer
from dtensor_llm.worlds import World, threads
from parity_tests import fuzz
from parity_tests.harness import (
    LLAMA,
    SECONDS,
    batches_for,
    parity,
    parity_with,
    reference_for,
    small_config,
)

SEVERAL = (*LOOP, *V_SHAPED)
# Between them, loops and Vs, whole and split backwards each meet every stage of ZeRO.
ZERO_STAGES = {
    "interleaved-1f1b": (0, 2),
    "looped-bfs": (3, 1),
    "interleaved-zero-bubble": (1, 3),
    "zbv": (3, 2),
    "dualpipev": (0, 1),
}


def with_zero() -> Iterator[Any]:
    """(schedule, stage of ZeRO, mesh): the fast tier has the first on 2x2x2, the other without."""
    for name, zero, mesh in product(SEVERAL, range(4), ("2x2x2", "1x2x2")):
        is_fast = dict(zip(("2x2x2", "1x2x2"), ZERO_STAGES[name], strict=True))[mesh] == zero
        yield pytest.param(name, zero, mesh, marks=() if is_fast else pytest.mark.full)


@pytest.mark.covering(1)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize(("mesh", "layers"), [("1x2x1", 5), ("1x4x1", 9)])
def test_equals_one_device(mesh: str, layers: int, name: str, tied: bool) -> None:
    """With more layers than stages, so that they are uneven, and dropout."""
    values = {"layers": layers, "dropout": 0.1, "tied_embeddings": tied, "micro_batch_size": 1}
    report = parity(small_config(mesh, schedule=name, **values))
    assert report.passed, report


@pytest.mark.parametrize(("name", "zero", "mesh"), list(with_zero()))
def test_equals_one_device_with_zero_and_tp(name: str, zero: int, mesh: str) -> None:
    values = {"zero": zero, "layers": 5, "dropout": 0.1, "micro_batch_size": 1}
    report = parity(small_config(mesh, schedule=name, **values))
    assert report.passed, report


@pytest.mark.parametrize(
    "values",
    [
        {"schedule": "interleaved-1f1b", "stages_per_rank": 3, "layers": 7},
        {"schedule": "interleaved-1f1b", "stages_per_rank": 4, "layers": 8, "zero": 3},
        {"schedule": "interleaved-zero-bubble", "stages_per_rank": 1, "zero": 2},
        {"schedule": "interleaved-zero-bubble", "stages_per_rank": 4, "layers": 9, "zero": 3},
        {"schedule": "looped-bfs", "stages_per_rank": 4, "layers": 9, "zero": 2},
        {"schedule": "looped-bfs", "reshard_after_forward": True},
        {"schedule": "interleaved-1f1b", "reshard_after_forward": True},
        {"schedule": "interleaved-1f1b", "zero": 0, "ddp": True, "ddp_bucket_mb": 0.01},
        {"schedule": "zbv", "offload": "weights"},
        {"schedule": "zbv", "offload": "optimizer", "zero": 2},
        {"schedule": "dualpipev", "offload": "optimizer", "zero": 0},
        {"schedule": "dualpipev", "zero": 2, "defer_reduce": True},
        {"schedule": "zbv", **LLAMA},
        {"schedule": "zbv", "parallel_block": True, "fused_qkv": True},
    ],
    ids=lambda values: "-".join(map(str, values.values()))[:60],
)
def test_equals_one_device_with_other_options(values: dict[str, Any]) -> None:
    report = parity(small_config("1x2x2", **{"layers": 5, "global_batch_size": 16, **values}))
    assert report.passed, report


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize(
    "values",
    [
        {"mesh": "tp=2x2,pp=2"},
        {"mesh": "2x2x1", "gather_again": True},
        {"mesh": "2x2x1", "gather_again": True, "parallel_block": True},
        {"mesh": "2x2x1", "sequence_parallel": False},
        {"mesh": "4x2x1", "kv_heads": 2},
        {"mesh": "dp_replicate=2,dp_shard=2,pp=2", "micro_batch_size": 1, "zero": 3},
        {"mesh": "dp_replicate=2,dp_shard=2,pp=2", "micro_batch_size": 1, "zero": 1},
        {"mesh": "dp_replicate=2,dp_shard=2,pp=2", "micro_batch_size": 1, "zero": 0},
    ],
    ids=lambda values: "-".join(map(str, values.values())),
)
def test_equals_one_device_on_other_meshes(name: str, values: dict[str, Any]) -> None:
    common = {"layers": 4, "global_batch_size": 16, "dropout": 0.1}
    report = parity(small_config(**common, **values, schedule=name))
    assert report.passed, report


FILES = {
    "blocks of stages": """
        0F0 1F0 0F1 1F1 0F2 1F2 ... 1B0 0B0 1B1 0B1 1B2 0B2
        ... ... 2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1 2F2 3F2 3B2 2B2
    """,
    "a V of whole backwards": """
        0F0 0F1 0F2 3F0 3B0 3F1 3B1 3F2 3B2 0B0 0B1 0B2
        1F0 2F0 1F1 2F1 1F2 2F2 2B0 1B0 2B1 1B1 2B2 1B2
    """,
    "uneven, partly split": """
        0F0 0F1 3F0 3F1 3I1 3I0 3W0 3W1 0B1 0B0
        1F0 1F1 ... 1I1 1I0 1W1 1W0
        2F0 2F1 ... 2B1 2B0
    """,
}


def file_of(name: str, folder: Path) -> str:
    path = folder / "schedule.csv"
    lines = FILES[name].strip().splitlines()
    rows = [",".join(cell.replace("...", "") for cell in line.split()) for line in lines]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return str(path)


@pytest.mark.covering(1)
@pytest.mark.parametrize("zero", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("name", FILES)
def test_schedule_from_a_file_equals_one_device(
    name: str, zero: int | None, tmp_path: Path
) -> None:
    """Stages in another placement than torch's schedules have; backwards in another order."""
    file = file_of(name, tmp_path)
    pp, m = (3, 2) if name.startswith("uneven") else (2, 3)
    dp = 1 if zero is None else 2
    values = {"global_batch_size": 2 * m * dp, "layers": 6, "dropout": 0.1, "zero": zero or 0}
    config = small_config(f"1x{pp}x{dp}", schedule_csv=file, **values)
    assert config.microbatches == m, "the file decides"
    report = parity(config)
    assert report.passed, report


@pytest.mark.parametrize("name", NAMES)
def test_file_of_a_schedule_does_what_the_schedule_does(name: str, tmp_path: Path) -> None:
    config = small_config("1x2x1", schedule=name, layers=4, micro_batch_size=1)
    write_csv(schedule_of(config), tmp_path / "schedule.csv")
    own = small_config("1x2x1", schedule_csv=str(tmp_path / "schedule.csv"), layers=4)
    assert (placement(own), own.microbatches) == (placement(config), config.microbatches)
    assert splits_backward(own) == splits_backward(config)
    for rank in range(2):
        assert live_microbatches(own, rank) == live_microbatches(config, rank)
    report = parity_with(own, reference_for(config))
    assert report.passed, report


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mesh", ["1x2x1", "1x2x2"])
def test_evaluation_is_that_of_one_device(name: str, mesh: str) -> None:
    """Before the first step, between steps, and it changes nothing."""

    def losses(mesh: str) -> list[float]:
        config = small_config(mesh, schedule=name, layers=4, dropout=0.1)

        def main(world: World) -> list[float]:
            trainer, found = Trainer(config, world), []
            for step in range(2):
                batch = batches_for(config).batch(step, trainer.samples)
                found.append(trainer.evaluate(iter([batch]))[0])
                found.append(trainer.step(step, batch.tokens, batch.labels).loss)
            return found

        return threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS)[0]

    assert losses(mesh) == pytest.approx(losses("1x1x1"), rel=1e-12)


@pytest.mark.covering(1)
@pytest.mark.parametrize("zero", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("name", SEVERAL)
def test_tied_copies_stay_bitwise_equal(name: str, zero: int | None) -> None:
    """On two ranks, or on one: there one parameter, or two that fully_shard took apart."""
    mesh = "1x2x1" if zero is None else "1x2x2"
    values = {"layers": 4, "zero": zero or 0, "global_batch_size": 16}
    config = small_config(mesh, schedule=name, **values)

    def main(world: World) -> list[Tensor]:
        trainer, copies = Trainer(config, world), []
        for step in range(3):
            batch = batches_for(config).batch(step, trainer.samples)
            trainer.step(step, batch.tokens, batch.labels)
        for stage in trainer.parallel.stages:
            weight = stage.weights().get("token_embedding.weight")
            copies += [] if weight is None else [local_tensor(weight).detach().clone()]
        return copies

    by_rank = threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS)
    dp = config.dp
    for shard in range(dp):
        copies = [copy for rank in by_rank[shard::dp] for copy in rank]
        assert len(copies) == 2
        assert torch.equal(*copies)


@pytest.mark.parametrize("m", [1, 3, 5, 7])
def test_gpipe_takes_any_number_of_microbatches(m: int) -> None:
    report = parity(small_config("1x4x1", schedule="gpipe", layers=4, **of_microbatches(m)))
    assert report.passed, report


def of_microbatches(m: int) -> dict[str, int]:
    return {"global_batch_size": m, "micro_batch_size": 1}


@pytest.mark.parametrize("name", NAMES)
def test_microbatch_without_a_label(name: str) -> None:
    """Of no other one are labels taken in its place; counts of the others differ, too."""
    config = small_config("1x2x1", schedule=name, layers=4, **of_microbatches(4), check_parity=True)
    report = fuzz.parity_of(fuzz.Case(0, 0, config, "empty microbatch"))
    assert report.passed, report


@pytest.mark.parametrize("zero", range(4))
def test_plan_has_what_the_memory_forms_say(zero: int) -> None:
    """Of a V whose first rank has the tied embedding twice, or two stages share it."""
    config = small_config("1x2x2", schedule="zbv", layers=4, vocab_size=60, zero=zero)
    for pp, plan in enumerate(plan_stages(config)):
        assert plan.weight_bytes == at_rest(config, Place(pp=pp)).weights
        names = [parameter.name for parameter in plan.parameters]
        assert ("head.weight" in names) == (pp == 0 and zero in (0, 3))
    blocks = ["blocks.0.mlp.up.weight", "blocks.3.mlp.up.weight"]
    first = plan_stages(config)[0]
    stages = {p.name: p.stages for p in first.parameters}
    assert [name for name in stages if name.endswith("up.weight")] == blocks
    assert first.stages == (0, 3)
    assert [stages[name] for name in blocks] == [(0,), (3,)]
    both = [(0,), (3,)] if zero in (0, 3) else [(0, 3)]
    ends = [stages[name] for name in ("token_embedding.weight", "head.weight") if name in stages]
    assert ends == both


def test_placement() -> None:
    loop = small_config("1x3x1", schedule="interleaved-1f1b", stages_per_rank=2)
    assert placement(loop) == ((0, 3), (1, 4), (2, 5))
    assert placement(small_config("1x3x1", schedule="zbv")) == ((0, 5), (1, 4), (2, 3))
    assert placement(small_config("1x3x1", schedule="gpipe")) == ((0,), (1,), (2,))
    assert placement(small_config("2x1x2", schedule="zbv")) == ((0,),)


def test_live_microbatches_by_hand() -> None:
    pipeline = small_config("1x2x1", schedule="1f1b", micro_batch_size=1)
    assert [live_microbatches(pipeline, rank) for rank in range(2)] == [2, 1]
    assert live_microbatches(small_config("2x1x1", micro_batch_size=1), 0) == 1


def test_live_microbatches_of_a_file_by_hand(tmp_path: Path) -> None:
    """Most are there only after the first backward."""
    file = tmp_path / "schedule.csv"
    file.write_text("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F1,1F2,1B1,1B2\n", encoding="utf-8")
    own = small_config("1x2x1", schedule_csv=str(file), global_batch_size=3)
    assert [live_microbatches(own, rank) for rank in range(2)] == [3, 2]


@pytest.mark.parametrize("name", NAMES)
def test_a_backward_is_split_in_a_pipeline_alone(name: str) -> None:
    assert splits_backward(small_config("1x2x1", schedule=name)) == (name in SPLIT)
    assert not splits_backward(small_config("2x1x2", schedule=name))
