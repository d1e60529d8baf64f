"""Random numbers that do not depend on the mesh.

A generator with a state gives numbers in the order in which they are asked for, so every way of
splitting a model over ranks gives other numbers. Here a number is a pure function of

    (seed, name of the stream, step, place of the element in the GLOBAL tensor)

so that a rank computes the elements that it owns, and only those, and finds what a single device
would have found there, bit for bit. The function is Threefry-2x32 with 20 rounds, in effect a block
cipher: `block i` below is the encrypted counter i, two 32-bit words.

    normal      element i takes block i          48 of its 64 bits
    keep_mask   element e takes block e // 4     16 bits: the field e % 4

Nothing here reads or moves a generator of torch, and no state is kept between calls.

Paper: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import hashlib
import math
from array import array
from collections.abc import Iterable, Sequence
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

Key = tuple[int, int]

NUM_ROUNDS = 20
ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
KEY_PARITY = 0x1BD11BDA
# Blocks enciphered together: enough to hide the cost of a call, few enough to stay in the cache.
BLOCKS_AT_ONCE = 1 << 18
# Values of the 16-bit numbers: the cells of `normal`, the fields of `keep_mask`.
CELLS = FIELD_VALUES = 1 << 16
FIELDS_PER_BLOCK = 4


class Extent(NamedTuple):
    """The part [start, start + length) of a dim that has `total` elements in the global tensor."""

    start: int
    length: int
    total: int


def key(seed: int, stream: str, step: int | None = None) -> Key:
    """Hash the name of a stream to the two 32-bit words of its key.

    Args:
        seed: the run's seed.
        stream: a parameter's name (initialization) or a dropout site's name.
        step: the optimizer step, for streams that draw anew at each step.
    """
    text = f"{seed}/{stream}" if step is None else f"{seed}/{stream}/{step}"
    digest = hashlib.blake2s(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def threefry2x32(key: Key, low: Tensor, high: Tensor | int) -> tuple[Tensor, Tensor]:
    """Encipher counters: two random 32-bit words for each, as the bit patterns of int32.

    Args:
        key: from `key()`.
        low: the counters' low words, int32, any shape; its device does the work.
        high: the counters' high words: int32 of the same shape, or one word for all.
    """
    word0 = low.flatten().clone()
    if isinstance(high, Tensor):
        word1 = high.flatten().clone()
    else:
        word1 = torch.full_like(word0, _signed(high))
    at_once = BLOCKS_AT_ONCE if low.device.type == "cpu" else max(1, low.numel())
    for piece0, piece1 in zip(word0.split(at_once), word1.split(at_once), strict=True):
        _encipher(key, piece0, piece1)
    return word0.reshape(low.shape), word1.reshape(low.shape)


def normal(
    key: Key,
    global_shape: Sequence[int],
    *,
    offset: Sequence[int] | None = None,
    shape: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Draw the part [offset, offset + shape) of a global tensor of standard normal numbers.

    The inverse of the distribution function, exact at the inner borders of 65,536 cells of equal
    probability and straight between them; the tails end at 4.48. A product and a sum, rounded one
    after the other, give the same bits in every slice and on every device.

    Args:
        key: from `key()`.
        global_shape: the shape of the whole tensor, at least one dim.
        offset: where the part begins in each dim (default: at 0).
        shape: the part's own shape (default: all that follows `offset`).
        device: where to compute.

    Returns:
        float64, of `shape`.
    """
    if offset is None:
        offset = [0] * len(global_shape)
    if shape is None:
        shape = [total - start for total, start in zip(global_shape, offset, strict=True)]
    extents = [Extent(*parts) for parts in zip(offset, shape, global_shape, strict=True)]
    row_starts = _places(extents[:1], math.prod(global_shape[1:]), device)
    places_in_row = _places(extents[1:], 1, device)

    borders = torch.frombuffer(_cell_borders(), dtype=torch.float64).to(device)
    widths = borders.diff()
    numbers = torch.empty(*shape, dtype=torch.float64, device=device)
    rows_at_once = max(1, BLOCKS_AT_ONCE // max(1, len(places_in_row)))
    for rows, starts in zip(
        numbers.split(rows_at_once), row_starts.split(rows_at_once), strict=True
    ):
        cell, fraction = _cell_and_fraction(key, (starts.unsqueeze(1) + places_in_row).flatten())
        own = fraction.mul_(widths.index_select(0, cell)).add_(borders.index_select(0, cell))
        rows.copy_(own.reshape(rows.shape))
    return numbers


def keep_mask(
    key: Key, rate: float, samples: Tensor, extents: Sequence[Extent], dtype: torch.dtype
) -> Tensor:
    """Draw a dropout mask: 0 where an element is dropped, 1 / (1 - rate) where it is kept.

    The rate is rounded to a multiple of 1/65536, and the factor is that of the rounded rate.
    Fastest where the last dims are whole and their product is a multiple of four.

    Args:
        key: from `key()`, with the step.
        rate: the fraction to drop, 0 <= rate < 1.
        samples: (b,) int64, each sequence's place in the global batch; its device does the work.
        extents: for every other dim of the site, the part that this rank holds.
        dtype: of the mask.

    Returns:
        (b, *lengths of the extents).

    Raises:
        ValueError: the rate is outside [0, 1), or so near to 1 that nothing would be kept.
    """
    threshold = round(rate * FIELD_VALUES)
    if not 0 <= threshold < FIELD_VALUES:
        raise ValueError(
            f"dropout rate {rate} is not in [0, 1), or so near to 1 that nothing is kept"
        )
    outer, run = _trailing_run(extents)
    sample_size = math.prod(extent.total for extent in extents)
    starts = samples.unsqueeze(1) * sample_size + _places(outer, run.total, samples.device)
    fields = _fields_of_runs(key, starts.flatten() + run.start, run)
    kept = fields >= threshold - FIELD_VALUES // 2
    mask = kept.to(dtype).mul_(FIELD_VALUES / (FIELD_VALUES - threshold))
    return mask.reshape(len(samples), *(extent.length for extent in extents))


def _encipher(key: Key, word0: Tensor, word1: Tensor) -> None:
    """Twenty rounds in place: word0 += word1; word1 = rotate_left(word1) ^ word0."""
    keys = (*key, key[0] ^ key[1] ^ KEY_PARITY)
    # Zero-dim tensors: as Python numbers the constants would double the cost of a small call.
    keys0 = _scalars(keys[group % 3] for group in range(NUM_ROUNDS // 4 + 1))
    keys1 = _scalars(keys[(group + 1) % 3] + group for group in range(NUM_ROUNDS // 4 + 1))
    down_shifts = _scalars(32 - rotation for rotation in ROTATIONS)
    low_masks = _scalars((1 << rotation) - 1 for rotation in ROTATIONS)
    low_bits = torch.empty_like(word0)
    word0.add_(keys0[0])
    word1.add_(keys1[0])
    for index in range(NUM_ROUNDS):
        turn = index % len(ROTATIONS)
        word0.add_(word1)
        # int32 has only the arithmetic shift, so the copies of the sign bit are masked away.
        torch.bitwise_right_shift(word1, down_shifts[turn], out=low_bits)
        low_bits.bitwise_and_(low_masks[turn])
        torch.add(low_bits, word1, alpha=1 << ROTATIONS[turn], out=word1)
        word1.bitwise_xor_(word0)
        if index % 4 == 3:
            word0.add_(keys0[index // 4 + 1])
            word1.add_(keys1[index // 4 + 1])


def _scalars(words: Iterable[int]) -> tuple[Tensor, ...]:
    return torch.tensor([_signed(word) for word in words], dtype=torch.int32, device="cpu").unbind()


def _signed(word: int) -> int:
    """The int32 that has the bits of an unsigned 32-bit word (higher bits dropped)."""
    return (word + 2**31) % 2**32 - 2**31


def _words(key: Key, blocks: Tensor) -> tuple[Tensor, Tensor]:
    return threefry2x32(key, blocks.to(torch.int32), (blocks >> 32).to(torch.int32))


def _places(extents: Sequence[Extent], stride: int, device: torch.device | str) -> Tensor:
    """Row-major places of a hyper-rectangle in its global tensor, whose last dim has `stride`."""
    places = torch.zeros(1, dtype=torch.int64, device=device)
    for extent in reversed(extents):
        own = torch.arange(extent.start, extent.start + extent.length, device=device) * stride
        places = (own.unsqueeze(1) + places).flatten()
        stride *= extent.total
    return places


@cache
def _cell_borders() -> "array[float]":
    """Borders of 65,536 cells of equal probability; a finite number stands for infinity."""
    bell = NormalDist()
    tail = bell.inv_cdf(2.0**-18)
    return array("d", [tail, *(bell.inv_cdf(j / CELLS) for j in range(1, CELLS)), -tail])


def _cell_and_fraction(key: Key, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For each block a cell (16 bits) and a place in it, in [0, 1) (48 bits, exact in float64)."""
    word0, word1 = _words(key, blocks)
    cell = (word0 >> 16) & 0xFFFF
    low_bits = word1.to(torch.int64).bitwise_and_(0xFFFFFFFF)
    numerator = (word0 & 0xFFFF).to(torch.int64).bitwise_left_shift_(32).add_(low_bits)
    return cell, numerator.to(torch.float64).mul_(2.0**-48)


def _trailing_run(extents: Sequence[Extent]) -> tuple[list[Extent], Extent]:
    """Split extents into outer ones and one run of elements that are neighbours in memory."""
    outer, run = list(extents), Extent(0, 1, 1)
    while outer and run.length == run.total:
        extent = outer.pop()
        run = Extent(*(run.total * part for part in extent))
    return outer, run


def _fields_of_runs(key: Key, starts: Tensor, run: Extent) -> Tensor:
    """16-bit fields of the elements [start, start + run.length) of each start, less 32768.

    Args:
        starts: (runs,) int64, row-major places in the global tensor.
        run: its start and total say whether every run begins with a block.

    Returns:
        int16, (runs, run.length).
    """
    aligned = run.start % FIELDS_PER_BLOCK == 0 and run.total % FIELDS_PER_BLOCK == 0
    slack = 0 if aligned else FIELDS_PER_BLOCK - 1
    num_blocks = math.ceil((run.length + slack) / FIELDS_PER_BLOCK)
    first_blocks = (starts // FIELDS_PER_BLOCK).unsqueeze(1)
    blocks = first_blocks + torch.arange(num_blocks, device=starts.device)
    # Little-endian halves of word 0, then of word 1, are the fields in order. Flipping the sign
    # bits of the unsigned halves subtracts 32768: comparisons of int16 then have the right order.
    words = torch.stack(_words(key, blocks), dim=-1).bitwise_xor_(_signed(0x80008000))
    fields = words.view(torch.int16).flatten(1)
    if aligned:
        return fields[:, : run.length]
    shifts = (starts % FIELDS_PER_BLOCK).unsqueeze(1)
    return fields.gather(1, shifts + torch.arange(run.length, device=starts.device))
