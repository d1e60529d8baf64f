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
        inputs: tensors to be read; those of all_reduce, reduce and broadcast are the outputs.
        agree: what all ranks have to give alike (reduction, root, dtypes, shapes).
        splits: rows sent to each rank and received from each rank (all_to_all_single only).
    """

    name: str
    outputs: Sequence[Tensor]
    inputs: Sequence[Tensor]
    agree: tuple[object, ...] = ()
    splits: tuple[Sequence[int], Sequence[int]] | None = None

    def __str__(self) -> str:
        tensors = ", ".join(describe_tensor(tensor) for tensor in self.inputs or self.outputs)
        named = [str(item) for item in self.agree if isinstance(item, str)]
        return f"{self.name}({', '.join([tensors, *named] if tensors else named)})"


def describe_tensor(tensor: Tensor) -> str:
    """A tensor in words: "float32[4, 8]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def copy(target: Tensor, source: Tensor) -> None:
    """Write source's values into target, unseen by autograd, as a transport does.

    Raises:
        ValueError: another number of elements or another dtype.
    """
    if target.dtype != source.dtype or target.numel() != source.numel():
        raise ValueError(
            f"a tensor {describe_tensor(source)} was sent to one of {describe_tensor(target)}"
        )
    if target.shape != source.shape:
        source = source.reshape(target.shape)
    target.data.copy_(source)


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


def reduce_tensors(parts: Sequence[Tensor], reduction: str) -> Tensor:
    """A new tensor: the parts combined in their order.

    Raises:
        NotImplementedError: a reduction that this world does not know.
    """
    if reduction not in _COMBINE:
        raise NotImplementedError(f"the threads world cannot reduce with {reduction}")
    combine = _COMBINE[reduction]
    total = parts[0].detach().clone()
    for part in parts[1:]:
        combine(total, part)
    return total.div_(len(parts)) if reduction == "AVG" else total


def _reduction(call: Call) -> str:
    return str(call.agree[0])


def _root(call: Call) -> int:
    return int(str(call.agree[0]).removeprefix("root "))


def _all_reduce(calls: Sequence[Call]) -> None:
    for parts in zip(*(call.inputs for call in calls), strict=True):
        total = reduce_tensors(parts, _reduction(calls[0]))
        for part in parts:
            part.data.copy_(total)


def _reduce(calls: Sequence[Call]) -> None:
    root = int(str(calls[0].agree[1]).removeprefix("root "))
    for parts in zip(*(call.inputs for call in calls), strict=True):
        parts[root].data.copy_(reduce_tensors(parts, _reduction(calls[0])))


def _broadcast(calls: Sequence[Call]) -> None:
    sources = calls[_root(calls[0])].inputs
    for call in calls:
        for target, source in zip(call.outputs, sources, strict=True):
            if target is not source:
                copy(target, source)


def _all_gather(calls: Sequence[Call]) -> None:
    for call in calls:
        for target, other in zip(call.outputs, calls, strict=True):
            copy(target, other.inputs[0])


def _all_gather_single(calls: Sequence[Call]) -> None:
    for call in calls:
        for index, target in enumerate(call.outputs):
            copy(target, torch.stack([other.inputs[index] for other in calls]))


def _reduce_scatter(calls: Sequence[Call]) -> None:
    for rank, call in enumerate(calls):
        parts = [other.inputs[rank] for other in calls]
        copy(call.outputs[0], reduce_tensors(parts, _reduction(call)))


def _reduce_scatter_single(calls: Sequence[Call]) -> None:
    for parts in zip(*(call.inputs for call in calls), strict=True):
        total = reduce_tensors(parts, _reduction(calls[0]))
        index = next(i for i, part in enumerate(calls[0].inputs) if part is parts[0])
        chunks = total.flatten().chunk(len(calls))
        for call, chunk in zip(calls, chunks, strict=True):
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


def _split(tensor: Tensor, sizes: Sequence[int], parts: int) -> Sequence[Tensor]:
    return tensor.split(list(sizes)) if sizes else tensor.chunk(parts)


def _gather(calls: Sequence[Call]) -> None:
    targets = calls[_root(calls[0])].outputs
    for target, call in zip(targets, calls, strict=True):
        copy(target, call.inputs[0])


def _scatter(calls: Sequence[Call]) -> None:
    sources = calls[_root(calls[0])].inputs
    for source, call in zip(sources, calls, strict=True):
        copy(call.outputs[0], source)


def _barrier(calls: Sequence[Call]) -> None:
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
