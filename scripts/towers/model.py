"""A model of two kinds of layers: a vision encoder, then a smaller text decoder."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

SIDE, PATCH, HEAD_SIZE = 64, 4, 32
NUM_PATCHES = (SIDE // PATCH) ** 2
IMAGE_WIDTH, TEXT_WIDTH, TEXT_LENGTH, VOCABULARY = 192, 96, 64, 1000
ENCODER_LAYERS, DECODER_LAYERS = 4, 9
MICRO_BATCH = 1  # samples


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); tokens look back only, where `causal`."""

    def __init__(self, width: int, *, causal: bool) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.causal = causal

    def forward(self, x: Tensor, text: Tensor) -> Tensor:  # noqa: ARG002 - layers are called alike
        q, k, v = rearrange(  # b h t k
            self.qkv(self.attention_norm(x)), "b t (n h k) -> n b h t k", n=3, k=HEAD_SIZE
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.output(rearrange(y, "b h t k -> b t (h k)"))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Patches(nn.Module):
    """Images b c h w to patches b p d; they have learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, IMAGE_WIDTH, PATCH, stride=PATCH)
        self.positions = nn.Parameter(0.1 * torch.randn(NUM_PATCHES, IMAGE_WIDTH))

    def forward(self, images: Tensor, text: Tensor) -> Tensor:  # noqa: ARG002 - called alike
        x = rearrange(self.patches(images), "b d h w -> b (h w) d").contiguous()  # to be sent
        return x + self.positions


class Bridge(nn.Module):
    """What the encoder saw, a few patches at once, and the text behind it: b p/4+t d."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * IMAGE_WIDTH)
        self.projection = nn.Linear(4 * IMAGE_WIDTH, TEXT_WIDTH)
        self.embedding = nn.Embedding(VOCABULARY, TEXT_WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(TEXT_LENGTH, TEXT_WIDTH))

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        seen = self.projection(self.norm(rearrange(x, "b (p n) d -> b p (n d)", n=4)))
        return torch.cat([seen, self.embedding(text) + self.positions], dim=1)


class Head(nn.Module):
    """Logits b t v of the text."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(TEXT_WIDTH), nn.Linear(TEXT_WIDTH, VOCABULARY)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        return self.head(self.norm(x[:, -text.shape[1] :]))


def build_layers(dtype: torch.dtype) -> list[nn.Module]:
    """The whole model as a row of layers, the same on every rank."""
    torch.manual_seed(0)
    encoder = [Block(IMAGE_WIDTH, causal=False) for _ in range(ENCODER_LAYERS)]
    decoder = [Block(TEXT_WIDTH, causal=True) for _ in range(DECODER_LAYERS)]
    return [layer.to(dtype) for layer in (Patches(), *encoder, Bridge(), *decoder, Head())]


@dataclass(frozen=True)
class Batch:
    images: Tensor  # b c h w
    text: Tensor  # b t
    labels: Tensor  # b t


def make_batch(num_samples: int, dtype: torch.dtype) -> Batch:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(num_samples, 3, SIDE, SIDE, generator=generator, dtype=dtype)
    text = torch.randint(VOCABULARY, (num_samples, TEXT_LENGTH + 1), generator=generator)
    return Batch(images, text[:, :-1].contiguous(), text[:, 1:].contiguous())


def loss(num_tokens: int, logits: Tensor, labels: Tensor) -> Tensor:
    """A microbatch's part: the sum over its tokens, divided by those of the whole batch."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_tokens
