"""A GPT in plain functions of tensors, with the options of GPT-2 and of Llama.

A model is a dict of weights {name: tensor}; every function takes the dict and looks up what it
needs by name. So a rank's model, a stage's model or a single gathered layer is just another dict,
and the strategies beside this file call these same functions.

Shapes: b sequence, t token (s: the token looked at), d width, h query head, g key/value head,
k head size, f feed-forward width, v vocabulary. A linear's weight is (out, in). In bfloat16, sums
over many elements (norms, the loss) are taken in float32.

Papers: Radford et al., "Language models are unsupervised multitask learners", 2019 (GPT-2);
Touvron et al., arXiv 2302.13971 (Llama); Su et al., arXiv 2104.09864 (RoPE); Shazeer, arXiv
2002.05202 (SwiGLU); Ainslie et al., arXiv 2305.13245 (grouped-query attention); Chowdhery et al.,
PaLM, arXiv 2204.02311 (parallel blocks).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from einops import einsum, rearrange, repeat
from torch import Tensor

from reference import random_numbers

Weights = dict[str, Tensor]
Watch = Callable[[str, Tensor], None]
IGNORED_LABEL = -100
_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


@dataclass(frozen=True)
class ModelOptions:
    """What the model is; None stands for the value that the property of like name works out."""

    vocab_size: int = 256
    width: int = 64
    heads: int = 8
    kv_heads: int | None = None
    fused_qkv: bool = False
    layers: int = 4
    seq_len: int = 64
    ffn_width: int | None = None
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    positions: Literal["learned", "rope"] = "learned"
    mlp: Literal["gelu", "swiglu"] = "gelu"
    bias: bool = True
    tied_embeddings: bool = True
    dropout: float = 0.0
    attention_dropout: float | None = None
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    parallel_block: bool = False

    @property
    def num_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def num_ffn(self) -> int:
        if self.ffn_width is None:
            return 4 * self.width if self.mlp == "gelu" else -(-8 * self.width // 192) * 64
        return self.ffn_width

    @property
    def attention_dropout_rate(self) -> float:
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    @property
    def head_name(self) -> str:
        """The weight that turns the last activations into logits."""
        return "token_embedding.weight" if self.tied_embeddings else "head.weight"


@dataclass(frozen=True)
class Model:
    """Options, and weights under the names of `parameter_shapes`."""

    options: ModelOptions
    weights: Weights


@dataclass(frozen=True)
class Dropout:
    """Draws the masks of one step; `first_sample` is the first sequence's place in the batch."""

    seed: int
    step: int
    first_sample: int = 0

    def starting_at(self, sample: int) -> "Dropout":
        """The same masks from another sequence on, counted from the present first one."""
        return replace(self, first_sample=self.first_sample + sample)

    def __call__(
        self, x: Tensor, site: str, rate: float, part: tuple[int, int] = (0, 1), dim: int = 1
    ) -> Tensor:
        """Drop elements of x at a site.

        Args:
            x: b t d, or b h t s.
            site: the name of the place, a stream of random numbers.
            rate: the fraction to drop.
            part: (index, count) when x is one of `count` equal pieces along a dim.
            dim: which: 1 are the tokens of b t d, the heads of b h t s; 2 the entries of b t d.
        """
        index, count = part
        shape = (*x.shape[:dim], count * x.shape[dim], *x.shape[dim + 1 :])
        mask = random_numbers.keep_mask(self.seed, site, self.step, rate, self.first_sample, shape)
        return x * mask.chunk(count, dim)[index].to(x.dtype)


def drop(
    x: Tensor,
    site: str,
    rate: float,
    dropout: Dropout | None,
    part: tuple[int, int] = (0, 1),
    dim: int = 1,
) -> Tensor:
    """Apply dropout where there is any; None means evaluation."""
    return x if dropout is None or rate == 0 else seen(site, dropout(x, site, rate, part, dim))


def parameter_shapes(options: ModelOptions) -> dict[str, tuple[int, ...]]:
    """The name and shape of every parameter, from the input to the output."""
    d, v = options.width, options.vocab_size
    modules: dict[str, tuple[int, ...]] = {"token_embedding": (v, d)}
    if options.positions == "learned":
        modules["position_embedding"] = (options.seq_len, d)
    for index in range(options.layers):
        for name, shape in _block_shapes(options).items():
            modules[f"blocks.{index}.{name}"] = shape
    modules["final_norm"] = (d,)
    if not options.tied_embeddings:
        modules["head"] = (v, d)
    shapes = {}
    for name, shape in modules.items():
        shapes[f"{name}.weight"] = shape
        if _has_bias(name, options):
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


def initial_weights(options: ModelOptions, seed: int, dtype: torch.dtype) -> Weights:
    """Norm weights 1, biases 0, all else normal, smaller where a block adds to the residual."""
    weights = {}
    for name, shape in parameter_shapes(options).items():
        if name.endswith(".bias"):
            weights[name] = torch.zeros(shape, dtype=dtype)
        elif "norm" in name:
            weights[name] = torch.ones(shape, dtype=dtype)
        else:
            into_residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
            std = options.init_std / ((2 * options.layers) ** 0.5 if into_residual else 1)
            weights[name] = (std * random_numbers.normal(seed, name, shape)).to(dtype)
    return weights


@contextmanager
def watching(watch: Watch | None) -> Iterator[None]:
    """Call `watch` with name and value of what is made inside, in order: see `seen`."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


def seen(name: str, x: Tensor) -> Tensor:
    """x, after telling whoever watches. A name is a module's, for what it gives out;
    `NAME.input` for what it is given; or `tokens`, `labels`, `loss` (of each token)."""
    watch = _watch.get()
    if watch is not None:
        watch(name, x)
    return x


def forward(model: Model, tokens: Tensor, dropout: Dropout | None = None) -> Tensor:
    """Tokens (b t) to logits (b t v)."""
    x = embed(model.weights, tokens, model.options, dropout)
    for index in range(model.options.layers):
        x = block(model.weights, index, x, model.options, dropout)
    return head(model.weights, x, model.options)


def embed(
    weights: Weights, tokens: Tensor, options: ModelOptions, dropout: Dropout | None
) -> Tensor:
    """Tokens (b t) to activations (b t d)."""
    rows = weights["token_embedding.weight"][seen("tokens", tokens)]
    x = seen("token_embedding", rows)  # b t d
    if options.positions == "learned":
        positions = weights["position_embedding.weight"][: tokens.shape[1]]
        x = seen("position_embedding", x + positions)
    return drop(x, "embedding_dropout", options.dropout, dropout)


def block(
    weights: Weights, index: int, x: Tensor, options: ModelOptions, dropout: Dropout | None
) -> Tensor:
    """x + attention, then x + feed-forward network, each on a normed x. b t d to b t d."""
    if options.parallel_block:
        return parallel_block(weights, index, x, options, dropout)
    name = f"blocks.{index}"
    x = seen(f"{name}.input", x)
    normed = norm(weights, f"{name}.attention_norm", x, options)
    heads = attention_heads(weights, f"{name}.attention", normed, options, dropout)
    heads = seen(f"{name}.attention.output.input", heads)
    y = seen(f"{name}.attention", linear(weights, f"{name}.attention.output", heads))
    x = x + drop(y, f"{name}.attention_residual_dropout", options.dropout, dropout)
    normed = norm(weights, f"{name}.mlp_norm", x, options)
    hidden = seen(f"{name}.mlp.down.input", mlp_hidden(weights, f"{name}.mlp", normed, options))
    y = seen(f"{name}.mlp", linear(weights, f"{name}.mlp.down", hidden))
    return seen(name, x + drop(y, f"{name}.mlp_residual_dropout", options.dropout, dropout))


def parallel_block(
    weights: Weights, index: int, x: Tensor, options: ModelOptions, dropout: Dropout | None
) -> Tensor:
    """x + attention + feed-forward network, both on the same normed x (PaLM, section 2)."""
    name = f"blocks.{index}"
    x = seen(f"{name}.input", x)
    normed = norm(weights, f"{name}.norm", x, options)
    heads = attention_heads(weights, f"{name}.attention", normed, options, dropout)
    heads = seen(f"{name}.attention.output.input", heads)
    hidden = seen(f"{name}.mlp.down.input", mlp_hidden(weights, f"{name}.mlp", normed, options))
    y = seen(f"{name}.attention", linear(weights, f"{name}.attention.output", heads))
    z = seen(f"{name}.mlp", linear(weights, f"{name}.mlp.down", hidden))
    y = drop(y, f"{name}.attention_residual_dropout", options.dropout, dropout)
    z = drop(z, f"{name}.mlp_residual_dropout", options.dropout, dropout)
    return seen(name, x + seen(f"{name}.addition", y + z))


def head(weights: Weights, x: Tensor, options: ModelOptions) -> Tensor:
    """Activations (b t d) to logits (b t v)."""
    x = norm(weights, "final_norm", x, options)
    return seen("head", F.linear(x, weights[options.head_name]))


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    """x times the weight, plus the bias where there is one."""
    return seen(name, F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias")))


def norm(weights: Weights, name: str, x: Tensor, options: ModelOptions) -> Tensor:
    """LayerNorm, or RMSNorm, which leaves out the mean and the bias."""
    wide = widen(x)  # b t d
    if options.norm == "layernorm":
        wide = wide - wide.mean(dim=-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + options.norm_eps)
    y = wide.to(x.dtype) * weights[f"{name}.weight"]
    bias = weights.get(f"{name}.bias")
    return seen(name, y if bias is None else y + bias)


def attention_heads(
    weights: Weights,
    name: str,
    x: Tensor,
    options: ModelOptions,
    dropout: Dropout | None,
    part: tuple[int, int] = (0, 1),
) -> Tensor:
    """Causal self-attention before its output projection: b t d to b t (h k).

    Args:
        weights: may hold a part of the heads only, query and key/value heads alike. In the fused
            weight the rows of a key/value head follow those of the query heads that look into it:
            (query.., key, value), (query.., key, value), ...
        name: "blocks.N.attention".
        x: b t d.
        options: of the whole model.
        dropout: None in evaluation.
        part: (index, count) of that part among the equal parts of all heads.
    """
    q, k, v = query_key_value(weights, name, x, options)
    return mix(name, q, k, v, options, dropout, part)


def query_key_value(
    weights: Weights, name: str, x: Tensor, options: ModelOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """b t (h k), b t (g k), b t (g k)."""
    if not options.fused_qkv:
        q, k, v = (linear(weights, f"{name}.{role}", x) for role in ("query", "key", "value"))
        return q, k, v
    return split_fused(linear(weights, f"{name}.qkv", x), options)


def split_fused(rows: Tensor, options: ModelOptions) -> tuple[Tensor, Tensor, Tensor]:
    """What the fused linear gives, b t (g n k), as b t (h k), b t (g k), b t (g k)."""
    roles = (options.heads // options.num_kv_heads, 1, 1)
    groups = rearrange(rows, "b t (g n k) -> b t g n k", n=sum(roles), k=options.head_size)
    q, k, v = (rearrange(y, "b t g n k -> b t (g n k)") for y in groups.split(roles, dim=3))
    return q, k, v


def mix(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: ModelOptions,
    dropout: Dropout | None,
    part: tuple[int, int] = (0, 1),
) -> Tensor:
    """Attention between projections: b t (h k), b t (g k), b t (g k) to b t (h k); see above."""
    q, k, v = (
        rearrange(x, "b t (h k) -> b h t k", k=options.head_size) for x in (query, key, value)
    )
    if options.positions == "rope":
        q, k = rotate(q, options.rope_theta), rotate(k, options.rope_theta)
    # Query head i looks into key/value head i // (heads / kv_heads).
    k, v = (repeat(y, "b g s k -> b (g r) s k", r=q.shape[1] // k.shape[1]) for y in (k, v))
    scores = einsum(q * options.head_size**-0.5, k, "b h t k, b h s k -> b h t s")
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(diagonal=1)
    shares = scores.masked_fill(later, -torch.inf).softmax(dim=-1)
    shares = drop(shares, f"{name}.dropout", options.attention_dropout_rate, dropout, part)
    mixed = einsum(shares, v, "b h t s, b h s k -> b h t k")
    return rearrange(mixed, "b h t k -> b t (h k)")


def rotate(x: Tensor, theta: float) -> Tensor:
    """RoPE: turn the pair (i, i + k/2) of each head by the angle t * theta^(-2i/k)."""
    half = x.shape[-1] // 2
    speed = theta ** -(torch.arange(half, dtype=torch.float64) / half)
    angle = torch.outer(torch.arange(x.shape[-2], dtype=torch.float64), speed)  # t k/2
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def mlp_hidden(weights: Weights, name: str, x: Tensor, options: ModelOptions) -> Tensor:
    """The feed-forward network before its down projection: b t d to b t f."""
    up = linear(weights, f"{name}.up", x)
    if options.mlp == "gelu":
        return F.gelu(up, approximate="tanh")
    return F.silu(linear(weights, f"{name}.gate", x)) * up


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy summed over the valid labels. logits b t v, labels b t."""
    wide = widen(logits)
    valid = seen("labels", labels) != IGNORED_LABEL
    index = rearrange(labels.where(valid, 0), "b t -> b t 1")
    picked = rearrange(wide.gather(-1, index), "b t 1 -> b t")
    return seen("loss", (wide.logsumexp(dim=-1) - picked).where(valid, 0)).sum()


def num_valid(labels: Tensor) -> int:
    """Count the labels that are not ignored."""
    return int((labels != IGNORED_LABEL).sum())


def widen(x: Tensor) -> Tensor:
    """At least float32."""
    return x.float() if x.dtype == torch.bfloat16 else x


def _block_shapes(options: ModelOptions) -> dict[str, tuple[int, ...]]:
    d, f, k = options.width, options.num_ffn, options.head_size
    gate = {"mlp.gate": (f, d)} if options.mlp == "swiglu" else {}
    query, key_value = options.heads * k, options.num_kv_heads * k
    projections: dict[str, tuple[int, ...]] = {
        "attention.query": (query, d),
        "attention.key": (key_value, d),
        "attention.value": (key_value, d),
    }
    if options.fused_qkv:
        projections = {"attention.qkv": (query + 2 * key_value, d)}
    norms: dict[str, tuple[int, ...]] = {"attention_norm": (d,), "mlp_norm": (d,)}
    return {
        **({"norm": (d,)} if options.parallel_block else norms),
        **projections,
        "attention.output": (d, options.heads * k),
        **gate,
        "mlp.up": (f, d),
        "mlp.down": (d, f),
    }


def _has_bias(module: str, options: ModelOptions) -> bool:
    if module.endswith(("embedding", "head", "gate")):
        return False
    return options.bias and ("norm" not in module or options.norm == "layernorm")
