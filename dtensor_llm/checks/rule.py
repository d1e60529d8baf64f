"""A rule: what must hold between several settings, or between settings and machines."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dtensor_llm.config import Config
from dtensor_llm.settings import join_or

DIVISORS_TRIED = 4096
"""Bounds the search for a value to propose."""


@dataclass(frozen=True)
class Surroundings:
    """What was started, and on what machine.

    Args:
        num_processes: processes of the whole run.
        local_processes: those of them on this machine.
        memory_bytes: this machine's memory; None where it is not known.
        num_cuda: CUDA devices of this machine.
        first_machine: whether rank 0, which writes the files, is on this machine.
    """

    num_processes: int = 1
    local_processes: int = 1
    memory_bytes: int | None = None
    num_cuda: int = 0
    first_machine: bool = True


@dataclass(frozen=True)
class Rule:
    """A check that involves several settings.

    Args:
        find: yields a text for each fault: what was given, the rule, the arithmetic, the cure.
        reads: names of the fields that `find` reads; where one of them is already known to be
            wrong, the rule is left out.
    """

    find: Callable[[Config, Surroundings], Iterable[str]]
    reads: frozenset[str]


def near_multiples(value: int, step: int) -> list[int]:
    """The positive multiples of `step` on both sides of `value`."""
    below = value // step * step
    return [n for n in (below, below + step) if n > 0]


def propose(flag: str, values: list[int], *others: str) -> str:
    """`--seq-len 8, 10 or --no-sequence-parallel would do`."""
    first, *rest = values
    return f"{join_or([f'{flag} {first}', *rest, *others])} would do"


def remainder(value: int, divisor: int) -> str:
    """`9 / 2 leaves 1`."""
    return f"{value} / {divisor} leaves {value % divisor}"


def batch_factors(config: Config) -> str:
    """`dp=2`, or with two-dimensional tp `dp=2 x tp_row=3`."""
    rows = config.parallel.mesh.tp_row
    return f"dp={config.dp}" + (f" x tp_row={rows}" if rows > 1 else "")


def largest_divisor(number: int, limit: int) -> int | None:
    """The largest divisor of `number` up to `limit`, if one is near."""
    tried = range(limit, max(0, limit - DIVISORS_TRIED), -1)
    return next((n for n in tried if number % n == 0), None)
