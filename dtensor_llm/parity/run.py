"""What a recorded run is, whoever ran it: numbers of each step, tensors of some."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

Tensors = Mapping[str, Mapping[str, Tensor]]
"""{quantity: {parameter name: tensor}}; a quantity that the optimizer lacks is left out."""

QUANTITIES = ("gradient", "weight", "exp_avg", "exp_avg_sq", "momentum")
"""In the order in which a step makes them: the gradient, before clipping, and what it updates."""


class Incomparable(ValueError):
    """Two runs cannot be compared: other parameters, or no bound that would judge them."""


class Run(Protocol):
    """A recorded run; its tensors are whole, by the names they have in the whole model."""

    @property
    def losses(self) -> Sequence[float]:
        """Of each step: the mean over the valid tokens of the global batch."""

    @property
    def gradient_norms(self) -> Sequence[float]:
        """Of each step, before clipping."""

    @property
    def tensors_at(self) -> Mapping[int, Tensors]:
        """Of the steps, counted from 0, whose tensors were recorded."""


def prepared(quantity: str, x: Tensor) -> Tensor:
    """The tensor as it is compared: of the second moment the root, which the update divides by."""
    return x.sqrt() if quantity == "exp_avg_sq" else x


def check_parameters(
    step: int, quantity: str, own: Mapping[str, Any], whole: Mapping[str, Any]
) -> None:
    """Refuse to compare what has other names or shapes; of numbers, the names.

    Raises:
        Incomparable: naming what is missing, what is too much, or the two shapes.
    """
    place = f"step {step + 1}, {quantity}"
    only = {"only in the first": own.keys() - whole.keys()}
    only["only in the second"] = whole.keys() - own.keys()
    texts = [f"{where}: {', '.join(sorted(names))}" for where, names in only.items() if names]
    if texts:
        raise Incomparable(f"{place}: the two runs name other parameters; {'; '.join(texts)}")
    for name, x in own.items():
        if isinstance(x, Tensor) and x.shape != whole[name].shape:
            raise Incomparable(
                f"{place} of {name}: shape {tuple(x.shape)} in the first, "
                f"{tuple(whole[name].shape)} in the second"
            )
