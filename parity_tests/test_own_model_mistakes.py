"""check_parity for any model: what a planted mistake is called."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from parity_tests.own_models import (
    BOTH,
    DP,
    TP,
    WIDTH,
    Convolutions,
    Deep,
    Mlp,
    Tokens,
    by_hand,
    by_tokens,
    checked,
    divide,
    inputs,
    local_sum,
    nothing,
    one_replica_moved,
    shard,
    sum_gradients,
    sum_of_squares,
    waves,
)

# What a mistake is called


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
