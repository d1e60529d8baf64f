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

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard

_STATELESS = {Shard, _StridedShard, Replicate, Partial, _NormPartial}
_MOST_DECISIONS = 20_000


class SharedPropagation:
    """Stands in for ShardingPropagator.propagate_op_sharding_non_cached."""

    def __init__(self, propagator: ShardingPropagator) -> None:
        self._propagator = propagator
        self._decide = propagator.propagate_op_sharding_non_cached
        self._known: dict[object, OutputSharding] = {}
        self._mesh_keys: dict[DeviceMesh, object] = {}

    def __call__(self, schema: OpSchema) -> OutputSharding:
        meshes: list[DeviceMesh] = []
        try:
            key = self._neutral(schema._comparison_key, meshes)
        except _NotSharedError:
            return self._decide(schema)
        if not meshes:
            return self._decide(schema)
        known = self._known.get(key)
        if known is None:
            decision = self._decide(schema)
            if self._can_share(schema, decision, meshes):
                self._known[key] = decision
            return decision
        return self._copy(known, meshes[0])

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
        return item

    def _mesh_key(self, mesh: DeviceMesh) -> object:
        if mesh not in self._mesh_keys:
            rank_map, layout, device, names, _ = mesh._hash_key()
            self._mesh_keys[mesh] = hash((rank_map, layout, device, names))
        return self._mesh_keys[mesh]

    def _can_share(
        self, schema: OpSchema, decision: OutputSharding, meshes: list[DeviceMesh]
    ) -> bool:
        specs = _specs(decision.output_spec)
        if decision.redistribute_schema is not None:
            specs += _specs(decision.redistribute_schema.args_schema)
            specs += _specs(tuple(decision.redistribute_schema.kwargs_schema.values()))
        return schema.op not in self._propagator.op_to_scalar_shape_adjuster and all(
            mesh == meshes[0] for mesh in (*meshes, *(spec.mesh for spec in specs))
        ) and all(type(p) in _STATELESS for spec in specs for p in spec.placements)

    def _copy(self, known: OutputSharding, mesh: DeviceMesh) -> OutputSharding:
        output, schema = _on_mesh(known.output_spec, mesh), known.redistribute_schema
        if schema is not None:
            schema = OpSchema(
                schema.op,
                _on_mesh(schema.args_schema, mesh),
                {name: _on_mesh(value, mesh) for name, value in schema.kwargs_schema.items()},
                schema.schema_info,
            )
            if (
                known.use_val_from_redistribute_schema
                and schema.op in self._propagator.op_to_shape_and_stride_idx
            ):
                schema = self._propagator._adjust_shape_and_stride_args(
                    output.tensor_meta, schema, output
                )
        return OutputSharding(
            output, schema, known.needs_redistribute, known.use_val_from_redistribute_schema
        )


class _NotSharedError(Exception):
    """An argument has a placement with a state of its own."""


def _specs(item: Any) -> list[DTensorSpec]:
    if isinstance(item, DTensorSpec):
        return [item]
    if isinstance(item, (tuple, list)):
        return [spec for part in item for spec in _specs(part)]
    return []


def _on_mesh(item: Any, mesh: DeviceMesh) -> Any:
    """The item with every DTensorSpec copied onto a mesh."""
    if isinstance(item, DTensorSpec):
        spec = object.__new__(DTensorSpec)
        spec.__dict__.update(item.__dict__, mesh=mesh, _hash=None)
        return spec
    if isinstance(item, (tuple, list)):
        return type(item)([_on_mesh(part, mesh) for part in item])
    return item
