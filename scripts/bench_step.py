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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from benchmark.forecast import forecast_step
from benchmark.plain import Step, plain_ddp_step, plain_fsdp_step, plain_step
from tabulate import tabulate
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dtensor_llm.config import Config, MeshSizes, ModelConfig, ParallelConfig, TrainConfig
from dtensor_llm.train import Trainer
from dtensor_llm.worlds import World, processes
from dtensor_llm.worlds.processes_rank import Place, close_world, open_world

MODEL = ModelConfig(vocab_size=256, width=384, heads=6, layers=6, seq_len=256)
BATCH, RANKS, WARMUP = 8, 2, 3
TRAIN = TrainConfig(global_batch_size=BATCH, lr=1e-3, steps=10**6, warmup_steps=0)
MICROBATCHES = 4  # of the pipeline
ROWS_OF_PROFILE = 24


@dataclass(frozen=True)
class Variant:
    """One way to do the step.

    Args:
        make: builds it, on every rank that takes part.
        ranks: 1, with two threads unless `threads` says otherwise, or 2 with one each.
        threads: of each rank.
        target: of its time over that of `one`.
        other: name of the variant that it is compared with, ...
        share: ... of whose time this part counts.
        other_target: of that ratio, ...
        other_least: ... which has a lower bound, too, where it is to be as near one as this.
        forecast: the step returns seconds, and is not timed.
        silent: both ranks do, at the same time, the step of one rank.
    """

    make: Callable[[World], Step]
    ranks: int = RANKS
    threads: int = 1
    target: float | None = None
    other: str = ""
    share: float = 1.0
    other_target: float | None = None
    other_least: float | None = None
    forecast: bool = False
    silent: bool = False

    def is_alone(self, rank: int) -> bool:
        """Whether `rank` does here what a world of one does."""
        return self.silent or (self.ranks == 1 and rank == 0)


def our_step(
    world: World,
    train: TrainConfig = TRAIN,
    *,
    zero: int = 3,
    ddp: bool = False,
    async_tp: bool = False,
    **sizes: int,
) -> Step:
    """`sizes` are those of mesh axes."""
    parallel = ParallelConfig(MeshSizes(**sizes), zero=zero, ddp=ddp, async_tp=async_tp)
    trainer = Trainer(Config(MODEL, train, parallel), world)
    count = iter(range(TRAIN.steps))

    def step(tokens: Tensor, labels: Tensor) -> float:
        own = trainer.samples
        return trainer.step(next(count), tokens[own], labels[own]).loss

    return step


# A pipeline of p stages idles for (p-1) of (m+p-1) microbatches; the work is 1/p of one rank's.
PIPELINED = dataclasses.replace(TRAIN, micro_batch_size=BATCH // MICROBATCHES)
IDEAL_PIPELINE = (MICROBATCHES + RANKS - 1) / (MICROBATCHES * RANKS)


def forecast(world: World) -> Step:
    return forecast_step(Config(MODEL, PIPELINED, ParallelConfig(MeshSizes(pp=RANKS))), world)


ONE = "one"
VARIANTS: dict[str, Variant] = {
    "plain": Variant(partial(plain_step, MODEL), ranks=1, threads=2),
    ONE: Variant(our_step, ranks=1, threads=2, other="plain"),
    "one-thread": Variant(our_step, ranks=1),
    "pair": Variant(our_step, silent=True, other="one-thread"),
    "plain-ddp": Variant(partial(plain_ddp_step, MODEL)),
    "dp": Variant(
        partial(our_step, dp_shard=2, zero=0), target=1.0, other="plain-ddp", other_target=1.03
    ),
    "ddp": Variant(
        partial(our_step, dp_shard=2, zero=0, ddp=True),
        target=1.0,
        other="plain-ddp",
        other_target=1.03,
    ),
    "plain-fsdp": Variant(partial(plain_fsdp_step, MODEL)),
    "fsdp": Variant(
        partial(our_step, dp_shard=2), target=1.05, other="plain-fsdp", other_target=1.03
    ),
    "tp": Variant(partial(our_step, tp=2), target=1.15),
    "tp-async": Variant(partial(our_step, tp=2, async_tp=True), other="tp", other_target=1.0),
    "pp": Variant(
        partial(our_step, train=PIPELINED, pp=2),
        other="one-thread",
        share=IDEAL_PIPELINE,
        other_target=1.06,
    ),
    "pp-forecast": Variant(forecast, forecast=True, other="pp", other_target=1.1, other_least=0.9),
}


@dataclass(frozen=True)
class Times:
    """Seconds of one step: on the clock, of the main thread, and of the process."""

    wall: float
    main_thread: float
    process: float


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
    parser.add_argument("--profile", choices=tuple(VARIANTS), metavar="NAME", help=goes)
    asked = parser.parse_args()
    if asked.profile and asked.only:
        parser.error(f"--only: --profile {asked.profile} times no other; leave one of them out")
    if asked.steps < 1:
        parser.error(f"--steps {asked.steps}: must be at least 1")
    return asked


def with_others(names: Iterable[str]) -> list[str]:
    wanted = {ONE, *names}
    wanted |= {VARIANTS[name].other for name in wanted}
    return [name for name in VARIANTS if name in wanted]


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


def table(
    variants: Mapping[str, Variant], seconds: Mapping[str, Sequence[float]], cpu: Sequence[float]
) -> str:
    """`cpu` are the milliseconds of CPU time that all ranks of a step use together."""
    rows = []
    for (name, v), used in zip(variants.items(), cpu, strict=True):
        own = seconds[name]
        row = [name, f"{v.ranks} x {v.threads}", f"{1e3 * median(own):.0f}"]
        row += [f"{1e3 * min(own):.0f}", f"{used:.0f}"]
        row += [ratio(own, seconds[ONE]), target(v.target)]
        if v.other:
            share = f"{v.share:g} " if v.share != 1 else ""
            row += [ratio(own, seconds[v.other], v.share), target(v.other_target, v.other_least)]
            row += [f"{share}{v.other}"]
        rows.append(row)
    headers = ["step", "ranks x threads", "median ms", "least ms", "CPU ms", f"of {ONE}", "target"]
    return tabulate(rows, [*headers, "ratio", "target", "to"], disable_numparse=True)


def ratio(own: Sequence[float], other: Sequence[float], share: float = 1.0) -> str:
    return f"{median(a / (share * b) for a, b in zip(own, other, strict=True)):.3f}"


def target(value: float | None, least: float | None = None) -> str:
    if value is None:
        return ""
    return f"<= {value:.2f}" if least is None else f"{least:.2f} to {value:.2f}"


def waiting(variants: Mapping[str, Variant], second: Tensor) -> str:
    """How busy the second rank was while the first worked alone: it should have slept."""
    alone = [index for index, v in enumerate(variants.values()) if v.ranks == 1]
    return f"CPU time of the rank that waits: {1e3 * second[alone].max():.1f} ms at most"


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


def clocks(name: str, measured: Sequence[Times]) -> str:
    """The main thread computes or waits; what gloo's threads do is the rest of the process."""
    wall = median(times.wall for times in measured)
    computes = median(times.main_thread for times in measured)
    waits = median(times.wall - times.main_thread for times in measured)
    others = median(times.process - times.main_thread for times in measured)
    return (
        f"{name}: {1e3 * wall:.1f} ms a step; the main thread computes {1e3 * computes:.1f} and "
        f"waits {1e3 * waits:.1f} ({waits / wall:.0%}); other threads compute {1e3 * others:.1f}"
    )


def operators(found: profile, num_steps: int) -> str:
    """The operators by their own time, which includes the profiler's."""
    events = sorted(found.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    rows = [
        (
            event.key[:60],
            f"{event.count / num_steps:.1f}",
            f"{event.self_cpu_time_total / num_steps / 1e3:.2f}",
            f"{event.self_cpu_time_total / total:.1%}",
        )
        for event in events[:ROWS_OF_PROFILE]
    ]
    headers = ["operator", "a step", "own ms a step", "share"]
    return tabulate(rows, headers, disable_numparse=True, colalign=("left", *["right"] * 3))


if __name__ == "__main__":
    processes.end(main)
