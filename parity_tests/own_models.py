"""Models that are no GPT, what ranks do to them, and batches: what the tests of own_model share."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from dtensor_llm.parity.own_model import (
    OwnModelReport,
    check_parity,
)
from parity_tests.harness import SECONDS

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


def local_sum(model: nn.Module, mesh: DeviceMesh) -> None:
    divide(model, mesh, output_layouts=Partial())


def one_replica_moved(model: nn.Module, mesh: DeviceMesh, rank: int = 1) -> None:
    shift = 0.1 * (mesh.get_rank() == rank)
    with torch.no_grad():
        model.get_parameter("norm.bias").add_(shift)


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
