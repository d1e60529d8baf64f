"""Counts what a rank communicates, in a real step of any world.

with CommRecorder(mesh) as recorder:
    trainer.step(...)
recorder.table()  # [Traffic("all-gather", "dp_shard", 9, ...), ...]
"""

import contextlib
import itertools
from functools import cached_property
from types import TracebackType

from torch.distributed.device_mesh import DeviceMesh

from dtensor_llm.planner.traffic import Traffic, axis_name, merged, traffic
from dtensor_llm.worlds.observation import Communication, observed_by


class CommRecorder:
    """Records the calling rank's collectives and messages while the context is open.

    The first step of a pipeline is special: its stages agree, by messages of one number, on what
    they will send. Record a later one.

    Attributes:
        calls: one Traffic for each call, in the order in which the rank made them.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        """`mesh` is the whole one, with a name for each axis."""
        self.mesh = mesh
        self.calls: list[Traffic] = []
        self._open = contextlib.ExitStack()

    def __enter__(self) -> "CommRecorder":
        self._open.enter_context(observed_by(self._record))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def table(self) -> list[Traffic]:
        """One entry for each operation and axis."""
        return merged(self.calls)

    def _record(self, seen: Communication) -> None:
        axis = self._axes.get(seen.ranks, f"ranks {','.join(map(str, seen.ranks))}")
        self.calls.append(traffic(seen.operation, axis, len(seen.ranks), seen.payload))

    @cached_property
    def _axes(self) -> dict[tuple[int, ...], str]:
        """{ranks of a group that holds this rank: the name of the axes it spans}."""
        names, shape = self.mesh.mesh_dim_names or (), self.mesh.shape
        sizes = dict(zip(names, shape, strict=True))
        own = self.mesh.get_coordinate()
        assert own is not None, "this rank is not in the mesh"
        used = [axis for axis in names if sizes[axis] > 1]
        found: dict[tuple[int, ...], str] = {}
        for count in range(1, len(used) + 1):
            for spanned in itertools.combinations(used, count):
                index = [
                    slice(None) if axis in spanned else coordinate
                    for axis, coordinate in zip(names, own, strict=True)
                ]
                ranks = self.mesh.mesh[tuple(index)].flatten().tolist()
                found[tuple(ranks)] = axis_name(spanned, sizes)
        return found
