"""parity.py: each error formula by hand, what is infinite, the control, the report's text."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from dtensor_llm.config import Config, ModelConfig, TrainConfig
from dtensor_llm.parity import (
    BOUND,
    CONTROL_FACTOR,
    ParityCheck,
    Report,
    Row,
    compare_runs,
    largest_difference,
    reference_arguments,
    relative_errors,
    scalar_row,
)
from dtensor_llm.train import StepResult, Trainer
from dtensor_llm.worlds import World, processes, threads
from parity_tests.harness import SECONDS, batches_for, reference_for, small_config
from reference.training import OptimizerState, Run
from reference.training import train as train_reference

INFINITE = math.inf


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# The error of a tensor


@pytest.mark.parametrize(
    ("quantity", "largest", "expected"),
    [
        # Own largest entry 4 with G = 100: f G = 0.1 for gradients and moments, 100 for weights.
        ("gradient", 4.0, 1e-9 / 4.0),
        ("exp_avg", 4.0, 1e-9 / 4.0),
        ("exp_avg_sq", 4.0, 1e-9 / 4.0),
        ("momentum", 4.0, 1e-9 / 4.0),
        ("weight", 4.0, 1e-9 / 100.0),
        # Tiny tensors, such as the gradient of a key bias: the floor.
        ("gradient", 1e-17, 1e-9 / 0.1),
        ("exp_avg", 1e-17, 1e-9 / 0.1),
        ("exp_avg_sq", 0.0, 1e-9 / 0.1),
        ("momentum", 0.0, 1e-9 / 0.1),
        ("weight", 0.0, 1e-9 / 100.0),
    ],
)
def test_error_of_a_tensor(quantity: str, largest: float, expected: float) -> None:
    whole = {"small": vector(largest, -largest / 2), "large": vector(0.0, -100.0)}
    errors = relative_errors(quantity, {"small": 1e-9, "large": 0.0}, whole)
    assert errors == {"small": pytest.approx(expected, rel=1e-15), "large": 0.0}


def test_tensors_that_are_all_zero() -> None:
    whole = {"a": vector(0.0), "b": vector(0.0)}
    errors = relative_errors("gradient", {"a": 0.0, "b": 1e-300}, whole)
    assert errors == {"a": 0.0, "b": INFINITE}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_infinitely_wrong(bad: float) -> None:
    good = vector(1.0, 2.0)
    assert largest_difference(good, good) == 0.0
    assert largest_difference(vector(1.0, bad), good) == INFINITE
    assert largest_difference(good, vector(bad, 2.0)) == INFINITE
    assert largest_difference(vector(bad), vector(bad)) == INFINITE, "infinity agrees with nothing"
    whole = {"a": vector(1.0, bad), "b": good}
    assert relative_errors("weight", {"a": INFINITE, "b": 0.0}, whole)["a"] == INFINITE


def test_largest_difference_of_parts() -> None:
    assert largest_difference(vector(1.0, 5.0, 2.0), vector(1.5, 4.0, 2.0)) == 1.0
    assert largest_difference(torch.empty(0, 3), torch.empty(0, 3)) == 0.0
    with pytest.raises(AssertionError, match=r"\(2,\) against the reference's \(3,\)"):
        largest_difference(vector(1.0, 2.0), vector(1.0, 2.0, 3.0))


# The error of a scalar


def test_error_of_a_scalar_is_that_of_the_worst_step() -> None:
    """Steps are the entries of one tensor: the scale is the largest of them."""
    row = scalar_row("loss", [2.0, 4.0 + 2e-9, 8.0], [2.0, 4.0, 8.0 + 1e-9])
    assert (row.quantity, row.worst, row.bound) == ("loss", "step 2", BOUND)
    assert row.error == pytest.approx(0.25e-9, rel=1e-6)
    assert scalar_row("loss", [0.0], [0.0]).error == 0.0, "a step without a valid token"
    assert scalar_row("loss", [1e-300], [0.0]).error == INFINITE


@pytest.mark.parametrize(("a", "b"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, math.inf)])
def test_scalar_that_is_not_finite_is_infinitely_wrong(a: float, b: float) -> None:
    row = scalar_row("gradient norm", [1.0, a, 1.0], [1.0, b, 1.0])
    assert (row.worst, row.error, row.passed) == ("step 2", INFINITE, False)


def test_number_of_steps_must_agree() -> None:
    with pytest.raises(AssertionError, match="2 steps against the reference's 3"):
        scalar_row("loss", [1.0, 1.0], [1.0, 1.0, 1.0])


# The report


def test_report_tells_what_differs() -> None:
    rows = (
        Row("loss", "step 1", 0.0, BOUND),
        Row("gradient", "final_norm.weight", 3e-7, BOUND),
        Row("weight", "head.weight", BOUND, BOUND),
    )
    report = Report(rows)
    assert not report.passed
    assert report.largest is rows[1]
    assert str(report) == (
        "quantity    worst              error     bound     verdict\n"
        "----------  -----------------  --------  --------  ---------\n"
        "loss        step 1             0.00e+00  1.00e-12  ok\n"
        "gradient    final_norm.weight  3.00e-07  1.00e-12  FAIL\n"
        "weight      head.weight        1.00e-12  1.00e-12  ok\n"
        "largest error 3.00e-07 (gradient): DIFFERS from the reference: "
        "gradient of final_norm.weight"
    )
    good = Report(rows[::2])
    assert good.passed
    assert str(good).endswith("largest error 1.00e-12 (weight): equal")
    assert not Report((Row("loss", "step 1", INFINITE, BOUND),)).passed


# Comparing a trainer


def compare(
    mesh: str, reference: Run, control: Run | None = None, **options: Any
) -> tuple[Report, ...]:
    """Every rank's report of a training on `mesh`."""
    config = small_config(mesh, **options)

    def main(world: World) -> Report:
        return trained(Trainer(config, world)).compare(reference, control)

    return tuple(threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS))


def trained(trainer: Trainer) -> ParityCheck:
    check = ParityCheck(trainer)
    batches = batches_for(trainer.config)
    for step in range(trainer.config.train.steps):
        batch = batches.batch(step, trainer.samples)
        result = trainer.compute_gradients(step, batch.tokens, batch.labels)
        check.on_gradients(result)
        trainer.update(result)
    return check


def changed(run: Run, quantity: str, name: str, tensor: Tensor | None) -> Run:
    """The run with another tensor in one place, or without it."""

    def put(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        others = {key: value for key, value in tensors.items() if key != name}
        return others if tensor is None else others | {name: tensor}

    if quantity == "weight":
        return dataclasses.replace(run, weights=put(run.weights))
    if quantity == "gradient":
        return dataclasses.replace(run, gradients_at={0: put(run.gradients)})
    state = {"exp_avg": run.exp_avg, "exp_avg_sq": run.exp_avg_sq}
    state[quantity] = put(state[quantity])
    moments = OptimizerState(exp_avg=state["exp_avg"], exp_avg_sq=state["exp_avg_sq"])
    return dataclasses.replace(run, optimizer=moments)


@pytest.mark.parametrize("quantity", ["gradient", "weight", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("name", ["position_embedding.weight", "blocks.1.mlp_norm.bias"])
def test_one_wrong_element_is_found_wherever_it_is(quantity: str, name: str) -> None:
    """The last element, which the last rank holds; every rank gets the same report."""
    reference = reference_for(small_config())
    whole = {
        "gradient": reference.gradients,
        "weight": reference.weights,
        "exp_avg": reference.exp_avg,
        "exp_avg_sq": reference.exp_avg_sq,
    }[quantity]
    wrong = whole[name].clone()
    wrong.flatten()[-1] += 1e-6 * max(w.abs().max() for w in whole.values())
    reports = compare("1x1x2", changed(reference, quantity, name, wrong))
    assert str(reports[0]) == str(reports[1])
    assert [(r.quantity, r.worst) for r in reports[0].rows if not r.passed] == [(quantity, name)]


def test_reference_with_a_tensor_that_no_rank_holds_is_refused() -> None:
    reference = changed(reference_for(small_config()), "weight", "head.bias", torch.zeros(61))
    with pytest.raises(Exception, match=r"no rank holds the weight of \['head\.bias'\]"):
        compare("1x1x2", reference)


def test_tensor_that_the_reference_lacks_is_refused() -> None:
    reference = changed(reference_for(small_config()), "gradient", "final_norm.bias", None)
    with pytest.raises(Exception, match=r"lacks the gradient of \['final_norm\.bias'\]"):
        compare("1x1x2", reference)


def test_tensor_of_another_shape_is_refused() -> None:
    """Also where what a rank holds fits into it."""
    whole = reference_for(small_config()).weights["position_embedding.weight"]
    longer = torch.cat([whole, whole])
    reference = changed(
        reference_for(small_config()), "weight", "position_embedding.weight", longer
    )
    with pytest.raises(Exception, match=r"\(8, 32\) against the reference's \(16, 32\)"):
        compare("1x1x1", reference)


def test_sgd_is_compared_by_its_momentum() -> None:
    reference = reference_for(small_config(optimizer="sgd"))
    (report,) = compare("1x1x1", reference, optimizer="sgd")
    assert [row.quantity for row in report.rows] == [
        "loss",
        "gradient norm",
        "gradient",
        "weight",
        "momentum",
    ]
    assert report.passed


# The control


@pytest.mark.parametrize(
    ("steps", "lr", "needed"),
    [
        (3, 1e-2, False),
        (4, 1e-2, True),
        (3, 1.1e-2, True),
        (20, 1e-3, False),
        (21, 1e-3, True),
        (20, 1.1e-3, True),
        (1, 1.0, True),
    ],
)
def test_when_a_control_is_needed(steps: int, lr: float, needed: bool) -> None:
    assert Config(train=TrainConfig(steps=steps, lr=lr)).needs_control == needed


def test_what_amplifies_rounding_needs_a_control() -> None:
    """AdamW divides by eps where a true gradient is zero; large weights multiply in each block."""
    three = TrainConfig(steps=3, lr=1e-2)
    assert Config(train=dataclasses.replace(three, eps=1e-9)).needs_control
    assert not Config(train=dataclasses.replace(three, eps=1e-6)).needs_control
    assert Config(ModelConfig(init_std=0.2), three).needs_control


def run_of(weight: float, loss: float = 2.0, norm: float = 1.0) -> Run:
    tensors = {"a": vector(1.0, weight), "b": vector(10.0)}
    state = OptimizerState(exp_avg=tensors, exp_avg_sq=tensors)
    run = Run(tensors, state, losses=[loss], gradient_norms=[norm])
    run.gradients_at[0] = tensors
    return run


def test_two_runs_are_compared_by_the_same_formulas() -> None:
    rows = compare_runs(run_of(4.0 + 1e-6, loss=2.0 + 1e-9), run_of(4.0))
    assert [(row.quantity, row.worst) for row in rows] == [
        ("loss", "step 1"),
        ("gradient norm", "step 1"),
        ("gradient", "a"),
        ("weight", "a"),
        ("exp_avg", "a"),
        ("exp_avg_sq", "a"),
    ]
    expected = [0.5e-9, 0.0, 1e-6 / 4, 1e-6 / 10, 1e-6 / 4, 0.25e-6 / 2]
    for row, error in zip(rows, expected, strict=True):
        assert row.error == pytest.approx(error, rel=1e-6), row.quantity


def test_control_sets_the_bounds_and_never_below_the_fixed_one() -> None:
    reference = reference_for(small_config())
    weight = reference.weights["token_embedding.weight"]
    off = changed(reference, "weight", "token_embedding.weight", weight * (1 + 1e-9))
    (report,) = compare("1x1x1", reference, control=off)
    bounds = {row.quantity: row.bound for row in report.rows}
    expected = {row.quantity: row.error for row in compare_runs(off, reference)}["weight"]
    assert bounds.pop("weight") == pytest.approx(CONTROL_FACTOR * expected) != BOUND
    assert set(bounds.values()) == {BOUND}


def test_control_takes_single_sequences_from_last_to_first() -> None:
    config = small_config(dropout=0.1)
    batches = [batches_for(config).batch(step) for step in range(3)]
    arguments = reference_arguments(config, batches, reverse=True)
    assert (arguments["microbatches"], arguments["reverse"]) == (8, True)
    rows = compare_runs(train_reference(**arguments), reference_for(config))
    assert all(row.passed for row in rows), rows
    assert any(row.error > 0 for row in rows), "it rounds otherwise"


# The same run twice


Bits = tuple[list[StepResult], dict[str, Tensor]]


def bits_of_a_run(world: World) -> Bits:
    """Numbers and weights of one rank of a training on 2x2x2 with dropout."""
    trainer = Trainer(small_config("2x2x2", dropout=0.1), world)
    check = trained(trainer)
    return check.results, {n: shard.detach() for n, shard in trainer.optimizer.shards.items()}


def test_two_runs_on_the_same_mesh_have_the_same_bits() -> None:
    first, second = (threads.run(8, bits_of_a_run, timeout=SECONDS) for _ in range(2))
    for (results, weights), (other_results, other_weights) in zip(first, second, strict=True):
        assert results == other_results
        for name, weight in weights.items():
            assert weight.equal(other_weights[name]), name


def test_processes_differ_from_threads_by_rounding_at_most() -> None:
    """Of eight ranks' shares of the gradient norm: gloo adds them up in another order."""
    first = threads.run(8, bits_of_a_run, timeout=SECONDS)
    second = processes.spawn(8, bits_of_a_run, timeout=SECONDS)
    for (results, weights), (other_results, other_weights) in zip(first, second, strict=True):
        for result, other in zip(results, other_results, strict=True):
            assert result.loss == pytest.approx(other.loss, rel=1e-13)
            assert result.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-13)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, other_weights[name], rtol=0, atol=1e-13, msg=name)
