"""Worlds: where the ranks live.

The same training code runs in every world. `processes` makes the calling process one rank of a
torchrun job (gloo or NCCL, or a world of one when started alone); `threads` makes every rank a
thread of this process, with real numbers and no network; `fake` is one rank without the others and
without numbers. Nothing outside this package knows which world it is in, and no environment
variable is read outside it.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch

T = TypeVar("T")


def _make_alone(make: Callable[[], Any]) -> Any:
    return make()


@dataclass(frozen=True)
class World:
    """One rank's view of the ranks that run together.

    Args:
        kind: where the ranks live, "processes", "threads" or "fake".
        rank: this rank, from 0 to size - 1.
        size: number of ranks.
        device: where this rank's tensors live.
    """

    kind: Literal["processes", "threads", "fake"]
    rank: int
    size: int
    device: torch.device
    _share: Callable[[Callable[[], Any]], Any] = field(
        default=_make_alone, repr=False, compare=False
    )

    def share(self, make: Callable[[], T]) -> T:
        """Compute something once, on rank 0, and give the result to every rank.

        Every rank has to call it, in the same order. In the threads world all ranks get the same
        object and must not change it; between processes the result is pickled.

        Args:
            make: called on rank 0 alone; it may not communicate.

        Comm: processes: one broadcast of the pickled result; threads: none.
        """
        return self._share(make)


class WorldError(RuntimeError):
    """A world ended early. The message names the first failing rank and holds its traceback.

    Attributes:
        rank: the first failing rank, or None when no single rank is to blame (a deadlock).
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


def environment_size() -> int:
    """The number of processes that the launcher started (WORLD_SIZE), 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_torchrun() -> bool:
    """Whether a launcher such as torchrun started this process, whatever the number of ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def name_ranks(ranks: Sequence[int]) -> str:
    """Sorted ranks in words, runs shortened: "rank 3", "ranks 0-2, 7"."""
    return f"rank {ranges(ranks)}" if len(ranks) == 1 else f"ranks {ranges(ranks)}"


def ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers, runs shortened: "0-2, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
