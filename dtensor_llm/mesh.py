"""From `--mesh 8x4x16` to axis sizes to a DeviceMesh: the only caller of init_device_mesh.

An axis is one kind of parallelism. From outermost to innermost they are pp, dp_replicate, dp_shard,
cp, tp, so that tp peers, which talk most, have neighbouring ranks on one node. Axes of size 1 stay.
`tp=RxC` asks for tensor parallelism in two dimensions: its axes tp_row and tp_col come after tp,
and are there only then.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING

from dtensor_llm.config import ConfigError, MeshSizes
from dtensor_llm.settings import join_or

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
TP_HEADS, TP_COPIES = "tp_heads", "tp_copies"  # tp as two axes: see `split_tp`
GRID_AXES = ("tp_row", "tp_col")
NAMED_SIZES = ("tp", "pp", "dp", "dp_replicate", "dp_shard", "cp", "ep")


class MeshError(ConfigError):
    """A mesh that cannot be read or does not fit the ranks."""

    def __init__(self, text: str, problem: str) -> None:
        super().__init__([f"--mesh {text or 'without a value'}: {problem}"])


def parse_mesh(text: str, num_ranks: int | None) -> MeshSizes:
    """Read `TPxPPxDP`, or `axis=size` pairs in any order with axes left out being 1.

    Args:
        text: for example `8x4x16`, `2x1x-1`, `tp=2,pp=2,dp=-1` or `tp=2x2,dp=2`; `dp` alone means
            dp_shard.
        num_ranks: what a size of -1 fills; None where that is not known.

    Raises:
        MeshError: the text is neither form, or -1 has no whole answer.
    """
    asked = _named_sizes(text) if "=" in text else _positional_sizes(text)
    for axis, size in asked.items():
        if size < 1 and size != -1:
            or_fill = "" if axis in GRID_AXES else ", or -1 to fill the ranks"
            raise MeshError(text, f"{axis}={size} must be at least 1{or_fill}")
    open_axes = [axis for axis, size in asked.items() if size == -1]
    if len(open_axes) > 1:
        raise MeshError(text, f"only one size can be -1, not both {' and '.join(open_axes)}")
    if open_axes:
        asked[open_axes[0]] = _fill(text, open_axes[0], asked, num_ranks)
    return _sizes(asked)


def fitting_meshes(num_ranks: int, like: MeshSizes) -> list[MeshSizes]:
    """All meshes of `num_ranks` ranks with the cp, dp_replicate and grid of `like`, nearest first.

    Near means few doublings and halvings of tp, pp and dp_shard; among equals, dp takes the change.
    """
    grid = like.tp_row * like.tp_col
    rest, left = divmod(num_ranks, like.cp * like.dp_replicate * grid)
    if left:
        plain = dataclasses.replace(like, cp=1, dp_replicate=1, tp_row=1, tp_col=1)
        return fitting_meshes(num_ranks, plain)

    def distance(sizes: MeshSizes) -> tuple[float, int, int]:
        pairs = ((sizes.tp, like.tp), (sizes.pp, like.pp), (sizes.dp_shard, like.dp_shard))
        doublings = sum(abs(math.log2(ours / theirs)) for ours, theirs in pairs)
        return round(doublings, 9), -sizes.dp_shard, sizes.tp

    meshes = [
        dataclasses.replace(like, tp=tp, pp=pp, dp_shard=rest // (tp * pp))
        for tp in (divisors(rest) if grid == 1 else [1])
        for pp in divisors(rest // tp)
    ]
    return sorted(meshes, key=distance)


def divisors(number: int) -> list[int]:
    """The divisors of a positive number in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    large = [number // n for n in reversed(small) if n * n != number]
    return small + large


def build_mesh(sizes: MeshSizes, device_type: str) -> DeviceMesh:
    """The DeviceMesh over all ranks of the default process group: MESH_AXES, then GRID_AXES if any.

    Raises:
        MeshError: the process group has another number of ranks; torch would leave some idle.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if sizes.num_ranks != dist.get_world_size():
        raise MeshError(
            str(sizes), f"{sizes.num_ranks} ranks, but the world has {dist.get_world_size()}"
        )
    axes = MESH_AXES + GRID_AXES * (sizes.tp_row * sizes.tp_col > 1)
    shape = tuple(getattr(sizes, axis) for axis in axes)
    return init_device_mesh(device_type, shape, mesh_dim_names=axes)


def _positional_sizes(text: str) -> dict[str, int]:
    if not re.fullmatch(r"-?\d{1,18}(x-?\d{1,18}){2}", text):
        raise MeshError(
            text,
            "not TPxPPxDP (tensor x pipeline x data), for example 2x2x2, nor named sizes, for "
            "example tp=2,pp=2,dp=2",
        )
    return dict(zip(("tp", "pp", "dp"), map(int, text.split("x")), strict=True))


def split_tp(mesh: DeviceMesh, parts: int) -> DeviceMesh:
    """The tp axis as two, tp_heads x tp_copies: `parts` parts of a weight, neighbours hold copies.

    Called on every rank. Comm: the making of process groups.
    """
    # Private: torch 2.13 has no public way to make two axes of one.
    return mesh._unflatten("tp", (parts, mesh.size() // parts), (TP_HEADS, TP_COPIES))


def _named_sizes(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in NAMED_SIZES:
            raise MeshError(text, f"no axis is called {axis!r}: there are {', '.join(NAMED_SIZES)}")
        if axis in sizes or (axis == "tp" and "tp_row" in sizes):
            raise MeshError(text, f"{axis} is given twice")
        if axis == "tp" and (grid := re.fullmatch(r"(\d{1,18})x(\d{1,18})", size)):
            sizes |= zip(GRID_AXES, map(int, grid.groups()), strict=True)
            continue
        if not re.fullmatch(r"-?\d{1,18}", size):
            form = "not a whole number"
            if axis == "tp":
                form = "neither a whole number nor two of at least 1, for example 2x2"
            raise MeshError(text, f"{axis}={size} is {form}")
        sizes[axis] = int(size)
    if "dp" in sizes and sizes.keys() & {"dp_replicate", "dp_shard"}:
        raise MeshError(text, "dp is dp_replicate x dp_shard: give dp, or those two")
    return sizes


def _fill(text: str, axis: str, asked: dict[str, int], num_ranks: int | None) -> int:
    """The size that -1 stands for."""
    if num_ranks is None:
        raise MeshError(text, f"{axis}=-1 fills the ranks, and their number is not known here")
    if axis == "ep":
        raise MeshError(text, "ep reuses ranks of dp_shard x cp and cannot fill the rest: give it")
    others = {name: size for name, size in asked.items() if name not in (axis, "ep")}
    product = math.prod(others.values())
    if num_ranks % product == 0:
        return num_ranks // product
    given = " x ".join(f"{name}={size}" for name, size in others.items())
    problem = f"{axis}=-1 fills the ranks, but {given} = {product} does not divide {num_ranks}"
    if num_ranks == 1:
        raise MeshError(text, f"{problem}; with one process started, give every size")
    fitting = fitting_meshes(num_ranks, _sizes(asked | {axis: max(1, num_ranks // product)}))[:3]
    raise MeshError(text, f"{problem}; {join_or(fitting)} would fit")


def _sizes(asked: dict[str, int]) -> MeshSizes:
    return MeshSizes(**{"dp_shard" if axis == "dp" else axis: asked[axis] for axis in asked})
