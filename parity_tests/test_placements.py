"""The plan of a configuration is what its ranks hold when they train."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtensor_llm.config import Config, ParallelConfig, TrainConfig
from dtensor_llm.mesh import parse_mesh
from dtensor_llm.model import GPT
from dtensor_llm.parallel import zero
from dtensor_llm.plan import local_tensor
from dtensor_llm.planner import placements
from dtensor_llm.planner.placement_table import group, one_by_one
from dtensor_llm.planner.placements import RankPlan, extremes, num_elements, plan_rank, plan_stages
from dtensor_llm.presets import PRESETS
from dtensor_llm.train import Trainer
from dtensor_llm.worlds import World, threads
from parity_tests.harness import LLAMA, SECONDS, Script, batches_for, small_config

CASES: dict[str, Config] = {
    "alone": small_config("1x1x1"),
    "uneven, tied on two stages": small_config("2x2x2"),
    "uneven stages": small_config("1x3x1", layers=4),
    "a rank that owns nothing of some": small_config("1x1x3", vocab_size=7, width=16),
    "hybrid": small_config("tp=2,dp_replicate=2,dp_shard=2"),
    "hybrid, uneven, stages": small_config("pp=2,dp_replicate=2,dp_shard=3", global_batch_size=12),
    "replicated over two axes": small_config("tp=2,dp_replicate=2,dp_shard=2", zero=0),
    "stage 1": small_config("2x1x3", zero=1, global_batch_size=12),
    "stage 2, hybrid, stages": small_config("pp=2,dp_replicate=2,dp_shard=2", zero=2),
    "DistributedDataParallel": small_config("1x2x2", zero=0, ddp=True),
    "two-dimensional": small_config("tp=2x2,dp=2", vocab_size=64, zero=1),
    "weights offloaded": small_config("1x1x2", offload="weights"),
    "no sequence parallelism": small_config("4x1x2", sequence_parallel=False),
    "llama": small_config("2x2x2", **LLAMA),
    "float32, momentum": small_config("1x1x2", dtype="float32", optimizer="sgd"),
    "float32, no momentum": small_config("2x1x1", dtype="float32", optimizer="sgd", momentum=0.0),
}


@dataclasses.dataclass(frozen=True)
class Held:
    """What a training rank has; bytes."""

    coordinates: list[int]
    parameters: Mapping[str, tuple[Any, ...]]  # (shape, {axis: placement}, local shape, dtype)
    weights: int
    gradients: int
    moments: int


def held_in_training(config: Config) -> list[Held]:
    """By rank, after a step in the threads world."""

    def main(world: World) -> Held:
        trainer = Trainer(config, world)
        batch = batches_for(config).batch(0, trainer.samples)
        trainer.step(0, batch.tokens, batch.labels)
        weights = trainer.model.weights()
        shards = trainer.optimizer.shards
        gradients = [shard.grad for shard in shards.values() if shard.grad is not None]
        moments = [
            tensor
            for name in shards
            for key, tensor in trainer.optimizer.state(name).items()
            if key != "step" and tensor is not None
        ]
        return Held(
            list(trainer.mesh.get_coordinate() or ()),
            {name: look(weight) for name, weight in weights.items()},
            sum(local_tensor(weight).nbytes for weight in weights.values()),
            sum(gradient.nbytes for gradient in gradients),
            sum(moment.nbytes for moment in moments),
        )

    return threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS)


def look(weight: torch.Tensor) -> tuple[Any, ...]:
    axes = {}
    if isinstance(weight, DTensor):
        for axis, placement in zip(
            weight.device_mesh.mesh_dim_names or (), weight.placements, strict=True
        ):
            axes[axis] = str(placement)
    return tuple(weight.shape), axes, tuple(local_tensor(weight).shape), weight.dtype


@pytest.mark.parametrize("case", CASES)
def test_plan_of_each_rank_is_what_it_holds(case: str) -> None:
    config = CASES[case]
    ranks = held_in_training(config)
    for rank, held in enumerate(ranks):
        plan = plan_rank(config, rank)
        assert list(plan.coordinates.values()) == held.coordinates
        assert [p.name for p in plan.parameters] == list(held.parameters)
        for p in plan.parameters:
            shape, placements, local_shape, dtype = held.parameters[p.name]
            assert (p.shape, p.local_shape, p.dtype) == (shape, local_shape, dtype)
            assert p.placements.keys() == placements.keys()
            for axis, placement in p.placements.items():
                assert short(placement) in placements[axis], f"{p.name} on {axis}"
        assert plan.weight_bytes == held.weights
        assert plan.gradient_bytes == held.gradients
        assert plan.optimizer_bytes == held.moments
    hold_stages_to(config, ranks)


def short(placement: str) -> str:
    """As torch prints it: `S(0)`, within `_S(0, 2)` for a strided shard too."""
    return placement.replace("Shard", "S").replace("Replicate", "R").rstrip(")")


def hold_stages_to(config: Config, ranks: list[Held]) -> None:
    """Smallest and largest parts of each stage are those of its ranks."""
    for plan in plan_stages(config):
        peers = [held for held in ranks if held.coordinates[0] == plan.pp]
        assert plan.weight_bytes == max(held.weights for held in peers), "the first holds most"
        for p in plan.parameters:
            sizes = [num_elements(held.parameters[p.name][2]) for held in peers]
            assert num_elements(p.smallest) == min(sizes)
            assert num_elements(p.largest) == max(sizes)


def test_smallest_part_need_not_be_that_of_the_last_rank() -> None:
    """9 rows over 2 are 5 and 4; over 4 more, 2, 2, 1, 0 and 1, 1, 1, 1."""
    assert extremes((9, 3), (Shard(0), Shard(0)), (4, 2)) == ((0, 3), (2, 3))
    assert extremes((9, 3), (Replicate(), Shard(1)), (4, 2)) == ((9, 1), (9, 2))


GPT3 = Config(PRESETS["gpt3-175b"], parallel=ParallelConfig(parse_mesh("8x4x16", None)))


@pytest.fixture(scope="module")
def gpt3() -> list[RankPlan]:
    return plan_stages(GPT3)


def test_gpt3_175b_on_512_ranks_by_hand(gpt3: list[RankPlan]) -> None:
    """12 d^2 + 13 d a block: linears over tp x dp = 128, norms and two biases over dp alone."""
    d, v, t = 12288, 50257, 2048
    block, own_block = 12 * d * d + 13 * d, (12 * d * d + 7 * d) // 128 + 6 * d // 16
    own_rows = 393  # ceil(ceil(50257 / 8) / 16)
    parameters = [24 * block + (v + t) * d, 24 * block, 24 * block, 24 * block + v * d + 2 * d]
    own = [24 * own_block + (own_rows + t // 16) * d, 24 * own_block, 24 * own_block]
    own += [24 * own_block + own_rows * d + 2 * d // 16]
    assert [plan.rank for plan in gpt3] == [0, 128, 256, 384]
    assert [plan.num_parameters for plan in gpt3] == parameters
    assert sum(parameters) - v * d == GPT3.model.num_parameters
    assert [plan.stage_bytes for plan in gpt3] == [4 * n for n in parameters]
    assert [plan.weight_bytes for plan in gpt3] == [4 * n for n in own]
    assert [plan.gradient_bytes for plan in gpt3] == [4 * n for n in own]
    assert [plan.optimizer_bytes for plan in gpt3] == [8 * n for n in own]
    embedding = gpt3[0].parameters[0]
    assert (embedding.smallest, embedding.largest) == ((381, d), (393, d))


def test_equal_layers_are_one_line(gpt3: list[RankPlan]) -> None:
    parameters = [p for plan in gpt3 for p in plan.parameters]
    lines = {line.pattern: line for line in group(parameters)}
    query = lines["blocks.*.attention.query.weight"]
    assert (len(query.names), query.stages) == (96, [0, 1, 2, 3])
    assert lines["token_embedding.weight"].stages == [0, 3]
    assert len(lines) == 1 + 1 + 16 + 2
    assert len(one_by_one(parameters)) == 2 + 1 + 96 * 16 + 2


def test_layers_that_lie_differently_are_not() -> None:
    parameters = list(plan_stages(small_config("1x1x2"))[0].parameters)
    index = next(i for i, p in enumerate(parameters) if p.name == "blocks.1.mlp.up.weight")
    parameters[index] = dataclasses.replace(parameters[index], placements={"dp_shard": "Shard(1)"})
    patterns = [line.pattern for line in group(parameters)]
    assert patterns.count("blocks.0.mlp.up.weight") == 1
    assert patterns.count("blocks.1.mlp.up.weight") == 1


def test_plan_follows_the_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a strategy does not shard, the plan does not show as sharded."""

    def nothing(model: GPT, *_: object, **__: object) -> None:
        assert model.blocks

    monkeypatch.setattr(zero, "apply", nothing)
    parameters = plan_stages(small_config("2x1x2"))[0].parameters
    assert all(p.placements.keys() == {"tp"} for p in parameters)


def test_no_rank_takes_memory_for_the_largest_model() -> None:
    """The stage of 7 layers alone would be 100 GB."""
    mesh = ParallelConfig(parse_mesh("8x16x128", None))
    config = Config(PRESETS["llama3-405b"], TrainConfig(global_batch_size=2048), mesh)
    plan: RankPlan = plan_rank(config, 16383)
    assert plan.coordinates == {"pp": 15, "dp_replicate": 0, "dp_shard": 127, "cp": 0, "tp": 7}
    assert plan.stage_bytes == 4 * (7 * config.model.num_block_parameters + 128257 * 16384)


def test_script_shows_every_parameter(
    script: Script, gpt3: list[RankPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(config: Config) -> list[RankPlan]:
        assert (config.model, config.parallel.mesh) == (GPT3.model, GPT3.parallel.mesh)
        return gpt3

    monkeypatch.setattr(placements, "plan_stages", planned)  # to plan it again takes seconds
    done = script("show_plan.py", "--mesh 8x4x16 --model gpt3-175b")
    assert done.returncode == 0
    rows = [" ".join(line.split()) for line in done.stdout.splitlines()]
    down = "blocks.*.mlp.down.weight 96 0-3 12288 x 49152 Shard(0) Shard(1) 768 x 6144 float32"
    assert f"{down} 2,415,919,104 18,874,368" in rows
    embedding = (
        "token_embedding.weight 1 0, 3 50257 x 12288 Shard(0) Shard(0) 393 x 12288 381 x 12288"
    )
    assert f"{embedding} float32 2,470,232,064 19,316,736" in rows
    assert any(row.startswith("1 24-47 43,490,377,728 173,961,510,912 128 ") for row in rows)


def test_script_shows_one_rank_and_every_layer(script: Script) -> None:
    done = script("show_plan.py", "--mesh 2x2x2 --vocab-size 257 --rank 7 --all")
    assert done.returncode == 0
    assert "rank 7: pp=1, dp_replicate=0, dp_shard=1, cp=0, tp=1\n" in done.stdout
    rows = [" ".join(line.split()) for line in done.stdout.splitlines()]
    up = (
        "blocks.3.mlp.up.weight 1 1 256 x 64 Shard(0) Shard(0) 64 x 64 192, 0 float32 65,536 16,384"
    )
    assert up in rows


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--mesh 2x2", "--mesh 2x2: not TPxPPxDP"),
        ("--mesh 3x1x1", "tp=3 must divide --heads"),
        ("--mesh 2x1x2 --rank 4", "--rank 4: mesh 2x1x2 has the ranks 0 to 3"),
        ("--mesh 2x1x2 --rank -1", "--rank -1: mesh 2x1x2 has the ranks 0 to 3"),
        ("--mesh 2x1x2 --ranks 4", "--ranks is not a flag; did you mean --rank?"),
        ("--mesh 2x1x2 --metrics x --check-parity", "--metrics and --check-parity: train_gpt.py"),
        ("--mesh 8x4x64 --world threads", "more than the threads of one process can run"),
    ],
)
def test_bad_input_is_one_message(script: Script, line: str, message: str) -> None:
    done = script("show_plan.py", line)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_a_wrong_rank_is_told_with_the_rest(script: Script) -> None:
    done = script("show_plan.py", "--mesh 1x2x1 --rank 5 --lr -3")
    assert done.returncode == 2
    assert "--lr -3" in done.stderr
    assert "--rank 5: mesh 1x2x1 has the ranks 0 to 1" in done.stderr


def test_more_ranks_than_threads_are_no_problem(script: Script) -> None:
    done = script("show_plan.py", "--mesh 8x4x64 --global-batch-size 256 --rank 2047")
    assert done.returncode == 0
