"""The processes world: this process is one rank, started by torchrun or alone.

torchrun tells each process its place through environment variables; a process started alone is a
world of one, without a network. Ranks talk through gloo on CPUs and NCCL on GPUs. When a rank
fails, the first to fail prints its traceback and all of them leave.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from dtensor_llm.worlds import World, is_torchrun
from dtensor_llm.worlds.processes_rank import Place, close_world, open_world
from dtensor_llm.worlds.processes_spawn import spawn

__all__ = ["leave", "refuse", "run", "spawn"]

T = TypeVar("T")

INTERRUPTED, READER_LEFT = 130, 141  # exit status after Ctrl-C or a closed pipe, as shells have it

_START = timedelta(minutes=10)
_PATIENCE = timedelta(seconds=5)  # for the rank that speaks: torchrun ends all once one has left


def run(main: Callable[[World], T], *, device: str = "auto", timeout: float | None = None) -> T:
    """Run main on the one rank that this process is.

    With other ranks, a failure of main ends this process: the first failing rank prints its
    traceback, the exit status is 1. Alone, the exception passes through.

    Args:
        main: called with this rank's World.
        device: "cpu", "cuda" or "auto" (cuda where there is one).
        timeout: seconds that a collective may take; None is 60 on a CPU and 600 on a GPU.

    Returns:
        What main returned.

    Raises:
        ValueError: the device is not there.
    """
    place = read_place()
    kind = _choose_device(device, place)
    store = _connect(_START)
    try:
        world = open_world(place, kind, timeout, store)
        result = main(world)
        close_world()
        return result
    except BaseException as error:
        if place.size > 1:
            _fail(place, store, error)
        if dist.is_initialized():
            dist.destroy_process_group()
        raise


def refuse(message: str) -> NoReturn:
    """End this process with exit status 2 before any world is open: every rank that cannot start.

    Rank 0 says why; the others leave after it has. Where rank 0 can start, the first of them says
    it.
    """
    place = read_place()
    if place.rank == 0:
        print(message, file=sys.stderr, flush=True)
    if place.size > 1:
        with contextlib.suppress(RuntimeError):  # without rank 0 there may be no store
            store = _connect(_PATIENCE)
            if place.rank == 0:
                store.set("told", "")
            elif not _was_told(store):
                _tell_once(store, message)
    leave(2)


def torchrun(size: int) -> list[str]:
    """The command that starts `size` ranks on this machine, on a port that the system chooses.

    A script and its arguments, or -m and a module, are to follow.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d"]
    return [*launcher, "--rdzv-endpoint=localhost:0", f"--nproc-per-node={size}"]


def leave(code: int = 0) -> NoReturn:
    """End this process; every rank of a script has to end through here.

    A plain exit leaves gloo's threads behind in the interpreter's last moments, where some abort.

    Args:
        code: exit status; 0 waits for the other ranks first.

    Comm: a barrier, when the process group is still there and code is 0.
    """
    if code == 0 and dist.is_initialized():
        close_world()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a reader may have left
            stream.flush()
    os._exit(code)


def end(main: Callable[[], int]) -> NoReturn:
    """Run a script's `main` and end this process with the status it returns.

    Ctrl-C ends it with one line, and a reader of the output that has left without any.
    """
    try:
        code = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    except BrokenPipeError:
        code = READER_LEFT
    leave(code)


def read_place() -> Place:
    """This process among those that the launcher started; a world of one without a launcher."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    return Place(rank, size, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", size)))


def _connect(timeout: timedelta) -> dist.Store:
    """Where the ranks find each other."""
    if not is_torchrun():
        return dist.HashStore()
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    return store


def _tell_once(store: dist.Store, message: str) -> None:
    """Print the message of the first rank that calls; the others wait until it is out."""
    if store.add("failures", 1) == 1:
        print(message, file=sys.stderr, flush=True)
        store.set("told", "")
    else:
        _was_told(store)


def _was_told(store: dist.Store) -> bool:
    try:
        store.wait(["told"], _PATIENCE)
    except dist.DistStoreError:
        return False
    return True


def _choose_device(device: str, place: Place) -> torch.device:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cpu" or (device == "auto" and gpus == 0):
        return torch.device("cpu")
    if device not in ("auto", "cuda"):
        raise ValueError(f"device {device!r} is not one of auto, cpu, cuda")
    if place.local_rank >= gpus:
        raise ValueError(
            f"local rank {place.local_rank} needs a GPU of its own, but this machine has {gpus}: "
            f"start at most {gpus} processes on it, or use the CPU"
        )
    return torch.device("cuda", place.local_rank)


def _fail(place: Place, store: dist.Store, error: BaseException) -> NoReturn:
    """Leave after a failure; only the first rank to fail says why."""
    if isinstance(error, SystemExit):
        leave(error.code if isinstance(error.code, int) else 1)
    if isinstance(error, KeyboardInterrupt):
        with contextlib.suppress(RuntimeError):
            _tell_once(store, "interrupted")
        leave(INTERRUPTED)
    trace = "".join(traceback.format_exception(error))
    with contextlib.suppress(RuntimeError):  # the store ends with the rank that keeps it
        _tell_once(store, f"rank {place.rank} of {place.size} failed:\n{trace}")
    leave(1)
