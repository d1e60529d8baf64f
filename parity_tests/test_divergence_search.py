"""What the finder records of a step, compares and says; it sees every value."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dtensor_llm.config import Config
from dtensor_llm.model import GPT
from dtensor_llm.parity import Finding, Row, reference_arguments
from dtensor_llm.parity.finder.divergence import record_step, why_nothing
from dtensor_llm.parity.finder.explain import finding_of, module_around
from dtensor_llm.parity.finder.finding import PHASES
from dtensor_llm.parity.finder.observe import INPUT, Observation, watch_reference
from dtensor_llm.parity.finder.search import NOT_MODULES, Part, Search, Spot, place_of
from dtensor_llm.worlds import World, threads
from parity_tests.harness import LLAMA, SECONDS, batches_for, reference_for, small_config
from reference.training import train as train_reference


def run(config: Config, main: Callable[[World], Any]) -> list[Any]:
    return threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("2x2x2", {"dropout": 0.1}),
        ("2x2x2", {"dropout": 0.1, **LLAMA}),
        ("4x1x2", {"dropout": 0.1, **LLAMA, "kv_heads": 2}),
        ("2x1x1", {"dropout": 0.1, **LLAMA, "fused_qkv": True}),
        ("2x1x1", {"dropout": 0.1, "parallel_block": True, "gather_again": True}),
        ("2x2x1", {"dropout": 0.1, "parallel_block": True, "sequence_parallel": False}),
        ("2x1x2", {"dropout": 0.1, "tied_embeddings": False, "sequence_parallel": False}),
        ("1x1x1", {"dropout": 0.1, "micro_batch_size": 2, "optimizer": "sgd"}),
        ("tp=2x2,dp=2", {"dropout": 0.1, "micro_batch_size": 1}),
        ("tp=2x2,pp=2", {"dropout": 0.1, **LLAMA}),
        ("2x2x2", {"dropout": 0.1, "zero": 1}),
        ("dp_replicate=2,dp_shard=2", {"micro_batch_size": 1, "zero": 2}),
        ("1x2x2", {"schedule": "zbv", "layers": 5, "micro_batch_size": 1}),
        ("2x2x1", {"schedule": "interleaved-1f1b", "layers": 5, "tied_embeddings": False}),
    ],
)
def test_nothing_differs_in_a_step_without_a_fault(mesh: str, options: dict[str, Any]) -> None:
    """Every value of a step of every rank, with an uneven vocabulary."""
    config = small_config(mesh, **options)

    def main(world: World) -> tuple[set[str], Finding | None]:
        search = record_step(config, world, batches_for(config), train_reference, step=1)
        return {name for name, _ in search.observed.seen.values}, finding_of(search)

    results = run(config, main)
    assert [finding for _, finding in results] == [None] * len(results)
    seen = set().union(*(names for names, _ in results))
    assert seen == {name for name, _ in observed_reference(config).values if not is_weight(name)}


def is_weight(name: str) -> bool:
    return name.endswith((".weight", ".bias"))


def observed_reference(config: Config) -> Observation:
    seen = Observation()
    batches = [batches_for(config).batch(0)]
    train_reference(**reference_arguments(config, batches), watch={0: watch_reference(seen)})
    return seen


@pytest.mark.parametrize("options", [{"dropout": 0.1}, {"dropout": 0.1, **LLAMA}])
def test_reference_is_seen_under_the_names_of_the_model(options: dict[str, Any]) -> None:
    """Every module that computes, but for those that hold others without a result of their own."""
    config = small_config(**options)
    seen = observed_reference(config)
    with torch.device("meta"):
        model = GPT(config.model)
    modules = {name for name, module in model.named_modules() if name and name != "blocks"}
    names = {name for name, _ in seen.values if not is_weight(name) and name not in NOT_MODULES}
    assert {name for name in names if not name.endswith(INPUT)} == modules
    assert {name.removesuffix(INPUT) for name in names} <= modules
    weights = {name for name, _ in seen.values if is_weight(name)}
    assert weights == set(model.weights())


def test_watching_changes_nothing() -> None:
    config = small_config(dropout=0.1)
    arguments = reference_arguments(config, [batches_for(config).batch(s) for s in range(2)])
    watched = train_reference(**arguments, watch={1: watch_reference(Observation())})
    plain = reference_for(config)
    assert watched.losses == plain.losses
    assert all(torch.equal(x, plain.weights[name]) for name, x in watched.weights.items())


def test_order_and_flow_of_the_reference() -> None:
    seen = observed_reference(small_config())
    block = "blocks.1"
    assert seen.producers[f"{block}{INPUT}"] == ("blocks.0",)
    assert seen.producers[f"{block}.attention.output{INPUT}"] == tuple(
        f"{block}.attention.{name}" for name in ("query", "key", "value")
    )
    assert seen.consumers(f"{block}.attention_norm") == tuple(
        f"{block}.attention.{name}" for name in ("query", "key", "value")
    )
    assert seen.consumers(f"{block}{INPUT}") == (f"{block}.attention_norm",)
    assert seen.consumers(f"{block}.attention") == (f"{block}.mlp_norm",)
    assert seen.consumers("head") == ("loss",)
    backward = [name for name, _ in seen.gradients]
    assert backward[:4] == ["loss", "head", "final_norm", block]
    assert backward.index("blocks.0") > backward.index(f"{block}{INPUT}")


def test_module_around_several() -> None:
    assert module_around(["blocks.0.mlp.up", "blocks.0.mlp.gate"]) == "blocks.0.mlp"
    assert module_around(["head"]) == "head"
    assert module_around(["blocks.0.mlp", "blocks.1"]) == ""
    assert module_around([]) == ""


def searching(main: Callable[[Search], None], mesh: str = "1x1x1", **options: Any) -> None:
    """Call `main` on every rank with what it recorded of the second step, without a fault."""
    config = small_config(mesh, **options)

    def search(world: World) -> None:
        main(record_step(config, world, batches_for(config), train_reference, step=1))

    run(config, search)


def every_value(search: Search) -> list[Tensor]:
    """All that this rank recorded."""
    observed = search.observed
    states = [named for state in (observed.state, search.before) for named in state.values()]
    sources = [observed.weights, observed.seen.values, observed.seen.gradients, observed.gradients]
    return [x for named in [*sources, *states] for x in named.values()]


@contextmanager
def changed(x: Tensor) -> Iterator[None]:
    """The last element is off by a little, or by one where it is a whole number."""
    last = (-1,) * x.ndim
    before = x[last].clone()
    x[last] += 1e-6 if x.is_floating_point() else 1
    try:
        yield
    finally:
        x[last] = before


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("1x1x1", {"micro_batch_size": 4, "dropout": 0.1}),
        ("2x1x1", LLAMA),
    ],
)
def test_every_value_is_compared(mesh: str, options: dict[str, Any]) -> None:
    """Whichever recorded value is changed, that is seen where it is compared, and nowhere else."""

    def main(search: Search) -> None:
        spots = [spot for _, spots in search.spots() for spot in spots]
        values = {id(part.found): part.found for spot in spots if (part := part_of(search, spot))}
        assert values.keys() == {id(x) for x in every_value(search)}
        for spot in spots:
            part = part_of(search, spot)
            if part is not None:
                with changed(part.found):
                    suspect = search.suspect(spot)
                assert suspect is not None and suspect.spot == spot
        assert search.suspects() == []

    searching(main, mesh, **options)


def part_of(search: Search, spot: Spot) -> Part | None:
    """None for the numbers that all ranks have in common."""
    return search.part(spot) if search.scalars(spot) is None else None


def test_first_in_the_order_of_causes() -> None:
    """Of many values: the earliest phase, then the order of the reference, then the microbatch."""

    def main(search: Search) -> None:
        seen = search.observed.seen
        later = [search.observed.gradients["head.weight"], seen.gradients["blocks.1", 0]]
        later += [seen.values["blocks.1", 0], seen.values["blocks.0.mlp", 1]]
        with ExitStack() as stack:
            for x in later:
                stack.enter_context(changed(x))
            [first] = search.suspects()
        assert (first.spot.phase, first.spot.name, first.spot.microbatch) == (
            "forward",
            "blocks.0.mlp",
            1,
        )

    searching(main, micro_batch_size=4, tied_embeddings=False)


def test_value_that_is_missing_or_of_another_shape() -> None:
    def main(search: Search) -> None:
        values, gradients = search.observed.seen.values, search.observed.seen.gradients
        with patch.dict(values):
            del values["blocks.1.mlp", 1]
            [suspect] = search.suspects()
        assert (suspect.spot.name, suspect.problem) == ("blocks.1.mlp", "it is not computed")
        with patch.dict(gradients):
            del gradients["blocks.1.mlp", 1]
            [suspect] = search.suspects()
        assert (suspect.spot.phase, suspect.problem) == ("backward", "no gradient arrives there")
        with patch.dict(values):
            values["head", 0] = values["head", 0][:, :, :50]
            [suspect] = search.suspects()
            finding = finding_of(search)
        assert suspect.problem == "its shape is (4, 8, 50), no part of the reference's (8, 8, 61)"
        assert finding is not None and finding.diagnosis == suspect.problem
        assert suspect.problem in str(finding)

    searching(main, micro_batch_size=4)


def test_place_of_a_value_is_read_off_its_shape() -> None:
    rows = slice(4, 6)
    assert place_of((2, 8, 32), (8, 8, 32), rows, 1, 2) == (rows, slice(0, 8), slice(0, 32))
    assert place_of((2, 4, 32), (8, 8, 32), rows, 1, 2) == (rows, slice(4, 8), slice(0, 32))
    assert place_of((2, 8, 13), (8, 8, 61), rows, 3, 4) == (rows, slice(0, 8), slice(48, 61))
    assert place_of((2, 8, 15), (8, 8, 61), rows, 3, 4) is None
    assert place_of((3, 8, 32), (8, 8, 32), rows, 0, 1) is None
    assert place_of((2, 8), (8, 8, 32), rows, 0, 1) is None


def test_finding_in_words() -> None:
    found = Finding(
        step=0,
        phase="backward",
        name="head",
        at="final_norm",
        what="output",
        microbatch=1,
        rank=3,
        coordinates={"pp": 1, "tp": 1},
        index=(4, 7),
        value=0.25,
        expected=0.5,
        error=0.5,
        neighbours=("head",),
        diagnosis="0.5 times what is right, throughout: 1/tp",
        tolerance=1e-9,
    )
    assert str(found).splitlines() == [
        "first divergence: step 1, backward pass: gradient at the output of final_norm, "
        "microbatch 2, rank 3 (pp 1, tp 1)",
        "  at [4, 7] 0.25, where 0.5 is right: error 5.0e-01, where rounding gives less than 1e-09",
        "  the forward pass is right, and so is every gradient that comes before on the way back: "
        "look into the backward pass of head, between head and the output of final_norm",
        "  0.5 times what is right, throughout: 1/tp",
    ]
    assert found.names == ("head", "final_norm", "backward")
    assert found.points_at("final_*") and not found.points_at("blocks.*")
    bias = dataclasses.replace(found, phase="gradient", name="head.bias", at="head.bias")
    assert bias.names == ("head.bias", "head", "gradient")
    for phase in PHASES:
        text = str(dataclasses.replace(found, phase=phase, name=phase, coordinates={}))
        assert text.startswith(f"first divergence: step 1, {phase}")


@pytest.mark.parametrize(
    ("dtype", "error", "text"),
    [
        ("float32", 3e-7, "what differs in float32 is a matter of precision"),
        ("float32", 5e-2, "an error of 5.0e-02 is more than rounding makes of it in float32: look"),
        ("float64", 3e-11, "which is as fine as this search is; the report's error is 3.0e-11"),
    ],
)
def test_what_is_said_where_float64_shows_nothing(dtype: str, error: float, text: str) -> None:
    """An error far beyond its bound is no rounding, though it is gone in float64."""
    assert text in why_nothing(dtype, Row("loss", "step 1", error, bound=1e-7))
