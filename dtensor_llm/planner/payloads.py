"""What closed forms of communication are written in: payloads, and operations over named axes."""

import math
from collections.abc import Iterable

from dtensor_llm.config import Config
from dtensor_llm.mesh import GRID_AXES, MESH_AXES
from dtensor_llm.planner.parameters import Group, Parameter, Place, padded_numel, tp_shape
from dtensor_llm.planner.traffic import Traffic, axis_name, traffic

ALL_AXES = MESH_AXES + GRID_AXES


def over(config: Config, operation: str, axes: tuple[str, ...], payload: int) -> list[Traffic]:
    """One operation over the named axes together; none where they have one rank."""
    sizes = {axis: getattr(config.parallel.mesh, axis) for axis in ALL_AXES}
    num_ranks = math.prod(sizes[axis] for axis in axes)
    if num_ranks == 1:
        return []
    return [traffic(operation, axis_name(axes, sizes), num_ranks, payload)]


def times(count: int, parts: Iterable[Traffic]) -> list[Traffic]:
    return [part.times(count) for part in parts if count > 0]


def activation(config: Config) -> int:
    """Bytes of b t d, the activations of a microbatch between two blocks; on a grid b t d/q."""
    width = config.model.width // config.parallel.mesh.tp_col
    return num_tokens(config) * width * config.train.element_size


def num_tokens(config: Config) -> int:
    """Tokens of a rank's microbatch."""
    return config.micro_batch_size * config.model.seq_len


def shards_tokens(config: Config) -> bool:
    """Whether activations between the split multiplications are sharded by tokens over tp."""
    return config.parallel.sequence_parallel and config.parallel.mesh.tp > 1


def bytes_of(parameters: Iterable[Parameter], config: Config, place: Place) -> int:
    elements = sum(math.prod(tp_shape(p, config, place)) for p in parameters)
    return elements * config.train.element_size


def padded_bytes(group: Group, config: Config, place: Place) -> int:
    elements = sum(padded_numel(parameter, config, place) for parameter in group.values())
    return elements * config.train.element_size
