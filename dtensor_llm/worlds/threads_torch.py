"""Every change that the threads world makes inside torch, made and undone in one place.

All of it leans on private parts of torch 2.13, so another version is refused.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.tensor import DTensor

from dtensor_llm.worlds.threads_group import Meeting, ThreadGroup
from dtensor_llm.worlds.threads_scheduler import Scheduler
from dtensor_llm.worlds.threads_sharding import SharedPropagation

TORCH_VERSION = "2.13"

# DeviceMesh tells the ranks of one process apart under this backend name alone.
BACKEND = "threaded"

_one_world = threading.Lock()
_mesh_ids = itertools.count(1)


class _ThreadState(threading.local):
    """c10d's tables of process groups, one set per thread; the first ten names are c10d's."""

    def __init__(self) -> None:
        self.default_pg: dist.ProcessGroup | None = None
        self.pg_map: dict = {}
        self.pg_names: dict = {}
        self.pg_group_ranks: dict = {}
        self.pg_backend_config: dict = {}
        self.group_count = 0
        self.tags_to_pg: dict = {}
        self.pg_to_tag: dict = {}
        self.pg_coalesce_state: dict = {}
        self.comms: list = []
        self.mesh_id = 0


@dataclass
class SharedGroups:
    """The groups of one world; what all ranks would compute alike is computed once and kept."""

    scheduler: Scheduler
    size: int
    store: dist.Store = field(default_factory=dist.HashStore)
    _meetings: dict[str, Meeting] = field(default_factory=dict)
    _partitions: dict[object, "Partition"] = field(default_factory=dict)

    def meeting(self, name: str, ranks: Sequence[int]) -> Meeting:
        """The place where the group of this name meets, made by the first who asks."""
        with self.scheduler.lock:
            found = self._meetings.get(name)
            if found is None:
                found = self._meetings[name] = Meeting(name, tuple(ranks))
            return found

    def partition(self, axis: Any, rank_map: torch.Tensor) -> "Partition":
        """How one axis of a mesh divides its ranks into groups."""
        key = (axis, tuple(rank_map.tolist()))
        if key not in self._partitions:
            rows = device_mesh._MeshLayout([axis]).remap_to_tensor(rank_map).tolist()
            self._partitions[key] = Partition(rows)
        return self._partitions[key]


class Partition:
    """Groups of ranks that do not overlap, and for each rank the index of its group."""

    def __init__(self, groups: list[list[int]]) -> None:
        self.groups = groups
        self.group_of = {rank: index for index, ranks in enumerate(groups) for rank in ranks}


class _WorldGroup(ThreadGroup):
    """The group of all ranks. c10d asks it to make all others."""

    def __init__(self, shared: SharedGroups, rank: int) -> None:
        super().__init__(shared.scheduler, shared.meeting("0", range(shared.size)), rank)
        self.shared = shared

    def new_group(self, ranks: list[int], group_name: str, **_: Any) -> ThreadGroup | None:
        rank = self.rank()
        if rank not in ranks:
            return None
        return ThreadGroup(self._scheduler, self.shared.meeting(group_name, ranks), rank)


def _register(group: ThreadGroup, ranks: Sequence[int], store: dist.Store) -> None:
    """Enter a group into the calling rank's c10d tables."""
    distributed_c10d._register_pg_in_world(
        group,
        backend_name=BACKEND,
        store=store,
        group_name=group.group_name,
        backend_config=f"cpu:{BACKEND}",
        rank_mapping={member: index for index, member in enumerate(ranks)},
        add_to_default_tag=True,
    )


def enter_rank(shared: SharedGroups, rank: int) -> None:
    """Make the calling thread a rank: the counterpart of init_process_group."""
    state: Any = distributed_c10d._world
    state.mesh_id = next(_mesh_ids)
    state.group_count = 1
    state.default_pg = _WorldGroup(shared, rank)
    _register(state.default_pg, range(shared.size), shared.store)
    torch.autograd.set_multithreading_enabled(False)


def _join_mesh_group(axis: Any, rank_map: Any, _name: str, _backend: Any) -> str | None:
    """DeviceMesh._init_one_process_group, without a look at the groups of other ranks.

    The names are those that c10d would count out, had each rank made every group.
    """
    state: Any = distributed_c10d._world
    world_group = state.default_pg
    if axis.numel() == world_group.size():
        return world_group.group_name
    rank = world_group.rank()
    partition = world_group.shared.partition(axis, rank_map)
    first = state.group_count
    state.group_count += len(partition.groups)
    index = partition.group_of.get(rank)
    if index is None:
        return None
    ranks = partition.groups[index]
    group = world_group.new_group(ranks, str(first + index))
    _register(group, ranks, world_group.shared.store)
    return group.group_name


@contextlib.contextmanager
def torch_for_threads() -> Iterator[None]:
    """While it lasts, every thread has process groups, meshes and threading of its own.

    Raises:
        RuntimeError: another version of torch, or another threads world is running.
    """
    if not torch.__version__.startswith(f"{TORCH_VERSION}."):
        raise RuntimeError(
            f"the threads world is built on torch {TORCH_VERSION}, but this is {torch.__version__}"
        )
    if not _one_world.acquire(blocking=False):
        raise RuntimeError("a threads world is already running in this process")
    try:
        with contextlib.ExitStack() as undo:
            _install(undo)
            yield
    finally:
        _one_world.release()


def _install(undo: contextlib.ExitStack) -> None:
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _refuse_init, devices=["cpu"])
    state = _ThreadState()
    mesh_threading = SimpleNamespace(get_ident=lambda: state.mesh_id)
    _swap(undo, distributed_c10d, "_world", state)
    _swap(undo, device_mesh, "threading", mesh_threading)
    _swap(
        undo, device_mesh.DeviceMesh, "_init_one_process_group", staticmethod(_join_mesh_group)
    )
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding_non_cached = SharedPropagation(propagator)
    undo.callback(delattr, propagator, "propagate_op_sharding_non_cached")
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    undo.callback(torch._C._distributed_c10d._set_thread_isolation_mode, False)
    undo.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(1)


def _swap(undo: contextlib.ExitStack, owner: Any, name: str, value: object) -> None:
    undo.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, value)


def _refuse_init(*_: object) -> None:
    raise RuntimeError("the ranks of a threads world have their process group already")
