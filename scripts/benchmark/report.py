"""What bench_step.py prints."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from tabulate import tabulate
from torch import Tensor
from torch.profiler import profile

from benchmark.variants import ONE, Variant

ROWS_OF_PROFILE = 24


@dataclass(frozen=True)
class Times:
    """Seconds of one step: on the clock, of the main thread, and of the process."""

    wall: float
    main_thread: float
    process: float


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
    """The median of the ratios round by round, and between what the true one is, at 95 %."""
    ratios = sorted(a / (share * b) for a, b in zip(own, other, strict=True))
    text, outside = f"{median(ratios):.3f}", left_out(len(ratios))
    if outside is None:
        return text
    return f"{text} ({ratios[outside]:.2f} to {ratios[-1 - outside]:.2f})"


def left_out(count: int) -> int | None:
    """How many of `count` draws lie on either side of an interval that has the median at 95 %.

    That it is below all but the least k has the chance of at most k heads in `count` throws of a
    coin, which is to be 2.5 % at most; None where even all heads are likelier.
    """
    chances = accumulate(math.comb(count, heads) / 2**count for heads in range(count + 1))
    return max((k for k, chance in enumerate(chances) if chance <= 0.025), default=None)


def target(value: float | None, least: float | None = None) -> str:
    if value is None:
        return ""
    return f"<= {value:.2f}" if least is None else f"{least:.2f} to {value:.2f}"


def waiting(variants: Mapping[str, Variant], second: Tensor) -> str:
    """How busy the second rank was while the first worked alone: it should have slept."""
    alone = [index for index, v in enumerate(variants.values()) if v.ranks == 1]
    return f"CPU time of the rank that waits: {1e3 * second[alone].max():.1f} ms at most"


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
