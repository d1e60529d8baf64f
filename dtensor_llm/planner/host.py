"""What offload holds and copies, in closed form: bytes by place and role, and bytes of a step.

| of what a rank holds | none   | optimizer       | weights |
|----------------------|--------|-----------------|---------|
| weights              | device | device and host | host    |
| gradients            | device | device and host | host    |
| optimizer state      | device | host            | host    |

Copies of a step:

| option    | out                                     | in                                |
|-----------|-----------------------------------------|-----------------------------------|
| optimizer | gradients, once                         | weights, once                     |
| weights   | gradients, once for each reduce-scatter | weights, once for each all-gather |
"""

import math
from collections.abc import Mapping

from dtensor_llm.config import Config
from dtensor_llm.planner.parameters import Group, Place, groups, owned_shape
from dtensor_llm.planner.payloads import padded_bytes
from dtensor_llm.planner.pipeline_costs import gathered_groups

PLACES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "none": {"weights": ("device",), "gradients": ("device",), "optimizer": ("device",)},
    "optimizer": {
        "weights": ("device", "host"),
        "gradients": ("device", "host"),
        "optimizer": ("host",),
    },
    "weights": {"weights": ("host",), "gradients": ("host",), "optimizer": ("host",)},
}
"""The first table: {option: {role: where it lies}}."""


def held(option: str, roles: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """What a rank holds at the end of a step, {"device" or "host": {role: bytes}}.

    Args:
        option: none, optimizer or weights.
        roles: bytes that the rank holds without offload, of what it steps on: `weights`,
            `gradients` and `optimizer` (state).
    """
    places = PLACES[option]
    return {
        place: {role: size for role, size in roles.items() if place in places[role]}
        for place in ("device", "host")
    }


def copies(config: Config, place: Place) -> dict[str, int]:
    """Bytes that the rank at `place` copies `out` of its device and `in` during one step."""
    out = into = 0
    if config.parallel.offload == "optimizer":
        out = into = sum(own_bytes(group, config, place) for group in groups(config, place))
    elif config.parallel.offload == "weights":
        for gathered in gathered_groups(config, place):
            padded = padded_bytes(gathered.group, config, place) // config.parallel.mesh.dp_shard
            out += own_bytes(gathered.group, config, place, copies=True) * reductions(config)
            into += padded * gathered.times
    return {"out": out, "in": into}


def own_bytes(group: Group, config: Config, place: Place, *, copies: bool = False) -> int:
    """What the rank reduces of a group; with `copies`, of second copies, too."""
    own = [p for p in group.values() if copies or not p.is_copy]
    elements = sum(math.prod(owned_shape(parameter, config, place)) for parameter in own)
    return elements * config.train.element_size


def reductions(config: Config) -> int:
    """Reduce-scatters of each gradient at ZeRO stage 3, also of a rank that is alone."""
    deferred = config.parallel.defer_reduce or config.parallel.mesh.pp > 1
    return 1 if deferred else config.microbatches
