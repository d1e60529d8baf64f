"""Process groups and meshes of one threads world, each computed once for all ranks.

A mesh axis of 512 ranks divides them into hundreds of groups. Each rank needs the one it is in,
and the division is the same for all: so it is computed by the first rank and kept here.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, _MeshLayout

from dtensor_llm.worlds.threads_group import BACKEND, ThreadGroup
from dtensor_llm.worlds.threads_meeting import Meeting
from dtensor_llm.worlds.threads_scheduler import Scheduler

_concatenate = DeviceMesh._concatenate
_slice = DeviceMesh.__getitem__


class Partition:
    """How a mesh axis divides ranks into groups.

    Attributes:
        groups: the ranks of each group.
        group_of: for each rank, the index of its group.
    """

    def __init__(self, groups: list[list[int]]) -> None:
        self.groups = groups
        self.group_of = {rank: index for index, ranks in enumerate(groups) for rank in ranks}


class SharedGroups:
    """The groups of one world."""

    def __init__(self, scheduler: Scheduler, size: int) -> None:
        self.scheduler = scheduler
        self.size = size
        self.store = dist.HashStore()
        self._meetings: dict[str, Meeting] = {}
        self._partitions: dict[object, Partition] = {}

    def meeting(self, name: str, ranks: Sequence[int]) -> Meeting:
        """The place where the group of this name meets, made for the first who asks."""
        with self.scheduler.lock:
            if name not in self._meetings:
                self._meetings[name] = Meeting(self.scheduler, name, tuple(ranks))
            return self._meetings[name]

    def unfinished(self) -> list[str]:
        """What some rank began and others never joined, in words."""
        return [line for meeting in self._meetings.values() for line in meeting.unfinished()]

    def partition(self, axis: Any, rank_map: torch.Tensor) -> Partition:
        """How an axis of a mesh layout divides the ranks of its map."""
        key = (axis, tuple(rank_map.tolist()))
        if key not in self._partitions:
            rows = _MeshLayout([axis]).remap_to_tensor(rank_map)
            self._partitions[key] = Partition(rows.tolist())
        return self._partitions[key]


class WorldGroup(ThreadGroup):
    """The group of all ranks. c10d asks it to make all others."""

    def __init__(self, shared: SharedGroups, rank: int) -> None:
        super().__init__(shared.meeting("0", range(shared.size)), rank)
        self.shared = shared

    def new_group(self, ranks: list[int], *, group_name: str, **_: Any) -> ThreadGroup | None:
        """c10d's hook: this rank's membership, None if it is not a member."""
        if self.rank() not in ranks:
            return None
        return ThreadGroup(self.shared.meeting(group_name, ranks), self.rank())


class RankState:
    """c10d's tables of process groups, of one rank; all but the last three names are c10d's."""

    def __init__(self) -> None:
        self.default_pg: WorldGroup | None = None
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
        self.concatenated: dict[tuple[DeviceMesh, ...], DeviceMesh] = {}
        self.slices: dict[tuple[DeviceMesh, str | tuple[str, ...]], DeviceMesh] = {}


def register(group: ThreadGroup, store: dist.Store) -> None:
    """Enter a group into the calling rank's tables."""
    distributed_c10d._register_pg_in_world(
        group,
        backend_name=BACKEND,
        store=dist.PrefixStore(f"{group.group_name}/", store),
        group_name=distributed_c10d.GroupName(group.group_name),
        backend_config=f"cpu:{BACKEND}",
        rank_mapping={member: index for index, member in enumerate(group.meeting.ranks)},
        add_to_default_tag=True,
    )


def join_axis_group(axis: Any, rank_map: torch.Tensor, *_: object) -> str | None:
    """Stands in for DeviceMesh._init_one_process_group, blind to the groups of other ranks.

    The names are those that c10d would count out, had each rank made every group.

    Returns:
        The name of this rank's group on the axis, None if the mesh does not hold this rank.
    """
    state: Any = distributed_c10d._world
    world_group = state.default_pg
    if axis.numel() == world_group.size():
        return world_group.group_name
    partition = world_group.shared.partition(axis, rank_map)
    first = state.group_count
    state.group_count += len(partition.groups)
    index = partition.group_of.get(world_group.rank())
    if index is None:
        return None
    group = world_group.new_group(partition.groups[index], group_name=str(first + index))
    register(group, world_group.shared.store)
    return group.group_name


def concatenate(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Stands in for DeviceMesh._concatenate, which FSDP calls for each parameter under tp."""
    state: Any = distributed_c10d._world
    key = tuple(meshes)
    if key not in state.concatenated:
        state.concatenated[key] = _concatenate(meshes)
    return state.concatenated[key]


def slice_mesh(mesh: DeviceMesh, axes: str | tuple[str, ...]) -> DeviceMesh:
    """Stands in for DeviceMesh.__getitem__: of its half a millisecond, a rank pays once a slice."""
    state: Any = distributed_c10d._world
    key = (mesh, axes)
    if key not in state.slices:
        state.slices[key] = _slice(mesh, axes)
    return state.slices[key]
