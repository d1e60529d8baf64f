"""Random numbers are those of Threefry, and of one device in any slice of the global tensor."""

import math
import statistics
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from dtensor_llm import rng
from dtensor_llm.rng import Extent

WORD = 0xFFFFFFFF
# From the file kat_vectors of Random123: counter, key, ciphertext of threefry2x32 with 20 rounds.
KNOWN_ANSWERS = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


def int32(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def whole(*lengths: int) -> list[Extent]:
    return [Extent(0, length, length) for length in lengths]


def words(key: rng.Key, block: int) -> tuple[int, int]:
    """Threefry-2x32-20 of one counter in Python integers, straight from the paper."""
    keys = (*key, 0x1BD11BDA ^ key[0] ^ key[1])
    x0, x1 = (block + keys[0]) & WORD, ((block >> 32) + keys[1]) & WORD
    for group in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x0 = (x0 + x1) & WORD
            x1 = ((x1 << rotation | x1 >> (32 - rotation)) & WORD) ^ x0
        x0 = (x0 + keys[(group + 1) % 3]) & WORD
        x1 = (x1 + keys[(group + 2) % 3] + group + 1) & WORD
    return x0, x1


def normal_number(key: rng.Key, element: int) -> float:
    """One normal number, from its definition."""
    word0, word1 = words(key, element)
    bell, tail = statistics.NormalDist(), statistics.NormalDist().inv_cdf(2**-18)
    borders = [
        tail if j == 0 else -tail if j == 65536 else bell.inv_cdf(j / 65536)
        for j in (word0 >> 16, (word0 >> 16) + 1)
    ]
    fraction = (word0 & 0xFFFF) * 2**-16 + word1 * 2**-48
    return borders[0] + fraction * (borders[1] - borders[0])


def is_kept(key: rng.Key, rate: float, element: int) -> bool:
    """Whether dropout keeps an element, from its definition."""
    word0, word1 = words(key, element // 4)
    field = (word0 & 0xFFFF, word0 >> 16, word1 & 0xFFFF, word1 >> 16)[element % 4]
    return field >= round(rate * 65536)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers_of_random123(
    counter: tuple[int, int], key: tuple[int, int], answer: tuple[int, int]
) -> None:
    low, high = (torch.tensor([int32(word)], dtype=torch.int32) for word in counter)
    for high_word in (high, counter[1]):
        found = rng.threefry2x32(key, low, high_word)
        assert tuple(int(word) & WORD for word in found) == answer
    assert words(key, counter[0] | counter[1] << 32) == answer


@pytest.mark.parametrize("at_once", [1, 7, 64])
def test_blocks_enciphered_in_pieces_are_the_same(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    low = torch.arange(60, dtype=torch.int32).reshape(6, 10).T
    before = rng.threefry2x32((1, 2), low, 3)
    normals = rng.normal((1, 2), (6, 10))
    monkeypatch.setattr(rng, "BLOCKS_AT_ONCE", at_once)
    after = rng.threefry2x32((1, 2), low, 3)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert before[0].shape == (10, 6)
    assert torch.equal(normals, rng.normal((1, 2), (6, 10)))


def test_the_counters_given_are_left_alone() -> None:
    low, high = torch.arange(5, dtype=torch.int32), torch.ones(5, dtype=torch.int32)
    rng.threefry2x32((1, 2), low, high)
    assert low.tolist() == [0, 1, 2, 3, 4]
    assert high.tolist() == [1] * 5


def test_a_key_is_the_hash_of_its_name() -> None:
    # blake2s of "7/head.weight" and "7/head.weight/3", 8 bytes: the format is a promise to files.
    assert rng.key(7, "head.weight") == (0x2490196A, 0xD3465665)
    assert rng.key(7, "head.weight", 3) == (0x763AF6F5, 0x8D15EE85)


def test_streams_differ_by_seed_name_and_step() -> None:
    keys = [
        rng.key(seed, stream, step)
        for seed in (0, 1)
        for stream in ("blocks.0.mlp.up.weight", "blocks.1.mlp.up.weight")
        for step in (None, 0, 1)
    ]
    draws = torch.stack([rng.normal(key, (64,)) for key in keys])
    assert len(set(keys)) == len(keys)
    assert len(draws.flatten().unique()) == draws.numel()


def test_normal_follows_its_definition() -> None:
    key = rng.key(3, "stream")
    expected = [normal_number(key, element) for element in range(60)]
    assert rng.normal(key, (3, 4, 5)).flatten().tolist() == expected


@pytest.mark.parametrize("cell_word", [0x00000000, 0x0000FFFF, 0xFFFF0000, 0xFFFFFFFF])
def test_the_outermost_cells_have_finite_ends(
    cell_word: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = torch.tensor([int32(cell_word)], dtype=torch.int32)
    monkeypatch.setattr(rng, "threefry2x32", lambda *_: (word, word))
    value = abs(float(rng.normal((0, 0), (1,))))
    assert statistics.NormalDist().inv_cdf(1 - 2**-16) <= value <= 4.48


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_normal_shards_are_slices_of_one_draw(parts: int, dim: int) -> None:
    key, shape = rng.key(0, "weight"), (12, 61, 10)
    shards = []
    start = 0
    for piece in torch.empty(shape).chunk(parts, dim):
        offset = [start if d == dim else 0 for d in range(3)]
        shards.append(rng.normal(key, shape, offset=offset, shape=piece.shape))
        start += piece.shape[dim]
    assert torch.equal(torch.cat(shards, dim), rng.normal(key, shape))
    assert all(not torch.equal(a, b) for a, b in pairwise(shards))


def test_normal_of_a_block_in_the_middle() -> None:
    key, shape = rng.key(0, "weight"), (9, 8, 7)
    part = rng.normal(key, shape, offset=(2, 3, 1), shape=(5, 4, 6))
    assert torch.equal(part, rng.normal(key, shape)[2:7, 3:7, 1:7])
    assert torch.equal(rng.normal(key, shape, offset=(4, 0, 2)), rng.normal(key, shape)[4:, :, 2:])


@pytest.mark.parametrize("shape", [(0, 7), (3, 0), (0, 0)])
def test_normal_of_nothing(shape: tuple[int, int]) -> None:
    assert rng.normal((0, 0), (3, 7), offset=(0, 0), shape=shape).shape == shape


def test_normal_beyond_32_bits_uses_the_high_word() -> None:
    key, shape = rng.key(0, "large"), (1 << 20, 1 << 20)
    far = rng.normal(key, shape, offset=(1 << 19, 5), shape=(2, 3))
    elements = [(1 << 39) + 5 + column + (row << 20) for row in range(2) for column in range(3)]
    assert far.flatten().tolist() == [normal_number(key, element) for element in elements]
    assert not torch.equal(far, rng.normal(key, shape, offset=(0, 5), shape=(2, 3)))


def test_moments_of_the_normal() -> None:
    count = 1_000_000
    draw = rng.normal(rng.key(0, "moments"), (1000, 1000))
    # Five standard errors; the cells change 2e-5 of the variance and 1e-3 of the fourth moment.
    assert abs(draw.mean()) < 5 / math.sqrt(count)
    assert abs(draw.square().mean() - 1) < 5 * math.sqrt(2 / count) + 2e-5
    assert abs(draw.pow(3).mean()) < 5 * math.sqrt(15 / count)
    assert abs(draw.pow(4).mean() - 3) < 5 * math.sqrt(96 / count) + 1e-3
    assert abs((draw[:, 1:] * draw[:, :-1]).mean()) < 5 / math.sqrt(count)
    for z in (-2.0, -0.5, 0.0, 1.0, 3.0):
        share = statistics.NormalDist().cdf(z)
        error = math.sqrt(share * (1 - share) / count)
        assert abs((draw < z).double().mean() - share) < 5 * error


def test_the_exact_moments_of_the_cells() -> None:
    border = torch.tensor(rng._cell_borders(), dtype=torch.float64)
    low, high = border[:-1], border[1:]
    assert (high > low).all()
    assert torch.equal(border, -border.flip(0))
    # A number that is even in [low, high] has second moment (low^2 + low high + high^2) / 3.
    variance = ((low * low + low * high + high * high) / 3).mean()
    fourth = sum(low.pow(4 - i) * high.pow(i) for i in range(5)) / 5
    assert abs(variance - 1) < 2e-5
    assert abs(fourth.mean() - 3) < 1e-3


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_keep_mask_follows_its_definition(rate: float) -> None:
    key = rng.key(1, "embedding_dropout", 2)
    samples = torch.tensor([5, 0, 1 << 40])
    mask = rng.keep_mask(key, rate, samples, whole(3, 5), torch.float64)
    scale = 65536 / (65536 - round(rate * 65536))
    expected = [
        scale * is_kept(key, rate, 15 * sample + inner)
        for sample in samples.tolist()
        for inner in range(15)
    ]
    assert mask.shape == (3, 3, 5)
    assert mask.flatten().tolist() == expected


@pytest.mark.parametrize("total", [(4, 6, 8), (4, 6, 7), (3, 5, 9)])
@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])
def test_keep_mask_slices_are_those_of_the_whole(
    total: tuple[int, int, int], dims: tuple[int, ...]
) -> None:
    key, samples = rng.key(0, "site", 0), torch.tensor([2, 7, 3])
    mask = rng.keep_mask(key, 0.3, torch.arange(8), whole(*total), torch.float32)
    for start, length in ((0, 2), (1, 1), (1, 2), (2, 1), (0, 0)):
        extents = [
            Extent(start, length, size) if dim in dims else Extent(0, size, size)
            for dim, size in enumerate(total)
        ]
        own = rng.keep_mask(key, 0.3, samples, extents, torch.float32)
        expected = mask[samples]
        for dim in dims:
            expected = expected.narrow(dim + 1, start, length)
        assert torch.equal(own, expected)


def test_a_site_without_further_dims() -> None:
    mask = rng.keep_mask((1, 2), 0.5, torch.arange(9), [], torch.float64)
    assert mask.tolist() == [2.0 * is_kept((1, 2), 0.5, sample) for sample in range(9)]


@pytest.mark.parametrize("element", range(4))
def test_the_field_that_equals_the_threshold_is_kept(element: int) -> None:
    word0, word1 = words((1, 2), 0)
    field = (word0 & 0xFFFF, word0 >> 16, word1 & 0xFFFF, word1 >> 16)[element]
    for dropped, expected in ((field, True), (field + 1, False)):
        mask = rng.keep_mask((1, 2), dropped / 65536, torch.tensor([0]), whole(4), torch.float64)
        assert bool(mask[0, element]) == expected


def test_keep_rate_and_mean() -> None:
    count, rate = 1_048_576, 0.1
    mask = rng.keep_mask(
        rng.key(0, "site", 0), rate, torch.arange(64), whole(128, 128), torch.float64
    )
    error = math.sqrt(rate * (1 - rate) / count)
    assert abs((mask == 0).double().mean() - rate) < 5 * error + 2**-17
    assert abs(mask.mean() - 1) < 5 * error / (1 - rate)
    halves = mask[:, :64].bool(), mask[:, 64:].bool()
    assert abs((halves[0] == halves[1]).double().mean() - 0.82) < 0.005


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_mask_is_the_same_in_every_dtype(dtype: torch.dtype) -> None:
    def draw(dtype: torch.dtype) -> Tensor:
        return rng.keep_mask(rng.key(0, "s", 0), 0.2, torch.arange(4), whole(8, 8), dtype)

    assert draw(dtype).dtype == dtype
    assert torch.equal(draw(dtype), draw(torch.float64).to(dtype))


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, 1 - 2**-18])
def test_a_rate_that_keeps_nothing_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match=r"dropout rate .* is not in \[0, 1\)"):
        rng.keep_mask((0, 0), rate, torch.arange(2), whole(4), torch.float32)


def test_no_generator_of_torch_is_read_or_moved() -> None:
    def draw() -> list[Tensor]:
        mask = rng.keep_mask(rng.key(0, "s", 0), 0.2, torch.arange(4), whole(8, 8), torch.float32)
        return [mask, rng.normal(rng.key(0, "weight"), (8, 8))]

    torch.manual_seed(1)
    first, state = draw(), torch.random.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    assert all(torch.equal(a, b) for a, b in zip(first, draw(), strict=True))


def test_threads_do_not_disturb_each_other() -> None:
    def draw(seed: int) -> Tensor:
        return rng.normal(rng.key(seed, "weight"), (300, 300))

    alone = [draw(seed) for seed in range(2)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(draw, [0, 1] * 8, timeout=60))
    for index, found in enumerate(together):
        assert torch.equal(found, alone[index % 2])
