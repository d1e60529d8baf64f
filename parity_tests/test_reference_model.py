"""The reference model against transformers' GPT-2 and Llama; its options, names and dropout."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

from dtensor_llm import rng
from reference import random_numbers
from reference.model import (
    Dropout,
    Model,
    ModelOptions,
    Weights,
    forward,
    initial_weights,
    loss_sum,
    parameter_shapes,
)
from reference.training import loss_and_gradients

GPT2 = ModelOptions(vocab_size=61, width=32, heads=4, layers=2, seq_len=12)
LLAMA = ModelOptions(
    vocab_size=61,
    width=32,
    heads=4,
    layers=2,
    seq_len=12,
    norm="rmsnorm",
    positions="rope",
    mlp="swiglu",
    bias=False,
    tied_embeddings=False,
)
# Our names, theirs; GPT-2 keeps query, key and value in one weight, and its weights are (in, out).
GPT2_NAMES = {
    "token_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "final_norm": "transformer.ln_f",
}
GPT2_BLOCK_NAMES = {
    "attention_norm": "ln_1",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
PHI_NAMES = {
    "token_embedding": "model.embed_tokens",
    "final_norm": "model.final_layernorm",
    "head": "lm_head",
}
PHI_BLOCK_NAMES = {
    "norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.dense",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
}
LLAMA_NAMES = {
    "token_embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
}
LLAMA_BLOCK_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def random_model(options: ModelOptions, seed: int = 0) -> Model:
    """Every weight random, biases and norms too: a wrong one of any kind then shows."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in parameter_shapes(options).items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        weights[name] = 1 + 0.3 * noise if name.endswith("norm.weight") else 0.3 * noise
    return Model(options, weights)


def random_batch(options: ModelOptions, count: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (count, options.seq_len)
    tokens = torch.randint(options.vocab_size, shape, generator=generator)
    labels = torch.randint(options.vocab_size, shape, generator=generator)
    return tokens, labels.masked_fill(torch.rand(shape, generator=generator) < 0.3, -100)


def as_gpt2(weights: Weights, layers: int) -> Weights:
    """Weights, or gradients, under GPT-2's names and in its shapes."""
    theirs = {}
    for kind in ("weight", "bias"):
        for ours, name in GPT2_NAMES.items():
            if f"{ours}.{kind}" in weights:
                theirs[f"{name}.{kind}"] = weights[f"{ours}.{kind}"]
        for n in range(layers):
            for ours, name in GPT2_BLOCK_NAMES.items():
                theirs[f"transformer.h.{n}.{name}.{kind}"] = weights[f"blocks.{n}.{ours}.{kind}"]
            roles = [weights[f"blocks.{n}.attention.{r}.{kind}"] for r in ("query", "key", "value")]
            theirs[f"transformer.h.{n}.attn.c_attn.{kind}"] = torch.cat(roles)
    linears = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    return {
        name: rearrange(w, "out into -> into out") if name.endswith(linears) else w
        for name, w in theirs.items()
    }


def as_llama(weights: Weights, layers: int) -> Weights:
    names = {f"{ours}.weight": f"{name}.weight" for ours, name in LLAMA_NAMES.items()}
    for n in range(layers):
        for ours, name in LLAMA_BLOCK_NAMES.items():
            names[f"blocks.{n}.{ours}.weight"] = f"model.layers.{n}.{name}.weight"
    return {names[ours]: w for ours, w in weights.items()}


def as_phi(weights: Weights, layers: int) -> Weights:
    names = dict(PHI_NAMES)
    for n in range(layers):
        for ours, name in PHI_BLOCK_NAMES.items():
            names[f"blocks.{n}.{ours}"] = f"model.layers.{n}.{name}"
    kinds = {"weight", "bias"}
    renamed = {f"{ours}.{k}": f"{name}.{k}" for ours, name in names.items() for k in kinds}
    return {renamed[ours]: w for ours, w in weights.items()}


def assert_equal_models(model: Model, theirs: nn.Module, as_theirs: Any) -> None:
    """Same logits, same loss, same gradient of every parameter."""
    theirs.double()
    missing, unexpected = theirs.load_state_dict(
        as_theirs(model.weights, model.options.layers), strict=False
    )
    assert unexpected == []
    assert missing == (["lm_head.weight"] if model.options.tied_embeddings else [])
    tokens, labels = random_batch(model.options)
    logits = theirs(input_ids=tokens).logits
    loss = F.cross_entropy(rearrange(logits, "b t v -> (b t) v"), rearrange(labels, "b t -> (b t)"))
    loss.backward()
    torch.testing.assert_close(forward(model, tokens), logits, rtol=1e-10, atol=1e-10)
    own_loss, gradients = loss_and_gradients(model, tokens, labels)
    assert abs(own_loss - loss.item()) < 1e-10
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    found = as_theirs(gradients, model.options.layers)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert gradient.abs().max() > 1e-6
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-10, msg=name)


def test_equals_transformers_gpt2() -> None:
    config = GPT2Config(
        vocab_size=GPT2.vocab_size,
        n_embd=GPT2.width,
        n_head=GPT2.heads,
        n_layer=GPT2.layers,
        n_positions=GPT2.seq_len,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="eager",
    )
    assert_equal_models(random_model(GPT2), GPT2LMHeadModel(config), as_gpt2)


def no_lower_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """They cast to float32 in norm, softmax and angles, which float64 would lose 1e-7 to."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("rope_theta", [10000.0, 500000.0])
def test_equals_transformers_llama(
    kv_heads: int, rope_theta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ModelOptions(**{**vars(LLAMA), "kv_heads": kv_heads, "rope_theta": rope_theta})
    config = LlamaConfig(
        vocab_size=options.vocab_size,
        hidden_size=options.width,
        num_attention_heads=options.heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=options.layers,
        intermediate_size=options.num_ffn,
        max_position_embeddings=options.seq_len,
        rms_norm_eps=options.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    no_lower_precision(monkeypatch)
    assert_equal_models(random_model(options), LlamaForCausalLM(config), as_llama)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_parallel_blocks_equal_transformers_phi(
    kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Phi has PaLM's block, of one norm, with GPT-2's LayerNorm, GELU and biases."""
    changes = {"kv_heads": kv_heads, "norm": "layernorm", "mlp": "gelu", "bias": True}
    options = ModelOptions(**{**vars(LLAMA), **changes, "parallel_block": True})
    config = PhiConfig(
        vocab_size=options.vocab_size,
        hidden_size=options.width,
        num_attention_heads=options.heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=options.layers,
        intermediate_size=options.num_ffn,
        max_position_embeddings=options.seq_len,
        layer_norm_eps=options.norm_eps,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": options.rope_theta,
            "partial_rotary_factor": 1.0,
        },
        hidden_act="gelu_new",
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    no_lower_precision(monkeypatch)
    theirs = PhiForCausalLM(config)
    theirs.lm_head.bias = None
    assert_equal_models(random_model(options), theirs, as_phi)


def test_names_and_shapes_of_gpt2() -> None:
    options = ModelOptions(vocab_size=61, width=32, heads=4, layers=1, seq_len=12)
    assert parameter_shapes(options) == {
        "token_embedding.weight": (61, 32),
        "position_embedding.weight": (12, 32),
        "blocks.0.attention_norm.weight": (32,),
        "blocks.0.attention_norm.bias": (32,),
        "blocks.0.attention.query.weight": (32, 32),
        "blocks.0.attention.query.bias": (32,),
        "blocks.0.attention.key.weight": (32, 32),
        "blocks.0.attention.key.bias": (32,),
        "blocks.0.attention.value.weight": (32, 32),
        "blocks.0.attention.value.bias": (32,),
        "blocks.0.attention.output.weight": (32, 32),
        "blocks.0.attention.output.bias": (32,),
        "blocks.0.mlp_norm.weight": (32,),
        "blocks.0.mlp_norm.bias": (32,),
        "blocks.0.mlp.up.weight": (128, 32),
        "blocks.0.mlp.up.bias": (128,),
        "blocks.0.mlp.down.weight": (32, 128),
        "blocks.0.mlp.down.bias": (32,),
        "final_norm.weight": (32,),
        "final_norm.bias": (32,),
    }


def test_names_and_shapes_of_llama() -> None:
    options = ModelOptions(**{**vars(LLAMA), "layers": 1, "kv_heads": 2})
    assert parameter_shapes(options) == {
        "token_embedding.weight": (61, 32),
        "blocks.0.attention_norm.weight": (32,),
        "blocks.0.attention.query.weight": (32, 32),
        "blocks.0.attention.key.weight": (16, 32),
        "blocks.0.attention.value.weight": (16, 32),
        "blocks.0.attention.output.weight": (32, 32),
        "blocks.0.mlp_norm.weight": (32,),
        "blocks.0.mlp.gate.weight": (128, 32),
        "blocks.0.mlp.up.weight": (128, 32),
        "blocks.0.mlp.down.weight": (32, 128),
        "final_norm.weight": (32,),
        "head.weight": (61, 32),
    }


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_fused_weights_are_those_of_query_key_and_value_group_by_group(kv_heads: int) -> None:
    apart = ModelOptions(**{**vars(LLAMA), "kv_heads": kv_heads, "bias": True})
    fused = ModelOptions(**{**vars(apart), "fused_qkv": True})
    weights = initial_weights(apart, 0, torch.float64)
    shapes = parameter_shapes(fused)
    laid_out = {name: weights[name] for name in shapes if name in weights}
    for name in shapes.keys() - weights.keys():
        groups = [
            rearrange(
                weights[name.replace("qkv", role)],
                "(g n k) ... -> g (n k) ...",
                g=kv_heads,
                k=apart.head_size,
            )
            for role in ("query", "key", "value")
        ]
        laid_out[name] = torch.cat(groups, dim=1).flatten(0, 1)
    assert {name: tuple(x.shape) for name, x in laid_out.items()} == shapes
    tokens = torch.arange(16).reshape(2, 8)
    separate = forward(Model(apart, weights), tokens)
    torch.testing.assert_close(
        forward(Model(fused, laid_out), tokens), separate, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(("width", "expected"), [(48, 128), (64, 192), (96, 256), (4096, 10944)])
def test_swiglu_width_is_rounded_up(width: int, expected: int) -> None:
    assert ModelOptions(width=width, mlp="swiglu").num_ffn == expected


def test_initial_weights() -> None:
    options = ModelOptions(layers=8, tied_embeddings=False)
    weights = initial_weights(options, seed=3, dtype=torch.float64)
    for name, weight in weights.items():
        if name.endswith("bias"):
            assert not weight.any(), name
        elif "norm" in name:
            assert torch.equal(weight, torch.ones_like(weight)), name
        else:
            residual = name.endswith(("output.weight", "down.weight"))
            assert weight.std() == pytest.approx(0.02 / 4 if residual else 0.02, rel=0.05), name
    drawn = [w.flatten()[:8] for name, w in weights.items() if w.std() > 0]
    assert len(torch.cat(drawn).unique()) == 8 * len(drawn)
    half = initial_weights(options, seed=3, dtype=torch.bfloat16)
    assert all(torch.equal(half[name], weights[name].bfloat16()) for name in weights)


@pytest.mark.parametrize("shape", [(61, 32), (7,), (3, 5, 7)])
def test_both_generators_draw_the_same_normal_numbers(shape: tuple[int, ...]) -> None:
    ours = random_numbers.normal(5, "a.weight", shape)
    assert torch.equal(ours, rng.normal(rng.key(5, "a.weight"), shape))


@pytest.mark.parametrize("rest", [(8, 12), (3, 5), (2, 7, 7), ()])
@pytest.mark.parametrize("rate", [0.1, 0.25])
def test_both_generators_draw_the_same_masks(rest: tuple[int, ...], rate: float) -> None:
    ours = random_numbers.keep_mask(5, "site", 9, rate, first_sample=3, shape=(4, *rest))
    extents = [rng.Extent(0, length, length) for length in rest]
    key = rng.key(5, "site", 9)
    assert torch.equal(ours, rng.keep_mask(key, rate, torch.arange(3, 7), extents, torch.float64))


@pytest.mark.parametrize(
    ("key", "counter", "answer"),
    [
        ((0, 0), 0, (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), -1, (0x1CB996FC, 0xBB002BE7)),
        # The digits of pi; the counter 85a308d3 243f6a88 as a signed number of 64 bits.
        ((0x13198A2E, 0x03707344), 0x85A308D3243F6A88 - 2**64, (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_the_reference_generator_knows_the_answers_of_random123(
    key: tuple[int, int], counter: int, answer: tuple[int, int]
) -> None:
    words = random_numbers.threefry(key, torch.tensor([counter]))
    assert tuple(int(word) for word in words) == answer


def test_dropout_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {}

    def record(seed: int, site: str, step: int, rate: float, first: int, shape: Any) -> Tensor:
        drawn[site] = (seed, step, rate, first, shape)
        return torch.ones(shape, dtype=torch.float64)

    monkeypatch.setattr(random_numbers, "keep_mask", record)
    options = ModelOptions(**{**vars(GPT2), "dropout": 0.1, "attention_dropout": 0.2})
    tokens, _ = random_batch(options)
    forward(random_model(options), tokens, Dropout(seed=4, step=6).starting_at(9))
    residual, attention = (4, 6, 0.1, 9, (3, 12, 32)), (4, 6, 0.2, 9, (3, 4, 12, 12))
    assert drawn == {
        "embedding_dropout": residual,
        "blocks.0.attention.dropout": attention,
        "blocks.0.attention_residual_dropout": residual,
        "blocks.0.mlp_residual_dropout": residual,
        "blocks.1.attention.dropout": attention,
        "blocks.1.attention_residual_dropout": residual,
        "blocks.1.mlp_residual_dropout": residual,
    }


def test_dropout_of_a_part_is_that_part_of_the_mask() -> None:
    x = torch.rand(4, 6, 8, dtype=torch.float64)
    dropout = Dropout(seed=0, step=1)
    whole = dropout(x, "site", 0.5)
    assert 0.3 < (whole == 0).double().mean() < 0.7
    parts = [dropout(x.chunk(3, 1)[part], "site", 0.5, part=(part, 3)) for part in range(3)]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert torch.equal(dropout.starting_at(2)(x[2:], "site", 0.5), whole[2:])


def test_no_dropout_in_evaluation() -> None:
    options = ModelOptions(**{**vars(GPT2), "dropout": 0.5})
    model, (tokens, _) = random_model(options), random_batch(options)
    assert torch.equal(forward(model, tokens), forward(random_model(GPT2), tokens))
    assert not torch.equal(forward(model, tokens), forward(model, tokens, Dropout(0, 0)))


def test_loss_sum_counts_only_valid_labels() -> None:
    logits = torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, -100, 6, -100, 0], [-100] * 5])
    expected = F.cross_entropy(
        rearrange(logits, "b t v -> (b t) v"), rearrange(labels, "b t -> (b t)"), reduction="sum"
    )
    torch.testing.assert_close(loss_sum(logits, labels), expected, rtol=1e-14, atol=0)
    assert loss_sum(logits, torch.full((2, 5), -100)) == 0
