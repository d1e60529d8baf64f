"""Every change that the threads world makes inside torch, made and undone in one place.

All of it leans on private parts of torch 2.13, so another version is refused.
"""

import contextlib
import gc
import itertools
import threading
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _collective_utils, _redistribute
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from dtensor_llm.worlds.threads_group import BACKEND
from dtensor_llm.worlds.threads_mesh import (
    RankState,
    SharedGroups,
    WorldGroup,
    concatenate,
    join_axis_group,
    register,
    slice_mesh,
)
from dtensor_llm.worlds.threads_sharding import SharedPropagation

TORCH_VERSION = "2.13"

_FULL_COLLECTION_EVERY = 100  # collections of the middle generation; Python's default is 10

_one_world = threading.Lock()
_mesh_ids = itertools.count(1)


class _ThreadState(threading.local, RankState):
    """c10d keeps its tables in one object of the process; here each thread has its own."""


@contextlib.contextmanager
def torch_for_threads() -> Iterator[None]:
    """While it lasts, each thread of this process can be a rank.

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


def enter_rank(shared: SharedGroups, rank: int) -> None:
    """Make the calling thread a rank: the counterpart of init_process_group."""
    state: Any = distributed_c10d._world
    # A thread's own number may have been that of another rank in an earlier world, and torch
    # keeps caches that are keyed by meshes.
    state.mesh_id = next(_mesh_ids)
    state.group_count = 1
    state.default_pg = WorldGroup(shared, rank)
    register(state.default_pg, shared.store)
    torch.autograd.set_multithreading_enabled(False)


def leave_rank() -> None:
    """Forget the calling thread's groups."""
    distributed_c10d._unregister_all_process_groups()


def _install(undo: contextlib.ExitStack) -> None:
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _refuse_init, devices=["cpu"])
    state = _ThreadState()
    _swap(undo, distributed_c10d, "_world", state)
    # DeviceMesh asks for its thread's number to tell equal meshes of two ranks apart.
    _swap(undo, device_mesh, "threading", SimpleNamespace(get_ident=lambda: state.mesh_id))
    _swap(undo, DeviceMesh, "_init_one_process_group", staticmethod(join_axis_group))
    _swap(undo, DeviceMesh, "_concatenate", staticmethod(concatenate))
    _swap(undo, DeviceMesh, "__getitem__", slice_mesh)
    _swap(undo, ShardingPropagator, "_fake_mode_lock", threading.RLock())
    propagator = DTensor._op_dispatcher.sharding_propagator
    shared = SharedPropagation(propagator)
    propagator.propagate_op_sharding_non_cached = shared  # type: ignore[assignment, method-assign]
    undo.callback(delattr, propagator, "propagate_op_sharding_non_cached")
    undo.callback(_forget_meshes)
    isolate: Any = vars(torch._C._distributed_c10d)["_set_thread_isolation_mode"]
    isolate(True)
    undo.callback(isolate, False)
    # Threads start with the number that is set at the time; ranks compute with one each.
    undo.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(1)
    undo.callback(torch.set_default_dtype, torch.get_default_dtype())
    # What hundreds of ranks hold lives as long as they do: there is little to find in all of it.
    undo.callback(gc.set_threshold, *gc.get_threshold())
    gc.set_threshold(*gc.get_threshold()[:2], _FULL_COLLECTION_EVERY)
    # The ranks save and restore the filters in turns, so the last one may restore another's.
    undo.enter_context(warnings.catch_warnings())


def _swap(undo: contextlib.ExitStack, owner: Any, name: str, value: object) -> None:
    undo.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, value)


def _forget_meshes() -> None:
    """Empty the caches of torch that would keep this world's meshes, and with them its groups."""
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    ShardingPropagator._propagate_tensor_meta_cached.cache_clear()


def _refuse_init(*_: object) -> None:
    raise RuntimeError("the ranks of a threads world have their process group already")
