"""What a rank communicates, seen alike in every world.

Between processes c10d's operations pass torch's dispatcher, where a mode sees them, those of the
backward pass too. The process group of the threads world is Python and no operation: it reports
each call by itself, to the observers of its own thread.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Communication:
    """One call of one rank.

    Args:
        operation: all-reduce, all-gather, reduce-scatter, all-to-all, broadcast, reduce, gather,
            scatter, barrier, send or recv.
        ranks: those of its group, in the world.
        payload: bytes of the whole tensor on the group: what each rank brings to a reduction, gets
            from an all-gather, sends or receives.
    """

    operation: str
    ranks: tuple[int, ...]
    payload: int


Observer = Callable[[Communication], None]

THREADS = "threaded"  # the backend of the threads world

# The operation that an operator of c10d or of its functional form is, and the argument that is the
# whole tensor; of a functional or a fused all-gather it is one of as many equal parts as there are
# ranks, and of a fused reduce-scatter it is what a matrix `B` makes the whole tensor of.
_OPERATORS = {
    "c10d::allreduce_": ("all-reduce", "tensors"),
    "c10d::allreduce_coalesced_": ("all-reduce", "tensors"),
    "c10d::allgather_": ("all-gather", "output_tensors"),
    "c10d::allgather_coalesced_": ("all-gather", "output_lists"),
    "c10d::_allgather_base_": ("all-gather", "output_tensor"),
    "c10d::allgather_into_tensor_coalesced_": ("all-gather", "outputs"),
    "c10d::reduce_scatter_": ("reduce-scatter", "input_tensors"),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", "input_tensor"),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce-scatter", "inputs"),
    "c10d::alltoall_": ("all-to-all", "input_tensors"),
    "c10d::alltoall_base_": ("all-to-all", "input"),
    "c10d::broadcast_": ("broadcast", "tensors"),
    "c10d::reduce_": ("reduce", "tensors"),
    "c10d::gather_": ("gather", "input_tensors"),
    "c10d::scatter_": ("scatter", "output_tensors"),
    "c10d::barrier": ("barrier", ""),
    "c10d::monitored_barrier_": ("barrier", ""),
    "c10d::send": ("send", "tensors"),
    "c10d::recv_": ("recv", "tensors"),
    "c10d::recv_any_source_": ("recv", "tensors"),
    "_c10d_functional::all_reduce": ("all-reduce", "input"),
    "_c10d_functional::all_reduce_": ("all-reduce", "input"),
    "_c10d_functional::all_reduce_coalesced": ("all-reduce", "inputs"),
    "_c10d_functional::all_reduce_coalesced_": ("all-reduce", "inputs"),
    "_c10d_functional::all_gather_into_tensor": ("all-gather", "input"),
    "_c10d_functional::all_gather_into_tensor_out": ("all-gather", "input"),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all-gather", "inputs"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce-scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce-scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce-scatter", "inputs"),
    "_c10d_functional::all_to_all_single": ("all-to-all", "input"),
    "_c10d_functional::broadcast": ("broadcast", "input"),
    "_c10d_functional::broadcast_": ("broadcast", "input"),
    "symm_mem::fused_all_gather_matmul": ("all-gather", "A"),
    "symm_mem::fused_matmul_reduce_scatter": ("reduce-scatter", "A"),
    "dtensor_llm::begin_reduce_scatter": ("reduce-scatter", "input"),
    "dtensor_llm::begin_all_gather": ("all-gather", "output"),
    "dtensor_llm::begin_all_reduce": ("all-reduce", "whole"),
}
_GROUPS = ("process_group", "group_name")  # the argument; an operator without one sends nothing
_NAMESPACES = {"c10d", "_c10d_functional", "symm_mem", "dtensor_llm"}


class _Observers(threading.local):
    def __init__(self) -> None:
        self.all: list[Observer] = []


_observers = _Observers()


@contextlib.contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Tell `observer` of each collective and message that the calling rank takes part in."""
    if not dist.is_initialized():
        yield  # a rank alone
    elif dist.get_backend() == THREADS:
        _observers.all.append(observer)
        try:
            yield
        finally:
            _observers.all.remove(observer)
    else:
        with _Mode(observer):
            yield


def report(operation: str, ranks: tuple[int, ...], whole: Sequence[Tensor]) -> None:
    """Called by the threads world's process group, on the thread of the rank that communicates."""
    if _observers.all:
        communication = Communication(operation, ranks, _num_bytes(whole))
        for observer in _observers.all:
            observer(communication)


class _Mode(TorchDispatchMode):
    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # it calls again, with local tensors, and may communicate
        if func.namespace in _NAMESPACES:
            names = [argument.name for argument in func._schema.arguments]
            if any(name in _GROUPS for name in names):
                arguments = dict(zip(names, args, strict=False)) | (kwargs or {})
                self._observer(_read(func._schema.name, arguments))
        return func(*args, **(kwargs or {}))


def _read(operator: str, arguments: dict[str, Any]) -> Communication:
    if operator not in _OPERATORS:
        raise NotImplementedError(f"{operator} communicates, and what it sends is not known here")
    operation, whole = _OPERATORS[operator]
    if "process_group" in arguments:
        group, parts = dist.ProcessGroup.unbox(arguments["process_group"]), 1
    else:
        group = _resolve_process_group(arguments["group_name"])
        parts = group.size() if operation == "all-gather" and whole in ("input", "A") else 1
    ranks = tuple(dist.get_process_group_ranks(group))
    size = parts * _num_bytes(arguments.get(whole, ()))
    if operation == "reduce-scatter" and whole == "A":
        size = size // arguments["A"].shape[-1] * arguments["B"].shape[-1]
    return Communication(operation, ranks, size)


def _num_bytes(whole: Any) -> int:
    """Of a tensor, or of all in nested sequences."""
    return whole.nbytes if isinstance(whole, Tensor) else sum(map(_num_bytes, whole))
