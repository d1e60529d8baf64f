"""Every strategy's reference computes the loss and gradients of the plain reference model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from reference import (
    data_parallel,
    pipeline_parallel,
    sequence_parallel,
    tensor_parallel,
    tensor_parallel_2d,
    training,
    zero,
)
from reference.model import Dropout, Model, ModelOptions, parameter_shapes
from reference.training import Gradients, loss_and_gradients

Strategy = Callable[..., tuple[float, Gradients]]


FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {
        "kv_heads": 4,
        "norm": "rmsnorm",
        "positions": "rope",
        "mlp": "swiglu",
        "ffn_width": 32,
        "bias": False,
    },
    "gpt2 fused": {"fused_qkv": True},
    "gpt2, parallel blocks": {"parallel_block": True},
}


STRATEGIES: dict[str, Strategy] = {
    "tp2": partial(tensor_parallel.loss_and_gradients, tp=2),
    "tp4": partial(tensor_parallel.loss_and_gradients, tp=4),
    "tp2 sequence parallel": partial(sequence_parallel.loss_and_gradients, tp=2),
    "tp2 overlapped": partial(sequence_parallel.loss_and_gradients, tp=2, overlapped=True),
    "tp4 overlapped": partial(sequence_parallel.loss_and_gradients, tp=4, overlapped=True),
    "tp4 sequence parallel": partial(sequence_parallel.loss_and_gradients, tp=4),
    "tp 2x2": partial(tensor_parallel_2d.loss_and_gradients, q=2),
    "tp 4x4": partial(tensor_parallel_2d.loss_and_gradients, q=4),
    "dp2": partial(data_parallel.loss_and_gradients, dp=2),
    "dp4, accumulation 2": partial(data_parallel.loss_and_gradients, dp=4, microbatches=2),
    "zero dp2": partial(zero.loss_and_gradients, dp=2),
    "zero dp16, empty shards": partial(zero.loss_and_gradients, dp=16),
    "zero 1 dp2, accumulation 4": partial(zero.loss_and_gradients, dp=2, stage=1, microbatches=4),
    "zero 2 dp4, accumulation 4": partial(zero.loss_and_gradients, dp=4, stage=2, microbatches=4),
    "zero 3 dp4, accumulation 2": partial(zero.loss_and_gradients, dp=4, microbatches=2),
    "pp1": partial(pipeline_parallel.loss_and_gradients, stages=1, microbatches=2),
    "pp2 gpipe": partial(
        pipeline_parallel.loss_and_gradients, stages=2, microbatches=4, schedule="gpipe"
    ),
    "pp3 1f1b": partial(pipeline_parallel.loss_and_gradients, stages=3, microbatches=8),
    "pp4 1f1b, few microbatches": partial(
        pipeline_parallel.loss_and_gradients, stages=4, microbatches=2
    ),
}


def make_model(
    family: str = "gpt2",
    *,
    tied: bool = True,
    dropout: float = 0.0,
    vocab_size: int = 61,
    layers: int = 4,
) -> Model:
    """Every weight random, biases and norms too: a wrong one of any kind then shows."""
    options = ModelOptions(
        vocab_size=vocab_size,
        width=16,
        heads=4,
        layers=layers,
        seq_len=8,
        tied_embeddings=tied,
        dropout=dropout,
        **FAMILIES[family],
    )
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in parameter_shapes(options).items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        weights[name] = 1 + 0.3 * noise if name.endswith("norm.weight") else 0.3 * noise
    return Model(options, weights)


def make_batch(
    vocab_size: int = 61, *, uneven: bool = True, seed: int = 1
) -> tuple[Tensor, Tensor]:
    """16 sequences; uneven: half of the labels ignored, and all of the first four sequences'."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (16, 8), generator=generator)
    labels = torch.randint(vocab_size, (16, 8), generator=generator)
    if uneven:
        labels[torch.rand(16, 8, generator=generator) < 0.5] = -100
        labels[:4] = -100
    return tokens, labels


def largest_error(found: Gradients, expected: Gradients) -> float:
    """Largest difference of a tensor, relative to it or to 1e-3 of the largest tensor."""
    assert found.keys() == expected.keys()
    floor = 1e-3 * max(float(tensor.abs().max()) for tensor in expected.values())
    return max(
        float((found[name] - tensor).abs().max()) / max(float(tensor.abs().max()), floor)
        for name, tensor in expected.items()
    )


def error_of(strategy: Strategy, model: Model, batch: tuple[Tensor, Tensor]) -> float:
    dropout = Dropout(seed=2, step=3)
    loss, gradients = strategy(model, *batch, dropout)
    expected_loss, expected = loss_and_gradients(model, *batch, dropout)
    return max(abs(loss / max(expected_loss, 1e-300) - 1), largest_error(gradients, expected))


@pytest.mark.covering
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("tied", "dropout", "vocab_size", "uneven"),
    [(True, 0.1, 61, True), (False, 0.0, 61, False), (True, 0.0, 64, True), (False, 0.1, 64, True)],
)
def test_equals_the_plain_model(
    strategy: str, family: str, tied: bool, dropout: float, vocab_size: int, uneven: bool
) -> None:
    model = make_model(family, tied=tied, dropout=dropout, vocab_size=vocab_size)
    batch = make_batch(vocab_size, uneven=uneven)
    assert error_of(STRATEGIES[strategy], model, batch) <= 1e-12


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_batch_without_labels(strategy: str) -> None:
    tokens, labels = make_batch()
    loss, gradients = STRATEGIES[strategy](make_model(), tokens, torch.full_like(labels, -100))
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients.values())


def dropped_forward_reduction(patch: pytest.MonkeyPatch) -> Strategy:
    patch.setattr(tensor_parallel, "g", lambda partial: partial[0] + 0 * partial[1])
    return STRATEGIES["tp2"]


def dropped_backward_reduction(patch: pytest.MonkeyPatch) -> Strategy:
    patch.setattr(tensor_parallel, "f", lambda x, tp: [x, *[x.detach()] * (tp - 1)])
    return STRATEGIES["tp2"]


def row_bias_of_every_rank(patch: pytest.MonkeyPatch) -> Strategy:
    def wrong(ranks: list[Any], name: str, parts: list[Tensor]) -> Tensor:
        return right(ranks, name, parts) + ranks[1][f"{name}.bias"]

    right = tensor_parallel.row_parallel
    patch.setattr(tensor_parallel, "row_parallel", wrong)
    return STRATEGIES["tp2"]


def every_rank_drops_as_the_first(patch: pytest.MonkeyPatch) -> Strategy:
    def wrong(*arguments: Any, part: tuple[int, int]) -> Tensor:
        return right(*arguments, part=(0, part[1]))

    right = sequence_parallel.drop
    patch.setattr(sequence_parallel, "drop", wrong)
    return STRATEGIES["tp2 sequence parallel"]


def every_rank_drops_attention_as_the_first(patch: pytest.MonkeyPatch) -> Strategy:
    def wrong(*arguments: Any, part: tuple[int, int]) -> Tensor:
        return right(*arguments, part=(0, part[1]))

    right = tensor_parallel.attention_heads
    patch.setattr(tensor_parallel, "attention_heads", wrong)
    return STRATEGIES["tp2"]


def norm_gradients_of_one_rank(patch: pytest.MonkeyPatch) -> Strategy:
    def wrong(ranks: list[Any], model: Model) -> Gradients:
        own = {name: weight.grad for name, weight in ranks[0].items() if ".weight" in name}
        norms = {name: gradient for name, gradient in own.items() if "norm" in name}
        return {**right(ranks, model), **norms}

    right = sequence_parallel.join_gradients
    patch.setattr(sequence_parallel, "join_gradients", wrong)
    return STRATEGIES["tp2 sequence parallel"]


def products_of_one_column(patch: pytest.MonkeyPatch) -> Strategy:
    patch.setattr(tensor_parallel_2d, "add_up", lambda partial: partial[0])
    return STRATEGIES["tp 2x2"]


def every_column_drops_as_the_first(patch: pytest.MonkeyPatch) -> Strategy:
    def wrong(*arguments: Any, part: tuple[int, int], dim: int) -> Tensor:
        return right(*arguments, part=(0, part[1]), dim=dim)

    right = tensor_parallel_2d.drop
    patch.setattr(tensor_parallel_2d, "drop", wrong)
    return STRATEGIES["tp 2x2"]


def vector_gradients_of_one_row(patch: pytest.MonkeyPatch) -> Strategy:
    def wrong(grid: list[Any], model: Model) -> Gradients:
        first = {name: torch.cat([own[name].grad for own in grid[0]]) for name in vectors(model)}
        return {**right(grid, model), **first}

    def vectors(model: Model) -> list[str]:
        return [name for name, weight in model.weights.items() if weight.ndim == 1]

    right = tensor_parallel_2d.join_gradients
    patch.setattr(tensor_parallel_2d, "join_gradients", wrong)
    return STRATEGIES["tp 2x2"]


def average_over_dp(patch: pytest.MonkeyPatch) -> Strategy:
    patch.setattr(data_parallel, "all_reduce", lambda partial: torch.stack(partial).mean(dim=0))
    return STRATEGIES["dp2"]


def loss_divided_by_local_tokens(patch: pytest.MonkeyPatch) -> Strategy:
    def wrong(*arguments: Any) -> tuple[float, Gradients]:
        loss, gradients = right(*arguments[:-1], 2 * int((arguments[2] != -100).sum()))
        return loss, gradients

    right = data_parallel.rank_backward
    patch.setattr(data_parallel, "rank_backward", wrong)
    return STRATEGIES["dp2"]


def shards_in_the_wrong_order(patch: pytest.MonkeyPatch) -> Strategy:
    right = zero.gather
    patch.setattr(zero, "gather", lambda ranks, *prefixes: right(ranks[::-1], *prefixes))
    return STRATEGIES["zero dp2"]


def only_the_last_microbatch_is_kept(patch: pytest.MonkeyPatch) -> Strategy:
    patch.setattr(zero, "added", lambda _, new: new)
    return STRATEGIES["zero 2 dp4, accumulation 4"]


def ranks_own_each_others_rows(patch: pytest.MonkeyPatch) -> Strategy:
    right = zero.reduce_scatter
    patch.setattr(zero, "reduce_scatter", lambda whole: right(whole)[::-1])
    return STRATEGIES["zero 1 dp2, accumulation 4"]


def tied_gradient_of_one_stage(patch: pytest.MonkeyPatch) -> Strategy:
    def wrong(ranks: list[Any], model: Model) -> Gradients:
        del ranks[-1].weights["token_embedding.weight"]
        return right(ranks, model)

    right = pipeline_parallel.join_gradients
    patch.setattr(pipeline_parallel, "join_gradients", wrong)
    return STRATEGIES["pp2 gpipe"]


@pytest.mark.parametrize(
    "plant",
    [
        dropped_forward_reduction,
        dropped_backward_reduction,
        row_bias_of_every_rank,
        every_rank_drops_as_the_first,
        every_rank_drops_attention_as_the_first,
        norm_gradients_of_one_rank,
        products_of_one_column,
        every_column_drops_as_the_first,
        vector_gradients_of_one_row,
        average_over_dp,
        loss_divided_by_local_tokens,
        shards_in_the_wrong_order,
        only_the_last_microbatch_is_kept,
        ranks_own_each_others_rows,
        tied_gradient_of_one_stage,
    ],
)
def test_a_planted_fault_is_seen(
    plant: Callable[[pytest.MonkeyPatch], Strategy], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert error_of(plant(monkeypatch), make_model(dropout=0.1), make_batch()) > 1e-3


@pytest.mark.parametrize("vocabulary", [5, 6, 7, 8, 61])
def test_vocabulary_is_split_as_torch_chunk_does(vocabulary: int) -> None:
    model = make_model(vocab_size=vocabulary)
    if vocabulary in (5, 6):
        with pytest.raises(ValueError, match=f"vocabulary {vocabulary} is too small for 4 parts"):
            tensor_parallel.split_weights(model, 4)
        return
    ranks = tensor_parallel.split_weights(model, 4)
    own = [rank["token_embedding.weight"].detach() for rank in ranks]
    assert [len(rows) for rows in own] == [len(rows) for rows in torch.empty(vocabulary).chunk(4)]
    assert torch.equal(torch.cat(own), model.weights["token_embedding.weight"])


@pytest.mark.parametrize("page", [tensor_parallel, tensor_parallel_2d])
def test_large_logits_do_not_overflow(page: Any) -> None:
    logits = 1e4 * torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).double()
    labels = torch.tensor([[0, 3, 7], [-100, 4, 1]])
    found = page.loss_sum(list(logits.split(3, dim=-1)), labels)
    torch.testing.assert_close(found, training.loss_sum(logits, labels), rtol=1e-14, atol=0)


def test_sequence_parallel_refuses_uneven_tokens() -> None:
    tokens, labels = make_batch()
    with pytest.raises(ValueError, match="7 tokens cannot be cut into 2 equal parts"):
        sequence_parallel.loss_and_gradients(make_model(), tokens[:, :7], labels[:, :7], tp=2)


def test_a_grid_refuses_what_does_not_divide() -> None:
    tokens, labels = make_batch()
    with pytest.raises(ValueError, match="7 sequences cannot be cut into 2 equal parts"):
        tensor_parallel_2d.loss_and_gradients(make_model(), tokens[:7], labels[:7], q=2)
    tokens, labels = make_batch(vocab_size=5)
    with pytest.raises(ValueError, match="vocabulary 5 is too small for 4 parts"):
        tensor_parallel_2d.loss_and_gradients(make_model(vocab_size=5), tokens, labels, q=4)
