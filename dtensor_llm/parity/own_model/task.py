"""What is checked: a model, how it is parallelized, its batches; and what is refused at once."""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.dropout import _DropoutNd

from dtensor_llm.plan import chunk
from dtensor_llm.worlds import World

Slices = tuple[slice, ...]
Loss = Callable[[nn.Module, Any], Tensor]
Parallelize = Callable[[nn.Module, DeviceMesh], nn.Module | None]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

DATA_AXES = ("dp", "dp_replicate", "dp_shard")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class OwnModelError(ValueError):
    """What was asked cannot be checked, or what the caller passed in raised."""


@dataclass(frozen=True)
class Task:
    """Everything a rank has to know; the fields are those of `check_parity`.

    `model` holds the initial weights and is copied, never trained; `batches` are whole.
    """

    model: nn.Module
    parallelize: Parallelize
    mesh: Mapping[str, int]
    batches: Sequence[Any]
    loss: Loss
    batch_axes: Sequence[str]
    average: bool
    make_optimizer: MakeOptimizer
    timeout: float
    dtype: torch.dtype = torch.float64

    @property
    def num_ranks(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def num_parts(self) -> int:
        """That a global batch is cut into."""
        return math.prod(self.mesh[axis] for axis in self.batch_axes)

    @property
    def share(self) -> float:
        """What the loss of a part counts in that of the whole batch."""
        return 1 / self.num_parts if self.average else 1.0

    @property
    def model_axes(self) -> list[str]:
        """Those whose ranks see the same batch."""
        return [axis for axis in self.mesh if axis not in self.batch_axes]

    def __str__(self) -> str:
        sizes = " x ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        return f"{sizes} = {counted(self.num_ranks, 'rank')}"

    def cast(self, dtype: torch.dtype) -> "Task":
        """The same with the model, copied, and the batches in `dtype`."""
        model = copy.deepcopy(self.model).to(dtype)
        batches = [cast(batch, dtype) for batch in self.batches]
        return dataclasses.replace(self, model=model, batches=batches, dtype=dtype)

    def device_mesh(self, world: World) -> DeviceMesh:
        ranks = torch.arange(world.size).reshape(tuple(self.mesh.values()))
        return DeviceMesh(world.device.type, ranks, mesh_dim_names=tuple(self.mesh))

    def coordinate(self, rank: int) -> dict[str, int]:
        """Of a rank on each axis; the last axis runs fastest."""
        place = {}
        for axis, size in reversed(list(self.mesh.items())):
            rank, place[axis] = divmod(rank, size)
        return {axis: place[axis] for axis in self.mesh}

    def part(self, rank: int) -> int:
        """Which part of the batch is the rank's."""
        place, index = self.coordinate(rank), 0
        for axis in self.batch_axes:
            index = index * self.mesh[axis] + place[axis]
        return index

    def peers(self) -> list[list[int]]:
        """Ranks that together see the whole batch once, their parts in order."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.num_ranks):
            place = self.coordinate(rank)
            groups.setdefault(tuple(place[axis] for axis in self.model_axes), []).append(rank)
        return [sorted(ranks, key=self.part) for ranks in groups.values()]

    def own_batch(self, batch: Any, rank: int) -> Any:
        return part_of_batch(batch, self.part(rank), self.num_parts)

    def where(
        self, whole: Sequence[int], own: Sequence[int], rank: int, *, has_rows: bool = False
    ) -> Slices | None:
        """Which part of a tensor of shape `whole` a rank holds that has one of shape `own`.

        By shape alone: each dim is whole or cut by one axis as by `torch.chunk`, the model's axes
        before those of the batch; with `has_rows`, dim 0 rather as the batch is. None where no cut
        makes that shape.
        """
        if len(whole) != len(own):
            return None
        place, parts = self.coordinate(rank), []
        for dim, (size, length) in enumerate(zip(whole, own, strict=True)):
            ways = [(0, 1)]
            if has_rows and dim == 0 and size % self.num_parts == 0:
                ways.append((self.part(rank), self.num_parts))
            axes = [*self.model_axes, *self.batch_axes]
            ways += [(place[axis], self.mesh[axis]) for axis in axes]
            cuts = [chunk(size, index, count) for index, count in ways]
            fitting = [start for start, found in cuts if found == length]
            if not fitting:
                return None
            parts.append(slice(fitting[0], fitting[0] + length))
        return tuple(parts)


def make_task(
    model: nn.Module, mesh: Mapping[str, int], batch_axes: Sequence[str] | None, **rest: Any
) -> Task:
    """The task, once all that can be seen before a step has been looked at.

    Raises:
        OwnModelError: the mesh, the batches or the model cannot be checked.
    """
    if not isinstance(model, nn.Module):
        raise OwnModelError(f"build_model gives {model!r:.80}: it is to give a module")
    if not isinstance(mesh, Mapping):
        raise OwnModelError(f'mesh {mesh!r}: sizes by name, for example {{"dp": 2, "tp": 2}}')
    sizes = " x ".join(f"{axis}={size}" for axis, size in mesh.items())
    if not mesh or any(not isinstance(size, int) or size < 1 for size in mesh.values()):
        raise OwnModelError(
            f"mesh {sizes or 'without an axis'}: every size is a whole number of at least 1, "
            'for example {"dp": 2, "tp": 2}'
        )
    if batch_axes is None:
        batch_axes = [axis for axis in mesh if axis in DATA_AXES]
    unknown = [axis for axis in batch_axes if axis not in mesh]
    if unknown:
        raise OwnModelError(
            f"batch_axes names {', '.join(unknown)}, but the mesh has only {', '.join(mesh)}"
        )
    refuse_randomness(model)
    if next(model.parameters(), None) is None:
        raise OwnModelError("the model has no parameters: there is nothing to train")
    task = Task(model=model, mesh=dict(mesh), batch_axes=tuple(batch_axes), **rest)
    if not task.batches:
        raise OwnModelError("no batches: a check takes at least one step, and each takes a batch")
    for step, batch in enumerate(task.batches):
        refuse_uneven(batch, step, task)
    return task


def refuse_uneven(batch: Any, step: int, task: Task) -> None:
    parts = " x ".join(f"{axis}={task.mesh[axis]}" for axis in task.batch_axes)
    for x in tensors_in(batch):
        if x.ndim and x.shape[0] % task.num_parts:
            below = x.shape[0] - x.shape[0] % task.num_parts
            cures = [str(size) for size in (below, below + task.num_parts) if size]
            raise OwnModelError(
                f"batch {step + 1} has a tensor of {x.shape[0]} rows, and {parts} divides them "
                f"into {task.num_parts} equal parts: {x.shape[0]} / {task.num_parts} = "
                f"{x.shape[0] / task.num_parts:g}; {' or '.join(cures)} rows would do"
            )


def refuse_randomness(model: nn.Module) -> None:
    """Dropout draws from a generator that the ranks share: no two runs would agree."""
    for name, module in model.named_modules():
        rate = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
        if module.training and isinstance(rate, float) and rate > 0:
            raise OwnModelError(
                f"{name or 'the model'} ({type(module).__name__}) drops with probability {rate:g}: "
                "its masks come from torch's generator and differ from rank to rank and run to "
                "run; build the model with dropout 0, or call .eval() on that module"
            )


def counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def map_tensors(change: Callable[[Tensor], Tensor], item: Any) -> Any:
    """The tensors in nested tuples, lists and dicts changed; all else as it was."""
    if isinstance(item, Tensor):
        return change(item)
    if isinstance(item, Mapping):
        return {key: map_tensors(change, part) for key, part in item.items()}
    if isinstance(item, tuple | list):
        parts = [map_tensors(change, part) for part in item]
        return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
    return item


def tensors_in(item: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        found.append(x)
        return x

    map_tensors(keep, item)
    return found


def cast(batch: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, batch)


def part_of_batch(batch: Any, index: int, count: int) -> Any:
    """Rows `index` of `count` equal parts; a tensor without dims is everybody's."""

    def rows(x: Tensor) -> Tensor:
        return x.tensor_split(count)[index] if x.ndim else x

    return map_tensors(rows, batch)
