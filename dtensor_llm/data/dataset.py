"""batch(step): which samples a step trains on, a pure function of the seed and the step.

Samples are taken in epochs. Epoch e visits the n training samples in the order of a permutation
keyed by (seed, e); the global position (samples consumed so far) says where a run stands. A
batch that crosses the end of an epoch takes the rest of it and the start of the next. No mesh, rank
or batch size is part of the order.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor

from dtensor_llm.data.documents import DataError
from dtensor_llm.data.samples import IGNORED_LABEL, Side, split
from dtensor_llm.data.sources import open_corpus

ROUNDS = 8  # from 6 samples on, 6 rounds do not yet give every permutation the same chance
NO_SAMPLE = -1


@dataclass(frozen=True)
class Batch:
    """Some samples of a global batch, in its order.

    Args:
        tokens: int64 b t.
        labels: int64 b t; the token after each token, -100 where there is nothing to predict.
        sample_ids: int64 b; number of the sample on its side of the split, -1 for padding.
    """

    tokens: Tensor
    labels: Tensor
    sample_ids: Tensor


@dataclass(frozen=True)
class Dataset:
    """A corpus ready to train on. Read-only: load it once a process, all threads may share it.

    Args:
        training, validation: the two sides of the split.
        seq_len: t, tokens in a sample.
        global_batch_size: samples in a step, over all ranks.
        seed: of the order of the training samples.
        fingerprint: identity of the corpus; another one must not continue a run.
        num_split_examples: .jsonl examples longer than t + 1 bytes, cut into several samples.
    """

    training: Side
    validation: Side
    seq_len: int
    global_batch_size: int
    seed: int
    fingerprint: str
    num_split_examples: int

    def batch(self, step: int, samples: slice | None = None) -> Batch:
        """Training batch of a step, or only those samples of it: a rank reads no more than its own.

        Args:
            step: optimizer step, from 0.
            samples: places in the global batch; all if None.
        """
        size = self.global_batch_size
        return self.take(range(step * size, (step + 1) * size)[samples or slice(None)])

    def take(self, positions: Iterable[int]) -> Batch:
        """Training samples at global positions (samples consumed before them), any batch size."""
        num_samples = len(self.training)
        ids = [shuffled(position, num_samples, self.seed) for position in positions]
        return _read(self.training, ids, self.seq_len)

    def evaluation_batches(
        self, batch_size: int, samples: slice | None = None, max_samples: int | None = None
    ) -> Iterator[Batch]:
        """Batches in which every validation sample appears exactly once, the same for every mesh.

        Args:
            batch_size: samples in each global batch; the last one is filled up with samples whose
                labels are all -100.
            samples: places in the global batch to read; all if None.
            max_samples: evaluate on at most so many samples, spread evenly; all if None.
        """
        total = len(self.validation)
        count = total if max_samples is None else min(max_samples, total)
        ids = [place * total // count for place in range(count)]
        ids += [NO_SAMPLE] * (-count % batch_size)
        for start in range(0, len(ids), batch_size):
            chosen = ids[start : start + batch_size][samples or slice(None)]
            yield _read(self.validation, chosen, self.seq_len)


def load(
    names: Sequence[str], *, seq_len: int, global_batch_size: int, vocab_size: int, seed: int = 0
) -> Dataset:
    """Open a corpus, in about a second whatever its size; only .jsonl files are parsed whole.

    Args:
        names: what --data was given: stdlib, files, folders.
        seq_len: tokens in a sample.
        global_batch_size: samples in a step, over all ranks.
        vocab_size: of the model; token ids must be below it.
        seed: of the order of the training samples; the split does not depend on it.

    Raises: DataError with every problem of the corpus.
    """
    corpus = open_corpus(names, vocab_size)
    problems = list(corpus.problems)
    training, validation, too_short = split(corpus, seq_len)
    if problems := problems or too_short:
        raise DataError(problems)
    num_split = sum(len(e.prompt) + len(e.answer) > seq_len + 1 for e in corpus.examples)
    return Dataset(
        training, validation, seq_len, global_batch_size, seed, corpus.fingerprint, num_split
    )


def problems(names: Sequence[str], *, seq_len: int, vocab_size: int) -> list[str]:
    """Everything that keeps `load` from succeeding, each in a sentence; needs no process group."""
    try:
        load(names, seq_len=max(1, seq_len), global_batch_size=1, vocab_size=vocab_size)
    except DataError as error:
        return list(error.problems)
    return []


def shuffled(position: int, num_samples: int, seed: int) -> int:
    """The sample at a global position: a permutation of range(num_samples) in every epoch.

    A Feistel network on (row, column) of a table just large enough, walked on while it leads to a
    cell beyond the samples: no list is kept, however many samples there are.

    Paper: Black and Rogaway, Ciphers with Arbitrary Finite Domains (CT-RSA 2002), section 5, with
    a keyed BLAKE2 as the round function.
    """
    epoch, place = divmod(position, num_samples)
    columns = isqrt(num_samples - 1) + 1
    rows = -(-num_samples // columns)
    keyed = hashlib.blake2b(f"{seed}/sample order/{epoch}".encode(), digest_size=8)

    def noise(half_round: int, value: int) -> int:
        hashed = keyed.copy()
        hashed.update(b"/%d/%d" % (half_round, value))
        return int.from_bytes(hashed.digest(), "little")

    while True:
        row, column = divmod(place, columns)
        for half_round in range(0, 2 * ROUNDS, 2):
            row = (row + noise(half_round, column)) % rows
            column = (column + noise(half_round + 1, row)) % columns
        place = row * columns + column
        if place < num_samples:
            return place


def _read(side: Side, ids: Sequence[int], seq_len: int) -> Batch:
    padding = (
        torch.zeros(seq_len, dtype=torch.int64),
        torch.full((seq_len,), IGNORED_LABEL),
    )
    read = [padding if number == NO_SAMPLE else side.read(number) for number in ids]
    if not read:
        empty = torch.empty(0, seq_len, dtype=torch.int64)
        return Batch(empty, empty, torch.empty(0, dtype=torch.int64))
    tokens, labels = (torch.stack(rows) for rows in zip(*read, strict=True))
    return Batch(tokens, labels, torch.tensor(ids))
