"""The text of a mesh, the meshes that fit, and the DeviceMesh itself."""

import pytest

from dtensor_llm.config import MeshSizes
from dtensor_llm.mesh import MeshError, build_mesh, fitting_meshes, parse_mesh
from dtensor_llm.worlds import World, WorldError, threads


@pytest.mark.parametrize(
    ("text", "num_ranks", "sizes"),
    [
        ("8x4x16", None, MeshSizes(tp=8, pp=4, dp_shard=16)),
        ("1x1x1", None, MeshSizes()),
        ("2x1x-1", 8, MeshSizes(tp=2, dp_shard=4)),
        ("-1x2x2", 8, MeshSizes(tp=2, pp=2, dp_shard=2)),
        ("2x-1x2", 4, MeshSizes(tp=2, dp_shard=2)),
        ("tp=2", None, MeshSizes(tp=2)),
        ("dp=-1,pp=2, tp=2", 16, MeshSizes(tp=2, pp=2, dp_shard=4)),
        ("dp_replicate=4,dp_shard=2,cp=2", None, MeshSizes(dp_replicate=4, dp_shard=2, cp=2)),
        ("dp_replicate=-1,dp_shard=2", 8, MeshSizes(dp_replicate=4, dp_shard=2)),
        ("dp=8,ep=4", None, MeshSizes(dp_shard=8, ep=4)),
        ("dp=-1,ep=2", 8, MeshSizes(dp_shard=8, ep=2)),
        ("tp=2x2", None, MeshSizes(tp_row=2, tp_col=2)),
        ("tp=1x1,dp=2", None, MeshSizes(dp_shard=2)),
        ("pp=2,tp=3x3,dp=-1", 36, MeshSizes(pp=2, dp_shard=2, tp_row=3, tp_col=3)),
    ],
)
def test_text_gives_sizes(text: str, num_ranks: int | None, sizes: MeshSizes) -> None:
    assert parse_mesh(text, num_ranks) == sizes
    assert parse_mesh(str(sizes), None) == sizes


NEITHER_FORM = (
    "not TPxPPxDP (tensor x pipeline x data), for example 2x2x2, nor named sizes, for example "
    "tp=2,pp=2,dp=2"
)
NO_TP = "neither a whole number nor two of at least 1, for example 2x2"


@pytest.mark.parametrize(
    ("text", "num_ranks", "problem"),
    [
        ("", None, f"--mesh without a value: {NEITHER_FORM}"),
        ("8", None, f"--mesh 8: {NEITHER_FORM}"),
        ("2x2", None, f"--mesh 2x2: {NEITHER_FORM}"),
        ("2x2x2x2", None, f"--mesh 2x2x2x2: {NEITHER_FORM}"),
        ("2 x 2 x 2", None, f"--mesh 2 x 2 x 2: {NEITHER_FORM}"),
        ("2x2.0x2", None, f"--mesh 2x2.0x2: {NEITHER_FORM}"),
        ("1x1x" + "9" * 19, None, f"--mesh 1x1x{'9' * 19}: {NEITHER_FORM}"),
        ("2x0x2", None, "--mesh 2x0x2: pp=0 must be at least 1, or -1 to fill the ranks"),
        ("2x2x-2", None, "--mesh 2x2x-2: dp=-2 must be at least 1, or -1 to fill the ranks"),
        ("-1x1x-1", 8, "--mesh -1x1x-1: only one size can be -1, not both tp and dp"),
        (
            "1x1x-1",
            None,
            "--mesh 1x1x-1: dp=-1 fills the ranks, and their number is not known here",
        ),
        (
            "3x1x-1",
            8,
            "--mesh 3x1x-1: dp=-1 fills the ranks, but tp=3 x pp=1 = 3 does not divide 8; "
            "4x1x2, 2x1x4 or 2x2x2 would fit",
        ),
        (
            "2x1x-1",
            1,
            "--mesh 2x1x-1: dp=-1 fills the ranks, but tp=2 x pp=1 = 2 does not divide 1; with one "
            "process started, give every size",
        ),
        (
            "tp=2,xp=2",
            None,
            "--mesh tp=2,xp=2: no axis is called 'xp': there are tp, pp, dp, dp_replicate, "
            "dp_shard, cp, ep",
        ),
        ("tp=2,tp=2", None, "--mesh tp=2,tp=2: tp is given twice"),
        (
            "dp=2,dp_shard=2",
            None,
            "--mesh dp=2,dp_shard=2: dp is dp_replicate x dp_shard: give dp, or those two",
        ),
        ("tp=two", None, f"--mesh tp=two: tp=two is {NO_TP}"),
        ("tp=", None, f"--mesh tp=: tp= is {NO_TP}"),
        ("dp=two", None, "--mesh dp=two: dp=two is not a whole number"),
        ("tp=2x2,tp=2", None, "--mesh tp=2x2,tp=2: tp is given twice"),
        ("tp=2,tp=2x2", None, "--mesh tp=2,tp=2x2: tp is given twice"),
        ("tp=2x-1", None, f"--mesh tp=2x-1: tp=2x-1 is {NO_TP}"),
        ("tp=-1x2", 8, f"--mesh tp=-1x2: tp=-1x2 is {NO_TP}"),
        ("tp=2x0", None, "--mesh tp=2x0: tp_col=0 must be at least 1"),
        (
            "ep=-1",
            8,
            "--mesh ep=-1: ep reuses ranks of dp_shard x cp and cannot fill the rest: give it",
        ),
    ],
)
def test_bad_text_is_explained(text: str, num_ranks: int | None, problem: str) -> None:
    with pytest.raises(MeshError) as raised:
        parse_mesh(text, num_ranks)
    assert raised.value.problems == [problem]


@pytest.mark.parametrize(
    ("num_ranks", "like", "nearest"),
    [
        (6, MeshSizes(tp=2, pp=2, dp_shard=2), ["1x2x3", "2x1x3"]),
        (4, MeshSizes(tp=2, pp=2, dp_shard=2), ["1x2x2", "2x1x2"]),
        (16, MeshSizes(tp=2, pp=2, dp_shard=2), ["2x2x4", "2x4x2"]),
        (7, MeshSizes(tp=2, pp=2, dp_shard=2), ["1x1x7", "1x7x1"]),
        (8, MeshSizes(cp=2, dp_shard=2), ["dp_shard=4,cp=2", "pp=2,dp_shard=2,cp=2"]),
        (3, MeshSizes(cp=2), ["1x1x3", "1x3x1"]),
        (16, MeshSizes(tp_row=2, tp_col=2), ["tp=2x2,dp_shard=4", "tp=2x2,pp=2,dp_shard=2"]),
        (6, MeshSizes(tp_row=2, tp_col=2), ["1x1x6", "1x2x3"]),
    ],
)
def test_fitting_meshes_come_nearest_first(
    num_ranks: int, like: MeshSizes, nearest: list[str]
) -> None:
    meshes = fitting_meshes(num_ranks, like)
    assert [str(mesh) for mesh in meshes[:2]] == nearest
    assert {mesh.num_ranks for mesh in meshes} == {num_ranks}
    assert len(meshes) == len(set(meshes))


def test_fitting_meshes_are_all_factorings() -> None:
    assert len(fitting_meshes(8, MeshSizes())) == 10  # 3 doublings over 3 axes: C(5, 2)


SIZES = MeshSizes(tp=2, pp=2, dp_shard=2)


def test_mesh_axes_run_from_pp_to_tp() -> None:
    def coordinates(world: World) -> tuple[tuple[str, ...] | None, tuple[int, ...]]:
        mesh = build_mesh(SIZES, world.device.type)
        return mesh.mesh_dim_names, tuple(mesh.get_coordinate() or ())

    results = threads.run(8, coordinates, timeout=30)
    assert {names for names, _ in results} == {("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    # coordinates are pp, dp_replicate, dp_shard, cp, tp: tp peers are neighbours
    assert [at for _, at in results] == [
        (pp, 0, dp, 0, tp) for pp in (0, 1) for dp in (0, 1) for tp in (0, 1)
    ]


def test_a_grid_is_the_innermost_of_a_mesh() -> None:
    sizes = MeshSizes(dp_shard=2, tp_row=2, tp_col=2)

    def coordinates(world: World) -> tuple[tuple[str, ...] | None, tuple[int, ...]]:
        mesh = build_mesh(sizes, world.device.type)
        return mesh.mesh_dim_names, tuple(mesh.get_coordinate() or ())

    results = threads.run(8, coordinates, timeout=30)
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "tp_row", "tp_col")
    assert {names for names, _ in results} == {axes}
    assert [at for _, at in results] == [
        (0, 0, dp, 0, 0, row, column) for dp in (0, 1) for row in (0, 1) for column in (0, 1)
    ]


def test_mesh_of_another_size_is_refused() -> None:
    with pytest.raises(WorldError) as raised:
        threads.run(4, lambda world: build_mesh(SIZES, world.device.type), timeout=30)
    assert isinstance(raised.value.__cause__, MeshError)
    assert raised.value.__cause__.problems == ["--mesh 2x2x2: 8 ranks, but the world has 4"]
