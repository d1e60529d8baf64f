"""check_parity for any model: what passes, what a planted mistake is called, what is refused."""

import copy
import runpy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from dtensor_llm.parity.expect import NUM_SEEDS
from dtensor_llm.parity.own_model import (
    OwnModelError,
    OwnModelReport,
    check,
    check_parity,
    verdict,
)
from dtensor_llm.parity.own_model.task import Task, make_task
from dtensor_llm.parity.own_model.training import OneDevice, train_on_one_device, whole
from dtensor_llm.worlds import World, threads
from parity_tests.harness import ROOT, SECONDS

ROWS, WIDTH, STEPS = 8, 6, 2
DP, TP, BOTH = {"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}


# Models, none of them a GPT


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 10), nn.LayerNorm(10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.norm(self.up(x))))


class Deep(nn.Module):
    """Two linear layers that tp divides, and a head that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.down(F.gelu(self.up(x)))))


class Convolutions(nn.Module):
    """Images to classes."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.head = nn.Linear(4 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:  # b (6 x 6 pixels)
        x = x.unflatten(1, (1, 6, 6)) if x.ndim == 2 else x
        return self.head(F.relu(self.norm(self.convolution(x)))[..., ::2, ::2].flatten(1))


class Recurrent(nn.Module):
    """Bags of words, then a cell that is called for every step of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(11, WIDTH, mode="mean")
        self.cell, self.head = nn.GRUCell(WIDTH, 5), nn.Linear(5, 3)

    def forward(self, words: Tensor) -> Tensor:  # b t words
        state = self.bag.weight.new_zeros(len(words), 5)
        for bag in words.unbind(1):
            state = self.cell(self.bag(bag), state)
        return self.head(state)


class Tokens(nn.Module):
    """A residual block between two norms, on b t d, so that tp can divide tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 8),
            nn.Linear(8, WIDTH),
        )
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.down(F.gelu(self.up(self.norm(x)))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embed(words).mean(1))


# What ranks do to them


def nothing(_: nn.Module, __: DeviceMesh) -> None:
    pass


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh["dp"])


def divide(model: nn.Module, mesh: DeviceMesh, **row: Any) -> None:
    up = ColwiseParallel(use_local_output=False)  # a local part loses an uneven width
    parallelize_module(model, mesh["tp"], {"up": up, "down": RowwiseParallel(**row)})


def divide_and_shard(model: nn.Module, mesh: DeviceMesh) -> None:
    divide(model, mesh)
    fully_shard(model, mesh=mesh["dp"])


def by_tokens(model: nn.Module, mesh: DeviceMesh, forgotten: str = "") -> None:
    """`norm` and `last` on tokens, `up` and `down` on features."""
    tokens, tp = Shard(1), mesh["tp"]
    plan = {
        "norm": SequenceParallel(use_local_output=True),
        "up": ColwiseParallel(input_layouts=tokens),
        "down": RowwiseParallel(output_layouts=tokens),
        "last": SequenceParallel(use_local_output=True),
    }
    plan.pop(forgotten, None)
    parallelize_module(model, tp, plan)
    whole_input = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=tokens, use_local_output=True
    )
    parallelize_module(model, tp, whole_input)

    def gather(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return (
            DTensor.from_local(output, tp, [tokens])
            .redistribute(placements=[Replicate()])
            .to_local()
        )

    model.register_forward_hook(gather)


def sum_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    shard(model, mesh)
    assert isinstance(model, FSDPModule)
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)


class AllReduced(torch.autograd.Function):
    """The sum of all ranks' tensors; every rank has its whole gradient."""

    @staticmethod
    def forward(_: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def all_reduced(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return AllReduced.apply(x, group)


def by_hand(model: nn.Module, mesh: DeviceMesh, *, reduce: bool = True) -> None:
    """Own code with plain tensors: features of `up` and `down` divided, an all-reduce after."""
    rank, size, group = mesh.get_local_rank("tp"), mesh["tp"].size(), mesh.get_group("tp")
    up, down = model.get_submodule("up"), model.get_submodule("down")
    up.weight = nn.Parameter(up.weight.detach().chunk(size)[rank].clone())
    up.bias = nn.Parameter(up.bias.detach().chunk(size)[rank].clone())
    down.weight = nn.Parameter(down.weight.detach().chunk(size, dim=1)[rank].clone())

    def rows(x: Tensor) -> Tensor:
        y = F.linear(x, down.weight)
        return (all_reduced(y, group) if reduce else y) + down.bias

    down.forward = rows


def by_hand_and_shard(model: nn.Module, mesh: DeviceMesh) -> None:
    by_hand(model, mesh)
    fully_shard(model, mesh=mesh["dp"])


# Batches and losses


def inputs(*shape: int, words: int = 0, steps: int = STEPS) -> list[Any]:
    """A batch a step: inputs of ROWS x shape, and a target."""
    draw = torch.Generator().manual_seed(1)
    return [
        (
            torch.randint(words, (ROWS, *shape), generator=draw)
            if words
            else torch.randn((ROWS, *shape), generator=draw),
            torch.randn((ROWS, 3), generator=draw),
        )
        for _ in range(steps)
    ]


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def sum_of_squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1], reduction="sum")


def waves(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Of outputs of any shape: their mean distance to a fixed pattern, the same for each row."""
    output = model(batch[0])
    target = torch.arange(output[0].numel(), dtype=output.dtype).sin().reshape(output[0].shape)
    return (output - target).square().mean()


def checked(
    build: Callable[[], nn.Module],
    parallelize: Callable[..., Any],
    mesh: dict[str, int],
    batches: list[Any] | None = None,
    **options: Any,
) -> OwnModelReport:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return build()

    options = {"loss": squares, "timeout": SECONDS} | options
    return check_parity(seeded, parallelize, mesh, batches or inputs(WIDTH), **options)


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


# What a mistake is called


def local_sum(model: nn.Module, mesh: DeviceMesh) -> None:
    divide(model, mesh, output_layouts=Partial())


def one_replica_moved(model: nn.Module, mesh: DeviceMesh, rank: int = 1) -> None:
    shift = 0.1 * (mesh.get_rank() == rank)
    with torch.no_grad():
        model.get_parameter("norm.bias").add_(shift)


def shards_of_rank_0(model: nn.Module, mesh: DeviceMesh) -> None:
    """Each rank keeps the first chunk of `up`, labelled as its own."""
    divide(model, mesh)
    weight = model.get_parameter("up.weight")
    assert isinstance(weight, DTensor)
    first = weight.full_tensor().detach().chunk(2)[0].clone()
    part = DTensor.from_local(first, mesh["tp"], [Shard(0)])
    model.get_submodule("up").weight = nn.Parameter(part)


def optimizer_of_rate(parameters: Any) -> torch.optim.Optimizer:
    """With another learning rate on rank 1."""
    on_rank_1 = dist.is_initialized() and dist.get_rank() == 1
    return torch.optim.SGD(parameters, lr=5e-4 if on_rank_1 else 1e-3)


def wrong_at(step: int, only: float = 3.0) -> Callable[..., torch.optim.Optimizer]:
    """On every rank another learning rate for `down.bias`, the last parameter, in one step."""

    class Late(torch.optim.SGD):
        steps = 0

        def step(self, *arguments: Any) -> None:
            last = self.param_groups[-1]["params"][-1]
            times = only if self.steps == step and dist.is_initialized() else 1.0
            last.grad = times * last.grad
            super().step(*arguments)
            self.steps += 1

    return lambda parameters: Late(parameters, lr=1e-3)


def of_sequence(forgotten: str) -> dict[str, Any]:
    return {
        "parallelize": lambda model, mesh: by_tokens(model, mesh, forgotten),
        "build": Tokens,
        "mesh": TP,
        "batches": inputs(4, WIDTH),
        "loss": waves,
    }


BUGS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "a partial sum goes on": (
        {"build": Deep, "parallelize": local_sum, "mesh": BOTH},
        "forward",
        "down",
        "the reduction over tp is missing",
    ),
    "own code without its all-reduce": (
        {
            "build": Deep,
            "parallelize": lambda model, mesh: by_hand(model, mesh, reduce=False),
            "mesh": TP,
        },
        "forward",
        "down",
        "",
    ),
    "every rank has the first shard": (
        {"build": Deep, "parallelize": shards_of_rank_0, "mesh": TP},
        "weight",
        "up.weight",
        "gave a rank the wrong part",
    ),
    "nothing reduces over dp": (
        {"build": Deep, "parallelize": divide, "mesh": BOTH},
        "gradient",
        "*",
        "nothing reduces this over dp",
    ),
    "a sum for a mean": (
        {"build": Mlp, "parallelize": sum_gradients, "mesh": DP},
        "gradient",
        "*",
        "2 times what is right, throughout: dp",
    ),
    "a mean for a sum": (
        {
            "build": Mlp,
            "parallelize": shard,
            "mesh": DP,
            "loss": sum_of_squares,
            "average": False,
        },
        "gradient",
        "*",
        "0.5 times what is right, throughout: 1/dp",
    ),
    "a norm left out under sequence parallelism": (
        of_sequence("norm"),
        "gradient",
        "norm.*",
        "the reduction over tp is missing",
    ),
    "the last norm left out": (
        of_sequence("last"),
        "gradient",
        "last.*",
        "the reduction over tp is missing",
    ),
    "replicas differ": (
        {"build": Mlp, "parallelize": one_replica_moved, "mesh": TP},
        "weight",
        "norm.bias",
        "parallelize changed it",
    ),
    "batch norm by the rows of a rank": (
        {
            "build": lambda: Convolutions(norm=True),
            "parallelize": lambda model, mesh: replicate(model, mesh=mesh),
            "mesh": DP,
            "batches": inputs(36),
        },
        "forward",
        "norm",
        "SyncBatchNorm",
    ),
    "another learning rate on one rank": (
        {
            "build": Mlp,
            "parallelize": nothing,
            "mesh": TP,
            "make_optimizer": optimizer_of_rate,
        },
        "update",
        "down.bias",
        "",
    ),
}


@pytest.mark.parametrize("case", BUGS)
def test_mistake_is_found_and_named(case: str) -> None:
    options, phase, name, diagnosis = BUGS[case]
    report = checked(**options)
    assert not report.passed
    finding = report.finding
    assert finding is not None
    assert finding.phase == phase, report
    assert finding.points_at(name), report
    assert diagnosis in finding.diagnosis, report
    assert str(finding) in str(report)
    assert finding.value != finding.expected


def test_numbers_of_a_finding() -> None:
    """0.1 is added to what the norm puts out on rank 1."""

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        shift = 0.1 * (mesh.get_rank() == 1)
        model.get_submodule("norm").register_forward_hook(lambda _, __, output: output + shift)

    report = checked(Mlp, parallelize, TP)
    finding = report.finding
    assert finding is not None
    assert (finding.step, finding.rank, finding.coordinates) == (0, 1, {"tp": 1})
    assert (finding.phase, finding.name, finding.neighbours) == ("forward", "norm", ("up",))
    assert finding.value is not None
    assert finding.value - finding.expected == pytest.approx(0.1)
    torch.manual_seed(0)
    model, x = Mlp().double(), inputs(WIDTH)[0][0].double()
    assert model.norm(model.up(x))[finding.index].item() == finding.expected


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


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": {"dp": 0}}, "mesh dp=0: every size is a whole number of at least 1"),
        ({"mesh": {}}, "mesh without an axis"),
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
