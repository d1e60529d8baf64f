"""Random numbers that belong to an element, not to a generator.

Each is a function of (seed, name of the stream, step, place of the element in the global tensor).
Here a whole tensor is drawn at a time, in the plainest arithmetic: int64, reduced to 32 bits after
each operation. What a rank of any mesh draws for its own elements must be a slice of this.

Paper: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Threefry-2x32).
"""

import hashlib
import math
from functools import cache
from statistics import NormalDist

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)


def stream_key(seed: int, stream: str, step: int | None = None) -> tuple[int, int]:
    """Two 32-bit words that stand for the name "seed/stream" or "seed/stream/step"."""
    name = "/".join(str(part) for part in (seed, stream, step) if part is not None)
    digest = hashlib.blake2s(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def threefry(key: tuple[int, int], counter: Tensor) -> tuple[Tensor, Tensor]:
    """Encrypt 64-bit counters (int64) with 20 rounds: two words in [0, 2^32) each (int64)."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA)
    x = (counter + keys[0]) & WORD
    y = ((counter >> 32) + keys[1]) & WORD
    for turn in range(20):
        rotation = ROTATIONS[turn % 8]
        x = (x + y) & WORD
        y = (((y << rotation) | (y >> (32 - rotation))) & WORD) ^ x
        if turn % 4 == 3:
            group = turn // 4 + 1
            x = (x + keys[group % 3]) & WORD
            y = (y + keys[(group + 1) % 3] + group) & WORD
    return x, y


def normal(seed: int, stream: str, shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers, float64: element i from block i.

    16 bits choose one of 65,536 cells of equal probability, 48 bits the place in the cell.
    """
    x, y = threefry(stream_key(seed, stream), torch.arange(math.prod(shape)))
    borders = _cell_borders()
    cell = x >> 16
    fraction = (x & 0xFFFF).double() * 2.0**-16 + y.double() * 2.0**-48
    numbers = borders[cell] + fraction * (borders[cell + 1] - borders[cell])
    return numbers.reshape(shape)


def keep_mask(
    seed: int, site: str, step: int, rate: float, first_sample: int, shape: tuple[int, ...]
) -> Tensor:
    """Dropout's mask, float64: 0 where dropped, 1 / (1 - rate) where kept.

    Element e takes 16 of the 64 bits of block e // 4, and is kept when they are at least
    rate * 65536.

    Args:
        seed: the run's seed.
        site: the name of the place in the model.
        step: the optimizer step.
        rate: the fraction to drop.
        first_sample: the place in the global batch of the first of the shape[0] sequences.
        shape: (sequences, ...); the other dims are whole.
    """
    first = first_sample * math.prod(shape[1:])
    stop = first + math.prod(shape)
    x, y = threefry(stream_key(seed, site, step), torch.arange(first // 4, (stop + 3) // 4))
    fields = torch.stack([x & 0xFFFF, x >> 16, y & 0xFFFF, y >> 16], dim=-1).flatten()
    threshold = round(rate * 65536)
    own = fields[first % 4 :][: stop - first]
    mask = (own >= threshold).double() * (65536 / (65536 - threshold))
    return mask.reshape(shape)


@cache
def _cell_borders() -> Tensor:
    """The normal quantiles of j / 65536; the two infinite ones are cut at 2^-18."""
    bell = NormalDist()
    end = bell.inv_cdf(2**-18)
    inner = [bell.inv_cdf(j / 65536) for j in range(1, 65536)]
    return torch.tensor([end, *inner, -end], dtype=torch.float64)
