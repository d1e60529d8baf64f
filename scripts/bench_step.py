"""Times our training step, alone and on two ranks, against plain PyTorch (benchmark/plain.py).

    python scripts/bench_step.py [--only NAME ...] [--steps 15]
    python scripts/bench_step.py --profile NAME      where the time of one of them goes

float32: 6 layers, width 384, 6 heads, 256 tokens, 8 sequences a step, vocabulary 256, tied, GELU,
AdamW, clip 1.0. Two processes talk over gloo, with one thread each; what one rank does, the first
of them does with two threads, while the other sleeps. All alternate step by step, so that they meet
the same weather: ratios are medians of the ratios round by round. `pair` is the step of one rank
and one thread, done by both ranks at once without a word: what two busy cores cost each other.
`pp-forecast` is not timed: it is what the simulator makes of the times that the stages take alone.
"""

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from benchmark.plain import Step
from benchmark.report import Times, clocks, operators, table, waiting
from benchmark.variants import BATCH, MODEL, RANKS, VARIANTS, Variant, with_others
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dtensor_llm.worlds import World, processes
from dtensor_llm.worlds.processes_rank import Place, close_world, open_world

WARMUP = 3


def main() -> int:
    asked = arguments()
    place = processes.read_place()
    if place.size == 1:
        os.execv(sys.executable, [*processes.torchrun(RANKS), __file__, *sys.argv[1:]])
    if place.size != RANKS:
        processes.refuse(
            f"{place.size} processes were started; this takes {RANKS}, or one to start"
        )
    names = [asked.profile] if asked.profile else with_others(asked.only or VARIANTS)
    variants = {name: VARIANTS[name] for name in names}
    alone = make_alone({name: v for name, v in variants.items() if v.is_alone(place.rank)})
    run = partial(profile_one if asked.profile else bench, variants, alone, asked.steps)
    processes.run(run, device="cpu")
    return 0


def arguments() -> argparse.Namespace:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    only = f"time these alone, and what they are compared with: {', '.join(VARIANTS)}"
    parser.add_argument("--only", nargs="+", choices=tuple(VARIANTS), metavar="NAME", help=only)
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each (default: 15)")
    goes = "show where the time of this step goes, and time no other"
    timed = tuple(name for name, v in VARIANTS.items() if not v.forecast)
    parser.add_argument("--profile", choices=timed, metavar="NAME", help=goes)
    asked = parser.parse_args()
    if asked.profile and asked.only:
        parser.error(f"--only: --profile {asked.profile} times no other; leave one of them out")
    if asked.steps < 1:
        parser.error(f"--steps {asked.steps}: must be at least 1")
    return asked


def make_alone(variants: Mapping[str, Variant]) -> dict[str, Step]:
    """Built in a world of one, whose process group they need no longer."""
    world = open_world(Place(0, 1, 0, 1), torch.device("cpu"), None, dist.HashStore())
    try:
        return {name: v.make(world) for name, v in variants.items()}
    finally:
        close_world()


def make_all(
    variants: Mapping[str, Variant], alone: Mapping[str, Step], world: World
) -> dict[str, Step]:
    """The steps that this rank takes part in."""
    together = {name: v for name, v in variants.items() if v.ranks == RANKS and not v.silent}
    return dict(alone) | {name: v.make(world) for name, v in together.items()}


def batches(num: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shape = (num, BATCH, MODEL.seq_len + 1)
    whole = torch.randint(MODEL.vocab_size, shape, generator=generator)
    return [(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in whole]


def bench(
    variants: Mapping[str, Variant], alone: Mapping[str, Step], num_steps: int, world: World
) -> None:
    steps = make_all(variants, alone, world)
    measured: dict[str, list[Times]] = {name: [] for name in variants}
    for index, batch in enumerate(batches(WARMUP + num_steps)):
        for name in variants if index % 2 else reversed(list(variants)):
            times = timed(steps.get(name), variants[name], *batch)
            if index >= WARMUP:
                measured[name].append(times)
    own = [[dataclasses.astuple(times) for times in measured[name]] for name in variants]
    of_ranks = [torch.empty(len(own), num_steps, 3, dtype=torch.float64) for _ in range(RANKS)]
    dist.all_gather(of_ranks, torch.tensor(own, dtype=torch.float64))
    if world.rank == 0:
        wall, _, process = torch.stack(of_ranks).unbind(dim=-1)  # rank variant step
        slowest = dict(zip(variants, wall.amax(dim=0).tolist(), strict=True))
        used = [process[: v.ranks, i].sum(dim=0).median() for i, v in enumerate(variants.values())]
        print(table(variants, slowest, [1e3 * seconds.item() for seconds in used]))
        print(waiting(variants, process[1]))


def timed(step: Step | None, variant: Variant, tokens: Tensor, labels: Tensor) -> Times:
    """One step of those that take part; the others (None) wait for its end."""
    torch.set_num_threads(variant.threads)
    dist.barrier()
    start = (time.perf_counter(), time.thread_time(), time.process_time())
    if step is not None:
        returned = step(tokens, labels)
        wall = returned if variant.forecast else time.perf_counter() - start[0]
        times = Times(wall, time.thread_time() - start[1], time.process_time() - start[2])
    dist.barrier()
    if step is None:
        used = time.process_time() - start[2]
        times = Times(0.0, time.thread_time() - start[1], used)
    return times


def profile_one(
    variants: Mapping[str, Variant], alone: Mapping[str, Step], num_steps: int, world: World
) -> None:
    """Where the time goes, on rank 0: first on the clocks, then by operator."""
    ((name, variant),) = variants.items()
    step = make_all(variants, alone, world).get(name)
    measured = [timed(step, variant, *batch) for batch in batches(WARMUP + num_steps)]
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for batch in batches(num_steps):
            timed(step, variant, *batch)
    if world.rank == 0:
        print(clocks(name, measured[WARMUP:]))
        print(operators(found, num_steps))


if __name__ == "__main__":
    processes.end(main)
