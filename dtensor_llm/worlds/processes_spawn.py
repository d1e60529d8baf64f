"""Worlds of fresh processes on this machine, for tests: no launcher and no ports."""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dtensor_llm.worlds import World, WorldError, name_ranks
from dtensor_llm.worlds.processes_rank import Place, open_world

T = TypeVar("T")

PRELOAD = ["torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.pipelining"]
_SECONDS_TO_START = 120.0
_SECONDS_TO_DIE = 0.5  # in which a death is seen, after another rank has noticed it


@dataclass(frozen=True)
class _Failure:
    """What a failed rank reports; the exception is None when it cannot be pickled."""

    trace: str
    exception: BaseException | None


def spawn(size: int, main: Callable[[World], T], *, timeout: float = 60.0) -> list[T]:
    """Run main on every rank of a new world of CPU processes; no process is left behind.

    The processes come from a server that has imported torch already, so a world starts fast.

    Args:
        size: number of ranks.
        main: a function of a module (it is pickled), called once per rank with its World.
        timeout: seconds that main may take on all ranks; also the collectives' limit.

    Returns:
        What main returned, by rank; it is pickled.

    Raises:
        WorldError: a rank raised (its exception is __cause__), died, or did not end in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ranks: list[tuple[ForkServerProcess, connection.Connection]] = []
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                arguments = (theirs, Place(rank, size, rank, size), store, main, timeout)
                process = context.Process(target=_be_rank, args=arguments, daemon=True)
                process.start()
                theirs.close()
                ranks.append((process, ours))
            _collect(ranks, _SECONDS_TO_START)
            return _collect(ranks, timeout)
        finally:
            for process, ours in ranks:
                process.kill()
                ours.close()
            for process, _ in ranks:
                process.join()


def _be_rank(
    parent: connection.Connection,
    place: Place,
    path: str,
    main: Callable[[World], Any],
    timeout: float,
) -> None:
    """The life of a spawned rank: two reports, ready and its result, then wait to be ended."""
    report: Any
    try:
        store = dist.FileStore(path, place.size)
        world = open_world(place, torch.device("cpu"), timeout, store)
        parent.send("ready")
        report = main(world)
    except BaseException as error:
        report = _Failure("".join(traceback.format_exception(error)), _picklable(error))
    parent.send(report)
    # A rank that ended now would break the others' connections, and they would report that.
    parent.poll(None)
    os._exit(0)


def _picklable(error: BaseException) -> BaseException | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error


def _collect(
    ranks: list[tuple[ForkServerProcess, connection.Connection]], timeout: float
) -> list[Any]:
    """Wait for one report of every rank.

    Raises:
        WorldError: at the first failure.
    """
    results: dict[int, Any] = {}
    rank_of = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
    deadline = time.monotonic() + timeout
    while len(results) < len(ranks):
        waiting = [pipe for pipe, rank in rank_of.items() if rank not in results]
        ready = connection.wait(waiting, deadline - time.monotonic())
        if not ready:
            late = [rank for rank in range(len(ranks)) if rank not in results]
            raise WorldError(f"{name_ranks(late)} did not end within {timeout:g} s", late[0])
        for pipe in ready:
            assert isinstance(pipe, connection.Connection)
            rank = rank_of[pipe]
            try:
                results[rank] = _receive(rank, pipe, ranks[rank][0])
            except WorldError as error:
                raise _death([process for process, _ in ranks]) or error from error.__cause__
    return [results[rank] for rank in range(len(ranks))]


def _death(processes: list[ForkServerProcess]) -> WorldError | None:
    """The rank that died, if one did: then what others report is only that it has left them."""
    handles = [process.sentinel for process in processes]
    for handle in connection.wait(handles, _SECONDS_TO_DIE):
        rank = handles.index(int(handle))  # type: ignore[arg-type] # what was passed in comes out
        processes[rank].join()
        return WorldError(f"rank {rank} died with exit status {processes[rank].exitcode}", rank)
    return None


def _receive(rank: int, pipe: connection.Connection, process: ForkServerProcess) -> Any:
    try:
        report = pipe.recv()
    except EOFError:
        process.join()
        raise WorldError(f"rank {rank} died with exit status {process.exitcode}", rank) from None
    if isinstance(report, _Failure):
        raise WorldError(f"rank {rank} failed:\n{report.trace}", rank) from report.exception
    return report
