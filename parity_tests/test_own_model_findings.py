"""check_parity for any model: which rank, step and quantity a finding names, and what is none."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from parity_tests.own_models import (
    DP,
    TP,
    WIDTH,
    Deep,
    Mlp,
    Tied,
    all_reduced,
    by_hand,
    checked,
    inputs,
    nothing,
    one_replica_moved,
    shard,
    waves,
    wrong_at,
)


def test_partial_sum_that_the_module_around_it_reduces_is_no_mistake() -> None:
    """The mistake is in the head, which comes after it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, 5, bias=False)
            self.group: Any = None

        def forward(self, x: Tensor) -> Tensor:
            y = self.down(F.gelu(self.up(x)))
            return y if self.group is None else all_reduced(y, self.group)

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        block, rank = model[0], mesh.get_rank()
        block.group = mesh.get_group("tp")
        block.up.weight = nn.Parameter(block.up.weight.detach().chunk(2)[rank].clone())
        block.up.bias = nn.Parameter(block.up.bias.detach().chunk(2)[rank].clone())
        block.down.weight = nn.Parameter(block.down.weight.detach().chunk(2, 1)[rank].clone())
        if moved:
            model[1].register_forward_hook(lambda _, __, output: output + moved)

    moved = 0.0
    assert checked(lambda: nn.Sequential(Block(), nn.Linear(5, 3)), parallelize, TP).passed
    moved = 0.1
    finding = checked(lambda: nn.Sequential(Block(), nn.Linear(5, 3)), parallelize, TP).finding
    assert finding is not None
    assert (finding.phase, finding.name, finding.neighbours) == ("forward", "1", ("0",))


def test_partial_gradient_that_is_reduced_later_is_no_mistake() -> None:
    """The first layer's weights have whole gradients, its output a part; the head is wrong."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Deep())

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        by_hand(model[1], mesh)
        for parameter in model[0].parameters():
            parameter.register_hook(lambda gradient: all_reduced(gradient, mesh.get_group("tp")))
        model[1].head.bias.register_hook(lambda gradient: times * gradient)

    times = 1.0
    assert checked(build, parallelize, TP).passed
    times = 3.0
    finding = checked(build, parallelize, TP).finding
    assert finding is not None
    assert (finding.phase, finding.name, finding.num_names) == ("gradient", "1.head.bias", 1)
    assert "3 times what is right, throughout" in finding.diagnosis


def test_mean_over_the_rows_of_a_rank_is_no_mistake() -> None:
    """A module's output that is a number: right, if its mean over the parts of the batch is."""

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.square().mean()

    class Regularized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.size, self.head = nn.Linear(WIDTH, 5), Mean(), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.up(x)
            size = self.size(x)
            return self.head(x), size

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        output, size = model(batch[0])
        return F.mse_loss(output, batch[1]) + size

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        model.get_submodule("head").register_forward_hook(lambda _, __, output: output + 0.1)
        shard(model, mesh)

    assert checked(Regularized, shard, DP, loss=loss).passed
    finding = checked(Regularized, parallelize, DP, loss=loss).finding
    assert finding is not None
    assert (finding.phase, finding.name) == ("forward", "head")


def test_replica_that_differs_is_told_with_its_rank() -> None:
    report = checked(Mlp, one_replica_moved, TP)
    finding = report.finding
    assert finding is not None
    assert (finding.name, finding.what, finding.rank) == ("norm.bias", "initial weight", 1)
    assert (finding.value, finding.expected) == (0.1, 0.0)
    worst = {row.quantity: row.worst for row in report.report.rows}
    assert worst["initial weight"] == worst["weight"] == "norm.bias (rank 1)"


@pytest.mark.parametrize("rank", range(4))
def test_any_replica_that_differs_is_found(rank: int) -> None:
    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        one_replica_moved(model, mesh, rank)

    report = checked(Mlp, parallelize, {"tp": 4}, inputs(WIDTH, steps=1))
    assert report.finding is not None
    assert (report.finding.name, report.finding.rank) == ("norm.bias", rank)


def test_gradient_that_is_off_by_1e_10_fails() -> None:
    def parallelize(model: nn.Module, _: DeviceMesh) -> None:
        model.get_parameter("down.bias").register_hook(lambda gradient: gradient * (1 + 1e-10))

    report = checked(Mlp, parallelize, TP, inputs(WIDTH, steps=1))
    (row,) = (row for row in report.report.rows if row.quantity == "gradient")
    assert not row.passed
    assert row.worst == "down.bias"
    assert row.error == pytest.approx(1e-10, rel=1e-3)


@pytest.mark.parametrize("step", range(3))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_update_that_is_wrong_in_one_step(step: int, dtype: torch.dtype) -> None:
    """In the last one, loss and gradients are right in every step."""
    batches = inputs(WIDTH, steps=3)
    report = checked(Mlp, nothing, TP, batches, make_optimizer=wrong_at(step), dtype=dtype)
    assert not report.passed
    assert report.finding is not None
    assert (report.finding.step, report.finding.phase) == (step, "update")
    assert report.finding.name == "down.bias"
    wrong = {row.quantity for row in report.report.rows if not row.passed}
    if step == 2:
        assert wrong - {"weight rms"} == {"weight"}


@pytest.mark.parametrize(
    ("value", "passed"), [(0.0, True), (1e-10, False), (float("nan"), False), (float("inf"), False)]
)
def test_buffer_that_differs_on_one_rank(value: float, passed: bool) -> None:
    def build() -> nn.Module:
        model = Mlp()
        model.register_buffer("shift", torch.tensor([0.0, 1.0]))
        return model

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        if mesh.get_rank() == 1:
            model.get_buffer("shift")[0] = value

    report = checked(build, parallelize, TP, inputs(WIDTH, steps=1))
    assert report.passed == passed, report
    assert {row.quantity for row in report.report.rows if not row.passed} <= {"buffer shift"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("values", "worst"),
    [
        (([1.0, 2.0], [1.0, 2.0], [1.0, 2.0]), ""),
        (([1.0, 2.0], [1.0, 2.0], [1.0, 2.0 + 1e-14]), ""),
        (([1.0, 2.0], [1.0, 2.0], [1.0, 2.1]), "norm.own (one device has none, rank 2)"),
        (([1.0], [1.0], None), "norm.own (one device has none, missing, rank 2)"),
        ((None, [1.0], [1.0]), "norm.own (one device has none, missing, rank 0)"),
        (([1.0], [1.0, 1.0], [1.0]), "norm.own (one device has none, of shape (2,), not (1,), ran"),
    ],
)
def test_buffer_that_parallelize_registers_is_alike_on_all_ranks(
    values: tuple[list[float] | None, ...], worst: str, dtype: torch.dtype
) -> None:
    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        own = values[mesh.get_rank()]
        if own is not None:
            own = torch.tensor(own, dtype=torch.float64)
            model.get_submodule("norm").register_buffer("own", own)

    report = checked(Mlp, parallelize, {"tp": 3}, inputs(WIDTH, steps=1), dtype=dtype)
    assert report.passed == (not worst), report
    (row,) = (row for row in report.report.rows if row.quantity == "buffer own")
    assert row.worst.startswith(worst or "norm.own (one device has none")
    if worst:
        assert report.finding is not None
        assert report.finding.name == row.worst.partition(" ")[0]


def test_buffer_of_the_ranks_is_compared_in_each_step() -> None:
    """One that is divided over tp is put together before."""

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        calls = torch.zeros(2)
        model.register_buffer("calls", calls)
        part = distribute_tensor(torch.arange(4.0), mesh["tp"], [Shard(0)], src_data_rank=None)
        model.register_buffer("part", part)

        def count(*_: Any) -> None:
            calls[0] += 1
            calls[1] = float(calls[0] == 2 and mesh.get_rank() == 1)

        model.register_forward_hook(count)

    report = checked(Mlp, parallelize, TP, inputs(WIDTH, steps=3))
    (row,) = (row for row in report.report.rows if not row.passed)
    assert (row.quantity, row.step) == ("buffer calls", 1)
    assert report.finding is not None
    assert (report.finding.step, report.finding.name) == (1, "calls")


def test_buffer_of_a_kind_that_one_device_has_too() -> None:
    """Both are named `mask`; the one that parallelize registers is compared among the ranks."""

    def build() -> nn.Module:
        model = Mlp()
        model.register_buffer("mask", torch.ones(2))
        return model

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        own = torch.ones(2) * (1 + moved * mesh.get_rank())
        model.get_submodule("norm").register_buffer("mask", own)

    moved = 0.0
    assert checked(build, parallelize, TP, inputs(WIDTH, steps=1)).passed
    moved = 0.1
    report = checked(build, parallelize, TP, inputs(WIDTH, steps=1))
    (row,) = (row for row in report.report.rows if not row.passed)
    assert (row.quantity, row.worst) == ("buffer mask", "norm.mask (one device has none, rank 1)")
    assert row.error == pytest.approx(0.1)
    assert (row.value, row.expected, row.index) == (pytest.approx(1.1), 1.0, (0,))


def test_state_that_only_the_optimizer_of_a_rank_keeps() -> None:
    def momentum_on_ranks(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9 * dist.is_initialized())

    batches = inputs(WIDTH, steps=1)
    report = checked(Mlp, nothing, TP, batches, make_optimizer=momentum_on_ranks)
    (row,) = (row for row in report.report.rows if not row.passed)
    assert row.quantity == "momentum_buffer"
    assert "a momentum_buffer, where one device has none" in row.worst


def test_difference_of_a_later_step_is_looked_for_in_that_step() -> None:
    class Late(nn.Linear):
        """One rank makes a mistake when it is called for the second time."""

        calls, wrong = 0, False

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) + 0.1 * (self.wrong and self.calls == 2)

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        model[1].wrong = mesh.get_rank() == 1

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 4), Late(4, 3))

    finding = checked(build, parallelize, TP, inputs(WIDTH, steps=3)).finding
    assert finding is not None
    assert (finding.step, finding.phase, finding.name, finding.rank) == (1, "forward", "1", 1)
    assert "the same vector is added to every token" in finding.diagnosis


def test_backward_mistake_is_named_by_the_gradient_of_an_output() -> None:
    """The gradient is doubled on its way from `down` to `up`."""

    def parallelize(model: nn.Module, _: DeviceMesh) -> None:
        def twice(_: nn.Module, args: tuple[Tensor]) -> Tensor:
            (x,) = args
            return 2 * x - x.detach()

        model.get_submodule("down").register_forward_pre_hook(twice)

    finding = checked(Mlp, parallelize, TP).finding
    assert finding is not None
    assert (finding.phase, finding.at, finding.name) == ("backward", "norm", "down")
    assert "2 times what is right, throughout" in finding.diagnosis


def test_untied_weights_are_told() -> None:
    def untie(model: nn.Module, _: DeviceMesh) -> None:
        model.get_submodule("head").weight = nn.Parameter(model.get_parameter("embed.weight") * 1)

    report = checked(Tied, untie, TP, inputs(3, words=11), loss=waves)
    assert not report.passed
    assert "embed.weight = head.weight" in {row.worst for row in report.report.rows}
    assert "several after it" in str(report.finding)


def test_weights_untied_on_a_later_rank_alone_are_told() -> None:
    def untie(model: nn.Module, mesh: DeviceMesh) -> None:
        if mesh.get_rank() == 1:
            weight = model.get_parameter("embed.weight")
            model.get_submodule("head").weight = nn.Parameter(weight * 1)

    report = checked(Tied, untie, TP, inputs(3, words=11, steps=1), loss=waves)
    assert "tied weights" in {row.quantity for row in report.report.rows}


def test_gradient_where_one_device_has_none() -> None:
    def build() -> nn.Module:
        model = Mlp()
        model.down.bias.requires_grad_(False)
        return model

    def unfreeze(model: nn.Module, _: DeviceMesh) -> None:
        model.get_parameter("down.bias").requires_grad_(True)

    optimizer = torch.optim.SGD
    report = checked(build, unfreeze, TP, inputs(WIDTH, steps=1), make_optimizer=optimizer)
    (row,) = (row for row in report.report.rows if row.quantity == "gradient")
    assert row.worst == "down.bias (a gradient, where one device has none)"
    assert row.error == float("inf")
    assert row.value is None
    assert report.finding is not None
    assert "only one side has a gradient" in report.finding.diagnosis


def test_gradient_on_one_side_only() -> None:
    def freeze(model: nn.Module, mesh: DeviceMesh) -> None:
        model.get_submodule("up").requires_grad_(mesh.get_rank() == 0)

    report = checked(Mlp, freeze, TP)
    (row,) = (row for row in report.report.rows if row.quantity == "gradient")
    assert row.worst in ("up.weight (no gradient, rank 1)", "up.bias (no gradient, rank 1)")
    assert row.error == float("inf")
    assert row.value is None


def test_loss_that_is_no_mean_over_the_parts() -> None:
    """A mean over valid rows whose number differs from part to part."""

    def valid_only(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        apart = (model(batch[0]) - batch[1]).square().mean(1)
        valid = batch[1][:, 0] > 0
        return apart[valid].sum() / valid.sum()

    report = checked(Mlp, shard, DP, loss=valid_only)
    assert report.finding is not None
    assert str(report.finding).startswith("first divergence: step 1, loss, rank 0\n  0.")
    assert "one device alone has this too" in report.finding.diagnosis
