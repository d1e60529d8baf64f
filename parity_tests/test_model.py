"""The GPT equals the reference's, whole or in stages; masks and initial weights on any mesh."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

import reference.model as reference
from dtensor_llm.config import Config, ModelConfig
from dtensor_llm.model import GPT, Dropout, make_norm
from dtensor_llm.plan import local_tensor
from dtensor_llm.train import Trainer
from dtensor_llm.worlds import World, threads
from parity_tests.harness import LLAMA, SECONDS, small_config
from reference.random_numbers import keep_mask
from reference.training import options_from

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2 untied": {"tied_embeddings": False},
    "gpt2 without biases": {"bias": False, "ffn_width": 40},
    "llama": LLAMA,
    "llama tied, one key head": LLAMA | {"tied_embeddings": True, "kv_heads": 1},
    "mixed": {"norm": "rmsnorm", "positions": "rope", "kv_heads": 2},
    "llama, other constants": LLAMA | {"rope_theta": 100.0, "norm_eps": 1e-2},
    "mixed otherwise": {"mlp": "swiglu", "norm_eps": 1e-2},
}
every_model = pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
BOUND = 1e-12


def options_of(config: ModelConfig) -> reference.ModelOptions:
    return options_from(reference.ModelOptions, dataclasses.asdict(config))


def random_weights(config: ModelConfig, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Nothing is zero and no two elements are equal: every parameter matters."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: (torch.rand(shape, generator=generator, dtype=torch.float64) - 0.3).to(dtype)
        for name, shape in reference.parameter_shapes(options_of(config)).items()
    }


@torch.no_grad()
def fill(model: GPT, weights: Mapping[str, Tensor]) -> GPT:
    for name, parameter in model.weights().items():
        parameter.copy_(weights[name])
    return model


def tokens_for(config: ModelConfig, sequences: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(config.vocab_size, (sequences, config.seq_len), generator=generator)


# One device


@every_model
def test_parameters_are_those_of_the_reference(options: dict[str, Any]) -> None:
    config = small_config(**options).model
    shapes = {name: tuple(p.shape) for name, p in GPT(config).weights().items()}
    assert shapes == reference.parameter_shapes(options_of(config))
    assert config.num_parameters == sum(torch.Size(shape).numel() for shape in shapes.values())


RATES = {
    "none": {},
    "all": {"dropout": 0.3},
    "residual": {"dropout": 0.3, "attention_dropout": 0.0},
    "attention": {"attention_dropout": 0.3},
}


@every_model
@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
def test_logits_are_those_of_the_reference(
    rates: dict[str, float], options: dict[str, Any]
) -> None:
    config = small_config(**options | rates).model
    weights, tokens = random_weights(config), tokens_for(config)
    model = fill(GPT(config).double(), weights)
    model.set_dropout(seed=5, step=7)
    whole = reference.Model(options_of(config), weights)
    dropout = reference.Dropout(seed=5, step=7, first_sample=2)
    samples = torch.arange(2, 5)
    trained = model.train()(tokens, samples)
    expected = reference.forward(whole, tokens, dropout)
    torch.testing.assert_close(trained, expected, rtol=BOUND, atol=BOUND)
    evaluated = model.eval()(tokens, samples)
    expected = reference.forward(whole, tokens)
    torch.testing.assert_close(evaluated, expected, rtol=BOUND, atol=BOUND)
    assert trained.equal(evaluated) == (not rates)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("options", [{}, LLAMA], ids=["gpt2", "llama"])
def test_lower_precision_is_near(options: dict[str, Any], dtype: torch.dtype, bound: float) -> None:
    config = small_config(**options).model
    weights, tokens = random_weights(config, dtype), tokens_for(config)
    logits = fill(GPT(config).to(dtype), weights)(tokens, torch.arange(3))
    exact = {name: weight.double() for name, weight in weights.items()}
    expected = reference.forward(reference.Model(options_of(config), exact), tokens)
    assert logits.dtype == dtype
    error = (logits - expected).abs().max() / expected.abs().max()
    assert error < bound


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_norms_add_up_gradients_over_many_tokens_in_more_than_bfloat16(norm: str) -> None:
    """As one sum of them, rounded once: in bfloat16 it would be several percent off."""
    config = ModelConfig(norm=norm, width=16, heads=2)
    modules = [make_norm(config).to(dtype) for dtype in (torch.bfloat16, torch.float64)]
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(4, 512, 16, generator=generator).bfloat16() for _ in range(2))
    for module in modules:
        for name, parameter in module.named_parameters():
            nn.init.constant_(parameter, 0.0 if name == "bias" else 1.0)
        module(x.to(parameter.dtype)).backward(grad.to(parameter.dtype))
    for own, exact in zip(*(module.parameters() for module in modules), strict=True):
        assert own.grad is not None
        assert exact.grad is not None
        error = (own.grad.double() - exact.grad).abs().max() / exact.grad.abs().max()
        assert error < 2**-7, "of the last bit of bfloat16, twice"


def test_no_token_sees_a_later_one() -> None:
    for options in (*MODELS.values(), {"dropout": 0.1}):
        config = small_config(**options).model
        model, tokens = fill(GPT(config).double(), random_weights(config)), tokens_for(config)
        other = tokens.clone()
        other[:, 5:] = (other[:, 5:] + 1) % config.vocab_size
        before, after = model(tokens, torch.arange(3)), model(other, torch.arange(3))
        assert before[:, :5].equal(after[:, :5])
        assert not before[:, 5].equal(after[:, 5])


# Stages


@every_model
def test_stages_one_after_another_are_the_model(options: dict[str, Any]) -> None:
    config = small_config(layers=3, dropout=0.3, **options).model
    weights, tokens, samples = random_weights(config), tokens_for(config), torch.arange(3)
    stages = [
        GPT(config, [0], last=False),
        GPT(config, [1], first=False, last=False),
        GPT(config, [2], first=False),
    ]
    names: set[str] = set()
    x = tokens
    for stage in (fill(stage.double(), weights) for stage in stages):
        stage.set_dropout(seed=1, step=2)
        x = stage(x, samples)
        names |= stage.weights().keys()
    assert names == weights.keys()
    whole = fill(GPT(config).double(), weights)
    whole.set_dropout(seed=1, step=2)
    assert x.equal(whole(tokens, samples))
    assert "blocks.1.mlp.up.weight" in stages[1].weights()
    last = "token_embedding.weight" if config.tied_embeddings else "head.weight"
    assert last in stages[2].weights()


def test_tied_head_is_the_embedding() -> None:
    model = GPT(small_config().model)
    assert model.head.weight is model.token_embedding.weight
    model.token_embedding.weight = nn.Parameter(torch.zeros(61, 32))
    assert model.head.weight is not model.token_embedding.weight
    model.tie_embeddings()
    assert model.head.weight is model.token_embedding.weight
    assert "head.weight" not in model.weights()

    untied = GPT(small_config(tied_embeddings=False).model)
    assert untied.head.weight is not untied.token_embedding.weight
    assert {"head.weight", "token_embedding.weight"} <= untied.weights().keys()


# Dropout


def mask_of(module: Dropout, samples: Sequence[int], step: int = 0, seed: int = 0) -> Tensor:
    """The mask for the part that the module holds."""
    module.seed, module.step = seed, step
    shape = [extent.length for extent in module.extents]
    ones = torch.ones(len(samples), *shape, dtype=torch.float64)
    return module(ones, torch.tensor(samples))


@pytest.mark.parametrize("shape", [(8, 6), (8, 5, 7)], ids=["b t d", "b h t s"])
def test_shards_of_a_mask_are_slices_of_it(shape: tuple[int, ...]) -> None:
    whole = mask_of(Dropout("site", 0.3, shape), range(4), step=3)
    assert whole.equal(keep_mask(0, "site", 3, 0.3, 0, (4, *shape)))
    for dim in range(len(shape)):
        for count in (n for n in (2, 4, 8) if shape[dim] % n == 0):
            for index, expected in enumerate(whole.chunk(count, dim=1 + dim)):
                module = Dropout("site", 0.3, shape)
                module.shard(dim, index, count)
                assert mask_of(module, range(4), step=3).equal(expected)


def test_mask_belongs_to_the_sample_and_to_nothing_else() -> None:
    module = Dropout("site", 0.5, (4, 9))
    whole = mask_of(module, range(6))
    assert mask_of(module, [4, 0, 3]).equal(whole[[4, 0, 3]])
    assert mask_of(module, range(6)).equal(whole), "asking twice gives the same"
    others = [
        mask_of(module, range(6), step=1),
        mask_of(module, range(6), seed=1),
        mask_of(Dropout("another site", 0.5, (4, 9)), range(6)),
        whole.flip(0),
    ]
    for other in others:
        assert not other.equal(whole)
    assert set(whole.unique().tolist()) == {0.0, 2.0}


def test_no_dropout_in_evaluation() -> None:
    module = Dropout("site", 0.5, (4, 9)).eval()
    assert mask_of(module, range(6)).equal(torch.ones(6, 4, 9, dtype=torch.float64))


def masks(model: GPT) -> dict[str, Tensor]:
    return {
        name: mask_of(module, range(2))
        for name, module in model.named_modules()
        if isinstance(module, Dropout)
    }


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_tp_ranks_hold_slices_of_each_mask(sequence_parallel: bool) -> None:
    """Of heads, and of tokens with sequence parallelism; what is replicated drops alike."""
    config = small_config("4x1x1", dropout=0.5, sequence_parallel=sequence_parallel)
    whole = masks(GPT(config.model))
    assert len(whole) == 7

    def main(world: World) -> dict[str, Tensor]:
        return masks(Trainer(config, world).model)

    ranks = threads.run(4, main, timeout=SECONDS)
    for name, mask in whole.items():
        sharded = sequence_parallel or name.endswith("attention.dropout")
        expected = mask.chunk(4, dim=1) if sharded else [mask] * 4
        for rank in range(4):
            assert ranks[rank][name].equal(expected[rank]), (name, rank)


# Initial weights


@dataclass(frozen=True)
class Part:
    """What one rank holds of a parameter."""

    coordinate: tuple[int, ...]
    sizes: tuple[int, ...]
    placements: tuple[Placement, ...]
    local: Tensor


def part_of(weight: nn.Parameter) -> Part:
    local = local_tensor(weight).detach()
    if not isinstance(weight, DTensor):
        return Part((), (), (), local)
    mesh = weight.device_mesh
    return Part(tuple(mesh.get_coordinate() or ()), tuple(mesh.shape), weight.placements, local)


def gather(parts: Sequence[Part]) -> Tensor:
    """The whole tensor, outermost axis first; where several ranks hold a part, it is the same."""
    held: dict[tuple[int, ...], Tensor] = {}
    for part in parts:
        assert held.setdefault(part.coordinate, part.local).equal(part.local)
    for size, placement in zip(parts[0].sizes, parts[0].placements, strict=True):
        held = {
            rest: join([held[(place, *rest)] for place in range(size)], placement)
            for rest in {coordinate[1:] for coordinate in held}
        }
    (whole,) = held.values()
    return whole


def join(pieces: list[Tensor], placement: Placement) -> Tensor:
    if placement.is_replicate():
        assert all(piece.equal(pieces[0]) for piece in pieces)
        return pieces[0]
    return torch.cat(pieces, dim=placement.dim)  # type: ignore[attr-defined] # Shard's and _StridedShard's


def gathered_weights(config: Config) -> dict[str, Tensor]:
    def main(world: World) -> dict[str, Part]:
        return {name: part_of(w) for name, w in Trainer(config, world).optimizer.weights.items()}

    ranks = threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS)
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: gather([rank[name] for rank in ranks if name in rank]) for name in names}


INITIAL: list[tuple[str, dict[str, Any]]] = [
    ("1x1x1", {}),
    ("2x1x1", {}),
    ("8x1x1", {}),
    ("1x2x1", {}),
    ("1x1x3", {"global_batch_size": 9}),  # 61, 32 and 8 rows: uneven, and more than 3 left over
    ("2x2x2", {}),
    ("2x2x2", LLAMA),
    ("2x1x4", {"vocab_size": 257}),  # 129 and 128 rows, each on 4 ranks
    ("dp_replicate=2,dp_shard=3", {"global_batch_size": 6}),
    ("1x1x2", {"zero": 0}),
    ("2x1x2", {"dtype": "float32"}),
    ("2x1x2", {"dtype": "bfloat16"}),
]


@pytest.mark.parametrize(("mesh", "options"), INITIAL, ids=[mesh for mesh, _ in INITIAL])
def test_initial_weights_are_those_of_one_device_bit_by_bit(
    mesh: str, options: dict[str, Any]
) -> None:
    config = small_config(mesh, seed=3, **options)
    dtype = getattr(torch, config.train.dtype)
    expected = reference.initial_weights(options_of(config.model), 3, dtype)
    weights = gathered_weights(config)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert weight.equal(expected[name]), name


@pytest.mark.parametrize("mesh", ["1x1x1", "8x1x1", "1x1x8", "1x2x2"])
def test_no_two_rows_of_the_model_start_equal(mesh: str) -> None:
    """Of no shard, no layer and no stage: each draws numbers of its own."""
    weights = gathered_weights(small_config(mesh)).values()
    rows = torch.cat([weight for weight in weights if weight.shape[1:] == (32,)])
    assert len(rows) == 61 + 8 + 2 * (4 * 32 + 128)
    assert len(rows.unique(dim=0)) == len(rows)
