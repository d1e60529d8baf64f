"""Hold the simulator to the clock: python scripts/time_schedules.py.

Runs each schedule of torch on processes whose stages sleep, one of them longer than the others, and
prints how long a step takes beside what dtensor_llm/planner/schedule.py says. Sleeping stages need
no core of their own, so a small machine shows the schedule and not its own lack of cores. Exit
status 1 where the median of the steps is further from the simulation than the bound.
"""

import argparse
import statistics
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from dtensor_llm.planner.schedule import Times, simulate
from dtensor_llm.schedules.actions import Action, Schedule
from dtensor_llm.schedules.torch_orders import (
    LOOP,
    NAMES,
    ONE_STAGE,
    V_SHAPED,
    make_schedule,
)
from dtensor_llm.worlds import World, processes
from dtensor_llm.worlds.processes_spawn import spawn

SLOW_STAGE, SLOWER = 1, 2.0  # which stage is slow, and how much
WIDTH = 4


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--schedules", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help="(all)")
    add("--stages", type=int, default=4, metavar="P", help="ranks of the pipeline (4)")
    add("--microbatches", type=int, default=8, metavar="M", help="of a step (8)")
    add("--steps", type=int, default=3, metavar="N", help="that are timed (3)")
    add("--unit", type=float, default=40.0, metavar="T", help="of a forward (ms; 40)")
    add("--bound", type=float, default=0.15, metavar="X", help="of measured/simulated - 1 (0.15)")
    asked = parser.parse_args()
    if min(asked.stages, asked.microbatches, asked.steps, asked.unit) <= 0:
        parser.error("every number must be above 0")
    try:
        rows = [row_of(name, asked) for name in asked.schedules]
    except ValueError as error:
        processes.refuse(str(error))
    print(tabulate(rows, ["schedule", "simulated (s)", "measured (s)", "ratio"], floatfmt=".3f"))
    return int(any(abs(ratio - 1) > asked.bound for *_, ratio in rows))


def row_of(name: str, asked: argparse.Namespace) -> tuple[str, float, float, float]:
    """Name, simulated and measured seconds of a step, and their ratio."""
    schedule = make_schedule(name, num_ranks=asked.stages, num_microbatches=asked.microbatches)
    times = sleeping_times(schedule.num_stages, asked.unit / 1000)
    simulated = simulate(schedule, times).makespan
    step = partial(time_steps, name, schedule, times, asked.steps)
    measured = max(spawn(schedule.num_ranks, step, timeout=60 + 10 * asked.steps * simulated))
    return name, simulated, measured, measured / simulated


def sleeping_times(num_stages: int, unit: float) -> Times:
    """In seconds. A backward sleeps on its way to the input; on stage 0 torch has no such way."""
    forward = [unit * (SLOWER if stage == SLOW_STAGE else 1) for stage in range(num_stages)]
    backward = [2 * seconds for seconds in forward]
    return Times(forward, [0.0, *backward[1:]], [backward[0], *[0.0] * (num_stages - 1)])


def time_steps(name: str, schedule: Schedule, times: Times, steps: int, world: World) -> float:
    """On one rank: the median seconds of a step, after one that is not counted."""
    own = schedule.stages[world.rank]
    stages = [make_stage(index, schedule.num_stages, times) for index in own]
    cls: Any = (ONE_STAGE | LOOP | V_SHAPED)[name]
    pipeline = cls(
        stages[0] if name in ONE_STAGE else stages,
        schedule.num_microbatches,
        loss_fn=lambda output, target: (output - target).square().sum(),
        scale_grads=False,
    )
    batch = torch.ones(schedule.num_microbatches, WIDTH)
    inputs = (batch,) if 0 in own else ()
    target = batch if schedule.num_stages - 1 in own else None
    seconds = []
    for _ in range(1 + steps):
        dist.barrier()
        start = time.perf_counter()
        pipeline.step(*inputs, target=target)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def make_stage(index: int, num_stages: int, times: Times) -> PipelineStage:
    tokens = torch.empty(1, WIDTH, device="meta", requires_grad=index > 0)
    output = torch.empty(1, WIDTH, device="meta", requires_grad=True)
    module = SleepingStage(times.forward[index], times.of(Action(index, "B", 0)))
    return PipelineStage(
        module,
        index,
        num_stages,
        torch.device("cpu"),
        input_args=tokens,
        output_args=output,
    )


class SleepingStage(nn.Module):
    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(self.linear(x), *self.seconds)


class Sleep(torch.autograd.Function):
    """The identity, after some seconds, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradients[0].clone(), None, None


if __name__ == "__main__":
    processes.end(main)
