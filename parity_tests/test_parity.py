"""parity.py: each error formula by hand, what is infinite, the control, the report's text."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dtensor_llm.config import Config, ModelConfig, TrainConfig
from dtensor_llm.parity import (
    BOUND,
    CONTROL_FACTOR,
    Expectation,
    ParityCheck,
    Report,
    Row,
    compare_runs,
    judge,
    reference_arguments,
)
from dtensor_llm.parity.difference import combine, difference, relative_errors, size_of
from dtensor_llm.parity.verdict import scalar_row
from dtensor_llm.train import StepResult, Trainer, watched_step
from dtensor_llm.worlds import World, processes, threads
from parity_tests.harness import SECONDS, batches_for, reference_for, small_config
from reference.training import Run
from reference.training import train as train_reference

INFINITE = math.inf


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# The error of a tensor


def errors_of(
    quantity: str, apart: dict[str, Tensor], whole: dict[str, Tensor]
) -> dict[str, float]:
    differences = {
        name: difference(whole[name] + apart[name], b, b.shape) for name, b in whole.items()
    }
    return relative_errors(quantity, differences, {name: size_of(b) for name, b in whole.items()})


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
    errors = errors_of(quantity, {"small": vector(0.0, 1e-9), "large": vector(0.0, 0.0)}, whole)
    assert errors == {"small": pytest.approx(expected, rel=1e-6), "large": 0.0}


def test_tensors_that_are_all_zero() -> None:
    whole = {"a": vector(0.0), "b": vector(0.0)}
    errors = errors_of("gradient", {"a": vector(0.0), "b": vector(1e-300)}, whole)
    assert errors == {"a": 0.0, "b": INFINITE}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_infinitely_wrong(bad: float) -> None:
    good = vector(1.0, 2.0)
    assert largest(good, good) == 0.0
    assert largest(vector(1.0, bad), good) == INFINITE
    assert largest(good, vector(bad, 2.0)) == INFINITE
    assert largest(vector(bad), vector(bad)) == INFINITE, "infinity agrees with nothing"
    whole = {"a": vector(1.0, bad), "b": good}
    assert errors_of("weight", {"a": vector(0.0, 0.0), "b": good}, whole)["a"] == INFINITE


def largest(a: Tensor, b: Tensor) -> float:
    return difference(a, b, b.shape).largest


def test_difference_of_parts() -> None:
    """Of the whole matrix, a rank holds the last two columns of the first two rows."""
    a, b = torch.tensor([[1.0, 5.0], [2.0, 0.0]]), torch.tensor([[1.5, 4.0], [2.0, 0.0]])
    found = difference(a, b, (4, 3), (slice(0, 2), slice(1, 3)))
    assert (found.largest, found.squares) == (1.0, 1.25)
    assert (found.place, found.value, found.expected) == (2, 5.0, 4.0)
    below = difference(a, b, (4, 3), (slice(2, 4), slice(0, 2)))
    assert below.place == 2 * 3 + 1
    together = combine([dataclasses.replace(found, largest=0.5), below])
    assert (together.largest, together.squares, together.place) == (1.0, 2.5, below.place)


def test_part_without_elements_is_no_difference() -> None:
    none = difference(torch.empty(0, 3), torch.empty(0, 3), (5, 3), (slice(5, 5), slice(0, 3)))
    assert none.largest < 0
    assert combine([none, difference(vector(1.0), vector(1.0), (1,))]).largest == 0.0
    with pytest.raises(AssertionError, match=r"\(2,\) against the reference's \(3,\)"):
        largest(vector(1.0, 2.0), vector(1.0, 2.0, 3.0))


# The error of a scalar


def test_error_of_a_scalar_is_that_of_the_worst_step() -> None:
    """Steps are the entries of one tensor: the scale is the largest of them."""
    row = scalar_row("loss", [2.0, 4.0 + 2e-9, 8.0], [2.0, 4.0, 8.0 + 1e-9], BOUND)
    assert (row.quantity, row.worst, row.bound) == ("loss", "step 2", BOUND)
    assert row.error == pytest.approx(0.25e-9, rel=1e-6)
    assert scalar_row("loss", [0.0], [0.0], BOUND).error == 0.0, "a step without a valid token"
    assert scalar_row("loss", [1e-300], [0.0], BOUND).error == INFINITE


@pytest.mark.parametrize(("a", "b"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, math.inf)])
def test_scalar_that_is_not_finite_is_infinitely_wrong(a: float, b: float) -> None:
    row = scalar_row("gradient norm", [1.0, a, 1.0], [1.0, b, 1.0], BOUND)
    assert (row.worst, row.error, row.passed) == ("step 2", INFINITE, False)


def test_number_of_steps_must_agree() -> None:
    with pytest.raises(AssertionError, match="2 steps against the reference's 3"):
        scalar_row("loss", [1.0, 1.0], [1.0, 1.0, 1.0], BOUND)


# The report


def test_report_tells_what_differs() -> None:
    rows = (
        Row("loss", "step 1", 0.0, BOUND, 0),
        Row("gradient", "final_norm.weight", 3e-7, BOUND, 0, (17,), 0.25, 0.5),
        Row("weight", "head.weight", BOUND, BOUND, 2, (3, 4), 1.0, 1.0),
    )
    report = Report(rows, first=rows[1])
    assert not report.passed
    assert report.largest is rows[1]
    assert str(report) == (
        "quantity    worst              at    error     bound     verdict\n"
        "----------  -----------------  ----  --------  --------  ---------\n"
        "loss        step 1                   0.00e+00  1.00e-12  ok\n"
        "gradient    final_norm.weight  17    3.00e-07  1.00e-12  FAIL\n"
        "weight      head.weight        3, 4  1.00e-12  1.00e-12  ok\n"
        "largest error 3.00e-07 (gradient): DIFFERS from the reference: "
        "gradient of final_norm.weight\n"
        "first difference: gradient, final_norm.weight [17] of step 1: 0.25, where 0.5 is right"
    )
    near = Row("loss", "step 1", 1e-11, BOUND, 0, (), 5.0, 5.0 + 5e-11)
    assert str(Report((near,), near)).endswith("step 1: 5, where 5.00000000005 is right")
    good = Report(rows[::2])
    assert good.passed
    assert str(good).endswith("largest error 1.00e-12 (weight): equal")
    assert not Report((Row("loss", "step 1", INFINITE, BOUND),)).passed


# Comparing a trainer


def compare(
    mesh: str, reference: Run, control: Callable[[], Run] | None = None, **options: Any
) -> tuple[Report, ...]:
    """Every rank's report of a training on `mesh`."""
    config = small_config(mesh, **options)

    def main(world: World) -> Report:
        compared = control and (lambda: compare_runs(control(), reference))
        return trained(Trainer(config, world)).compare(Expectation(reference, compared))

    return tuple(threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS))


def trained(trainer: Trainer) -> ParityCheck:
    check = ParityCheck(trainer)
    batches = batches_for(trainer.config)
    for step in range(trainer.config.train.steps):
        batch = batches.batch(step, trainer.samples)
        watched_step(trainer, step, batch, [check])
    return check


def changed(run: Run, step: int, quantity: str, name: str, tensor: Tensor | None) -> Run:
    """The run with another tensor in one place, or without it."""
    tensors = {q: dict(named) for q, named in run.tensors_at[step].items()}
    tensors[quantity].pop(name, None)
    if tensor is not None:
        tensors[quantity][name] = tensor
    return dataclasses.replace(run, tensors_at=run.tensors_at | {step: tensors})


@pytest.mark.parametrize("quantity", ["gradient", "weight", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("name", ["position_embedding.weight", "blocks.1.mlp_norm.bias"])
def test_one_wrong_element_is_found_wherever_it_is(quantity: str, name: str) -> None:
    """The last element, which the last rank holds; every rank gets the same report."""
    reference = reference_for(small_config())
    for step in (0, 1):
        whole = reference.tensors_at[step][quantity]
        wrong = whole[name].clone()
        wrong.flatten()[-1] += 1e-6 * max(w.abs().max() for w in whole.values())
        reports = compare("1x1x2", changed(reference, step, quantity, name, wrong))
        assert reports[0] == reports[1]
        (row,) = (row for row in reports[0].rows if not row.passed)
        last = tuple(size - 1 for size in wrong.shape)
        assert (row.quantity, row.worst, row.step, row.index) == (quantity, name, step, last)
        assert reports[0].first == row


def test_reference_with_a_tensor_that_no_rank_holds_is_refused() -> None:
    extra = torch.zeros(61)
    reference = changed(reference_for(small_config()), 0, "weight", "head.bias", extra)
    with pytest.raises(Exception, match=r"no rank holds the weight of head\.bias"):
        compare("1x1x2", reference)


def test_tensor_that_the_reference_lacks_is_refused() -> None:
    reference = changed(reference_for(small_config()), 0, "gradient", "final_norm.bias", None)
    with pytest.raises(Exception, match=r"lacks \[\('gradient', 'final_norm\.bias'\)\]"):
        compare("1x1x2", reference)


def test_tensor_of_another_shape_is_refused() -> None:
    """Also where what a rank holds fits into it."""
    whole = reference_for(small_config()).weights["position_embedding.weight"]
    longer = torch.cat([whole, whole])
    reference = changed(
        reference_for(small_config()), 0, "weight", "position_embedding.weight", longer
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
    run = Run(tensors, losses=[loss], gradient_norms=[norm])
    run.tensors_at[0] = dict.fromkeys(("gradient", "weight", "exp_avg", "exp_avg_sq"), tensors)
    return run


def test_two_runs_are_compared_by_the_same_formulas() -> None:
    good = run_of(4.0)
    report = judge(compare_runs(run_of(4.0 + 1e-6, loss=2.0 + 1e-9), good), Expectation(good))
    assert [(row.quantity, row.worst) for row in report.rows] == [
        ("loss", "step 1"),
        ("gradient norm", "step 1"),
        ("gradient", "a"),
        ("weight", "a"),
        ("exp_avg", "a"),
        ("exp_avg_sq", "a"),
    ]
    expected = [0.5e-9, 0.0, 1e-6 / 4, 1e-6 / 10, 1e-6 / 4, 0.25e-6 / 2]
    for row, error in zip(report.rows, expected, strict=True):
        assert row.error == pytest.approx(error, rel=1e-6), row.quantity
    assert report.first == report.rows[0]


def test_control_sets_the_bounds_and_never_below_the_fixed_one() -> None:
    """What is 1e-9 off passes if the control is 2e-10 off, and nothing else gets more room."""
    reference = reference_for(small_config())
    name = "token_embedding.weight"
    weight = reference.tensors_at[1]["weight"][name]
    expected = changed(reference, 1, "weight", name, weight * (1 + 1e-9))
    (alone,) = compare("1x1x1", expected)
    assert [row.quantity for row in alone.rows if not row.passed] == ["weight"]

    control = changed(expected, 1, "weight", name, weight * (1 + 0.8e-9))
    (report,) = compare("1x1x1", expected, control=lambda: control)
    assert report.passed
    bounds = {row.quantity: row.bound for row in report.rows}
    error = compare_runs(control, expected).worst("weight", 0.0).error
    assert bounds.pop("weight") == pytest.approx(CONTROL_FACTOR * error) != BOUND
    assert set(bounds.values()) == {BOUND}

    near = changed(expected, 1, "weight", name, weight * (1 + 0.99e-9))
    (report,) = compare("1x1x1", expected, control=lambda: near)
    assert not report.passed, "the control is a tenth of a per cent of it off"


def test_control_is_not_trained_where_the_fixed_bound_holds() -> None:
    def control() -> Run:
        raise AssertionError("not needed")

    (report,) = compare("1x1x1", reference_for(small_config()), control=control)
    assert report.passed


def test_control_takes_single_sequences_from_last_to_first() -> None:
    config = small_config(dropout=0.1)
    batches = [batches_for(config).batch(step) for step in range(2)]
    arguments = reference_arguments(config, batches, reverse=True)
    assert (arguments["microbatches"], arguments["reverse"]) == (8, True)
    reference = reference_for(config)
    report = judge(compare_runs(train_reference(**arguments), reference), Expectation(reference))
    assert report.passed, report
    assert report.largest.error > 0, "it rounds otherwise"


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
