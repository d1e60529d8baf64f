"""The processes world: alone, in spawned processes and under torchrun."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtensor_llm.worlds import World, WorldError, environment_size, is_torchrun, processes
from dtensor_llm.worlds.processes_rank import set_threads
from dtensor_llm.worlds.processes_spawn import spawn
from parity_tests.harness import torchrun

SCRIPT = """
import sys
import time
import torch
import torch.distributed as dist
from dtensor_llm.worlds import environment_size, is_torchrun, processes

def main(world):
    assert (world.kind, world.size) == ("processes", environment_size())
    dist.all_reduce(total := torch.ones(2) * (world.rank + 1))
    shared = world.share(lambda: {"from": world.rank})
    if "fail" in sys.argv and world.rank == 1:
        raise ValueError("a bad block")
    if "fail" in sys.argv:
        dist.barrier()
        time.sleep(60)
    return total.tolist(), shared

assert is_torchrun()
result = processes.run(main, device="cpu")
print(f"result {result}\\n", end="", flush=True)
processes.leave(0)
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def test_alone_is_a_world_of_one():
    def main(world: World) -> float:
        assert (world.kind, world.rank, world.size) == ("processes", 0, 1)
        dist.all_reduce(x := torch.ones(1))
        return x.item() + world.share(lambda: 1.0)

    assert processes.run(main, device="cpu") == 2.0
    assert not dist.is_initialized()
    assert environment_size() == 1
    assert not is_torchrun()


def test_alone_the_exception_passes_through():
    def main(_: World) -> None:
        raise KeyError("as it is")

    with pytest.raises(KeyError, match="as it is"):
        processes.run(main, device="cpu")
    assert not dist.is_initialized()


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="local rank 0 needs a GPU of its own, but this machine"):
        processes.run(lambda _: None, device="cuda")
    with pytest.raises(ValueError, match="'tpu' is not one of auto, cpu, cuda"):
        processes.run(lambda _: None, device="tpu")


@pytest.mark.parametrize(
    ("environment", "want"),
    [
        ({}, 4),
        ({"OMP_NUM_THREADS": "3"}, None),
        ({"OMP_NUM_THREADS": "1"}, None),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "7"}, 4),
        ({"OMP_NUM_THREADS": "5", "TORCHELASTIC_RUN_ID": "7"}, None),
    ],
)
def test_cores_are_divided_unless_the_user_has_set_a_number(monkeypatch, environment, want):
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    set_to: list[int] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(9))
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    set_threads(local_size=2)
    assert set_to == ([] if want is None else [want])


def sum_and_share(world: World) -> tuple[int, float, list[int]]:
    dist.all_reduce(x := torch.ones(1) * world.rank)
    return world.rank, x.item(), world.share(lambda: [world.rank, 5])


def fail_on_rank_1(world: World) -> None:
    if world.rank == 1:
        raise ValueError("a bad block")
    dist.barrier()


def die_on_rank_1(world: World) -> None:
    if world.rank == 1:
        os._exit(7)
    dist.barrier()


def sleep_on_rank_1(world: World) -> None:
    if world.rank == 1:
        time.sleep(60)


def test_spawned_ranks_return_their_results_in_order():
    assert spawn(3, sum_and_share) == [(rank, 3.0, [0, 5]) for rank in range(3)]


@pytest.mark.parametrize(
    ("main", "message"),
    [
        (fail_on_rank_1, r"rank 1 failed:\n(.|\n)*in fail_on_rank_1(.|\n)*a bad block"),
        (die_on_rank_1, "rank 1 died with exit status 7"),
        (sleep_on_rank_1, r"rank 1 did not end within 2 s"),
    ],
)
def test_a_spawned_world_ends_with_its_first_failure(main, message):
    start = time.monotonic()
    with pytest.raises(WorldError, match=message) as e:
        spawn(3, main, timeout=2 if main is sleep_on_rank_1 else 60)
    assert e.value.rank == 1
    assert main is not fail_on_rank_1 or isinstance(e.value.__cause__, ValueError)
    assert time.monotonic() - start < 30


def test_torchrun(program):
    run = torchrun(2, program)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("result ([3.0, 3.0], {'from': 0})") == 2


def test_the_first_failing_rank_of_torchrun_speaks_and_all_leave(program):
    start = time.monotonic()
    run = torchrun(2, program, "fail")
    assert run.returncode != 0
    assert run.stderr.count("rank 1 of 2 failed:") == 1
    assert run.stderr.count("ValueError: a bad block") == 1
    assert "rank 0 of 2 failed" not in run.stderr
    assert time.monotonic() - start < 50
