"""Show where every parameter lies: python scripts/show_plan.py --mesh 8x4x16 --model gpt3-175b.

Prints, without taking memory for any of them, the shape of every parameter, its placement on each
mesh axis, what a rank keeps of it, and totals of each pipeline stage.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial

from dtensor_llm.checks import Rule, Surroundings
from dtensor_llm.command_line import parse_beside_flags, parse_command_line, parser_beside_flags
from dtensor_llm.config import Config, ConfigError
from dtensor_llm.mesh import parse_mesh
from dtensor_llm.planner.placement_table import group, one_by_one, parameter_table, total_table
from dtensor_llm.planner.placements import plan_rank, plan_stages
from dtensor_llm.worlds import processes


def main() -> int:
    asked, flags = own_arguments(sys.argv[1:])
    try:
        config = configuration(flags, asked.rank)
    except ConfigError as error:
        processes.refuse(str(error))
    if processes.read_place().rank == 0:
        print(plan_text(config, asked.rank, list_all=asked.all))
    return 0


def own_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """What this script reads itself, and the flags of train_gpt.py."""
    parser = parser_beside_flags(__doc__)
    parser.add_argument(
        "--rank", type=int, metavar="N", help="what this rank holds, and where each part begins"
    )
    parser.add_argument(
        "--all", action="store_true", help="a line for every parameter, not for all layers together"
    )
    refused = ("--record", "--metrics", "--check-parity")
    return parse_beside_flags(parser, argv, refused=refused)


def configuration(flags: Sequence[str], rank: int | None) -> Config:
    """Checked as for a run on as many machines as it takes, of which `rank` is to be one.

    Raises ConfigError.
    """
    rules = [Rule(partial(rank_is_on_the_mesh, rank), frozenset({"mesh"}))]
    started = processes.read_place().size
    meshes = [flag.partition("=")[2] for flag in flags if flag.startswith("--mesh=")]
    try:
        num_ranks = parse_mesh(meshes[-1], started).num_ranks if meshes else started
    except ConfigError:
        num_ranks = started  # what is wrong with the mesh is told with the rest
    if "--world=threads" in flags:
        return parse_command_line(flags, Surroundings(), more_rules=rules)
    where = Surroundings(num_ranks, local_processes=num_ranks, num_cuda=num_ranks)
    return parse_command_line(flags, where, more_rules=rules)


def rank_is_on_the_mesh(rank: int | None, config: Config, _: Surroundings) -> Iterator[str]:
    mesh = config.parallel.mesh
    if rank is not None and not 0 <= rank < mesh.num_ranks:
        yield f"--rank {rank}: mesh {mesh} has the ranks 0 to {mesh.num_ranks - 1}"


def plan_text(config: Config, rank: int | None, *, list_all: bool) -> str:
    """The tables."""
    plans = plan_stages(config) if rank is None else [plan_rank(config, rank)]
    parameters = [parameter for plan in plans for parameter in plan.parameters]
    lines = one_by_one(parameters) if list_all else group(parameters)
    mesh = config.parallel.mesh
    num_ranks = "1 rank" if mesh.num_ranks == 1 else f"{mesh.num_ranks} ranks"
    text = f"mesh {mesh}: {num_ranks}; {config.model.num_parameters:,} parameters"
    if rank is not None:
        where = ", ".join(f"{axis}={index}" for axis, index in plans[0].coordinates.items())
        text = f"{text}\nrank {rank}: {where}"
    tables = [parameter_table(lines, config, of_rank=rank is not None), total_table(plans)]
    return "\n\n".join([text, *tables])


if __name__ == "__main__":
    processes.end(main)
