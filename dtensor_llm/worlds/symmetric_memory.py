"""Products fused with the exchange of what they take or give, for CUDA: torch's own.

A GPU reads the memory of the others, which must be in its machine, part by part and multiplies
these as they come. Private: torch 2.13 has no public name for the two operators. Neither has a
gradient.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

DEFINED_BY = "torch.distributed._symmetric_memory"


def gather_and_multiply(
    x: Tensor, matrices: Sequence[Tensor], dim: int, group: dist.ProcessGroup
) -> tuple[Tensor, list[Tensor]]:
    """The parts `x` of all ranks, side by side along `dim`, and their products with matrices n m.

    Comm: one all-gather of the parts.
    """
    fused = operator("fused_all_gather_matmul")
    return fused(x, matrices, dim, group.group_name)


def multiply_and_scatter(x: Tensor, matrix: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The rank's part along `dim` of the sum over all ranks of `x` times a matrix n m.

    Comm: one reduce-scatter of the product.
    """
    fused = operator("fused_matmul_reduce_scatter")
    return fused(x, matrix, "sum", dim, group.group_name)


@cache
def operator(name: str) -> Any:
    """torch's operator.

    Raises:
        NotImplementedError: this torch does not have it.
    """
    try:
        import_module(DEFINED_BY)
        return getattr(torch.ops.symm_mem, name)
    except (ImportError, AttributeError) as error:
        raise NotImplementedError(
            f"torch {torch.__version__} has no symm_mem::{name}, which --async-tp needs on CUDA; "
            "leaving --async-tp out would do"
        ) from error
