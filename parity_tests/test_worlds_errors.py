"""The threads world: how it ends early, and what it says then."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from dtensor_llm.worlds import World, WorldError, threads


def test_the_first_exception_ends_all_ranks_with_its_traceback():
    went_on: list[int] = []

    def fail_here(world: World) -> None:
        if world.rank == 2:
            raise KeyError("no such stage")

    def main(world: World) -> None:
        dist.barrier()
        fail_here(world)
        try:
            dist.barrier()
        except Exception:
            went_on.append(world.rank)
        went_on.append(world.rank)

    with pytest.raises(
        WorldError, match=r"rank 2 failed(.|\n)*in fail_here(.|\n)*no such stage"
    ) as e:
        threads.run(4, main)
    assert e.value.rank == 2
    assert isinstance(e.value.__cause__, KeyError)
    assert went_on == []


def test_an_exception_ends_ranks_that_wait_inside_a_backward_pass():
    def main(world: World) -> None:
        x = torch.ones(2, requires_grad=True)
        gathered = funcol.all_gather_single_autograd(x, 0, dist.group.WORLD)
        total = gathered.sum()
        if world.rank == 1:
            raise ValueError("not today")
        total.backward()

    with pytest.raises(WorldError, match="rank 1 failed") as e:
        threads.run(3, main)
    assert isinstance(e.value.__cause__, ValueError)


def test_a_deadlock_is_found_at_once_and_says_who_waits_for_what():
    def main(world: World) -> None:
        pair = dist.new_group([0, 1])
        if world.rank == 0:
            dist.all_reduce(torch.ones(3, 5), group=pair)
        elif world.rank == 1:
            dist.recv(torch.ones(2, dtype=torch.int64), 2, tag=7)
        elif world.rank == 2:
            return
        else:
            dist.barrier()

    start = time.monotonic()
    with pytest.raises(WorldError) as e:
        threads.run(5, main)
    assert time.monotonic() - start < 5
    assert e.value.rank is None
    assert str(e.value).splitlines() == [
        "deadlock, no rank can go on:",
        "rank 0 waits for all_reduce(float32[3, 5], SUM), collective 0 of group 1 (ranks 0-1): "
        "rank 1 did not come",
        "rank 1 waits for rank 2 to send int64[2], tag 7, in group 0 (ranks 0-4)",
        "ranks 3-4 wait for barrier(), collective 0 of group 0 (ranks 0-4): ranks 0-2 did not come",
        "rank 2 has ended",
    ]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            lambda: dist.all_reduce(torch.ones(4)),
            lambda: dist.broadcast(torch.ones(4), 0),
            r"rank 0 called all_reduce\(float32\[4\], SUM\), "
            r"but rank 1 called broadcast\(float32\[4\], root 0\)",
        ),
        (
            lambda: dist.all_reduce(torch.ones(4)),
            lambda: dist.all_reduce(torch.ones(2, 2)),
            r"float32\[4\].*float32\[2, 2\]",
        ),
        (
            lambda: dist.all_reduce(torch.ones(4)),
            lambda: dist.all_reduce(torch.ones(4).double()),
            r"float32\[4\].*float64\[4\]",
        ),
        (
            lambda: dist.all_reduce(torch.ones(4)),
            lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX),
            "SUM.*MAX",
        ),
        (
            lambda: dist.broadcast(torch.ones(4), 0),
            lambda: dist.broadcast(torch.ones(4), 1),
            "root 0.*root 1",
        ),
        (
            lambda: dist.all_to_all_single(torch.ones(2), torch.ones(2), [1, 1], [1, 1]),
            lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), [2, 1], [2, 1]),
            r"rank 0: all_to_all_single\(.*rank 1: all_to_all_single\(.*splits to \[2, 1\]",
        ),
        (
            lambda: dist.send(torch.ones(4), 1),
            lambda: dist.recv(torch.ones(3), 0),
            r"tag 0 from rank 0 to rank 1.*float32\[4\] does not fit into float32\[3\]",
        ),
    ],
)
def test_calls_that_do_not_fit_together_are_both_named(first, second, message):
    with pytest.raises(WorldError, match=message):
        threads.run(2, lambda world: (first, second)[world.rank](), runnable=1)


def test_communication_left_under_way_is_an_error():
    def main(world: World) -> None:
        if world.rank == 1:
            dist.isend(torch.ones(3), 0)
            dist.all_reduce(torch.ones(2), async_op=True)

    with pytest.raises(WorldError) as e:
        threads.run(2, main)
    assert (
        "all_reduce(float32[2], SUM), collective 0 of group 0 (ranks 0-1): rank 0 did not"
        in str(e.value)
    )
    assert "rank 1 waits for rank 0 to receive float32[3], tag 0" in str(e.value)


def test_a_rank_that_computes_for_ever_is_found_with_its_stack():
    released = threading.Event()

    def spin_here() -> None:
        released.wait(30)

    def main(world: World) -> None:
        if world.rank == 1:
            spin_here()
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(
        WorldError, match=r"rank 1 did not communicate for 0.5 s(.|\n)*in spin_here"
    ):
        threads.run(3, main, timeout=0.5)
    assert time.monotonic() - start < 10
    released.set()


def test_an_interrupt_of_the_main_thread_ends_the_world():
    def main(world: World) -> None:
        dist.barrier()
        if world.rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
        for _ in range(2000):
            time.sleep(0.01)
            dist.barrier()

    # A shell's background job ignores the signal, and so would these tests in one.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            threads.run(3, main)
    finally:
        signal.signal(signal.SIGINT, previous)


def test_a_world_inside_a_world_is_refused():
    with pytest.raises(WorldError, match="a threads world is already running"):
        threads.run(2, lambda _: threads.run(2, lambda _: None))


def test_another_version_of_torch_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    with pytest.raises(RuntimeError, match=r"built on torch 2\.13, but this is 2\.14\.0"):
        threads.run(1, lambda _: None)
