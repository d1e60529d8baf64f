"""Finds where a run first parts from the reference: step, module, microbatch, element.

Two trainings at most: one to find the step (unless it is known), and one up to that step, which
then is recorded value by value (`observe`). Each rank compares what it holds with the same elements
of the reference, so that nothing is gathered but what differs. The search is in float64, whatever
the run was in: a bug is still there, and rounding is out of the way.

It believes no plan. Which part of a value a rank holds is read off the shape: its sequences are
those of its data-parallel coordinate, and a dim that is shorter than it should be is the rank's
share on the tp axis.

The order of causes: what the model is given, its weights, the forward pass in the reference's order
of execution, the loss, the backward pass, the gradients of parameters, their norm, the update.
"""

import dataclasses
from typing import Any, Protocol

from dtensor_llm.config import Config
from dtensor_llm.data import Batch
from dtensor_llm.parity.check import ParityCheck, copied, own_state
from dtensor_llm.parity.expect import TrainReference, reference_arguments
from dtensor_llm.parity.finder.explain import finding_of
from dtensor_llm.parity.finder.finding import ROUNDING, Finding
from dtensor_llm.parity.finder.observe import Observation, observed_step, watch_reference
from dtensor_llm.parity.finder.search import TOLERANCE, ReferenceRun, Search
from dtensor_llm.parity.report import Row
from dtensor_llm.parity.verdict import Expectation
from dtensor_llm.train import Trainer, TrainingError, watched_step
from dtensor_llm.worlds import World

MUCH = 100.0  # times a bound of lower precision: beyond, nobody takes an error for rounding


class Batches(Protocol):
    """What `data.Dataset` is here: the global batch of a step, or some of its rows."""

    def batch(self, step: int, samples: slice | None = None) -> Batch: ...


def find_divergence(
    config: Config,
    world: World,
    batches: Batches,
    train_reference: TrainReference,
    first: Row | None = None,
) -> Finding | None:
    """The first number in which training `config` parts from the reference; None if none does.

    Every rank calls it and gets the same finding. Trains anew, in float64.

    Args:
        config: what was trained.
        world: of this rank.
        batches: what it is trained on.
        train_reference: `reference.training.train`.
        first: the first difference of a report (`Report.first`), which saves the search for the
            step. If in float64 there is none, the finding's phase is ROUNDING.

    Comm: that of the training; what differs, gathered from all ranks as Python objects.
    """
    exact = dataclasses.replace(config, train=dataclasses.replace(config.train, dtype="float64"))
    known = first.step if first is not None and config.train.dtype == "float64" else None
    finding = None
    if known is not None:
        finding = finding_of(record_step(exact, world, batches, train_reference, known))
    if finding is None or finding.step != known:  # the report's first may have been a later one
        step = first_differing_step(exact, world, batches, train_reference)
        if step is not None:
            finding = finding_of(record_step(exact, world, batches, train_reference, step))
    if finding is not None or first is None:
        return finding
    return Finding(
        0,
        ROUNDING,
        ROUNDING,
        diagnosis=why_nothing(config.train.dtype, first),
        tolerance=TOLERANCE,
    )


def why_nothing(dtype: str, first: Row) -> str:
    every = f"in float64 every number is the reference's to {TOLERANCE:.0e}"
    if dtype == "float64":
        return (
            f"{every}, which is as fine as this search is; the report's error is {first.error:.1e}"
        )
    if first.error > MUCH * first.bound:
        return (
            f"{every}; an error of {first.error:.1e} is more than rounding makes of it in {dtype}: "
            "look for what depends on the dtype, or on how many bytes something has"
        )
    return f"{every}: what differs in {dtype} is a matter of precision"


def first_differing_step(
    config: Config, world: World, batches: Batches, train_reference: TrainReference
) -> int | None:
    """Train all steps beside the reference; a step that ends in no finite number differs."""
    trainer = Trainer(config, world)
    check = ParityCheck(trainer)
    steps = config.train.steps
    for step in range(steps):
        try:
            watched_step(trainer, step, batches.batch(step, trainer.samples), [check])
        except TrainingError:
            break
    done = len(check.results)
    if done > 0:
        reference = world.share(
            lambda: train_reference(
                **reference_arguments(config, [batches.batch(step) for step in range(done)])
            )
        )
        report = check.compare(Expectation(reference, bound=TOLERANCE))
        if report.first is not None:
            return report.first.step
    return done if done < steps else None


def record_step(
    config: Config, world: World, batches: Batches, train_reference: TrainReference, step: int
) -> Search:
    """Train up to a step and record it, on this rank and on one device."""

    def trained() -> tuple[ReferenceRun, Observation]:
        observation = Observation()
        arguments = reference_arguments(
            config,
            [batches.batch(index) for index in range(step + 1)],
            steps=(step - 1, step),
        )
        run: Any = train_reference(**arguments, watch={step: watch_reference(observation)})
        return run, observation

    run, reference = world.share(trained)
    trainer = Trainer(config, world)
    for earlier in range(step):
        batch = batches.batch(earlier, trainer.samples)
        trainer.step(earlier, batch.tokens, batch.labels)
    before = {quantity: copied(parts) for quantity, parts in own_state(trainer).items()}
    names = [name for name, _ in reference.values]
    observed = observed_step(trainer, step, batches.batch(step, trainer.samples), names)
    return Search(trainer, step, run, reference, observed, before)
