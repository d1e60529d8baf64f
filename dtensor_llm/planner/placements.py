"""Where every parameter lies: which stage holds it, and how each mesh axis divides it.

Nothing here knows a strategy. One rank of each coordinate on pp is built by `parallelize.place`, as
in training, but in the fake world and on the meta device: placements and local shapes are read off
the DTensors, and the optimizer's share off the tensors that it steps on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from dtensor_llm import pipeline
from dtensor_llm.config import Config
from dtensor_llm.mesh import build_mesh
from dtensor_llm.optimizer import Optimizer
from dtensor_llm.parallelize import place
from dtensor_llm.plan import local_slice, local_tensor, slice_at
from dtensor_llm.worlds import World, fake

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PlacedParameter:
    """One parameter, as one rank holds it.

    Args:
        name: in the whole model; a tied weight has the name of the embedding on both stages, and on
            one rank that holds it twice the second one that of the head.
        pp: the rank's coordinate.
        stages: which of the pipeline's have it: one, or both ends where they share a tied weight.
        shape: of the whole parameter.
        placements: {axis: placement}, of axes that its DTensor has; along the others the ranks hold
            the same elements.
        local_shape: of the part that this rank holds.
        offset: where in the whole that part begins.
        smallest, largest: local shapes of the ranks of the stage that hold least and most.
        dtype: of weight, gradient and moments.
        num_stepped: elements that this rank's optimizer steps on: those of the reduced gradient.
        is_copy: the second one on its rank, which follows the first without an optimizer.
    """

    name: str
    pp: int
    stages: tuple[int, ...]
    shape: Shape
    placements: Mapping[str, str]
    local_shape: Shape
    offset: Shape
    smallest: Shape
    largest: Shape
    dtype: torch.dtype
    num_stepped: int
    is_copy: bool = False

    @property
    def num_bytes(self) -> int:
        """Of the whole weight."""
        return num_elements(self.shape) * self.dtype.itemsize

    @property
    def num_local_bytes(self) -> int:
        """Of this rank's part of the weight."""
        return num_elements(self.local_shape) * self.dtype.itemsize

    @property
    def num_stepped_bytes(self) -> int:
        """Of the gradient that this rank steps on; each moment has as many."""
        return self.num_stepped * self.dtype.itemsize


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds at rest; bytes."""

    config: Config
    rank: int
    coordinates: Mapping[str, int]  # {axis: coordinate}
    parameters: Sequence[PlacedParameter]

    @property
    def pp(self) -> int:
        return self.coordinates["pp"]

    @property
    def stages(self) -> tuple[int, ...]:
        """Those of the pipeline that the rank has."""
        return pipeline.placement(self.config)[self.pp]

    @property
    def num_parameters(self) -> int:
        """Elements of the parameters of its stages, over all of their ranks, each once."""
        return sum(num_elements(p.shape) for p in self.parameters if not p.is_copy)

    @property
    def stage_bytes(self) -> int:
        """Of one copy of the weights of its stages."""
        return sum(p.num_bytes for p in self.parameters if not p.is_copy)

    @property
    def weight_bytes(self) -> int:
        """Of this rank's weights."""
        return sum(p.num_local_bytes for p in self.parameters)

    @property
    def gradient_bytes(self) -> int:
        """Of the reduced gradients that this rank's optimizer steps on."""
        return sum(p.num_stepped_bytes for p in self.parameters)

    @property
    def optimizer_bytes(self) -> int:
        """Of this rank's moments; without torch's counters of steps."""
        return self.config.train.num_moments * self.gradient_bytes


def num_elements(shape: Shape) -> int:
    """1 for the empty shape."""
    return torch.Size(shape).numel()


def plan_stages(config: Config) -> list[RankPlan]:
    """The first rank of every coordinate on pp: of those with its stages, none holds more."""
    mesh = config.parallel.mesh
    return [plan_rank(config, rank) for rank in range(0, mesh.num_ranks, mesh.num_ranks // mesh.pp)]


def plan_rank(config: Config, rank: int) -> RankPlan:
    """What rank `rank` of the mesh holds. Takes no memory for it, and no other rank.

    To be called outside any world.
    """
    return fake.run(config.parallel.mesh.num_ranks, rank, partial(read_placements, config))


def read_placements(config: Config, world: World) -> RankPlan:
    """Build this rank's part of the model, and look."""
    mesh = build_mesh(config.parallel.mesh, "cpu")  # FSDP takes no mesh of the meta device
    placed = place(config, mesh, world.device)
    coordinates = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True))
    pp = coordinates["pp"]
    homes: dict[str, tuple[int, ...]] = {}
    for stage, part in zip(pipeline.placement(config)[pp], placed.stages, strict=True):
        for name in part.weights():
            homes[name] = (*homes.get(name, ()), stage)
    copies = placed.model.copies()
    shards = Optimizer(placed.model, config.train, placed.buckets).shards
    parameters = [
        read_parameter(name, weight, pp, homes[name][: 1 if name in copies else None], shards[name])
        for name, weight in placed.model.weights().items()
    ]
    for name, weight in copies.items():
        copy = read_parameter("head.weight", weight, pp, homes[name][1:], torch.empty(0))
        parameters.append(replace(copy, is_copy=True))
    return RankPlan(config, world.rank, coordinates, parameters)


def read_parameter(
    name: str, weight: Tensor, pp: int, stages: tuple[int, ...], stepped: Tensor
) -> PlacedParameter:
    """What the tensors tell: `weight` is a DTensor, or a plain one that no axis divides.

    `stepped` is what the optimizer of this rank steps on.
    """
    shape: Shape = tuple(weight.shape)
    axes: dict[str, str] = {}
    smallest = largest = shape
    if isinstance(weight, DTensor):
        names = weight.device_mesh.mesh_dim_names or ()
        axes = dict(zip(names, map(spell, weight.placements), strict=True))
        smallest, largest = extremes(shape, weight.placements, weight.device_mesh.shape)
    return PlacedParameter(
        name=name,
        pp=pp,
        stages=stages,
        shape=shape,
        placements=axes,
        local_shape=tuple(local_tensor(weight).shape),
        offset=tuple(part.start for part in local_slice(weight)),
        smallest=smallest,
        largest=largest,
        dtype=weight.dtype,
        num_stepped=stepped.numel(),
    )


def spell(placement: Placement) -> str:
    """`Shard(0)`, also where an inner axis shards the same dim first, and torch says so."""
    dim = getattr(placement, "dim", None)
    return type(placement).__name__ if dim is None else f"Shard({dim})"


@cache
def extremes(
    shape: Shape, placements: tuple[Placement, ...], sizes: tuple[int, ...]
) -> tuple[Shape, Shape]:
    """The smallest and the largest local shape among all ranks of a mesh of `sizes`."""
    coordinates = product(
        *(
            range(1 if placement.is_replicate() else size)
            for placement, size in zip(placements, sizes, strict=True)
        )
    )
    shapes = [
        tuple(part.stop - part.start for part in slice_at(coordinate, shape, placements, sizes))
        for coordinate in coordinates
    ]
    return min(shapes, key=num_elements), max(shapes, key=num_elements)
