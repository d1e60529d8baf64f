"""Faults of several pipeline stages on a rank: split backwards, and a tied weight held twice."""

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

from dtensor_llm.optimizer import Optimizer
from dtensor_llm.parallel import pipeline_parallel
from parity_tests.faults.fault import fault

V: dict[str, Any] = {"schedule": "zbv", "layers": 4, "micro_batch_size": 1}

of_backward = partial(fault, "backward", "pipeline_parallel")
of_reduction = partial(fault, "reduction", "pipeline_parallel")
of_update = partial(fault, "optimizer", "pipeline_parallel")


@of_backward(
    "1x2x1",
    "gradient",
    sabotaged="blocks.[123].* or final_norm.* or token_embedding.weight",
    symptom="Activations and their gradients are right; most weights learn from 7 of 8 sequences.",
    **V,
)
def half_of_a_split_backward_left_out() -> Iterator[None]:
    """The weights' half of the last microbatch's backward is not done."""
    stage = pipeline_parallel.Stage
    do = stage.backward_weight_one_chunk

    def wrong(self: Any, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if bwd_chunk_id < self.chunks - 1 or self.is_first:
            do(self, bwd_chunk_id, last_backward)

    with patch.object(stage, "backward_weight_one_chunk", wrong):
        yield


def without_copies(method: Any) -> Any:
    """The optimizer's method, as if no weight were on the rank twice."""

    def wrong(self: Optimizer, *args: Any) -> Any:
        copies, self.copies = self.copies, {}
        try:
            return method(self, *args)
        finally:
            self.copies = copies

    return wrong


@of_reduction(
    "1x2x2",
    "gradient",
    "token_embedding",
    sabotaged="token_embedding.weight",
    symptom="The embedding learns from its look-ups alone, not from the logits.",
    **V,
)
def second_copy_does_not_add_its_gradient() -> Iterator[None]:
    """Of a tied embedding that a rank holds twice, the head's gradient is forgotten."""
    with patch.object(Optimizer, "take_gradients", without_copies(Optimizer.take_gradients)):
        yield


@of_update(
    "1x2x2",
    "loss",
    sabotaged="head",
    symptom="The first step is right; from then on the head is that of the beginning.",
    **V,
)
def second_copy_is_left_behind() -> Iterator[None]:
    """Of a tied embedding that a rank holds twice, the head's copy is not updated."""
    with patch.object(Optimizer, "step", without_copies(Optimizer.step)):
        yield
