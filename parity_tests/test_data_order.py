"""The order of training samples, and who reads them."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from dtensor_llm import data
from dtensor_llm.data import samples
from parity_tests.corpora import load, write_ids

ORDER_OF_SEED_0 = [*(3, 9, 6, 1, 5, 8, 4, 2, 0, 7), *(1, 9, 3, 2, 5, 0, 8, 7, 4, 6)]


@pytest.mark.parametrize("num_samples", [1, 2, 3, 4, 5, 6, 16, 17, 99, 100, 101, 1000, 4097])
def test_an_epoch_visits_every_sample_once(num_samples: int) -> None:
    for epoch in range(3):
        positions = range(epoch * num_samples, (epoch + 1) * num_samples)
        visited = [data.shuffled(position, num_samples, seed=5) for position in positions]
        assert sorted(visited) == list(range(num_samples))


def test_all_permutations_are_equally_likely() -> None:
    num_epochs = 10 * 720
    seen = Counter(
        tuple(data.shuffled(epoch * 6 + place, 6, seed=1) for place in range(6))
        for epoch in range(num_epochs)
    )
    chi_square = sum((count - 10) ** 2 / 10 for count in seen.values())
    assert len(seen) == 720
    assert chi_square < 719 + 4 * (2 * 719) ** 0.5  # its mean, and four standard deviations


def test_neighbours_of_a_large_corpus_are_spread() -> None:
    num_samples = 10**12
    order = [data.shuffled(position, num_samples, seed=2) for position in range(400)]
    assert len(set(order)) == 400
    mean_step = sum(abs(a - b) for a, b in pairwise(order)) / 399
    assert mean_step == pytest.approx(num_samples / 3, rel=0.15)  # of two independent draws
    assert sum(order) / 400 == pytest.approx(num_samples / 2, rel=0.15)


def test_order_is_keyed_by_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [data.shuffled(epoch * 50 + place, 50, seed) for place in range(50)]

    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert len({tuple(each) for each in orders}) == 9
    for first in range(9):
        for second in range(first):
            agree = sum(a == b for a, b in zip(orders[first], orders[second], strict=True))
            assert agree <= 7  # 1 expected of two independent permutations


def test_order_stays_that_of_saved_runs() -> None:
    assert [data.shuffled(position, 10, seed=0) for position in range(20)] == ORDER_OF_SEED_0


def test_batch_is_a_function_of_seed_and_step(numbers: data.Dataset, tmp_path: Path) -> None:
    again = load(tmp_path / "numbers.u32.bin")
    numbers.batch(3)
    assert torch.equal(numbers.batch(7).tokens, again.batch(7).tokens)
    assert torch.equal(numbers.batch(7).sample_ids, again.batch(7).sample_ids)
    other = load(tmp_path / "numbers.u32.bin", seed=1)
    assert not torch.equal(numbers.batch(7).sample_ids, other.batch(7).sample_ids)


def test_epoch_boundary_inside_a_batch_is_exact(tmp_path: Path) -> None:
    few = load(write_ids(tmp_path / "few.bin", range(1000)), global_batch_size=7)
    n = len(few.training)
    assert n % 7  # else no batch would cross
    ids = [int(i) for step in range(n) for i in few.batch(step).sample_ids]
    epochs = [ids[start : start + n] for start in range(0, 7 * n, n)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 7


def test_another_batch_size_continues_the_same_order(numbers: data.Dataset, tmp_path: Path) -> None:
    resumed = load(tmp_path / "numbers.u32.bin", global_batch_size=5)
    ids = [numbers.batch(step).sample_ids for step in range(10)]
    consumed = 4 * 12
    later = [resumed.take(range(start, start + 5)).sample_ids for start in range(consumed, 118, 5)]
    assert torch.equal(torch.cat(ids)[:118], torch.cat(ids[:4] + later)[:118])


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_data_parallel_ranks_split_the_global_batch(numbers: data.Dataset, dp: int) -> None:
    size = 12 // dp
    whole = numbers.batch(5)
    parts = [numbers.batch(5, slice(rank * size, (rank + 1) * size)) for rank in range(dp)]
    for field in ("tokens", "labels", "sample_ids"):
        together = torch.cat([getattr(part, field) for part in parts])
        assert torch.equal(together, getattr(whole, field))


def test_a_rank_reads_only_its_own_samples(
    numbers: data.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    original = samples.Side.read
    monkeypatch.setattr(
        samples.Side, "read", lambda side, index: (read.append(index), original(side, index))[1]
    )
    batch = numbers.batch(2, slice(3, 6))
    assert read == batch.sample_ids.tolist()
    assert batch.tokens.shape == (3, 8)
    assert numbers.batch(2, slice(4, 4)).tokens.shape == (0, 8)


def test_threads_share_one_dataset(tmp_path: Path) -> None:
    shared = load(
        write_ids(tmp_path / "ids.bin", range(5000)), write_ids(tmp_path / "b.bin", range(900))
    )
    with ThreadPoolExecutor(8) as pool:
        batches = list(pool.map(shared.batch, [step % 10 for step in range(200)]))
    for step, batch in enumerate(batches):
        assert torch.equal(batch.tokens, shared.batch(step % 10).tokens)
