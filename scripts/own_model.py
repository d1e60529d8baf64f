"""Holds a model that is no GPT, a small vision transformer, to the same model on one device.

    python scripts/own_model.py [--mesh dp=2,tp=2] [--dtype float64] [--bug]

Its author parallelizes it with torch alone: tensor and sequence parallelism by a plan, and
`fully_shard` over dp. With `--bug` the plan leaves out one norm: each rank then normalizes its own
tokens, and its gradient is not summed over them. The loss of the first steps looks right, every
rank trains another norm, and the check says which. Exit status 1 if there is a difference.
"""

import argparse
import sys
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from dtensor_llm.parity.own_model import OwnModelError, check_parity

WIDTH, HEADS, LAYERS, PATCH, SIDE, CLASSES = 16, 4, 2, 4, 16, 10
STEPS, BATCH = 3, 8


class Attention(nn.Module):
    """Every patch looks at every patch; the number of heads follows from the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (  # b h/tp t k
            rearrange(linear(x), "b t (h k) -> b h t k", k=WIDTH // HEADS)
            for linear in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return self.output(rearrange(y, "b h t k -> b t (h k)"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = rearrange(self.patches(images), "b d h w -> b (h w) d")
        x = self.norm(self.blocks(x))
        return self.head(x.mean(dim=1))


def plan(forgotten: str = "") -> dict[str, ParallelStyle]:
    """Between two norms tp divides heads and features, around them tokens."""
    whole, tokens = Replicate(), Shard(1)
    styles: dict[str, ParallelStyle] = {
        "blocks": PrepareModuleInputOutput(
            input_layouts=whole,
            desired_input_layouts=tokens,
            use_local_input=True,
            output_layouts=tokens,
            desired_output_layouts=whole,
        )
    }
    for i in range(LAYERS):
        block = f"blocks.{i}"
        styles |= {
            f"{block}.attention_norm": SequenceParallel(use_local_output=True),
            f"{block}.attention": PrepareModuleInput(
                input_layouts=tokens, desired_input_layouts=whole
            ),
            f"{block}.attention.query": ColwiseParallel(),
            f"{block}.attention.key": ColwiseParallel(),
            f"{block}.attention.value": ColwiseParallel(),
            f"{block}.attention.output": RowwiseParallel(output_layouts=tokens),
            f"{block}.mlp_norm": SequenceParallel(use_local_output=True),
            f"{block}.up": ColwiseParallel(input_layouts=tokens),
            f"{block}.down": RowwiseParallel(output_layouts=tokens),
        }
    styles.pop(forgotten, None)
    return styles


def parallelize(model: nn.Module, mesh: DeviceMesh, forgotten: str = "") -> None:
    """What each rank does: first tp, then dp shards what tp has left, block by block."""
    parallelize_module(model, mesh["tp"], plan(forgotten))
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def random_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = (BATCH, 3, SIDE, SIDE)
    return [
        (
            torch.randn(shape, generator=generator),
            torch.randint(CLASSES, (BATCH,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return VisionTransformer()


def read_mesh(text: str) -> dict[str, int]:
    sizes = {"dp": 1, "tp": 1}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in sizes or not size.isdigit():
            raise argparse.ArgumentTypeError(f"{part!r} is not dp=SIZE or tp=SIZE")
        sizes[axis] = int(size)
    return sizes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mesh", type=read_mesh, default="dp=2,tp=2", help="default: %(default)s")
    dtypes = ("float64", "float32", "bfloat16")
    parser.add_argument("--dtype", choices=dtypes, default=dtypes[0], help="default: %(default)s")
    parser.add_argument("--bug", action="store_true", help="leave one norm out of the plan")
    options = parser.parse_args()
    forgotten = "blocks.1.mlp_norm" if options.bug else ""
    try:
        report = check_parity(
            build_model,
            partial(parallelize, forgotten=forgotten),
            options.mesh,
            random_batches(),
            loss=loss,
            dtype=getattr(torch, options.dtype),
        )
    except OwnModelError as error:
        print(error, file=sys.stderr)
        return 2
    print(report)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
