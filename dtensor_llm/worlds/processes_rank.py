"""How a process becomes one rank of a processes world, and stops being one."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dtensor_llm.worlds import World, shared_memory

_TIMEOUT_SECONDS = {"cpu": 60.0, "cuda": 600.0}
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

# Waiting for rank 0 to make what it shares is no communication: the short time-out of the
# collectives would end healthy worlds.
_SHARE = timedelta(days=1)


@dataclass(frozen=True)
class Place:
    """Where a rank is among all ranks, and among those of its machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def open_world(
    place: Place, device: torch.device, timeout: float | None, store: dist.Store
) -> World:
    """Make this process a rank.

    Args:
        timeout: seconds that a collective may take, None for the device's default.
        store: where the ranks find each other.
    """
    set_threads(place.local_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    seconds = _TIMEOUT_SECONDS[device.type] if timeout is None else timeout
    shared_memory.timeout = timedelta(seconds=seconds)
    dist.init_process_group(
        _BACKENDS[device.type],
        store=dist.PrefixStore("group", store),
        rank=place.rank,
        world_size=place.size,
        timeout=shared_memory.timeout,
        device_id=device if device.type == "cuda" else None,
    )
    if place.size == 1:
        return World("processes", 0, 1, device)
    return World("processes", place.rank, place.size, device, _sharer(place.rank, store))


def close_world() -> None:
    """Wait for the other ranks and end the process group.

    Comm: a barrier.
    """
    if dist.get_world_size() > 1:
        dist.barrier()
    dist.destroy_process_group()


def set_threads(local_size: int) -> None:
    """Divide the cores among the ranks of this machine, unless the user has set a number.

    torchrun sets OMP_NUM_THREADS=1 where the user has set none, so a 1 from it does not count.
    """
    asked = os.environ.get("OMP_NUM_THREADS")
    by_torchrun = asked == "1" and local_size > 1 and "TORCHELASTIC_RUN_ID" in os.environ
    if asked is None or by_torchrun:
        torch.set_num_threads(max(1, num_cores() // local_size))


def num_cores() -> int:
    """Cores that this process may use; on systems that do not tell, those of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _sharer(rank: int, store: dist.Store) -> Callable[[Callable[[], Any]], Any]:
    """What World.share does between processes: rank 0 makes and sends, the others wait."""
    count = 0

    def share(make: Callable[[], Any]) -> Any:
        nonlocal count
        key, count = f"shared/{count}", count + 1
        box = [None]
        if rank == 0:
            box[0] = make()
            store.set(key, "made")
        else:
            store.wait([key], _SHARE)
        dist.broadcast_object_list(box, src=0)
        return box[0]

    return share
