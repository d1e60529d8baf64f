"""Measured times of layers, what a cut makes of them, and the example that is cut by them."""

import re
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtensor_llm.planner import stage_times
from dtensor_llm.planner.schedule import simulate
from dtensor_llm.planner.stage_times import LayerTime, time_layers, time_transfer, times_of_stages
from dtensor_llm.schedules.torch_orders import make_schedule
from dtensor_llm.stages import balance
from dtensor_llm.worlds import threads
from parity_tests.harness import SECONDS, Finished, Script, run_imported

PAUSE = 0.01  # seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that goes on when a layer pauses, and not before."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(stage_times.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(Pause, "clock", clock)
    return clock


class Pause(torch.autograd.Function):
    clock: Any = None

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        Pause.clock.now += forward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        Pause.clock.now += ctx.backward_seconds
        return gradients[0], None, None


class Slow(nn.Module):
    def __init__(self, forward: int, backward: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.pauses = forward * PAUSE, backward * PAUSE
        self.taken: list[Tensor] = []

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.taken.append(x)
        return Pause.apply(self.linear(x) * scale, *self.pauses)


def test_each_layer_has_its_own_time() -> None:
    layers = [Slow(1, 3), Slow(5, 1), Slow(1, 1)]
    times = time_layers(layers, torch.ones(1, 2), loss=torch.sum, repeats=3)
    for layer, found in zip(layers, times, strict=True):
        assert (found.forward, found.backward) == pytest.approx(layer.pauses)
        assert found.whole == found.forward + found.backward


def test_layers_are_timed_as_stages_and_left_as_they_were() -> None:
    layers, batch = [Slow(0, 0), Slow(0, 0)], torch.ones(1, 2)
    time_layers(layers, batch, loss=torch.sum, context={"scale": 2.0}, repeats=2)
    first, second = layers
    assert len(first.taken) == 3  # one round is not counted
    assert not any(x.requires_grad for x in first.taken)
    assert all(x.is_leaf and x.requires_grad for x in second.taken)
    assert torch.equal(second.taken[0], first.linear(batch) * 2.0)
    assert all(p.grad is None for layer in layers for p in layer.parameters())


def test_first_round_does_not_count(clock: SimpleNamespace) -> None:
    """On its first call the layer takes longer."""
    pauses = iter([100.0, 1.0])

    def tick(*_: Any) -> None:
        clock.now += next(pauses)

    layer = nn.Linear(2, 2)
    layer.register_forward_hook(tick)
    assert time_layers([layer], torch.ones(1, 2), loss=torch.sum, repeats=1) == [(1.0, 0.0)]


def test_time_of_the_loss_is_the_last_layers() -> None:
    slow = Slow(5, 5)
    layers = [Slow(0, 0), Slow(0, 0)]
    first, last = time_layers(layers, torch.ones(1, 2), loss=lambda x: slow(x).sum(), repeats=3)
    assert first == (0.0, 0.0)
    assert last == pytest.approx((5 * PAUSE, 5 * PAUSE))


def test_cut_by_measured_times_is_the_fastest_of_all_by_simulation() -> None:
    """Of two stages: here every cut is tried."""
    times = [LayerTime(f, 2.0 * f) for f in (1, 4, 4, 4, 4, 1, 2, 2, 2, 2, 1)]
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=8)

    def makespan(end: int) -> float:
        cut = (range(end), range(end, len(times)))
        return simulate(schedule, times_of_stages(times, cut)).makespan

    best = balance(tuple(t.whole for t in times), 2)
    fastest = min(range(1, len(times)), key=makespan)
    assert best == (range(fastest), range(fastest, len(times)))
    assert makespan(best[0].stop) < 0.9 * makespan(balance((1,) * len(times), 2)[0].stop)


def test_times_of_stages_are_sums() -> None:
    times = [LayerTime(1, 2), LayerTime(3, 4), LayerTime(5, 6)]
    found = times_of_stages(times, [range(2), range(2, 3)], transfer=0.5)
    assert (found.forward, found.backward_input, found.transfer) == ([4, 5], [6, 6], 0.5)
    assert found.backward_weight == [0, 0]
    assert times_of_stages(times, [range(3)]).transfer == 0, "where nothing is said of it"


def test_a_message_takes_half_of_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by one each time that a rank looks; ranks 2 and up only listen."""
    own = threading.local()

    def look() -> float:
        own.now = getattr(own, "now", 0.0) + 1
        return own.now

    receivers: list[int] = []

    def send(message: Tensor, receiver: int) -> None:
        receivers.append(receiver)
        sent(message, receiver)

    sent = stage_times.dist.send
    monkeypatch.setattr(stage_times.time, "perf_counter", look)
    monkeypatch.setattr(stage_times.dist, "send", send)
    message = torch.empty(2, 3)
    found = threads.run(3, partial(time_transfer, message, repeats=2), timeout=SECONDS)
    assert found == [0.5] * 3
    assert sorted(receivers) == [0, 0, 0, 1, 1, 1]


TwoTowers = Callable[[str], Finished]


@pytest.fixture
def two_towers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> TwoTowers:
    return lambda line: run_imported("two_towers", line, monkeypatch, capsys)


def largest_error(done: Finished) -> float:
    (error,) = re.findall(r"^largest error .* float64: (\S+) of 1e-12$", done.stdout, re.MULTILINE)
    return float(error)


@pytest.mark.full  # test_two_towers_are_timed holds two stages to one device, too
@pytest.mark.parametrize("stages", [2, 4])
def test_two_towers_equal_one_device(stages: int, two_towers: TwoTowers) -> None:
    line = f"--stages {stages} --microbatches {stages} --parity-only"
    done = two_towers(line)
    assert done.returncode == 0, done.stderr
    assert largest_error(done) < 1e-12


def test_two_towers_are_timed(two_towers: TwoTowers) -> None:
    """How close the times come depends on what else the machine does: here they must only be there.

    The gradients of both cuts are one device's.
    """
    line = "--microbatches 2 --rounds 1 --sleep --bound 0"
    done = two_towers(line)
    assert done.returncode == 1, done.stderr
    assert "NOT within 0%" in done.stdout
    assert largest_error(done) < 1e-12
    row = r"^(equal numbers|by the clock) +\S+ +(\S+), (\S+) +\S+ +\S+$"
    rows = re.findall(row, done.stdout, re.MULTILINE)
    slowest = {name: max(float(first), float(second)) for name, first, second in rows}
    assert slowest["by the clock"] <= slowest["equal numbers"]


@pytest.mark.parametrize("line", ["--stages 1", "--stages 9", "--stages 4 --microbatches 2"])
def test_two_towers_refuse_what_cannot_be(line: str, script: Script) -> None:
    done = script("two_towers.py", line)
    assert done.returncode == 2
    assert "2 stages at least" in done.stderr
