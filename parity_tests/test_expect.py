"""What a run is held to: which trainings are made for it, and that each part can fail a run."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from dtensor_llm.parity import Expectation, ParityCheck, compare_runs, expect, judge
from dtensor_llm.parity.expect import NUM_SEEDS
from dtensor_llm.parity.verdict import OF_RMS, judged_errors
from dtensor_llm.train import Trainer, watched_step
from dtensor_llm.worlds import World, threads
from parity_tests.harness import SECONDS, batches_for, reference_for, small_config
from reference.training import Run
from reference.training import train as train_reference

Places = dict[tuple[int, str], float]  # {(step, quantity): by how much it is off there}
QUANTITIES = ("gradient", "weight", "exp_avg")


def run(error: float = 0.0, *, at: Places | None = None) -> Run:
    """Two recorded steps that are `error` off everywhere, and `at` some places more."""

    def tensor(step: int, quantity: str) -> Tensor:
        off = error + (at or {}).get((step, quantity), 0.0)
        return torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64) + off

    made = Run({}, losses=[2.0 + error] * 2, gradient_norms=[1.0 + error] * 2)
    for step in (0, 1):
        made.tensors_at[step] = {q: {"a": tensor(step, q)} for q in QUANTITIES}
    return made


class Trainings:
    """Stands for `reference.training.train`, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def __call__(self, **arguments: Any) -> Run:
        self.asked.append(arguments)
        training = arguments["training"]
        low = training["dtype"] != "float64"
        return run(1e-6 * (1 + training["seed"] % 5) if low else 0.0)

    def of(self, key: str) -> list[Any]:
        return [asked["training"][key] for asked in self.asked]


def expectation(trainings: Trainings, **options: Any) -> Expectation:
    config = small_config(**options)
    batches = [batches_for(config).batch(step) for step in range(config.train.steps)]
    return expect(config, batches, trainings, steps=(0, 1))


def test_float64_is_one_training_and_a_control_in_reverse_when_it_is_needed() -> None:
    trainings = Trainings()
    expected = expectation(trainings)
    assert len(trainings.asked) == 1
    assert expected.control is not None
    expected.control()
    first, control = trainings.asked
    assert (first["reverse"], first["microbatches"]) == (False, 1)
    assert (control["reverse"], control["microbatches"]) == (True, 8)
    assert all(asked["tensors_of"] == (0, 1) for asked in trainings.asked)
    assert trainings.of("dtype") == ["float64", "float64"]


def test_lower_precision_is_two_trainings_for_each_of_16_seeds() -> None:
    trainings = Trainings()
    expected = expectation(trainings, dtype="float32", seed=3)
    assert NUM_SEEDS == 16
    assert sorted(set(trainings.of("seed"))) == list(range(3, 19))
    assert len(trainings.asked) == 2 * NUM_SEEDS
    assert trainings.of("dtype").count("float32") == NUM_SEEDS
    assert expected.yardstick == judged_errors(compare_runs(run(5e-6), run())), "the worst seed's"


def judged(error: float, at: Places | None = None) -> list[str]:
    """What fails, of a run so far off, where one device is 1e-6 off."""
    one_device, exact = run(1e-6), run()
    expected = Expectation(exact, yardstick=judged_errors(compare_runs(one_device, exact)))
    report = judge(compare_runs(run(error, at=at), exact), expected)
    every = ["loss", "gradient norm", *(q + end for q in QUANTITIES for end in ("", OF_RMS))]
    assert [row.quantity for row in report.rows] == every
    return [row.quantity for row in report.rows if not row.passed]


def test_lower_precision_fails_at_more_than_twice_one_device() -> None:
    assert judged(1.9e-6) == []
    assert len(judged(2.1e-6)) == 8


@pytest.mark.parametrize(
    ("step", "quantity", "counts"),
    [(0, "gradient", True), (1, "gradient", False), (1, "weight", True), (0, "weight", False)],
)
def test_lower_precision_judges_the_first_gradients_and_the_last_state(
    step: int, quantity: str, counts: bool
) -> None:
    wrong = judged(1e-6, {(step, quantity): 1e-4})
    assert wrong == ([quantity, quantity + OF_RMS] if counts else [])


def test_float64_judges_every_step() -> None:
    for step in (0, 1):
        for quantity in QUANTITIES:
            other = run(at={(step, quantity): 1e-9})
            report = judge(compare_runs(other, run()), Expectation(run()))
            assert [r.quantity for r in report.rows if not r.passed] == [quantity]
            assert report.first is not None
            assert (report.first.step, report.first.quantity) == (step, quantity)


@pytest.mark.parametrize("mesh", ["1x1x4", "2x1x2", "1x4x1", "dp_replicate=2,dp_shard=2"])
def test_wrong_element_of_any_rank_is_seen(mesh: str) -> None:
    """Also of one that holds a copy, and of the ranks between the first and the last."""
    config = small_config(mesh, layers=4, steps=1)
    reference = reference_for(config)

    def main(world: World, spoiled: int) -> tuple[bool, bool]:
        trainer = Trainer(config, world)
        check = ParityCheck(trainer)
        watched_step(trainer, 0, batches_for(config).batch(0, trainer.samples), [check])
        held = [x for x in check.kept[0]["weight"].values() if x.numel()]
        before = check.compare(Expectation(reference)).passed
        if world.rank == spoiled:
            held[-1].view(-1)[-1] += 1e-6
        return before, check.compare(Expectation(reference)).passed

    for rank in range(4):
        results = threads.run(4, lambda world, rank=rank: main(world, rank), timeout=SECONDS)
        assert set(results) == {(True, False)}, rank


def test_squares_of_all_ranks_add_up_to_those_of_whole_tensors() -> None:
    config = small_config("2x1x2", steps=1)
    reference = reference_for(config)
    shifted = dataclasses.replace(reference, tensors_at={})
    shifted.tensors_at[0] = {
        quantity: {name: x + 1e-3 for name, x in named.items()}
        for quantity, named in reference.tensors_at[0].items()
    }

    def main(world: World) -> Any:
        trainer = Trainer(config, world)
        check = ParityCheck(trainer)
        watched_step(trainer, 0, batches_for(config).batch(0, trainer.samples), [check])
        return check.measure(shifted).differences

    found = threads.run(4, main, timeout=SECONDS)[0][0]["weight"]
    for name, x in reference.tensors_at[0]["weight"].items():
        assert found[name].squares == pytest.approx(1e-6 * x.numel(), rel=1e-6), name


def test_the_real_reference_is_what_expect_trains() -> None:
    config = small_config()
    batches = [batches_for(config).batch(step) for step in range(2)]
    expected = expect(config, batches, train_reference)
    assert judge(compare_runs(reference_for(config), expected.reference), expected).passed
