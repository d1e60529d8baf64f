"""Times our training step against plain PyTorch, written out below: same model, optimizer, batches.

    python scripts/bench_step.py [--steps 15]

One rank, two threads, float32: 6 layers, width 384, 6 heads, 256 tokens, 8 sequences a step,
vocabulary 256, tied, GELU, AdamW, clip 1.0. The two alternate step by step, so that both meet the
same weather; medians and their ratio count.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from einops import rearrange
from tabulate import tabulate
from torch import Tensor, nn

from dtensor_llm.config import Config, ModelConfig, TrainConfig
from dtensor_llm.train import Trainer
from dtensor_llm.worlds import World, processes

MODEL = ModelConfig(vocab_size=256, width=384, heads=6, layers=6, seq_len=256)
BATCH, THREADS, WARMUP = 8, 2, 3


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


def plain_step() -> Callable[[Tensor, Tensor], float]:
    """The loop that everybody writes."""
    model = PlainGPT(MODEL)
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


def our_step(world: World) -> Callable[[Tensor, Tensor], float]:
    train = TrainConfig(global_batch_size=BATCH, lr=1e-3, steps=10**6, warmup_steps=0)
    trainer = Trainer(Config(MODEL, train), world)
    count = iter(range(10**6))
    return lambda tokens, labels: trainer.step(next(count), tokens, labels).loss


def batches(num: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shape = (num, BATCH, MODEL.seq_len + 1)
    whole = torch.randint(MODEL.vocab_size, shape, generator=generator)
    return [(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in whole]


def main() -> None:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each (default: 15)")
    num_steps = parser.parse_args().steps

    def bench(world: World) -> None:
        torch.set_num_threads(THREADS)
        steps = {"plain PyTorch": plain_step(), "dtensor_llm": our_step(world)}
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for index, (tokens, labels) in enumerate(batches(WARMUP + num_steps)):
            for name, step in steps.items() if index % 2 else reversed(steps.items()):
                start = time.perf_counter()
                step(tokens, labels)
                if index >= WARMUP:
                    seconds[name].append(time.perf_counter() - start)
        report(seconds)

    processes.run(bench, device="cpu")


def report(seconds: dict[str, list[float]]) -> None:
    plain = median(seconds["plain PyTorch"])
    pairs = list(zip(seconds["dtensor_llm"], seconds["plain PyTorch"], strict=True))
    rows = [
        (name, f"{1e3 * median(s):.0f}", f"{1e3 * min(s):.0f}", f"{median(s) / plain:.3f}")
        for name, s in seconds.items()
    ]
    print(tabulate(rows, headers=("step", "median ms", "least ms", "ratio"), disable_numparse=True))
    print(f"median of the ratios pair by pair: {median(a / b for a, b in pairs):.3f}")


if __name__ == "__main__":
    main()
    processes.leave(0)
