"""The threads world: every rank is a thread of this process, with real numbers and no network.

FSDP2, DTensor, functional collectives and pipelines run unchanged on it; 512 ranks fit into one
process. It knows at once when ranks can never go on, and says what each of them waits for. Python
runs one thread at a time, so it is a tool to check and to learn, not to train fast.
"""

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dtensor_llm.worlds import World, WorldError, name_ranks
from dtensor_llm.worlds.threads_mesh import SharedGroups
from dtensor_llm.worlds.threads_scheduler import Aborted, Event, Scheduler
from dtensor_llm.worlds.threads_torch import enter_rank, leave_rank, torch_for_threads

T = TypeVar("T")

_STACK_BYTES = 8 * 2**20
_SECONDS_TO_LEAVE = 2.0
_SECONDS_TO_LOOK = 0.5  # also how long an interrupt may go unseen


def run(
    size: int,
    main: Callable[[World], T],
    *,
    timeout: float = 60.0,
    runnable: int | None = None,
) -> list[T]:
    """Run main on every rank of a world of threads.

    Each rank has process groups, meshes and a gradient mode of its own. What torch keeps per
    process the ranks have in common: the default dtype, the random generator, loss_parallel.

    Args:
        size: number of ranks.
        main: called once per rank with the rank's World.
        timeout: seconds without any communication after which the computing ranks count as hung.
        runnable: ranks that may compute at the same time. None is two, or one where torch has one
            thread: of small tensors two take longer, since Python runs one thread at a time.

    Returns:
        What main returned, by rank.

    Raises:
        WorldError: a rank raised (its exception is __cause__) or hung, the ranks deadlocked, or
            they ended with communication under way.
    """
    if runnable is None:
        runnable = min(2, torch.get_num_threads())
    scheduler = Scheduler(size, runnable)
    results: list[Any] = [None] * size
    with torch_for_threads():
        _run_ranks(main, scheduler, results, timeout)
    if scheduler.failure is not None:
        raise _world_error(*scheduler.failure) from scheduler.failure[1]
    return results


def _run_ranks(
    main: Callable[[World], Any], scheduler: Scheduler, results: list[Any], timeout: float
) -> None:
    size = len(results)
    shared, sharer = SharedGroups(scheduler, size), _Sharer(scheduler)

    def run_rank(rank: int) -> None:
        try:
            scheduler.enter(rank)
            enter_rank(shared, rank)
            world = World("threads", rank, size, torch.device("cpu"), sharer.of_rank(rank))
            results[rank] = main(world)
        except Aborted:
            pass
        except BaseException as error:
            scheduler.fail(rank, error)
        finally:
            leave_rank()
            scheduler.leave(rank)

    threads = _start_threads(size, run_rank)
    try:
        scheduler.start()
        _watch(scheduler, threads, timeout)
        if scheduler.failure is None and (unfinished := shared.unfinished()):
            lines = "\n".join(["the ranks ended with communication under way:", *unfinished])
            scheduler.fail(None, RuntimeError(lines))
    except BaseException as interrupt:
        scheduler.fail(None, interrupt)
        raise
    finally:
        scheduler.empty.wait(_SECONDS_TO_LEAVE)


def _start_threads(size: int, run_rank: Callable[[int], None]) -> list[threading.Thread]:
    previous = threading.stack_size(_STACK_BYTES)
    try:
        threads = [
            threading.Thread(target=run_rank, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(size)
        ]
        for thread in threads:
            thread.start()
    finally:
        threading.stack_size(previous)
    return threads


def _watch(scheduler: Scheduler, threads: list[threading.Thread], timeout: float) -> None:
    """Return when all ranks have ended or one has failed, which a hang counts as."""
    progress, since = -1, time.monotonic()
    while not scheduler.decided.wait(min(timeout / 4, _SECONDS_TO_LOOK)):
        if scheduler.progress != progress:
            progress, since = scheduler.progress, time.monotonic()
        elif time.monotonic() - since >= timeout:
            stuck = sorted(scheduler.running)
            scheduler.fail(stuck[0] if stuck else None, _hang(stuck, threads, timeout))


def _hang(stuck: list[int], threads: list[threading.Thread], timeout: float) -> TimeoutError:
    frames = sys._current_frames()
    stacks = []
    for rank in stuck:
        frame = frames.get(threads[rank].ident or 0)
        stacks.append(f"rank {rank} is here:\n{''.join(traceback.format_stack(frame))}")
    said = f"{name_ranks(stuck)} did not communicate for {timeout:g} s"
    return TimeoutError("\n".join([said, *stacks]))


def _world_error(rank: int | None, error: BaseException) -> WorldError:
    if rank is None:
        return WorldError(str(error))
    trace = "".join(traceback.format_exception(error))
    return WorldError(f"rank {rank} failed:\n{trace}", rank)


class _Sharer:
    """What World.share does here: rank 0 makes each thing once, the others wait for it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._made: dict[int, tuple[Event, list[Any]]] = {}

    def of_rank(self, rank: int) -> Callable[[Callable[[], Any]], Any]:
        """One rank's World.share."""
        count = 0

        def share(make: Callable[[], Any]) -> Any:
            nonlocal count
            number, count = count, count + 1
            return self._share(rank, number, make)

        return share

    def _share(self, rank: int, number: int, make: Callable[[], Any]) -> Any:
        with self._scheduler.lock:
            event, box = self._made.setdefault(
                number, (Event(lambda: f"rank 0 to share, for the time number {number}"), [])
            )
        if rank == 0:
            box.append(make())
            self._scheduler.fire(event)
        else:
            self._scheduler.wait(rank, event)
        return box[0]
