"""What the reference expects of a configuration, in its dtype.

The library does not import its oracle: whoever checks passes `reference.training.train` in.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dtensor_llm.config import Config
from dtensor_llm.data import Batch
from dtensor_llm.parity.run import Run
from dtensor_llm.parity.verdict import Comparison, Expectation, compare_runs, judged_errors

NUM_SEEDS = 16  # that the errors of one device are taken over

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

    In float64 that is one training, and one more where the fixed bound is broken; in lower
    precision it is two for each of 16 seeds. `on_progress` is told what is being trained.
    """

    def train(config: Config, **changes: Any) -> Run:
        return train_reference(**reference_arguments(config, batches, **changes))

    on_progress("the reference, in float64")
    reference = train(config, steps=steps)
    dtype = config.train.dtype
    if dtype == "float64":
        reverse = reference_arguments(config, batches, steps=steps, reverse=True)
        control = partial(distance_between, train_reference, reverse, reference)
        return Expectation(reference, control=control)
    yardstick: dict[str, float] = {}
    for number in range(NUM_SEEDS):
        on_progress(f"one device in {dtype}: seed {number + 1} of {NUM_SEEDS}")
        seeded = with_seed(config, config.train.seed + number)
        exact = train(seeded, steps=steps) if number else reference
        run = train(seeded, steps=steps, dtype=dtype)
        errors = judged_errors(compare_runs(run, exact))
        yardstick = {name: max(error, yardstick.get(name, 0.0)) for name, error in errors.items()}
    return Expectation(reference, yardstick=yardstick)


def distance_between(
    train_reference: TrainReference, arguments: dict[str, Any], reference: Run
) -> Comparison:
    """How far another training by the reference is from it; ranks send each other this function."""
    return compare_runs(train_reference(**arguments), reference)


def with_seed(config: Config, seed: int) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))
