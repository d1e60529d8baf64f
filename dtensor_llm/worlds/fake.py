"""The fake world: one rank of a world of any size, whose other ranks are not there.

Process groups, meshes and shardings are made as ever; what is sent goes nowhere. With tensors on
the meta device, which have shapes and no numbers, a rank of thousands is built in a second.
"""

import sys
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from dtensor_llm.worlds import World

T = TypeVar("T")


def run(size: int, rank: int, main: Callable[[World], T]) -> T:
    """Run main as rank `rank` of `size`, on the meta device.

    Raises:
        ValueError: this thread is a rank of another world already.
    """
    hook = sys.excepthook  # torch puts the rank before every later traceback
    dist.init_process_group("fake", rank=rank, world_size=size)
    try:
        return main(World("fake", rank, size, torch.device("meta")))
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
