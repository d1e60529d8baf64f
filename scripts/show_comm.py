"""Show what a step communicates: python scripts/show_comm.py --mesh 2x2x2.

Trains two steps and records the second: for the first rank of each pipeline stage, and for each
rank where they differ, the closed forms of planner/costs.py beside what was counted. Bytes are
those of one rank: payload, the whole tensors on the axis; wire, what the rank sends in a ring.
Exit status 1 where anything differs. --predict runs nothing and takes any mesh.
"""

import argparse
import sys
from collections.abc import Sequence

from dtensor_llm.checks import Surroundings
from dtensor_llm.command_line import parse_beside_flags, parse_command_line, parser_beside_flags
from dtensor_llm.config import Config, ConfigError
from dtensor_llm.launch import launch, prepare
from dtensor_llm.mesh import parse_mesh
from dtensor_llm.planner.contract import (
    Contract,
    axis_table,
    contract_table,
    describe,
    measure,
    prediction_table,
)
from dtensor_llm.planner.costs import step_traffic
from dtensor_llm.planner.parameters import Place
from dtensor_llm.worlds import World, processes


def main() -> int:
    asked, flags = own_arguments(sys.argv[1:])
    if asked.predict:
        return predict(flags)
    config, data = prepare(flags)

    def run_rank(world: World) -> int:
        contracts = measure(config, data, world)
        if world.rank == 0:
            print(report(config, contracts))
        return 0 if all(contract.holds for contract in contracts) else 1

    return launch(config, run_rank)


def own_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """What this script reads itself, and the flags of train_gpt.py."""
    parser = parser_beside_flags(__doc__)
    parser.add_argument(
        "--predict", action="store_true", help="closed forms alone: for a mesh of any size"
    )
    refused = ("--record", "--metrics", "--check-parity")
    return parse_beside_flags(parser, argv, refused=refused)


def predict(flags: Sequence[str]) -> int:
    """Print the closed forms of each stage's first rank."""
    try:
        config = configuration(flags)
    except ConfigError as error:
        processes.refuse(str(error))
    for stage in range(config.parallel.mesh.pp):
        place = Place(pp=stage)
        print(f"{title(config, place)}\n\n{prediction_table(config, place)}\n")
        print(f"{axis_table(step_traffic(config, place))}\n")
    return 0


def configuration(flags: Sequence[str]) -> Config:
    """Checked as for a run on as many machines as it takes. Raises ConfigError."""
    started = processes.read_place().size
    meshes = [flag.partition("=")[2] for flag in flags if flag.startswith("--mesh=")]
    try:
        num_ranks = parse_mesh(meshes[-1], started).num_ranks if meshes else started
    except ConfigError:
        num_ranks = started  # what is wrong with the mesh is told with the rest
    where = Surroundings(num_ranks, local_processes=num_ranks, num_cuda=num_ranks)
    return parse_command_line(flags, where)


def report(config: Config, contracts: Sequence[Contract]) -> str:
    """The tables, and what came of it."""
    broken = [contract for contract in contracts if not contract.holds]
    stages = {c.place.pp: c for c in reversed(contracts)}
    shown = [stages[stage] for stage in sorted(stages)]
    texts = [
        f"{title(config, c.place)}\n\n{contract_table(c)}\n\n{axis_table(c.counted)}"
        for c in [*shown, *(c for c in broken if c not in shown)]
    ]
    verdict = (
        f"NOT as predicted on {len(broken)} of {len(contracts)} ranks"
        if broken
        else f"as predicted on each of {len(contracts)} ranks, to the byte"
    )
    return "\n\n".join([*texts, verdict])


def title(config: Config, place: Place) -> str:
    mesh = config.parallel.mesh
    return f"mesh {mesh}, m = {config.microbatches} microbatches, rank {describe(place)}"


if __name__ == "__main__":
    processes.end(main)
