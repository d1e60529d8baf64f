"""What is simulated is what runs: in torch's schedules on real ranks, and in the reference."""

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from dtensor_llm.planner.schedule import live
from dtensor_llm.schedules.actions import Action, Schedule
from dtensor_llm.schedules.torch_orders import (
    LOOP,
    NAMES,
    ONE_STAGE,
    V_SHAPED,
    default_stages_per_rank,
    make_schedule,
)
from dtensor_llm.worlds import World, threads
from parity_tests.harness import SECONDS
from parity_tests.test_reference_strategies import largest_error, make_batch, make_model
from reference import pipeline_parallel as reference
from reference.model import Dropout
from reference.training import loss_and_gradients

CLASSES = ONE_STAGE | LOOP | V_SHAPED
WIDTH = 4


class Held:
    """A tensor that autograd keeps for the backward pass: gone when autograd lets go of it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # else the graph would hold itself


class Watched:
    """A torch stage that writes down what it does, and what its rank holds afterwards."""

    def __init__(self, stage: PipelineStage, rank: "Rank") -> None:
        self.rank, self.index = rank, stage.stage_index
        for kind, method in (
            ("F", "forward_one_chunk"),
            ("B", "backward_one_chunk"),
            ("W", "backward_weight_one_chunk"),
        ):
            setattr(stage, method, self.watch(kind, getattr(stage, method)))

    def watch(self, kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def watched(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            half = kind == "B" and not kwargs.get("full_backward", True)
            action = Action(self.index, "I" if half else kind, microbatch)
            if kind != "F":
                result = method(microbatch, *args, **kwargs)
            else:
                with torch.autograd.graph.saved_tensors_hooks(
                    lambda tensor: self.rank.hold(action, tensor), lambda held: held.tensor
                ):
                    result = method(microbatch, *args, **kwargs)
            self.rank.acted.append((action, self.rank.count()))
            return result

        return watched


class Rank:
    def __init__(self) -> None:
        self.acted: list[tuple[Action, int]] = []
        self.holds: dict[Action, list[weakref.ref[Held]]] = {}

    def hold(self, action: Action, tensor: Tensor) -> Held:
        held = Held(tensor)
        self.holds.setdefault(action, []).append(weakref.ref(held))
        return held

    def count(self) -> int:
        return sum(any(one() is not None for one in held) for held in self.holds.values())


def acted_in_torch(name: str, p: int, m: int, v: int) -> list[list[tuple[Action, int]]]:
    """Run a schedule of torch on p ranks of threads, with two linears and a tanh a stage."""
    schedule = make_schedule(name, num_ranks=p, num_microbatches=m, stages_per_rank=v)

    def main(world: World) -> list[tuple[Action, int]]:
        rank = Rank()
        stages = []
        for index in schedule.stages[world.rank]:
            module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            x = torch.empty(1, WIDTH, device="meta", requires_grad=index > 0)
            y = torch.empty(1, WIDTH, device="meta", requires_grad=True)
            stage = PipelineStage(
                module, index, p * v, torch.device("cpu"), input_args=x, output_args=y
            )
            Watched(stage, rank)
            stages.append(stage)
        cls: Any = CLASSES[name]
        torch_schedule = cls(
            stages[0] if name in ONE_STAGE else stages,
            m,
            loss_fn=lambda output, target: (output - target).square().sum(),
            scale_grads=False,
        )
        has = schedule.stages[world.rank]
        inputs = (torch.ones(m, WIDTH),) if 0 in has else ()
        target = torch.zeros(m, WIDTH) if p * v - 1 in has else None
        torch_schedule.step(*inputs, target=target)
        return rank.acted

    return threads.run(p, main, timeout=SECONDS)


SMALL = [
    (name, p, m, v)
    for name in NAMES
    for p, m in ((2, 4), (4, 8), (3, 7))
    for v in ((1, 3) if name in LOOP else (default_stages_per_rank(name),))
    if not (m == 7 and name in ("interleaved-1f1b", "interleaved-zero-bubble"))
]


@pytest.mark.parametrize(("name", "p", "m", "v"), SMALL)
def test_torch_acts_and_holds_as_simulated(name: str, p: int, m: int, v: int) -> None:
    """Same actions, and after each the same number of microbatches kept for a backward."""
    schedule = make_schedule(name, num_ranks=p, num_microbatches=m, stages_per_rank=v)
    for rank, acted in enumerate(acted_in_torch(name, p, m, v)):
        assert acted == list(live(schedule, rank))


def programs_of(schedule: Schedule) -> list[list[reference.Action]]:
    return [
        [reference.Action(*action) for action in schedule.actions(rank)]
        for rank in range(schedule.num_ranks)
    ]


@cache
def plain(layers: int, dropout: float) -> tuple[Any, tuple[Tensor, Tensor], float, Any]:
    model = make_model(layers=layers, dropout=dropout)
    batch = make_batch()
    return model, batch, *loss_and_gradients(model, *batch, Dropout(seed=2, step=3))


@pytest.mark.parametrize(
    ("name", "p", "m", "v"),
    [
        *((name, 2, 4, default_stages_per_rank(name)) for name in NAMES),
        *((name, 4, 8, default_stages_per_rank(name)) for name in NAMES),
        ("looped-bfs", 2, 1, 2),
        ("interleaved-1f1b", 3, 4, 2),
        ("interleaved-zero-bubble", 2, 8, 3),
        ("interleaved-zero-bubble", 4, 16, 1),
        ("zbv", 3, 2, 2),
    ],
)
def test_the_reference_runs_every_schedule(name: str, p: int, m: int, v: int) -> None:
    """Gradients of the plain model, and as many microbatches held as simulated."""
    schedule = make_schedule(name, num_ranks=p, num_microbatches=m, stages_per_rank=v)
    model, batch, loss, gradients = plain(layers=p * v + 1, dropout=0.1)
    programs = programs_of(schedule)
    execution = reference.execute(model, *batch, Dropout(seed=2, step=3), programs=programs)
    assert execution.loss == pytest.approx(loss, rel=1e-12)
    assert largest_error(execution.gradients, gradients) <= 1e-12
    for rank in range(p):
        own = [turn[rank] for turn in execution.timetable if turn[rank] is not None]
        assert own == programs[rank]
        assert [(action, execution.live[action]) for action in own] == list(live(schedule, rank))


def dropped_weights(patch: pytest.MonkeyPatch) -> None:
    """The weights' half of one split backward."""

    def wrong(stage: reference.Stage, number: int) -> None:
        if number == 1:
            stage.outputs.pop(number)
        else:
            right(stage, number)

    right = reference.Stage.backward_weights
    patch.setattr(reference.Stage, "backward_weights", wrong)


def stale_gradient(patch: pytest.MonkeyPatch) -> None:
    """A W that takes the output's gradient of another microbatch."""

    def wrong(stage: reference.Stage, number: int) -> None:
        for other in stage.gradients:
            stage.gradients[number] = stage.gradients[other]
        right(stage, number)

    right = reference.Stage.backward_weights
    patch.setattr(reference.Stage, "backward_weights", wrong)


@pytest.mark.parametrize("plant", [dropped_weights, stale_gradient])
def test_a_fault_in_a_split_backward_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = make_schedule("zbv", num_ranks=2, num_microbatches=4)
    model, batch, _, gradients = plain(layers=5, dropout=0.1)
    plant(monkeypatch)
    execution = reference.execute(
        model, *batch, Dropout(seed=2, step=3), programs=programs_of(schedule)
    )
    assert largest_error(execution.gradients, gradients) > 1e-3
