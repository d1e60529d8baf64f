"""How far a tensor is from the same tensor of the reference.

The error of tensor t in quantity Q is

    max|a - b| / max(max|b|, f G),        G the largest |entry| of Q over all tensors,

with f = 1e-3 for gradients and moments and f = 1 for weights, where Adam multiplies rounding by
lr/eps. The floor is for tensors whose true gradient is zero, such as the bias of a key projection.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

FLOOR, FLOOR_OF_WEIGHTS = 1e-3, 1.0


@dataclass(frozen=True)
class Difference:
    """Between a tensor, or a part of it, and the reference's.

    Args:
        largest: of |a - b| over the elements; infinite where one of them is not finite, -1 where
            there is no element.
        squares: sum of (a - b)^2.
        place: index of the worst element in the flattened whole tensor.
        value: a there.
        expected: b there.
    """

    largest: float
    squares: float
    place: int
    value: float
    expected: float


NOTHING = Difference(-1.0, 0.0, 0, 0.0, 0.0)


@dataclass(frozen=True)
class Size:
    """What errors of a tensor are measured by: the reference's largest |entry|, sum of squares."""

    largest: float
    squares: float
    shape: tuple[int, ...]


def difference(
    a: Tensor, b: Tensor, shape: Sequence[int], where: tuple[slice, ...] | None = None
) -> Difference:
    """Between two tensors of one shape, which are the part `where` of a whole of `shape`."""
    assert_same_shape(a, b)
    if a.numel() == 0:
        return NOTHING
    apart = (a.double() - b.double()).flatten().abs_()
    worst = int(apart.argmax())  # one that is no number counts as the largest
    largest, squares = apart[worst].item(), apart.dot(apart).item()
    own, starts = worst, [s.start for s in where] if where is not None else [0] * a.ndim
    place, stride = 0, 1  # in the whole tensor
    for whole, size, start in zip(shape[::-1], a.shape[::-1], starts[::-1], strict=True):
        own, index = divmod(own, size)
        place += (index + start) * stride
        stride *= whole
    return Difference(
        largest=largest if math.isfinite(largest) else math.inf,
        squares=squares if math.isfinite(largest) else math.inf,
        place=place,
        value=a.flatten()[worst].item(),
        expected=b.flatten()[worst].item(),
    )


def combine(parts: Iterable[Difference]) -> Difference:
    """Of the parts of one tensor, the worst one's place and values; the sums of squares add up."""
    parts = list(parts)
    worst = max(parts, key=lambda part: part.largest)
    squares = sum(part.squares for part in parts)
    return Difference(worst.largest, squares, worst.place, worst.value, worst.expected)


def size_of(b: Tensor) -> Size:
    largest = b.abs().amax().item() if b.numel() else 0.0
    return Size(largest, b.double().square().sum().item(), tuple(b.shape))


def relative_errors(
    quantity: str, differences: Mapping[str, Difference], sizes: Mapping[str, Size]
) -> dict[str, float]:
    """{tensor: error} by the formula above."""
    factor = FLOOR_OF_WEIGHTS if quantity == "weight" else FLOOR
    floor = factor * max(size.largest for size in sizes.values())
    return {
        name: over(found.largest, max(sizes[name].largest, floor))
        for name, found in differences.items()
    }


def rms_error(differences: Mapping[str, Difference], sizes: Mapping[str, Size]) -> float:
    """Root mean square of a - b over all elements of a quantity, over that of b."""
    squares = sum(found.squares for found in differences.values())
    scale = sum(size.squares for size in sizes.values())
    return over(math.sqrt(squares), math.sqrt(scale)) if math.isfinite(squares) else math.inf


def over(apart: float, scale: float) -> float:
    """apart / scale; infinite where it is no number, and for something where nothing should be."""
    if not math.isfinite(apart) or math.isnan(scale):
        return math.inf
    return apart / scale if scale > 0 else (0.0 if apart == 0 else math.inf)


def assert_same_shape(a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape, f"{tuple(a.shape)} against the reference's {tuple(b.shape)}"
