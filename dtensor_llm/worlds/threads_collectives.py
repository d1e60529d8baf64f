"""What each collective computes, from the tensors that all ranks of a group brought.

Every reduction adds in the order of the group's ranks, in the tensors' own dtype: the bits depend
neither on which rank came last nor on how the elements are cut into tensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Compute = Callable[[Sequence["Call"]], None]


@dataclass(frozen=True, slots=True)
class Call:
    """One rank's part in a collective.

    Args:
        name: the collective, a key of COMPUTE.
        outputs: tensors to be written.
        inputs: tensors to be read; all_reduce, reduce and broadcast have the same ones as outputs.
        reduction: how to combine, as c10d spells it ("SUM").
        root: the group rank that sends to all or receives from all.
        tensors: (dtype, shape) of the tensors, as far as all ranks have to bring them alike.
        splits: rows for each rank, rows from each rank (all_to_all_single; empty: equal parts).
    """

    name: str
    outputs: Sequence[Tensor] = ()
    inputs: Sequence[Tensor] = ()
    reduction: str | None = None
    root: int | None = None
    tensors: tuple[object, ...] = ()
    splits: tuple[Sequence[int], Sequence[int]] = ((), ())

    def agrees(self, other: "Call") -> bool:
        """Whether two ranks may make these calls in the same collective."""
        return (
            self.name == other.name
            and self.reduction == other.reduction
            and self.root == other.root
            and self.tensors == other.tensors
        )

    def __str__(self) -> str:
        parts = [describe_tensor(tensor) for tensor in self.inputs or self.outputs]
        if self.reduction is not None:
            parts.append(self.reduction)
        if self.root is not None:
            parts.append(f"root {self.root}")
        if any(self.splits):
            parts.append(f"splits to {list(self.splits[0])}, from {list(self.splits[1])}")
        return f"{self.name}({', '.join(parts)})"


def describe_tensor(tensor: Tensor) -> str:
    """A tensor in words: "float32[4, 8]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def metadata(tensors: Sequence[Tensor]) -> tuple[object, ...]:
    """What two ranks compare when both have to bring the same kind of tensors."""
    return tuple((tensor.dtype, tensor.shape) for tensor in tensors)


def copy(target: Tensor, source: Tensor) -> None:
    """Write source's values into target, as a transport does: elements in order, autograd unaware.

    Raises:
        ValueError: another number of elements or another dtype.
    """
    if target.dtype != source.dtype or target.numel() != source.numel():
        raise ValueError(f"{describe_tensor(source)} does not fit into {describe_tensor(target)}")
    target.data.copy_(source if target.shape == source.shape else source.reshape(target.shape))


_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": Tensor.add_,
    "AVG": Tensor.add_,
    "PRODUCT": Tensor.mul_,
    "MIN": lambda total, part: torch.minimum(total, part, out=total),
    "MAX": lambda total, part: torch.maximum(total, part, out=total),
    "BAND": Tensor.bitwise_and_,
    "BOR": Tensor.bitwise_or_,
    "BXOR": Tensor.bitwise_xor_,
}


def _combine(parts: Sequence[Tensor], reduction: str | None) -> Tensor:
    """A new tensor: the parts combined in their order."""
    if reduction not in _COMBINE:
        raise NotImplementedError(f"this world cannot reduce with {reduction}")
    combine = _COMBINE[reduction]
    total = parts[0].clone()
    for part in parts[1:]:
        combine(total, part)
    return total.div_(len(parts)) if reduction == "AVG" else total


def _columns(calls: Sequence[Call]) -> Sequence[Sequence[Tensor]]:
    """For each input tensor, what every rank brought."""
    return list(zip(*(call.inputs for call in calls), strict=True))


def _all_reduce(calls: Sequence[Call]) -> None:
    for parts in _columns(calls):
        total = _combine(parts, calls[0].reduction)
        for part in parts:
            copy(part, total)


def _reduce(calls: Sequence[Call]) -> None:
    for parts in _columns(calls):
        copy(parts[calls[0].root or 0], _combine(parts, calls[0].reduction))


def _broadcast(calls: Sequence[Call]) -> None:
    root = calls[0].root or 0
    for parts in _columns(calls):
        for rank, part in enumerate(parts):
            if rank != root:
                copy(part, parts[root])


def _all_gather(calls: Sequence[Call]) -> None:
    for call in calls:
        for target, other in zip(call.outputs, calls, strict=True):
            copy(target, other.inputs[0])


def _all_gather_single(calls: Sequence[Call]) -> None:
    for index, parts in enumerate(_columns(calls)):
        whole = torch.stack(list(parts))
        for call in calls:
            copy(call.outputs[index], whole)


def _reduce_scatter(calls: Sequence[Call]) -> None:
    for call, parts in zip(calls, _columns(calls), strict=True):
        copy(call.outputs[0], _combine(parts, call.reduction))


def _reduce_scatter_single(calls: Sequence[Call]) -> None:
    for index, parts in enumerate(_columns(calls)):
        total = _combine(parts, calls[0].reduction)
        for call, chunk in zip(calls, total.flatten().chunk(len(calls)), strict=True):
            copy(call.outputs[index], chunk)


def _all_to_all(calls: Sequence[Call]) -> None:
    for rank, call in enumerate(calls):
        for target, other in zip(call.outputs, calls, strict=True):
            copy(target, other.inputs[rank])


def _all_to_all_single(calls: Sequence[Call]) -> None:
    sent = [_split(call.inputs[0], call.splits[0], len(calls)) for call in calls]
    for rank, call in enumerate(calls):
        received = _split(call.outputs[0], call.splits[1], len(calls))
        for target, pieces in zip(received, sent, strict=True):
            copy(target, pieces[rank])


def _split(tensor: Tensor, rows: Sequence[int], parts: int) -> Sequence[Tensor]:
    return tensor.split(list(rows)) if rows else tensor.tensor_split(parts)


def _gather(calls: Sequence[Call]) -> None:
    targets = calls[calls[0].root or 0].outputs
    for target, call in zip(targets, calls, strict=True):
        copy(target, call.inputs[0])


def _scatter(calls: Sequence[Call]) -> None:
    sources = calls[calls[0].root or 0].inputs
    for source, call in zip(sources, calls, strict=True):
        copy(call.outputs[0], source)


def _barrier(_: Sequence[Call]) -> None:
    pass


COMPUTE: dict[str, Compute] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": _barrier,
}
