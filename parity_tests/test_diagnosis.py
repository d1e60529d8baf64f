"""The guess of a bug's class, from planted tensors: one for each class, and noise for none."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dtensor_llm.parity.finder.diagnosis import Evidence, diagnose, diagnose_norm, name_ratio

B, T, D, HEAD = 6, 8, 12, 4
DIMS = ("sequence", "token", "entry")
SIZES = {"tp": 2, "dp": 4, "the number of microbatches": 8}


def noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


WHOLE = noise(B, T, D)
MASK = noise(B, T, D, seed=9) > -0.5
DROPPED = WHOLE * MASK


def guess(found: Tensor, *where: slice, whole: Tensor = WHOLE, **known: Any) -> str:
    """The diagnosis of a part of the whole; dims not given are whole."""
    place = (*where, *(slice(0, size) for size in whole.shape[len(where) :]))
    options = {"sizes": SIZES, "dims": DIMS} | known
    return diagnose(Evidence(found=found, whole=whole, where=place, **options))


@pytest.mark.parametrize(
    ("factor", "name"),
    [
        (2.0, "tp"),
        (0.5, "1/tp"),
        (0.25, "1/dp"),
        (8.0, "the number of microbatches"),
        (1 / 32, "1/dp x 1/the number of microbatches"),
        (math.sqrt(2.0), "the root of tp"),
    ],
)
def test_constant_ratio_is_named(factor: float, name: str) -> None:
    rounding = 1 + 1e-14 * noise(B, T, D, seed=1)
    assert guess(WHOLE * factor * rounding).endswith(f"times what is right, throughout: {name}")


def test_ambiguous_ratio_names_all_sizes() -> None:
    assert name_ratio(2.0, {"tp": 2, "pp": 2, "dp": 3}) == "tp or pp"


def test_ratio_that_no_size_explains_is_still_a_fact() -> None:
    assert guess(WHOLE * 0.37) == "0.37 times what is right, throughout"


def test_ratio_of_a_single_number_is_no_evidence() -> None:
    scalar = torch.tensor(3.0, dtype=torch.float64)
    assert guess(scalar * 0.37, whole=scalar, dims=()) == ""
    assert guess(scalar * 2, whole=scalar, dims=()) == "2 times what is right, throughout: tp"


def test_turned_sign() -> None:
    assert guess(-WHOLE) == "the sign is turned"


def test_all_zero() -> None:
    assert guess(torch.zeros_like(WHOLE)) == "it is missing: all zero"


def test_not_finite() -> None:
    found = WHOLE.clone()
    found[0, 0, :2] = torch.nan
    assert guess(found) == f"2 of {B * T * D} entries are not finite"


def test_part_of_another_tp_rank() -> None:
    found = guess(WHOLE[:, :4], slice(0, B), slice(4, 8))
    assert found == "it is what belongs to tokens 0 to 3, where tokens 4 to 7 should be"


def test_rows_of_other_samples() -> None:
    found = guess(WHOLE[4:5], slice(1, 2))
    assert found == "it is what belongs to sequence 4, where sequence 1 should be"


def test_shard_of_another_rank() -> None:
    weight = noise(7, 3)
    found = guess(weight[0:3], slice(4, 7), whole=weight, dims=("row", "column"))
    assert found == "it is what belongs to rows 0 to 2, where rows 4 to 6 should be"


@pytest.mark.parametrize(("shift", "words"), [(1, "1 token too late"), (-2, "2 tokens too early")])
def test_shifted_tokens(shift: int, words: str) -> None:
    found = WHOLE.roll(shift, dims=1)
    assert guess(found) == f"shifted: everything is {words}"
    found[:, 0 if shift > 0 else -1] = 0.0  # padded in place of wrapped around
    assert guess(found) == f"shifted: everything is {words}"


def test_swapped_sequences() -> None:
    found = WHOLE[[0, 1, 4, 3, 2, 5]]
    assert guess(found).startswith("the sequences are in another order: 0, 1, 4, 3, 2, 5 for")


def test_permuted_heads() -> None:
    found = WHOLE.unflatten(-1, (-1, HEAD))[:, :, [1, 0, 2]].flatten(-2)
    assert guess(found, head_size=HEAD) == "the heads are in another order: 1, 0, 2 for 0, 1, 2"


def test_heads_exchanged_with_their_entries() -> None:
    found = WHOLE.unflatten(-1, (-1, HEAD)).mT.flatten(-2)
    text = "heads and the entries of a head are exchanged: entries 0, 4, 8, 1, 5, 9, 2, 6, ... for"
    assert guess(found, head_size=HEAD).startswith(text)


def test_sum_that_was_not_reduced() -> None:
    place = (slice(0, B), slice(0, T), slice(0, D))
    parts = [noise(B, T, D, seed=1), noise(B, T, D, seed=2)]
    parts.append(WHOLE - parts[0] - parts[1])
    text = guess(parts[0], peers={"dp": [], "tp": [(place, part) for part in parts]})
    assert text.endswith("the reduction over tp is missing")
    assert guess(parts[0], peers={"tp": [(place, part) for part in parts[:2]]}) == ""


def test_missing_slice() -> None:
    found = WHOLE.clone()
    found[:, 5:] = 0.0
    assert guess(found) == "missing: zero for tokens 5, 6, 7, and right elsewhere"


def test_another_dropout_mask() -> None:
    other = WHOLE * (noise(B, T, D, seed=10) > -0.5)
    assert guess(other, whole=DROPPED) == "another dropout mask"


def test_dropout_mask_of_another_rank() -> None:
    other = WHOLE[:, 4:] * MASK[:, :4]
    text = guess(other, slice(0, B), slice(4, 8), whole=DROPPED)
    assert text.startswith("another dropout mask: it is what belongs to tokens 0 to 3")


def test_elements_that_are_lost_are_no_dropout_mask() -> None:
    assert guess(DROPPED * (noise(B, T, D, seed=10) > -0.5), whole=DROPPED) == ""


def test_bias_too_often() -> None:
    bias = noise(D, seed=3)
    assert guess(WHOLE + 3 * bias, bias=bias) == "the bias counts 4 times"
    assert guess(WHOLE - bias, bias=bias) == "the bias is missing"
    assert guess(WHOLE + noise(D, seed=4), bias=bias).startswith("the same vector is added")
    own = guess((WHOLE + bias)[..., 6:], slice(0, B), slice(0, T), slice(6, D), bias=bias)
    assert own == "the bias counts 2 times"


def test_positions_of_another_shard() -> None:
    source, positions = noise(B, T, D, seed=5), noise(T, D, seed=6)
    found = source[:, 4:] + positions[:4]
    text = guess(found, slice(0, B), slice(4, 8), whole=source + positions, source=source)
    assert text == (
        "of what it adds: it is what belongs to tokens 0 to 3, where tokens 4 to 7 should be"
    )


def test_gradient_of_the_step_before() -> None:
    previous = noise(B, T, D, seed=7)
    assert "step before" in guess(WHOLE + 0.3 * previous, previous=previous)


def test_difference_in_some_slices_only() -> None:
    found = WHOLE.clone()
    found[:, [2, 7]] += noise(B, 2, D, seed=8)
    assert guess(found) == "right but for tokens 2, 7"


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_not_explained(seed: int) -> None:
    """Whatever is known around it."""
    other = noise(B, T, D, seed=20 + seed)
    known: dict[str, Any] = {
        "head_size": HEAD,
        "peers": {"tp": [((slice(0, B), slice(0, T), slice(0, D)), other)] * 2},
        "source": noise(B, T, D, seed=30),
        "bias": noise(D, seed=31),
        "previous": noise(B, T, D, seed=32),
    }
    assert guess(other, **known) == ""
    assert guess(WHOLE * (1 + 1e-3 * other), **known) == ""
    assert guess(2 * WHOLE * (1 + 1e-7 * other), **known) == ""


def test_nothing_is_said_of_what_is_right_or_of_another_shape() -> None:
    assert guess(WHOLE * (1 + 1e-13)) == ""
    assert guess(WHOLE[:, :3]) == ""


def test_constant_tensors_are_not_taken_for_moved_ones() -> None:
    """Weights of norms are all one: every slice equals every other."""
    ones = torch.ones(D, dtype=torch.float64)
    found = ones.clone()
    found[3] = 2.0
    assert guess(found, whole=ones, dims=("entry",)) == "right but for entry 3"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (math.sqrt(2 * 30), "the sum of squares is 2 times what is right: tp"),
        (math.sqrt(30 + 9), "the embedding counts twice"),
        (math.sqrt(30 - 9), "the embedding is left out"),
        (1.234 * math.sqrt(30), ""),
        (1.001 * math.sqrt(2 * 30), ""),
        (math.nan, ""),
    ],
)
def test_gradient_norm(found: float, words: str) -> None:
    squares = {"the embedding": 9.0, "others": 21.0}
    assert diagnose_norm(found, math.sqrt(30), squares, SIZES) == words


def test_evidence_is_not_changed() -> None:
    found, whole = -WHOLE, WHOLE.clone()
    evidence = Evidence(found, whole, tuple(slice(0, size) for size in whole.shape), dims=DIMS)
    before = dataclasses.replace(evidence, found=found.clone(), whole=whole.clone())
    diagnose(evidence)
    assert torch.equal(evidence.found, before.found) and torch.equal(evidence.whole, before.whole)
