"""check_parity for any model: what cannot be checked is refused, with the reason."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from dtensor_llm.parity.own_model import (
    OwnModelError,
    check_parity,
)
from parity_tests.own_models import (
    DP,
    TP,
    WIDTH,
    Deep,
    Mlp,
    checked,
    inputs,
    nothing,
    squares,
)

# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": {"dp": 0}}, "mesh dp=0: every size is a whole number of at least 1"),
        ({"mesh": {}}, "mesh without an axis"),
        ({"mesh": "dp=2"}, r"mesh 'dp=2': sizes by name, for example \{"),
        ({"build": Mlp()}, "build_model is a module; pass a function that gives one"),
        ({"build": lambda: None}, "build_model gives None: it is to give a module"),
        ({"build": nn.Identity}, "the model has no parameters: there is nothing to train"),
        ({"batch_axes": ("data",)}, "batch_axes names data, but the mesh has only dp"),
        (
            {"mesh": {"dp": 3}},
            r"batch 1 has a tensor of 8 rows, and dp=3 divides them into 3 equal parts: 8 / 3 = "
            r"2\.66667; 6 or 9 rows would do",
        ),
        ({"batches": []}, "at least one step"),
        ({"dtype": torch.int64}, "one of float64, float32, bfloat16, float16"),
        ({"build": lambda: nn.Dropout(0.1)}, r"the model \(Dropout\) drops with probability 0.1"),
        (
            {"build": lambda: nn.GRU(WIDTH, 3, num_layers=2, dropout=0.5)},
            "drops with probability 0.5",
        ),
        ({"loss": lambda model, batch: model(batch[0])}, r"one number as a tensor, but gave \(8"),
        (
            {"loss": lambda model, batch: squares(model, batch) * torch.rand(())},
            "one device twice, the same step: loss",
        ),
    ],
)
def test_what_cannot_be_checked_is_refused(options: dict[str, Any], message: str) -> None:
    arguments = {
        "build_model": Mlp,
        "parallelize": nothing,
        "mesh": DP,
        "batches": inputs(WIDTH),
        "loss": squares,
    }
    options = dict(options)
    if "build" in options:
        options["build_model"] = options.pop("build")
    with pytest.raises(OwnModelError, match=message):
        check_parity(**(arguments | options))


def test_dropout_that_is_switched_off_is_no_problem() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 3), nn.Dropout(0.5).eval())

    assert checked(build, nothing, TP).passed


def test_other_parameters_are_listed() -> None:
    def rename(model: nn.Module, _: DeviceMesh) -> None:
        model.other = model.down
        del model.down

    message = r"missing: down.bias, down.weight; new: other.bias, other.weight"
    with pytest.raises(OwnModelError, match=message):
        checked(Mlp, rename, TP)


def test_shape_that_no_axis_explains() -> None:
    def cut(model: nn.Module, _: DeviceMesh) -> None:
        linear = model.get_submodule("up")
        linear.weight = nn.Parameter(linear.weight.detach()[:, :2].clone())
        linear.forward = lambda x: F.linear(x[:, :2], linear.weight, linear.bias)

    with pytest.raises(OwnModelError, match=r"up.weight is \(10, 2\) on rank . and \(10, 6\) in"):
        checked(Mlp, cut, TP)


def test_what_the_users_code_raises_is_the_cause() -> None:
    def wrong(_: nn.Module, mesh: DeviceMesh) -> None:
        mesh["pp"]

    with pytest.raises(OwnModelError, match=r"^parallelize failed on rank \d: KeyError") as caught:
        checked(Mlp, wrong, TP)
    assert isinstance(caught.value.__cause__, KeyError)
    trace = caught.value.__cause__.__traceback__
    functions = set()
    while trace is not None:
        functions.add(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert "wrong" in functions


def test_plan_the_wrong_way_round_says_where_it_failed() -> None:
    def swapped(model: nn.Module, mesh: DeviceMesh) -> None:
        parallelize_module(model, mesh, {"up": RowwiseParallel(), "down": ColwiseParallel()})

    with pytest.raises(OwnModelError, match="the forward pass of step 1 failed on rank"):
        checked(Deep, swapped, TP)


def test_ranks_that_wait_for_each_other() -> None:
    def half(_: nn.Module, mesh: DeviceMesh) -> None:
        if mesh.get_rank() == 0:
            dist.all_reduce(torch.ones(1))

    with pytest.raises(OwnModelError, match=r"rank 0 waits for .*rank 1"):
        checked(Mlp, half, TP)


@pytest.mark.parametrize("rate", [1e12, 4e9])
def test_training_that_amplifies_rounding_is_refused(rate: float) -> None:
    """A term whose gradient turns with the last bits of the weights; 4e9 gives 2e-5 as a bound."""

    def unstable(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return squares(model, batch) + torch.sin(rate * model.up.weight.square().sum()) * 1e-3

    with pytest.raises(OwnModelError, match="this training amplifies rounding"):
        checked(Mlp, nothing, TP, inputs(WIDTH, steps=1), loss=unstable)


def test_random_gradient_of_a_loss_that_is_not_is_refused() -> None:
    noise = torch.Generator().manual_seed(0)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        bias = model.get_parameter("up.bias")
        nothing = (bias - bias.detach()).sum()
        return squares(model, batch) + nothing * torch.rand((), generator=noise)

    with pytest.raises(OwnModelError, match=r"twice, .* and the gradients of up\.bias differ"):
        checked(Mlp, nothing, TP, loss=loss)
