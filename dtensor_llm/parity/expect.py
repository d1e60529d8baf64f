"""What the reference expects of a configuration, in its dtype.

The library does not import its oracle: whoever checks passes `reference.training.train` in.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from dtensor_llm.config import Config
from dtensor_llm.data import Batch
from dtensor_llm.parity.run import Run
from dtensor_llm.parity.verdict import SCALARS, Comparison, Expectation, compare_runs, error_of

NUM_SEEDS = 16  # that the yardstick of scalars is taken over

TrainReference = Callable[..., Run]
"""`reference.training.train`, or another oracle that takes `reference_arguments`."""


def reference_arguments(
    config: Config,
    batches: Sequence[Batch],
    *,
    reverse: bool = False,
    dtype: str = "float64",
    steps: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Keyword arguments for `reference.training.train`, which shares no types with this library.

    `batches` are whole global batches, one for each step; `steps` those whose tensors are to be
    kept, None for all. With `reverse`, the control: as many microbatches as sequences, taken from
    last to first.
    """
    training = dataclasses.asdict(config.train) | {
        "warmup_steps": config.train.num_warmup_steps,
        "dtype": dtype,
    }
    return {
        "model": dataclasses.asdict(config.model),
        "training": training,
        "batches": [(batch.tokens, batch.labels) for batch in batches],
        "microbatches": config.train.global_batch_size if reverse else 1,
        "reverse": reverse,
        "tensors_of": steps,
    }


def expect(
    config: Config,
    batches: Sequence[Batch],
    train_reference: TrainReference,
    *,
    steps: Sequence[int] | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Expectation:
    """Train the reference, and what its bounds are measured by: see `verdict`.

    In float64 that is one training, beyond the fixed bound two; in lower precision one and one of
    its own for each of 16 seeds. `on_progress` is told what is being trained.
    """

    def train(config: Config, **changes: Any) -> Run:
        return train_reference(**reference_arguments(config, batches, **changes))

    on_progress("the reference, in float64")
    reference = train(config, steps=steps)
    dtype = config.train.dtype
    if dtype == "float64":
        if not config.needs_control:
            return Expectation(reference)
        on_progress("the control: the reference with its microbatches in reverse order")
        return Expectation(reference, control=train(config, steps=steps, reverse=True))
    on_progress(f"one device in {dtype}")
    yardstick = train(config, steps=steps, dtype=dtype)
    scalars = scalar_errors(compare_runs(yardstick, reference))
    for number in range(1, NUM_SEEDS):
        on_progress(
            f"one device in {dtype}, for its loss and norm: seed {number + 1} of {NUM_SEEDS}"
        )
        other = with_seed(config, config.train.seed + number)
        runs = (train(other, steps=(), dtype=d) for d in (dtype, "float64"))
        errors = scalar_errors(compare_runs(*runs))
        scalars = {name: max(scalars[name], errors[name]) for name in SCALARS}
    return Expectation(reference, yardstick=yardstick, scalars=scalars)


def scalar_errors(run: Comparison) -> dict[str, float]:
    return {name: error_of(run, name) for name in SCALARS}


def with_seed(config: Config, seed: int) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))
