"""From what differs on each rank to one finding, the same on all, with a guess of the cause."""

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtensor_llm.parity.difference import over
from dtensor_llm.parity.finder.diagnosis import Evidence, Where, diagnose, diagnose_norm, name_ratio
from dtensor_llm.parity.finder.finding import Finding
from dtensor_llm.parity.finder.observe import INPUT, Observation
from dtensor_llm.parity.finder.search import TOLERANCE, Search, Spot, Suspect
from dtensor_llm.worlds import World

T = TypeVar("T")

NEARLY_WORST = 0.99  # of several values that differ alike, the first is named


def finding_of(search: Search) -> Finding | None:
    """What differs first on any rank; None if nothing does.

    Every rank calls it. Comm: gathers Python objects over all ranks, and the value that differs
    first over the mesh axes of a rank that has it.
    """
    world = search.trainer.world
    suspects = [suspect for some in gather(world, search.suspects()) for suspect in some]
    if not suspects:
        return None
    first = min(suspect.spot.order for suspect in suspects)
    firsts = [suspect for suspect in suspects if suspect.spot.order == first]
    largest = max(suspect.error for suspect in firsts)
    chosen = next(suspect for suspect in firsts if suspect.error >= NEARLY_WORST * largest)
    spot = chosen.spot
    alike = {s.spot.name for s in suspects if (s.spot.step, s.spot.phase, s.spot.what) == spot.kind}
    name, neighbours = surroundings(search.reference, spot)
    return Finding(
        step=spot.step,
        phase=spot.phase,
        name=name,
        at=chosen.held.removesuffix(INPUT),
        what=spot.what,
        microbatch=None if spot.microbatch < 0 else spot.microbatch,
        rank=chosen.rank,
        coordinates=chosen.coordinates,
        index=chosen.index,
        value=chosen.value,
        expected=chosen.expected,
        error=chosen.error,
        num_names=len(alike),
        neighbours=neighbours,
        diagnosis=chosen.problem or diagnosis_of(search, chosen),
        tolerance=TOLERANCE,
    )


def surroundings(reference: Observation, spot: Spot) -> tuple[str, tuple[str, ...]]:
    """(what to look into, what next to it is known to be right)."""
    if spot.phase == "forward":
        near = reference.producers.get(spot.name, ())
        return owner(spot.name), tuple(map(described, near))
    if spot.phase == "backward":
        near = reference.consumers(spot.name)
        name = module_around([owner(name) for name in near]) or spot.name.removesuffix(INPUT)
        return name, tuple(map(described, near))
    return spot.name, ()


def owner(name: str) -> str:
    """The module to look into when a value is wrong: of an input, the one around its module."""
    module = name.removesuffix(INPUT)
    around = module.rpartition(".")[0]
    return around if name.endswith(INPUT) and around not in ("", "blocks") else module


def module_around(names: Sequence[str]) -> str:
    """The one module, or the innermost one that holds them all; empty where that is the model."""
    parts = zip(*(name.split(".") for name in names), strict=False)
    name = ".".join(part[0] for part in takewhile(lambda part: len(set(part)) == 1, parts))
    return "" if name == "blocks" else name


def described(name: str) -> str:
    return f"input of {name.removesuffix(INPUT)}" if name.endswith(INPUT) else name


def diagnosis_of(search: Search, chosen: Suspect) -> str:
    """Made on the rank where the value differs, with the values of the ranks along its axes."""
    scalars = search.scalars(chosen.spot)
    peers = {} if scalars is not None else parts_of_peers(search, chosen)
    text = ""
    if search.trainer.world.rank == chosen.rank:
        if scalars is None:
            text = diagnose(evidence(search, chosen.spot, peers))
        else:
            text = guess_scalar(search, chosen.spot, *scalars[:2])
    return gather(search.trainer.world, text)[chosen.rank]


Peers = Mapping[str, Sequence[tuple[Where, Tensor]]]  # by axis: what its ranks hold, and where


def parts_of_peers(search: Search, chosen: Suspect) -> Peers:
    """On the ranks that share an axis with the one where the value differs; empty elsewhere."""
    spot, peers = chosen.spot, {}
    holds = spot.microbatch < 0 or spot.name in search.observed.modules
    for axis, mesh in search.trainer.parallel.axes.items():
        group = mesh.get_group()
        if chosen.rank in dist.get_process_group_ranks(group):
            part = search.part(spot) if holds else None
            own = (part.where, part.found.cpu()) if part is not None and part.where else None
            parts: list[tuple[Where, Tensor] | None] = [None] * mesh.size()
            dist.all_gather_object(parts, own, group=group)
            peers[axis] = [each for each in parts if each is not None]
    return peers


def evidence(search: Search, spot: Spot, peers: Peers) -> Evidence:
    """What the rank knows of the value and what is around it."""
    part = search.part(spot)
    assert part is not None and part.where is not None
    forward, reference = spot.phase == "forward", search.reference
    near = reference.producers.get(spot.name, ()) if forward else ()
    is_heads = spot.name.endswith((".query", ".key", ".value", ".attention.output.input"))
    earlier = search.run.tensors_at.get(search.step - 1, {}).get("gradient", {})
    return Evidence(
        found=part.found.cpu(),
        whole=part.whole,
        where=part.where,
        sizes=possible_factors(search, spot),
        dims=names_of_dims(part.whole.ndim, of_parameter=spot.microbatch < 0),
        head_size=search.trainer.config.model.head_size if is_heads else None,
        peers=peers,
        source=reference.values[near[0], 0] if len(near) == 1 else None,
        bias=reference.values.get((f"{spot.name}.bias", 0)) if forward else None,
        previous=earlier.get(spot.name) if spot.phase == "gradient" else None,
    )


def names_of_dims(num_dims: int, *, of_parameter: bool) -> tuple[str, ...]:
    """What each counts; activations are b, b t, b t d or b h t s."""
    if of_parameter:
        return ("row", "column") if num_dims == 2 else ("entry",) * num_dims
    if num_dims == 4:
        return ("sequence", "head", "token", "column")
    return ("sequence", "token", "entry")[:num_dims]


def possible_factors(search: Search, spot: Spot) -> dict[str, float]:
    """What a value could be multiplied or divided by, by mistake."""
    config = search.trainer.config
    mesh, dropout = config.parallel.mesh, config.model.dropout
    factors: dict[str, float] = {"tp": mesh.tp, "pp": mesh.pp, "dp": config.dp}
    factors |= {"tp_row": mesh.tp_row, "tp_col": mesh.tp_col}
    if mesh.dp_replicate > 1 and mesh.dp_shard > 1:
        factors |= {"dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard}
    factors["the number of microbatches"] = config.microbatches
    factors["(1 - dropout)"] = 1.0 - round(dropout * 65536) / 65536  # as masks are drawn
    norm, limit = search.run.gradient_norms[spot.step], config.train.clip_grad
    if spot.phase == "update" and 0.0 < limit < norm:
        factors["the factor of clipping"] = limit / (norm + 1e-6)
    return factors


def guess_scalar(search: Search, spot: Spot, value: float, expected: float) -> str:
    factors = possible_factors(search, spot)
    if spot.phase == "gradient norm":
        return diagnose_norm(value, expected, squares(search), factors)
    if spot.name == "learning rate":
        return "each rank is to take that of the schedule"
    ratio = value / expected if expected else math.nan
    names = name_ratio(ratio, factors)
    text = f"{ratio:.6g} times what is right: {names}" if names else ""
    return text if spot.phase == "update" else guess_loss(search, text)


def guess_loss(search: Search, factor: str) -> str:
    """The microbatches' sums are right: what they are divided by, or how they are added up."""
    right = search.reference.gradients["loss", 0].amax().item()
    for (name, microbatch), gradient in search.observed.seen.gradients.items():
        found = gradient.item() if name == "loss" else right
        if found and over(abs(found - right), abs(right)) > TOLERANCE:
            return (
                f"the sum over the tokens of microbatch {microbatch + 1} is right, and is divided "
                f"by {1 / found:.6g}, where {1 / right:.6g} labels count"
            )
    known = "each microbatch's loss is right: look into how they are added up"
    return f"{factor}; {known}" if factor else known


def squares(search: Search) -> dict[str, float]:
    """Of the reference's gradients: of groups that are easily miscounted, and of each."""
    gradients = search.run.tensors_at[search.step]["gradient"]
    each = {name: x.square().sum().item() for name, x in gradients.items()}
    own, first = search.trainer.optimizer.weights, search.trainer.model.first
    counted = {name for name in own if first or name != "token_embedding.weight"}
    groups = {
        "what every tp rank holds whole": [name for name in own if is_whole_over_tp(own[name])],
        "what other stages hold": [name for name in each if name not in counted],
    }
    return {**{name: sum(each[n] for n in names) for name, names in groups.items()}, **each}


def is_whole_over_tp(weight: Tensor) -> bool:
    axes = (weight.device_mesh.mesh_dim_names or ()) if isinstance(weight, DTensor) else ()
    own = [axis for axis in ("tp", "tp_row") if axis in axes]
    return any(weight.placements[axes.index(axis)].is_replicate() for axis in own)  # type: ignore[attr-defined] # a DTensor's


def gather(world: World, own: T) -> list[T]:
    """Every rank's, by rank."""
    gathered: list[T | None] = [None] * world.size
    if world.size == 1:
        return [own]
    dist.all_gather_object(gathered, own)
    return gathered  # type: ignore[return-value] # all have been filled
