"""The workload of bench_step.py in plain PyTorch, as everybody writes it: the loop, DDP, FSDP."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dtensor_llm.config import ModelConfig
from dtensor_llm.worlds import World

Step = Callable[[Tensor, Tensor], float]
"""One optimizer step on the global batch, tokens and labels b t; returns a loss."""


class PlainAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        split = "b t (h k) -> b h t k"
        q, k, v = (
            rearrange(linear(x), split, h=self.heads)
            for linear in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(rearrange(y, "b h t k -> b t (h k)"))


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = PlainAttention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(c.vocab_size, c.width)
        self.positions = nn.Embedding(c.seq_len, c.width)
        self.blocks = nn.Sequential(*(PlainBlock(c.width, c.heads) for _ in range(c.layers)))
        self.norm = nn.LayerNorm(c.width)
        for p in self.parameters():
            nn.init.normal_(p, std=0.02) if p.ndim > 1 else None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


def plain_step(config: ModelConfig, _: World) -> Step:
    """One rank."""
    return training_step(PlainGPT(config))


def plain_ddp_step(config: ModelConfig, _: World) -> Step:
    """Equal parts of the batch, so the mean of their gradients is the gradient of their mean."""
    torch.manual_seed(0)
    return on_own_sequences(training_step(DistributedDataParallel(PlainGPT(config))))


def plain_fsdp_step(config: ModelConfig, world: World) -> Step:
    torch.manual_seed(0)
    model, mesh = PlainGPT(config), init_device_mesh("cpu", (world.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return on_own_sequences(training_step(model))


def training_step(model: nn.Module) -> Step:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)

    def step(tokens: Tensor, labels: Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def on_own_sequences(step: Step) -> Step:
    rank, size = dist.get_rank(), dist.get_world_size()
    return lambda tokens, labels: step(tokens.chunk(size)[rank], labels.chunk(size)[rank])
