"""The simulator against torch's own step code, on clocks that no computer's speed moves.

Each rank is a thread that runs `_step_microbatches` of torch's schedule. Its stages only set its
clock forward; a message is there `transfer` after both of its ends were posted, and a wait, be it
of a send or a receive, sets the clock to when that is.
"""

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from dtensor_llm.planner.schedule import Span, Times, simulate
from dtensor_llm.schedules.actions import Action, Schedule
from dtensor_llm.schedules.torch_orders import (
    LOOP,
    NAMES,
    ONE_STAGE,
    V_SHAPED,
    default_stages_per_rank,
    make_schedule,
)
from parity_tests.harness import Script, run_imported

CLASSES = ONE_STAGE | LOOP | V_SHAPED
Message = tuple[str, int, int]  # "F" or "B", the stage that receives it, microbatch


class Post:
    """Where both ends of every message write when they were posted."""

    def __init__(self, transfer: float) -> None:
        self.transfer = transfer
        self.posted: dict[Message, list[float]] = {}
        self.changed = threading.Condition()

    def post(self, messages: list[Message], time: float) -> list[Message]:
        with self.changed:
            for message in messages:
                self.posted.setdefault(message, []).append(time)
            self.changed.notify_all()
        return messages

    def arrival(self, message: Message) -> float:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.posted.get(message, [])) == 2, timeout=20)
            return max(self.posted[message]) + self.transfer


class Rank(threading.local):
    """The clock of the thread, and what its stages did."""

    clock: float
    spans: list[Span]


class Stage:
    """A stage that takes time and computes nothing."""

    submod = None

    def __init__(self, index: int, schedule: Schedule, times: Times, rank: Rank) -> None:
        self.stage_index, self.num_stages = index, schedule.num_stages
        self.is_first, self.is_last = index == 0, index == schedule.num_stages - 1
        self.group_size, self.times, self.rank = schedule.num_ranks, times, rank
        self.group_rank = schedule.rank_of_stage[index]

    def act(self, kind: str, microbatch: int) -> None:
        action = Action(self.stage_index, kind, microbatch)
        start, self.rank.clock = self.rank.clock, self.rank.clock + self.times.of(action)
        self.rank.spans.append(Span(action, start, self.rank.clock))

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.act("F", microbatch)

    def backward_one_chunk(self, microbatch: int, full_backward: bool = True, **_: Any) -> None:
        self.act("B" if full_backward else "I", microbatch)

    def backward_weight_one_chunk(self, microbatch: int, **_: Any) -> None:
        self.act("W", microbatch)

    def get_fwd_recv_ops(self, microbatch: int) -> list[Message]:
        return [] if self.is_first else [("F", self.stage_index, microbatch)]

    def get_fwd_send_ops(self, microbatch: int) -> list[Message]:
        return [] if self.is_last else [("F", self.stage_index + 1, microbatch)]

    def get_bwd_recv_ops(self, microbatch: int) -> list[Message]:
        return [] if self.is_last else [("B", self.stage_index, microbatch)]

    def get_bwd_send_ops(self, microbatch: int) -> list[Message]:
        return [] if self.is_first else [("B", self.stage_index - 1, microbatch)]

    def nothing(self, *_: Any) -> None:
        return None

    set_local_fwd_input = get_local_bwd_output = set_local_bwd_input = nothing
    perform_reduce_grad = nothing


def played_by_torch(
    name: str, schedule: Schedule, times: Times, patch: pytest.MonkeyPatch
) -> list[list[Span]]:
    rank, post = Rank(), Post(times.transfer)

    def batch(messages: list[Message], **_: Any) -> list[Message]:
        return post.post(messages, rank.clock)

    def wait(messages: list[Message]) -> None:
        rank.clock = max([rank.clock, *map(post.arrival, messages)])

    patch.setattr(schedules, "_batch_p2p", batch)
    patch.setattr(schedules, "_sorted_batch_p2p", lambda ops, **_: {0: batch(ops)})
    patch.setattr(schedules, "_wait_batch_p2p", wait)
    spans: list[list[Span]] = [[] for _ in range(schedule.num_ranks)]
    failures: list[BaseException] = []

    def run(own: int) -> None:
        rank.clock, rank.spans = 0.0, spans[own]
        cls: Any = CLASSES[name]
        stages = [Stage(index, schedule, times, rank) for index in schedule.stages[own]]
        try:
            step = cls(stages[0] if name in ONE_STAGE else stages, schedule.num_microbatches)
            step._initialize_stage = step._initialize_stages = lambda *_: None
            step._step_microbatches()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(own,)) for own in range(schedule.num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    return spans


def equal_times(num_stages: int, transfer: float) -> Times:
    return Times.equal(num_stages, transfer=transfer)


def unequal_times(num_stages: int, transfer: float) -> Times:
    draw = random.Random(num_stages)
    forward, backward_input, backward_weight = (
        [draw.uniform(0.5, 2.0) for _ in range(num_stages)] for _ in range(3)
    )
    return Times(forward, backward_input, backward_weight, transfer)


CASES = [
    (name, p, m, v)
    for name in NAMES
    for p, m in ((2, 4), (4, 8), (3, 9))
    for v in ((1, 2, 3) if name in LOOP else (default_stages_per_rank(name),))
]


@pytest.mark.parametrize("times_of", [equal_times, unequal_times])
@pytest.mark.parametrize(("name", "p", "m", "v"), CASES)
def test_same_times_as_torch(
    name: str,
    p: int,
    m: int,
    v: int,
    times_of: Callable[[int, float], Times],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every action starts and ends when torch's does, whatever stages and messages take.

    But for 1F1B, which waits for a send before its next: with messages that take longer than the
    work between them some actions start later, and the last one ends when it did.
    """
    schedule = make_schedule(name, num_ranks=p, num_microbatches=m, stages_per_rank=v)
    for transfer in (0.0, 0.4, 3.0):
        times = times_of(p * v, transfer)
        found = played_by_torch(name, schedule, times, monkeypatch)
        simulated = simulate(schedule, times).spans
        for own, expected in zip(simulated, found, strict=True):
            assert [span.action for span in own] == [span.action for span in expected]
            if name != "1f1b" or transfer < 1:
                for span, other in zip(own, expected, strict=True):
                    assert span[1:] == pytest.approx(other[1:], rel=1e-12), span.action
        ends = [max(span.end for own in spans for span in own) for spans in (simulated, found)]
        assert ends[0] == pytest.approx(ends[1], rel=1e-12)


def test_script_times_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here it must only run: how close it comes depends on what else the machine does."""
    line = "--schedules 1f1b zbv --stages 2 --microbatches 2 --steps 1 --unit 5 --bound 1e-9"
    done = run_imported("time_schedules", line, monkeypatch, capsys)
    assert done.returncode == 1, done.stderr
    cells = [line.split() for line in done.stdout.splitlines()[2:]]
    rows = {name: [float(cell) for cell in rest] for name, *rest in cells}
    assert list(rows) == ["1f1b", "zbv"]
    for simulated, measured, ratio in rows.values():
        assert measured >= simulated
        assert ratio == pytest.approx(measured / simulated, abs=0.1)


def test_script_refuses_what_torch_refuses(script: Script) -> None:
    done = script("time_schedules.py", "--schedules 1f1b --stages 4 --microbatches 2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "1f1b with 4 ranks needs at least 4 microbatches, not 2\n"
    assert script("time_schedules.py", "--stages 0").returncode == 2
