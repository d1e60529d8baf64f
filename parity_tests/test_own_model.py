"""check_parity for any model: what passes, lower precision, parts of tensors, the script."""

import copy
import runpy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from dtensor_llm.parity.expect import NUM_SEEDS
from dtensor_llm.parity.own_model import (
    OwnModelError,
    check,
    verdict,
)
from dtensor_llm.parity.own_model.task import Task, make_task
from dtensor_llm.parity.own_model.training import OneDevice, train_on_one_device, whole
from dtensor_llm.worlds import World, threads
from parity_tests.harness import ROOT, SECONDS
from parity_tests.own_models import (
    BOTH,
    DP,
    TP,
    WIDTH,
    Convolutions,
    Deep,
    Mlp,
    Recurrent,
    Tied,
    Tokens,
    by_hand,
    by_hand_and_shard,
    by_tokens,
    checked,
    divide,
    divide_and_shard,
    inputs,
    local_sum,
    nothing,
    shard,
    squares,
    sum_gradients,
    sum_of_squares,
    waves,
)

# What passes

GOOD = {
    "one rank": (Mlp, nothing, {"dp": 1}, {}),
    "replicas of tp": (Mlp, nothing, TP, {}),
    "tp": (Deep, divide, TP, {}),
    "tp on an uneven width": (Deep, divide, {"tp": 3}, {}),
    "fsdp over tp": (Deep, divide_and_shard, BOTH, {}),
    "fsdp over tp, uneven": (Deep, divide_and_shard, {"dp": 2, "tp": 3}, {}),
    "the axes turned round": (Deep, divide_and_shard, {"tp": 2, "dp": 2}, {}),
    "tokens": (Tokens, by_tokens, TP, {"batches": inputs(4, WIDTH), "loss": waves}),
    "plain tensors": (Deep, by_hand, TP, {}),
    "plain tensors and fsdp": (Deep, by_hand_and_shard, BOTH, {}),
    "ddp": (Mlp, lambda model, _: DistributedDataParallel(model), DP, {}),
    "replicate": (Mlp, lambda model, mesh: replicate(model, mesh=mesh), DP, {}),
    "a convolution": (Convolutions, shard, DP, {"batches": inputs(36)}),
    "a cell, called often": (Recurrent, shard, DP, {"batches": inputs(3, 2, words=11)}),
    "a sum": (Mlp, sum_gradients, DP, {"loss": sum_of_squares, "average": False}),
    "another name for dp": (
        Mlp,
        lambda model, mesh: fully_shard(model, mesh=mesh["workers"]),
        {"workers": 4},
        {"batch_axes": ("workers",)},
    ),
    "hybrid": (
        Mlp,
        lambda model, mesh: fully_shard(model, mesh=mesh),
        {"dp_replicate": 2, "dp_shard": 2},
        {},
    ),
}


@pytest.mark.parametrize("case", GOOD)
def test_right_parallelism_is_equal(case: str) -> None:
    build, parallelize, mesh, options = GOOD[case]
    report = checked(build, parallelize, mesh, **options)
    assert report.passed, report
    assert report.finding is None
    quantities = {row.quantity for row in report.report.rows}
    moments = {"exp_avg", "exp_avg_sq", "step"}
    tensors = {"initial weight", "gradient", "weight"}
    assert quantities == {"loss", "gradient norm"} | tensors | moments
    assert report.report.largest.error < 1e-12
    assert all(row.bound <= 1e-11 for row in report.report.rows), report


@pytest.mark.parametrize(
    ("make_optimizer", "state"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {"momentum_buffer"}),
        (lambda p: torch.optim.SGD(p, lr=0.1), set()),
        (lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9), {"square_avg", "step"}),
        (lambda p: torch.optim.Adagrad(p, lr=1e-3), {"sum", "step"}),
    ],
)
def test_state_is_compared_by_the_optimizers_own_keys(
    make_optimizer: Callable[..., Any], state: set[str]
) -> None:
    report = checked(Deep, divide_and_shard, BOTH, make_optimizer=make_optimizer)
    assert report.passed, report
    assert state <= {row.quantity for row in report.report.rows}


def test_batches_may_be_dicts_and_hold_numbers() -> None:
    batches = [{"x": x, "y": y, "scale": torch.tensor(0.5), "note": "s"} for x, y in inputs(WIDTH)]

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        assert batch["note"] == "s"
        return batch["scale"] * F.mse_loss(model(batch["x"]), batch["y"])

    assert checked(Mlp, shard, DP, batches, loss=loss).passed


def test_frozen_and_unused_parameters_have_no_gradient_on_either_side() -> None:
    def build() -> nn.Module:
        model = Mlp()
        model.unused = nn.Linear(2, 2)
        model.up.weight.requires_grad_(False)
        return model

    assert checked(build, lambda model, mesh: replicate(model, mesh=mesh), DP).passed


def test_weights_that_stay_tied() -> None:
    def tie(model: nn.Module, mesh: DeviceMesh) -> None:
        shard(model, mesh)
        assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")

    assert checked(Tied, tie, DP, inputs(3, words=11), loss=waves).passed


def test_batches_of_integers_alone() -> None:
    batches = [(words,) for words, _ in inputs(3, 2, words=11)]
    assert checked(Recurrent, shard, DP, batches, loss=waves).passed


def test_masks_of_infinity_agree() -> None:
    def build() -> nn.Module:
        model = Mlp()
        model.register_buffer("mask", torch.full((3,), -torch.inf))
        model.register_buffer("chosen", torch.tensor([True, False]))
        return model

    report = checked(build, shard, DP)
    assert report.passed, report
    assert {"buffer mask", "buffer chosen"} <= {row.quantity for row in report.report.rows}


def test_the_summary_says_how_much_is_sharded() -> None:
    text = str(checked(Deep, divide, TP))
    assert text.startswith(
        "tp=2 = 2 ranks, 2 steps in float64; rank 0 holds a part of 3 of 6 param"
    )


# Lower precision


def test_float32_is_judged_by_what_one_device_loses() -> None:
    report = checked(Deep, divide_and_shard, BOTH, dtype=torch.float32)
    assert report.passed, report
    bounds = {row.quantity: row.bound for row in report.report.rows}
    assert 1e-8 < bounds["loss"] < 1e-5
    assert 1e-8 < bounds["gradient rms"] < 1e-5


def test_yardstick_is_of_16_trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each from other weights, in the dtype of the check and in float64."""
    weights: dict[torch.dtype, list[float]] = {torch.float32: [], torch.float64: []}

    def train(task: Task, model: nn.Module | None = None) -> OneDevice:
        weights[task.dtype].append((model or task.model).up.weight.double().sum().item())
        return train_on_one_device(task, model)

    monkeypatch.setattr(verdict, "train_on_one_device", train)
    assert checked(Mlp, nothing, TP, inputs(WIDTH, steps=1), dtype=torch.float32).passed
    assert NUM_SEEDS == 16
    assert len(set(weights[torch.float32])) == len(weights[torch.float32]) == NUM_SEEDS
    assert weights[torch.float64] == weights[torch.float32][1:]


def test_mistake_in_float32_is_explained_in_float64() -> None:
    report = checked(Deep, local_sum, TP, dtype=torch.float32)
    assert not report.passed
    assert report.finding is not None
    assert report.finding.points_at("down")
    assert "reduction over tp" in report.finding.diagnosis


def test_rounding_that_is_worse_is_called_so() -> None:
    """The ranks keep their gradients in bfloat16, which float64 training does not do."""

    def parallelize(model: nn.Module, _: DeviceMesh) -> None:
        for parameter in model.parameters():
            if parameter.dtype == torch.float32:
                parameter.register_hook(lambda gradient: gradient.bfloat16().float())

    report = checked(Mlp, parallelize, TP, dtype=torch.float32)
    assert not report.passed
    assert "only their rounding is worse" in str(report.finding)


def test_report_stands_where_modules_cannot_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OwnModelError("rank 0 waits for rank 1")

    monkeypatch.setattr(check, "find", fail)
    report = checked(Deep, local_sum, TP)
    assert not report.passed
    assert str(report).endswith("its modules could not be watched: rank 0 waits for rank 1")


# Parts of tensors


OPTIONS: dict[str, Any] = {
    "parallelize": nothing,
    "batches": inputs(WIDTH),
    "loss": squares,
    "average": True,
    "make_optimizer": torch.optim.SGD,
    "timeout": SECONDS,
}


@pytest.fixture
def task() -> Task:
    return make_task(Mlp(), {"dp": 2, "tp": 3}, None, **OPTIONS)


@pytest.mark.parametrize(
    ("own", "rank", "expected"),
    [
        ((8, 7), 5, (slice(0, 8), slice(0, 7))),
        ((4, 7), 5, (slice(4, 8), slice(0, 7))),
        ((4, 3), 4, (slice(4, 8), slice(3, 6))),
        ((8, 1), 5, (slice(0, 8), slice(6, 7))),
        ((8, 1), 4, None),
        ((8, 7, 1), 4, None),
        ((2, 7), 5, (slice(6, 8), slice(0, 7))),
    ],
)
def test_part_of_a_tensor_by_its_shape(
    task: Task, own: tuple[int, ...], rank: int, expected: tuple[slice, ...] | None
) -> None:
    """Of an 8 x 7 tensor on dp=2 x tp=3; 7 columns are cut into 3, 3, 1, 8 rows into 3, 3, 2."""
    assert task.where((8, 7), own, rank, has_rows=True) == expected


def test_part_of_a_weight_is_by_the_models_axes_first() -> None:
    two = make_task(Mlp(), BOTH, None, **OPTIONS)
    assert two.where((8, 7), (4, 7), 1) == (slice(4, 8), slice(0, 7))
    assert two.where((8, 7), (4, 7), 1, has_rows=True) == (slice(0, 4), slice(0, 7))
    assert two.where((8, 7), (8, 3), 1) == (slice(0, 8), slice(4, 7))


def test_ranks_and_their_parts(task: Task) -> None:
    assert [task.part(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert task.peers() == [[0, 3], [1, 4], [2, 5]]
    assert task.own_batch(torch.arange(8), 4).tolist() == [4, 5, 6, 7]
    assert copy.deepcopy(task).num_parts == 2


@pytest.mark.parametrize("rows", [24, 7, 5])
def test_whole_tensor_of_fsdp_over_tp(rows: int) -> None:
    weight = torch.arange(rows * 2.0).reshape(rows, 2)

    def main(world: World) -> bool:
        mesh = DeviceMesh("cpu", torch.arange(world.size).reshape(2, 3), mesh_dim_names=("a", "b"))
        model = nn.Linear(2, rows, bias=False)
        model.weight = nn.Parameter(weight.clone())
        parallelize_module(model, mesh["b"], ColwiseParallel())
        fully_shard(model, mesh=mesh["a"])
        plain = distribute_tensor(weight, mesh, [Shard(0), Shard(0)], src_data_rank=None)
        return torch.equal(whole(model.weight), weight) and torch.equal(whole(plain), weight)

    assert all(threads.run(6, main, timeout=SECONDS))


# The script


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ((), 0, "largest error"),
        (("--bug",), 1, "gradient of blocks.1.mlp_norm.weight"),
        (("--mesh", "dp=3"), 2, "6 or 9 rows would do"),
    ],
)
def test_script(
    arguments: tuple[str, ...],
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["own_model.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "scripts/own_model.py"), run_name="__main__")
    output, errors = capsys.readouterr()
    assert ended.value.code == status, output + errors
    assert said in (errors if status == 2 else output)
