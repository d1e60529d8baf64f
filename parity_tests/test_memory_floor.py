"""The memory floor of tiny, by hand: width 64, 4 blocks, vocabulary 256, 64 sequences of 64."""

import pytest

from dtensor_llm.checks.memory_floor import memory_floor
from parity_tests.bad_configurations import read

KEPT_PER_TOKEN_AND_BLOCK = 4 * 64 + 4 * 64 + 2 * 256


@pytest.mark.parametrize(
    ("line", "states", "activations"),
    [
        ("", 220_544 * 4 * 4, 4096 * (4 * KEPT_PER_TOKEN_AND_BLOCK + 256) * 4),
        ("--micro-batch-size 8", 220_544 * 4 * 4, 512 * (4 * KEPT_PER_TOKEN_AND_BLOCK + 256) * 4),
        (
            "--dtype float64 --optimizer sgd --attention-dropout 0.1",
            220_544 * 3 * 8,
            4096 * (4 * (KEPT_PER_TOKEN_AND_BLOCK + 8 * 64) + 256) * 8,
        ),
        # ZeRO 0 holds dp copies, the reference of a parity check is one more
        (
            "--mesh 1x1x4 --zero 0 --check-parity --dtype float64 --optimizer sgd --momentum 0",
            220_544 * 2 * 8 * 5,
            4096 * (4 * KEPT_PER_TOKEN_AND_BLOCK + 256) * 8,
        ),
        # an offloaded optimizer has weights and gradients of its own
        (
            "--offload optimizer",
            220_544 * 6 * 4,
            4096 * (4 * KEPT_PER_TOKEN_AND_BLOCK + 256) * 4,
        ),
        # 1F1B on 2 stages: 2 and 1 microbatches in flight, 1.5 x 4 blocks
        (
            "--mesh 1x2x1 --micro-batch-size 8",
            220_544 * 4 * 4,
            512 * (6 * KEPT_PER_TOKEN_AND_BLOCK + 256) * 4,
        ),
        # the first stage has 3 blocks or none
        (
            "--mesh 1x2x1 --micro-batch-size 8 --stage-layers 3,1",
            220_544 * 4 * 4,
            512 * (7 * KEPT_PER_TOKEN_AND_BLOCK + 256) * 4,
        ),
        (
            "--mesh 1x2x1 --micro-batch-size 8 --stage-layers 0,4",
            220_544 * 4 * 4,
            512 * (4 * KEPT_PER_TOKEN_AND_BLOCK + 256) * 4,
        ),
        # GPipe holds all 8
        (
            "--mesh 1x2x1 --micro-batch-size 8 --schedule gpipe",
            220_544 * 4 * 4,
            512 * (32 * KEPT_PER_TOKEN_AND_BLOCK + 256) * 4,
        ),
    ],
)
def test_memory_floor(line: str, states: int, activations: int) -> None:
    floor = memory_floor(read(line))
    assert (floor.states, floor.activations) == (states, activations)
    assert floor.total == states + activations
