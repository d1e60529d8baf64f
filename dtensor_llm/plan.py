"""Applies a table {module name pattern: style}, strictly, and the styles every strategy shares.

A style says how one module's parameters are placed on a mesh axis, and turns the module into one
that computes on their local tensors. `torch.distributed.tensor.parallel.parallelize_module` applies
it; what we add is that a pattern without a match is an error and not a warning: a misspelt name
would leave a weight whole on every rank, and the run would go on, wrong.

Why local tensors and not DTensor operations all the way: the reader sees what a rank computes, the
input is gathered once for the three projections that share it, and no operation pays for dispatch.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.distributed.tensor.placement_types import Placement

from dtensor_llm.collectives import GatheredAgain, redistribute, unpack
from dtensor_llm.mesh import TP_COPIES

Plan = Sequence[tuple[str, ParallelStyle]]  # (module name pattern, style), applied in order
Placements = Placement | tuple[Placement, ...]  # on a mesh of one axis; on each axis of several


class PlanError(ValueError):
    """The plan names a module or a parameter that the model does not have."""


def matches(name: str, pattern: str) -> bool:
    """Whether the dotted `name` fits the `pattern`, in which `*` stands for one part."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def apply_plan(model: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    """Apply each style of `plan` to every module whose name matches, on `mesh`.

    Rows for the items of a container that has none, as the blocks of a pipeline stage that is the
    embedding alone, are passed over. Raises PlanError for any other pattern that matches nothing.
    """
    names = [name for name, _ in model.named_modules()]
    empty = [name for name, module in model.named_modules() if is_empty_container(module)]
    plan = [row for row in plan if not any(row[0].startswith(f"{name}.*") for name in empty)]
    lost = [pattern for pattern, _ in plan if not any(matches(name, pattern) for name in names)]
    if lost:
        raise PlanError(
            f"the plan names {', '.join(lost)}, but no module is called so; "
            f"the model has: {', '.join(name for name in names if name)}"
        )
    for pattern, style in plan:
        parallelize_module(model, mesh, {pattern: style}, src_data_rank=None)


def is_empty_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleDict | nn.ModuleList) and len(module) == 0


def distribute_parameters(
    module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placements]
) -> None:
    """Replace own parameters of `module` by DTensors; each rank keeps its part, nothing is sent.

    A parameter that the module has as None (a bias that is switched off) is passed over.
    Raises PlanError for a name the module does not have.
    """
    for name, placement in placements.items():
        if name not in module._parameters:
            raise PlanError(f"the plan places {name!r}, but {type(module).__name__} has no such")
        parameter = module._parameters[name]
        if parameter is not None:
            part = distribute_tensor(parameter, mesh, on_axes(placement), src_data_rank=None)
            setattr(module, name, nn.Parameter(part))


class _Local(torch.autograd.Function):
    """A weight, as a DTensor, to its local tensor; the local gradient to a DTensor placed alike.

    `DTensor.to_local` does the same in twice the time: it works out shape and strides anew and goes
    through autograd once more. Private are the two attributes and, here, the constructor: torch
    2.13 has no other way to a DTensor that is not recorded.
    """

    @staticmethod
    def forward(ctx: Any, weight: DTensor) -> Tensor:
        ctx.spec = weight._spec
        return weight._local_tensor.view_as(weight._local_tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        # A copy, because whoever computes with a DTensor may change what it is specified by.
        return DTensor(grad.contiguous(), copy(ctx.spec), requires_grad=False)


class ComputesOnLocalTensors:
    """Mixed in before a module's class: its forward sees its parameters' local tensors.

    `gradient_placements` says what the local gradients are parts of, by name and mesh axis: a
    replicated weight that meets different tokens on each rank has Partial gradients, to be summed:
    see `partial_gradients`.
    """

    gradient_placements: Mapping[str, Mapping[str, Placement]]
    _parameters: dict[str, Any]

    def local(self, name: str) -> Tensor:
        return _Local.apply(self._parameters[name])

    def forward(self, *args: Any) -> Any:
        whole = self._parameters
        self.__dict__["_parameters"] = {
            name: None if parameter is None else self.local(name)
            for name, parameter in whole.items()
        }
        try:
            return super().forward(*args)  # type: ignore[misc] # the module's class comes next
        finally:
            self.__dict__["_parameters"] = whole


@dataclass
class LocalModule(ParallelStyle):
    """Place the module's own parameters, and let it compute on their local tensors.

    `parameters` is one placement for all of them, or {name: placement}. `gradients` are the
    placements of the local gradients where they differ. `mesh` are the ranks of the plan's mesh as
    several axes, each with a placement of its own. `mixin` replaces ComputesOnLocalTensors
    where the forward needs more than that; `attributes` are set on the module for its use.
    """

    parameters: Placements | Mapping[str, Placements]
    gradients: Placements | Mapping[str, Placements] | None = None
    mixin: type[ComputesOnLocalTensors] = ComputesOnLocalTensors
    attributes: Mapping[str, Any] = field(default_factory=dict)
    mesh: DeviceMesh | None = None

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        names, mesh = list(module._parameters), self.mesh or device_mesh
        placements = by_name(self.parameters, names)
        distribute_parameters(module, mesh, placements)
        cls = type(module)
        module.__class__ = type(f"{self.mixin.__name__}{cls.__name__}", (self.mixin, cls), {})
        gradients = {**placements, **by_name(self.gradients or {}, names)}
        axes = mesh.mesh_dim_names or ()
        module.gradient_placements = {  # type: ignore[assignment] # the mixin's
            name: dict(zip(axes, on_axes(placed), strict=True))
            for name, placed in gradients.items()
        }
        for name, value in self.attributes.items():
            setattr(module, name, value)
        return module


def partial_gradients(model: nn.Module, axis: str = "tp") -> list[str]:
    """Names of the parameters whose local gradients are parts of a sum over the mesh axis.

    Their gradients' DTensors do not say so: they carry the parameter's placement, since of a
    Partial label `fully_shard` and `replicate` would make an all-reduce for each parameter and
    microbatch. Whoever applied the plan has to sum them, once a step.
    """
    return [
        f"{name}.{own}"
        for name, module in model.named_modules()
        if isinstance(module, ComputesOnLocalTensors)
        for own, placements in module.gradient_placements.items()
        if axis in placements and placements[axis].is_partial()
    ]


def by_name(
    placements: Placements | Mapping[str, Placements], names: Sequence[str]
) -> Mapping[str, Placements]:
    return placements if isinstance(placements, Mapping) else dict.fromkeys(names, placements)


def on_axes(placements: Placements) -> tuple[Placement, ...]:
    return placements if isinstance(placements, tuple) else (placements,)


@dataclass
class Input(ParallelStyle):
    """Redistribute the first argument of the module: see `collectives.redistribute`."""

    before: Placement
    after: Placement
    gradient: Placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x = redistribute(args[0], device_mesh, self.before, self.after, self.gradient)
            return (x, *args[1:])

        module.register_forward_pre_hook(hook)
        return module


@dataclass
class Output(ParallelStyle):
    """Redistribute what the module gives out: see `collectives.redistribute`."""

    before: Placement
    after: Placement
    gradient: Placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def hook(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
            return redistribute(output, device_mesh, self.before, self.after, self.gradient)

        module.register_forward_hook(hook)
        return module


@dataclass
class GatherAgain(ParallelStyle):
    """Gather what `source` of the module gives out, and not keep it: see `GatheredAgain`.

    Whoever saves a view of it inside the module's forward, as all linears do that share it, saves
    the shard in its place. The second gather begins when the module's backward does. `source` is a
    submodule's name, or empty for the module's own first argument; `before` is its placement.
    """

    before: Shard
    source: str = ""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        again: GatheredAgain | None = None

        def gather(shard: Tensor) -> Tensor:
            nonlocal again
            whole = redistribute(shard, device_mesh, self.before, Replicate(), Partial())
            again = GatheredAgain(shard, whole, device_mesh.get_group(), self.before.dim)
            return whole

        def pack(x: Tensor) -> Any:
            return x if again is None else again.pack(x)

        def forward(x: Tensor, *args: Any) -> Tensor:
            nonlocal again
            with saved_tensors_hooks(pack, unpack):
                given = x if self.source else gather(x)
                output = type(module).forward(module, given, *args)
            if output.requires_grad and again is not None:
                output.register_hook(again.start)
            again = None
            return output

        if self.source:
            module.get_submodule(self.source).register_forward_hook(
                lambda _, __, output: gather(output)
            )
        module.forward = forward
        return module


@dataclass
class Call(ParallelStyle):
    """Tell the module which part it holds: calls its method with the axis' coordinate and size."""

    method: str
    arguments: tuple[Any, ...] = ()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        getattr(module, self.method)(
            *self.arguments, device_mesh.get_local_rank(), device_mesh.size()
        )
        return module


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give every parameter on the meta device memory, uninitialized; shared ones stay shared."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    made[parameter] = nn.Parameter(empty_like(parameter, device))
                module._parameters[name] = made[parameter]


def empty_like(x: Tensor, device: torch.device) -> Tensor:
    # Of the shape: from meta to another device torch's own empty_like takes a Python detour.
    local = torch.empty(local_tensor(x).shape, dtype=x.dtype, device=device)
    if not isinstance(x, DTensor):
        return local
    return DTensor.from_local(
        local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )


def local_tensor(x: Tensor) -> Tensor:
    """The rank's own part of a DTensor, sharing its memory; a plain tensor is its own part."""
    return x.to_local() if isinstance(x, DTensor) else x


@dataclass(frozen=True)
class Part:
    """What one rank has of a tensor.

    Args:
        where: its place in the whole tensor.
        shape: of the whole tensor.
        axes: the mesh axes along which other ranks have other elements; along all others they have
            copies.
        tp_copies: how many neighbours on tp hold this part, where others on tp have other parts.
    """

    where: tuple[slice, ...]
    shape: tuple[int, ...]
    axes: frozenset[str] = frozenset()
    tp_copies: int | None = None

    @property
    def numel(self) -> int:
        return torch.Size(s.stop - s.start for s in self.where).numel()

    def rows(self, start: int, length: int, axis: str) -> "Part":
        """Rows of this part, of which each rank along `axis` has others."""
        first = self.where[0].start + start
        where = (slice(first, first + length), *self.where[1:])
        return replace(self, where=where, axes=self.axes | {axis})


def part_of(x: Tensor) -> Part:
    """What the rank's local tensor of `x` is, by its placements."""
    if not isinstance(x, DTensor):
        return Part(local_slice(x), tuple(x.shape))
    names = x.device_mesh.mesh_dim_names or ()
    pairs = zip(names, x.placements, strict=True)
    axes = frozenset(axis for axis, placement in pairs if not placement.is_replicate())
    copies = x.device_mesh.size(names.index(TP_COPIES)) if TP_COPIES in names else None
    return Part(local_slice(x), tuple(x.shape), axes, copies)


def local_slice(x: Tensor) -> tuple[slice, ...]:
    """Where the rank's own part lies in the whole tensor."""
    if not isinstance(x, DTensor):
        return tuple(slice(0, size) for size in x.shape)
    coordinate = x.device_mesh.get_coordinate() or ()
    return slice_at(coordinate, tuple(x.shape), x.placements, x.device_mesh.shape)


def slice_at(
    coordinate: Sequence[int],
    shape: Sequence[int],
    placements: Sequence[Placement],
    sizes: Sequence[int],
) -> tuple[slice, ...]:
    """Which part of a tensor of `shape` the rank at `coordinate` of a mesh of `sizes` has.

    Innermost axis first: tp divides a weight, then `fully_shard` divides what tp has left (torch
    2.13's compute_local_shape_and_global_offset gets that wrong on the last ranks where neither
    division is even, as for 257 rows on tp 2 x dp 4).
    """
    parts = [(0, size) for size in shape]
    for index, placement, size in reversed(list(zip(coordinate, placements, sizes, strict=True))):
        if not placement.is_replicate():
            dim = placement.dim  # type: ignore[attr-defined] # Shard's and _StridedShard's
            start, length = parts[dim]
            own = chunk(length, index, size)
            parts[dim] = (start + own[0], own[1])
    return tuple(slice(start, start + length) for start, length in parts)


def own_part(size: int, mesh: DeviceMesh) -> tuple[int, int]:
    """(start, length) of this rank's part of a dim of `size` that is sharded over `mesh`."""
    return chunk(size, mesh.get_local_rank(), mesh.size())


def chunk(size: int, index: int, count: int) -> tuple[int, int]:
    """(start, length) of one of `count` parts, cut as by `torch.chunk`: the last ones smaller."""
    largest = -(-size // count)
    start = min(index * largest, size)
    return start, min(largest, size - start)
