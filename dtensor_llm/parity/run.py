"""What a recorded run is, whoever ran it: numbers of each step, tensors of some."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

Tensors = Mapping[str, Mapping[str, Tensor]]
"""{quantity: {parameter name: tensor}}; a quantity that the optimizer lacks is left out."""

QUANTITIES = ("gradient", "weight", "exp_avg", "exp_avg_sq", "momentum")
"""In the order in which a step makes them: the gradient, before clipping, and what it updates."""


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
