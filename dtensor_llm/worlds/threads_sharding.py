"""One sharding propagation for all ranks of a threads world.

DTensor decides for every operation which placements its inputs need and its output gets. It keeps
the decisions per thread, since they name the rank's own DeviceMesh: 512 ranks would decide the
same thing 512 times, which costs more than the training step. Here the first rank decides, and the
others get a copy that names their own mesh.

A decision is a function of the operation, its static arguments and, for each tensor, the mesh's
shape, the placements and the global metadata: that is the key. The exceptions:
- Shapes among the arguments (of a view, say) are rewritten to the rank's local shape, which an
  uneven shard makes its own. They are computed again in every copy.
- A placement with a state of its own, the mask of a row-sharded embedding, is never shared.
"""

import itertools
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard

_STATELESS = frozenset({Shard, _StridedShard, Replicate, Partial, _NormPartial})

# Decisions outlive a world, without its meshes: a test suite makes many alike.
_MOST_DECISIONS = 20_000
_decisions: dict[object, OutputSharding] = {}
_mesh_keys: dict[object, int] = {}
_new_mesh_keys = itertools.count()


class _NotSharedError(Exception):
    """An argument has a placement with a state of its own."""


class SharedPropagation:
    """Stands in for ShardingPropagator.propagate_op_sharding_non_cached, for one world."""

    def __init__(self, propagator: ShardingPropagator) -> None:
        self._propagator = propagator
        self._decide = propagator.propagate_op_sharding_non_cached
        self._key_of_mesh: dict[DeviceMesh, int] = {}

    def __call__(self, schema: OpSchema) -> OutputSharding:
        meshes: list[DeviceMesh] = []
        try:
            key = self._neutral(schema._comparison_key, meshes)
        except _NotSharedError:
            return self._decide(schema)
        known = _decisions.get(key)
        if known is not None:
            return self._copy(known, meshes[0])
        decision = self._decide(schema)
        if meshes and self._can_share(schema, decision, meshes):
            if len(_decisions) >= _MOST_DECISIONS:
                _decisions.clear()
            _decisions[key] = _on_mesh(decision, None)
        return decision

    def _neutral(self, item: Any, meshes: list[DeviceMesh]) -> Any:
        """The item with every mesh replaced by what ranks have alike; collects the meshes."""
        if type(item) is DTensorSpec:
            if any(type(placement) not in _STATELESS for placement in item.placements):
                raise _NotSharedError
            meshes.append(item.mesh)
            return (
                self._mesh_key(item.mesh),
                item.placements,
                item.shard_order,
                item.use_strided_shard_as_shard_order,
                item.tensor_meta,
            )
        if type(item) is tuple:
            return tuple([self._neutral(part, meshes) for part in item])
        return type(item), item  # 2 and 2.0 are equal, but give other results

    def _mesh_key(self, mesh: DeviceMesh) -> int:
        key = self._key_of_mesh.get(mesh)
        if key is None:
            *alike, _thread = mesh._hash_key()
            key = _mesh_keys.setdefault(tuple(alike), next(_new_mesh_keys))
            self._key_of_mesh[mesh] = key
        return key

    def _can_share(
        self, schema: OpSchema, decision: OutputSharding, meshes: list[DeviceMesh]
    ) -> bool:
        specs = _specs(decision)
        return (
            schema.op not in self._propagator.op_to_scalar_shape_adjuster
            and all(mesh == meshes[0] for mesh in (*meshes, *(spec.mesh for spec in specs)))
            and all(type(place) in _STATELESS for spec in specs for place in spec.placements)
        )

    def _copy(self, known: OutputSharding, mesh: DeviceMesh) -> OutputSharding:
        decision = _on_mesh(known, mesh)
        schema = decision.redistribute_schema
        if (
            decision.use_val_from_redistribute_schema
            and schema.op in self._propagator.op_to_shape_and_stride_idx
        ):
            decision.redistribute_schema = self._propagator._adjust_shape_and_stride_args(
                decision.output_spec.tensor_meta, schema, decision.output_spec
            )
        return decision


def _specs(item: Any) -> list[DTensorSpec]:
    """All specs inside a decision or an argument."""
    if isinstance(item, DTensorSpec):
        return [item]
    if isinstance(item, OutputSharding):
        return _specs((item.output_spec, item.redistribute_schema))
    if isinstance(item, OpSchema):
        return _specs((item.args_schema, tuple(item.kwargs_schema.values())))
    if isinstance(item, (tuple, list)):
        return [spec for part in item for spec in _specs(part)]
    return []


def _on_mesh(item: Any, mesh: DeviceMesh | None) -> Any:
    """A copy of a decision or an argument, all its specs on the mesh."""
    if isinstance(item, DTensorSpec):
        spec = object.__new__(DTensorSpec)
        spec.__dict__.update(item.__dict__, mesh=mesh, _hash=None)
        return spec
    if isinstance(item, OutputSharding):
        return OutputSharding(
            _on_mesh(item.output_spec, mesh),
            _on_mesh(item.redistribute_schema, mesh),
            item.needs_redistribute,
            item.use_val_from_redistribute_schema,
        )
    if isinstance(item, OpSchema):
        schema = object.__new__(OpSchema)
        kwargs = {name: _on_mesh(value, mesh) for name, value in item.kwargs_schema.items()}
        schema.__dict__.update(
            item.__dict__, args_schema=_on_mesh(item.args_schema, mesh), kwargs_schema=kwargs
        )
        if mesh is not None:
            schema._recompute_comparison_key()
        return schema
    if isinstance(item, (tuple, list)):
        return type(item)([_on_mesh(part, mesh) for part in item])
    return item
