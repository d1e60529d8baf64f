"""The GPT, written for one device: it knows no mesh.

Shapes: b sequence, t token (s: the key's token), d width, h query head, g key/value head, k head
size, f feed-forward width, v vocabulary. A strategy may shard any of them: what a module needs to
know of the whole is in an attribute that the strategy sets (`LearnedPositions.first_token`,
`Dropout.extents`), and head counts are read off the tensors.

A pipeline stage is a GPT with some of the blocks; `first` says whether it holds the embeddings and
`last` whether it holds the final norm and the head. Block names carry the layer's number in the
whole model, so a parameter has one name on every mesh.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from dtensor_llm import rng
from dtensor_llm.config import ModelConfig


class Dropout(nn.Module):
    """Dropout whose mask depends on the seed, the site, the step and the element's global index.

    A rank, a microbatch or a recomputation draws exactly the numbers one device would have drawn.
    """

    def __init__(self, site: str, rate: float, shape: tuple[int, ...]) -> None:
        """`site` names the random stream; `shape` is one sample's global shape at this site."""
        super().__init__()
        self.site, self.rate = site, rate
        self.extents = [rng.Extent(0, size, size) for size in shape]
        self.seed = self.step = 0

    def shard(self, dim: int, index: int, count: int) -> None:
        """Take equal part `index` of `count` of dim `dim` (0 is the dim after the batch)."""
        total = self.extents[dim].total
        self.extents[dim] = rng.Extent(total // count * index, total // count, total)

    def forward(self, x: Tensor, samples: Tensor) -> Tensor:
        """`x` is b ..., `samples` b: each sequence's place in the global batch."""
        if not self.training or self.rate == 0.0:
            return x
        key = rng.key(self.seed, self.site, self.step)
        return x * rng.keep_mask(key, self.rate, samples, self.extents, x.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim (Zhang and Sennrich, arXiv 1910.07467, eq. 4)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # b t d -> b t d
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """torch's; in bfloat16 on the CPU computed in float32.

    There torch 2.13 adds up the gradients of weight and bias in bfloat16: over 4096 tokens they are
    a seventh off. CUDA's kernel adds in float32.
    """

    def forward(self, x: Tensor) -> Tensor:  # b t d -> b t d
        if x.dtype is not torch.bfloat16 or x.device.type != "cpu":
            return super().forward(x)
        weight, bias = self.weight.float(), None if self.bias is None else self.bias.float()
        y = F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps)
        return y.to(x.dtype)


def make_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm(config.width, config.norm_eps)
    return LayerNorm(config.width, eps=config.norm_eps, bias=config.bias)


class LearnedPositions(nn.Module):
    """Adds a learned vector to each position (GPT-2)."""

    def __init__(self, seq_len: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(seq_len, width))  # t d
        self.seq_len, self.first_token = seq_len, 0

    def shard(self, index: int, count: int) -> None:
        """Expect equal part `index` of `count` of the tokens."""
        self.first_token = self.seq_len // count * index

    def forward(self, x: Tensor) -> Tensor:  # b t d -> b t d
        return x + self.weight[self.first_token : self.first_token + x.shape[1]]


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary positions: turns the pair (i, i + k/2) of token t by the angle t * theta^(-2i/k).

    `x` is b h t k and holds the whole sequence. Angles are computed in float64 and rounded once.
    Paper: Su et al., arXiv 2104.09864, section 3.2; the pairing by halves is that of Llama.
    """
    half = x.shape[-1] // 2
    index = torch.arange(half, dtype=torch.float64, device=x.device)
    token = torch.arange(x.shape[2], dtype=torch.float64, device=x.device)
    angle = token[:, None] * theta ** (-index / half)  # t k/2
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    low, high = x.split(half, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


class Attention(nn.Module):
    """Causal self-attention; g key/value heads serve h query heads (arXiv 2305.13245).

    Fused, one linear makes all of them, a group of heads after the other: the h/g query heads that
    share a key/value head, its key, its value. So an equal part of the rows is whole groups.
    """

    def __init__(self, config: ModelConfig, site: str) -> None:
        super().__init__()
        kv_width = config.num_kv_heads * config.head_size
        if config.fused_qkv:
            self.qkv = nn.Linear(config.width, config.width + 2 * kv_width, bias=config.bias)
        else:
            self.query = nn.Linear(config.width, config.width, bias=config.bias)
            self.key = nn.Linear(config.width, kv_width, bias=config.bias)
            self.value = nn.Linear(config.width, kv_width, bias=config.bias)
        self.output = nn.Linear(config.width, config.width, bias=config.bias)
        self.dropout = Dropout(
            f"{site}.dropout",
            config.attention_dropout_rate,
            (config.heads, config.seq_len, config.seq_len),
        )
        self.heads_per_group = config.heads // config.num_kv_heads
        self.head_size, self.fused = config.head_size, config.fused_qkv
        self.rope_theta = config.rope_theta if config.positions == "rope" else None

    def forward(self, x: Tensor, samples: Tensor) -> Tensor:  # b t d -> b t d
        q, k, v = self.project(x)
        if self.rope_theta is not None:
            q, k = rotate(q, self.rope_theta), rotate(k, self.rope_theta)
        y = self.attend(q, k, v, samples)
        return self.output(rearrange(y, "b h t k -> b t (h k)"))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query b h t k, key b g s k and value b g s k of the heads held here."""
        if self.fused:
            roles = (self.heads_per_group, 1, 1)  # query heads, the key, the value of a group
            groups = rearrange(
                self.qkv(x), "b t (g n k) -> b g n t k", n=sum(roles), k=self.head_size
            )
            q, k, v = (rearrange(y, "b g n t k -> b (g n) t k") for y in groups.split(roles, dim=2))
            return q, k, v
        q = rearrange(self.query(x), "b t (h k) -> b h t k", k=self.head_size)
        k = rearrange(self.key(x), "b s (g k) -> b g s k", k=self.head_size)
        v = rearrange(self.value(x), "b s (g k) -> b g s k", k=self.head_size)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, samples: Tensor) -> Tensor:
        """softmax(q k / sqrt(head size)) v with a causal mask; b h t k -> b h t k."""
        if not self.training or self.dropout.rate == 0.0:
            grouped = q.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        k, v = (repeat(x, "b g s k -> b (g n) s k", n=q.shape[1] // x.shape[1]) for x in (k, v))
        scores = q @ k.mT * self.head_size**-0.5  # b h t s
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
        return self.dropout(weights, samples) @ v


class MLP(nn.Module):
    """down(gelu(up(x))), or with a gate down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.mlp == "swiglu":
            self.gate = nn.Linear(config.width, config.num_ffn, bias=False)
        self.up = nn.Linear(config.width, config.num_ffn, bias=config.bias)
        self.down = nn.Linear(config.num_ffn, config.width, bias=config.bias)
        self.gated = config.mlp == "swiglu"

    def forward(self, x: Tensor) -> Tensor:  # b t d -> b t d
        if self.gated:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        site, shape = f"blocks.{layer}", (config.seq_len, config.width)
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, f"{site}.attention")
        self.attention_residual_dropout = Dropout(
            f"{site}.attention_residual_dropout", config.dropout, shape
        )
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config)
        self.mlp_residual_dropout = Dropout(f"{site}.mlp_residual_dropout", config.dropout, shape)

    def forward(self, x: Tensor, samples: Tensor) -> Tensor:  # b t d -> b t d
        y = self.attention(self.attention_norm(x), samples)
        x = x + self.attention_residual_dropout(y, samples)
        return x + self.mlp_residual_dropout(self.mlp(self.mlp_norm(x)), samples)


class Addition(nn.Module):
    """Adds what two branches give: a module, so that a strategy can reduce the sum once."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x)): one norm, and neither branch waits for the other.

    Paper: Chowdhery et al., PaLM, arXiv 2204.02311, section 2; each branch keeps its dropout.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        site, shape = f"blocks.{layer}", (config.seq_len, config.width)
        self.norm = make_norm(config)
        self.attention = Attention(config, f"{site}.attention")
        self.attention_residual_dropout = Dropout(
            f"{site}.attention_residual_dropout", config.dropout, shape
        )
        self.mlp = MLP(config)
        self.mlp_residual_dropout = Dropout(f"{site}.mlp_residual_dropout", config.dropout, shape)
        self.addition = Addition()

    def forward(self, x: Tensor, samples: Tensor) -> Tensor:  # b t d -> b t d
        normed = self.norm(x)
        attention = self.attention_residual_dropout(self.attention(normed, samples), samples)
        mlp = self.mlp_residual_dropout(self.mlp(normed), samples)
        return x + self.addition(attention, mlp)


class GPT(nn.Module):
    """Tokens to logits; or, as a pipeline stage, one part of the way."""

    def __init__(
        self,
        config: ModelConfig,
        layers: Iterable[int] | None = None,
        *,
        first: bool = True,
        last: bool = True,
    ) -> None:
        """`layers` are the numbers of the blocks to hold; None is all of them."""
        super().__init__()
        if first:
            self.token_embedding = nn.Embedding(config.vocab_size, config.width)
            if config.positions == "learned":
                self.position_embedding = LearnedPositions(config.seq_len, config.width)
            self.embedding_dropout = Dropout(
                "embedding_dropout", config.dropout, (config.seq_len, config.width)
            )
        numbers = range(config.layers) if layers is None else layers
        kind = ParallelBlock if config.parallel_block else Block
        self.blocks = nn.ModuleDict({str(number): kind(config, number) for number in numbers})
        if last:
            self.final_norm = make_norm(config)
            self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.config, self.first, self.last = config, first, last
        self.tie_embeddings()

    def tie_embeddings(self) -> None:
        """Give the head the embedding's weight, if the model ties them and holds both.

        To be called again by whoever replaced either parameter.
        """
        if self.config.tied_embeddings and self.first and self.last:
            self.head.weight = self.token_embedding.weight

    def forward(self, x: Tensor, samples: Tensor) -> Tensor:
        """Tokens b t, or hidden states b t d of the stage before; logits b t v, or hidden states.

        `samples` (b) is each sequence's place in the global batch, for dropout.
        """
        if self.first:
            x = self.token_embedding(x)  # b t d
            if self.config.positions == "learned":
                x = self.position_embedding(x)
            x = self.embedding_dropout(x, samples)
        for block in self.blocks.values():
            x = block(x, samples)
        return self.head(self.final_norm(x)) if self.last else x

    def part(self, layers: Iterable[int], *, first: bool, last: bool) -> "GPT":
        """Some of what this one holds, as a GPT that shares its modules.

        `first` and `last` say whether the part begins and ends the model.
        """
        part = GPT(self.config, (), first=False, last=False)
        part.blocks = nn.ModuleDict({str(number): self.blocks[str(number)] for number in layers})
        names = [name for name, _ in self.named_children() if name != "blocks"]
        ends = ("final_norm", "head")
        for name in names:
            if last if name in ends else first:
                part.add_module(name, self.get_submodule(name))
        part.first, part.last = first, last
        return part

    def weights(self) -> dict[str, nn.Parameter]:
        """Every parameter once, by the name it has in the whole model.

        A tied head goes by the embedding's name, also where there is no embedding.
        """
        found: dict[str, nn.Parameter] = {}
        for name, parameter in self.named_parameters():
            is_tied = self.config.tied_embeddings and name == "head.weight"
            found.setdefault("token_embedding.weight" if is_tied else name, parameter)
        return found

    def copies(self) -> dict[str, nn.Parameter]:
        """Second copies of `weights`: a tied head's, where it has not the embedding's parameter."""
        if not (self.config.tied_embeddings and self.first and self.last):
            return {}
        own = dict(self.named_parameters())
        return {"token_embedding.weight": own["head.weight"]} if "head.weight" in own else {}

    def residual_modules(self) -> list[str]:
        """Name patterns of the modules with weights that work on b t d token by token."""
        names = ["blocks.*.attention_norm", "blocks.*.mlp_norm"]
        if self.config.parallel_block:
            names = ["blocks.*.norm"]
        names += ["position_embedding"] * (self.first and self.config.positions == "learned")
        return names + ["final_norm"] * self.last

    def set_dropout(self, *, seed: int, step: int) -> None:
        """Choose the masks of one optimizer step."""
        for module in self.modules():
            if isinstance(module, Dropout):
                module.seed, module.step = seed, step
