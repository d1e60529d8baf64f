"""A case of test_composition.py on real processes: torchrun ... -m parity_tests.torchrun_case I."""

import sys

from dtensor_llm.worlds import World, processes
from parity_tests.test_composition import CASES, check_rank


def main() -> int:
    case = CASES[int(sys.argv[1])]

    def run_rank(world: World) -> int:
        report = check_rank(case, world)
        if world.rank == 0:
            print(report)
        return 0 if report.passed else 1

    return processes.run(run_rank, device="cpu", timeout=120.0)


if __name__ == "__main__":
    processes.leave(main())
