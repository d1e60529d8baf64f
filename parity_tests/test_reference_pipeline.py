"""The reference of a pipeline: its actions, idle turns and live activations."""

from typing import Any

import pytest

from parity_tests.test_reference_strategies import make_batch, make_model
from reference import (
    pipeline_parallel,
)
from reference.pipeline_parallel import Action, actions


def test_gpipe_actions() -> None:
    assert " ".join(map(str, actions("gpipe", 1, 3, 4))) == "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3"


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"),
        (1, "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"),
        (2, "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"),
    ],
)
def test_1f1b_actions(stage: int, expected: str) -> None:
    assert " ".join(map(str, actions("1f1b", stage, 3, 4))) == expected


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
def test_idle_turns_and_live_activations(schedule: Any, stages: int, microbatches: int) -> None:
    execution = pipeline_parallel.run(
        make_model(), *make_batch(), stages=stages, microbatches=microbatches, schedule=schedule
    )
    assert len(execution.timetable) == 2 * (microbatches + stages - 1)
    for stage in range(stages):
        own = [turn[stage] for turn in execution.timetable if turn[stage] is not None]
        assert own == actions(schedule, stage, stages, microbatches)
        held = [execution.live[action] for action in own]
        most = microbatches if schedule == "gpipe" else min(microbatches, stages - stage)
        assert max(held) == most
        assert held[-1] == 0


def test_a_deadlock_is_named() -> None:
    programs = [[Action(0, "B", 0)], [Action(1, "F", 0)]]
    with pytest.raises(RuntimeError, match="every rank waits: 0B0, 1F0"):
        pipeline_parallel.next_turn(programs, arrived={}, last=1)


def test_a_pipeline_needs_a_block_for_each_stage() -> None:
    with pytest.raises(ValueError, match="4 blocks are too few for 5 stages"):
        pipeline_parallel.loss_and_gradients(make_model(), *make_batch(), stages=5, microbatches=2)
