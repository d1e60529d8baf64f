"""The plan of `placements` as text: parameters, equal ones of all layers in a line, and totals."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from dtensor_llm import pipeline
from dtensor_llm.config import Config
from dtensor_llm.mesh import MESH_AXES
from dtensor_llm.planner.placements import PlacedParameter, RankPlan, Shape
from dtensor_llm.worlds import ranges


@dataclass(frozen=True)
class Line:
    """Parameters that differ in their layer alone."""

    pattern: str  # their name, with * for the layer where there are several
    names: Sequence[str]
    stages: Sequence[int]
    ranks: Sequence[int]  # their coordinates on pp
    example: PlacedParameter


def group(parameters: Iterable[PlacedParameter]) -> list[Line]:
    """A line for all parameters that are placed alike and named alike but for the layer."""
    alike: dict[object, list[PlacedParameter]] = {}
    for p in parameters:
        axes = tuple(p.placements.items())
        key = (
            pattern(p.name),
            p.shape,
            axes,
            p.local_shape,
            p.offset,
            p.smallest,
            p.largest,
            p.dtype,
        )
        alike.setdefault(key, []).append(p)
    return [line(found) for found in alike.values()]


def one_by_one(parameters: Iterable[PlacedParameter]) -> list[Line]:
    """A line for each parameter on each stage that holds it."""
    return [line([p]) for p in parameters]


def line(found: Sequence[PlacedParameter]) -> Line:
    names = list(dict.fromkeys(p.name for p in found))
    name = names[0] if len(names) == 1 else pattern(names[0])
    stages = sorted({stage for p in found for stage in p.stages})
    return Line(name, names, stages, sorted({p.pp for p in found}), found[0])


def pattern(name: str) -> str:
    """`blocks.7.mlp.up.weight` is one of `blocks.*.mlp.up.weight`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def parameter_table(lines: Sequence[Line], config: Config, *, of_rank: bool = False) -> str:
    """A row for each line: of one parameter, shapes, placement on each axis, bytes.

    Local are those of the first rank of each stage, and of the ranks that have least where some
    have less; or, `of_rank`, the part of the one rank that the plan is of.
    """
    axes = axes_shown(config, lines)
    rows = []
    for one in lines:
        p = one.example
        row = {"parameter": one.pattern, "x": str(len(one.names)), "stage": ranges(one.stages)}
        if several_stages(config):
            row["pp"] = ranges(one.ranks)
        row |= {"global shape": spell_shape(p.shape)}
        row |= {axis: placement_on(axis, p.placements) for axis in axes}
        row |= {"local shape": spell_shape(p.local_shape)}
        if of_rank:
            row["from"] = ", ".join(map(str, p.offset))
        row["least"] = "" if p.smallest == p.largest else spell_shape(p.smallest)
        row["dtype"] = str(p.dtype).removeprefix("torch.")
        row |= {"bytes": f"{p.num_bytes:,}", "local bytes": f"{p.num_local_bytes:,}"}
        rows.append(row)
    uneven = any(row["least"] for row in rows)
    rows = [{k: v for k, v in row.items() if k != "least" or uneven} for row in rows]
    numbers = {"x", "bytes", "local bytes"}
    align = ["right" if key in numbers else "left" for key in rows[0]]
    return tabulate(rows, headers="keys", disable_numparse=True, colalign=align)


def several_stages(config: Config) -> bool:
    """Whether a rank of pp has more stages than one."""
    return pipeline.num_stages(config) > config.parallel.mesh.pp


def axes_shown(config: Config, lines: Sequence[Line]) -> list[str]:
    """The axes of more than one rank but pp, and whatever else a parameter is divided by."""
    sizes = {axis: getattr(config.parallel.mesh, axis) for axis in MESH_AXES if axis != "pp"}
    own = [axis for one in lines for axis in one.example.placements if axis not in sizes]
    divided = [a for a in own if any(is_divided(a, one.example.placements) for one in lines)]
    return [axis for axis, size in sizes.items() if size > 1] + list(dict.fromkeys(divided))


def is_divided(axis: str, placements: Mapping[str, str]) -> bool:
    return placement_on(axis, placements) != "Replicate"


def placement_on(axis: str, placements: Mapping[str, str]) -> str:
    """Along an axis that is not one of the DTensor's, all ranks hold the same elements."""
    return placements.get(axis, "Replicate")


def total_table(plans: Sequence[RankPlan]) -> str:
    """A row for each plan: parameters and bytes of the whole stage, and bytes of the rank."""
    rows = [
        {"stage": ranges(plan.stages)}
        | ({"pp": str(plan.pp)} if several_stages(plan.config) else {})
        | {
            "layers": layer_numbers(plan),
            "parameters": f"{plan.num_parameters:,}",
            "their bytes": f"{plan.stage_bytes:,}",
            "rank": str(plan.rank),
            "its weights": f"{plan.weight_bytes:,}",
            "gradients": f"{plan.gradient_bytes:,}",
            "optimizer": f"{plan.optimizer_bytes:,}",
            "together": f"{plan.weight_bytes + plan.gradient_bytes + plan.optimizer_bytes:,}",
        }
        for plan in plans
    ]
    align = ["right"] * len(rows[0])
    return tabulate(rows, headers="keys", disable_numparse=True, colalign=align)


def layer_numbers(plan: RankPlan) -> str:
    """Those of the blocks: `0-23`."""
    parts = [p.name.split(".") for p in plan.parameters]
    return ranges(sorted({int(part[1]) for part in parts if part[0] == "blocks"}))


def spell_shape(shape: Shape) -> str:
    """`50257 x 12288`."""
    return " x ".join(map(str, shape))
