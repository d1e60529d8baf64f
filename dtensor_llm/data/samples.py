"""From a corpus to numbered samples: the split into training and validation, and the windows.

The split depends on content alone: no seed, no seq_len, no order of the files and no file added
later moves anything from one side to the other. A document is cut into pieces; the hash of its
content says which of its first 16 pieces is validation, and every 16th after that is too. The
pieces of a side, laid end to end, are its stream, and windows are cut from the stream: none touches
both sides, and a long context needs no long pieces. Equal files are split equally, so a copy of a
training piece is never validation. Examples of a .jsonl file are drawn singly, by their own hash.

One in 16 (6 %) costs training little, and of 1 MB of text it gives 1000 validation windows of 64.
In a corpus so small that the hashes choose nothing, the lowest hash is validation.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from dtensor_llm.data.documents import Document, Example
from dtensor_llm.data.sources import Corpus

IGNORED_LABEL = -100
VALIDATION_PERIOD = 16
CIRCLE = 2**64  # draws are 64-bit: those in the first sixteenth are validation
PIECES_PER_DOCUMENT = 64  # so that 5 to 8 % of a document are validation
SMALLEST_PIECE = 2**9  # tokens


class Part(Protocol):
    """Samples of one kind on one side of the split."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels of a sample, each int64 t."""


@dataclass(frozen=True)
class Run:
    """Adjacent tokens start to stop of a document."""

    document: Document
    start: int
    stop: int


@dataclass(frozen=True)
class Stream:
    """Runs laid end to end; sample i is tokens i t to i t + t, its labels one further.

    The last (length - 1) mod t tokens are in no sample.
    """

    runs: tuple[Run, ...]
    ends: tuple[int, ...]
    seq_len: int

    @classmethod
    def of(cls, runs: Sequence[Run], seq_len: int) -> "Stream":
        """The stream of the runs, in order."""
        return cls(tuple(runs), tuple(accumulate(run.stop - run.start for run in runs)), seq_len)

    @property
    def num_tokens(self) -> int:
        """Tokens in the stream."""
        return self.ends[-1] if self.ends else 0

    def __len__(self) -> int:
        return max(0, self.num_tokens - 1) // self.seq_len

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels of a sample, each int64 t."""
        start = index * self.seq_len
        window = torch.cat(list(self._pieces(start, start + self.seq_len + 1)))
        return window[:-1], window[1:]

    def _pieces(self, start: int, stop: int) -> Iterator[Tensor]:
        at = bisect_right(self.ends, start)
        while start < stop:
            run, end = self.runs[at], min(stop, self.ends[at])
            shift = run.stop - self.ends[at]
            yield run.document.tokens(start + shift, end + shift)
            start, at = end, at + 1


@dataclass(frozen=True)
class Examples:
    """Prompts and answers, one window a sample, padded; only bytes of an answer are labels.

    An example longer than t + 1 bytes becomes several windows, t bytes apart: every byte of the
    answer is learned once. Windows of prompt alone have nothing to learn and are left out.
    """

    windows: tuple[tuple[Example, int], ...]
    seq_len: int

    @classmethod
    def of(cls, examples: Sequence[Example], seq_len: int) -> "Examples":
        """The windows (example, first byte) of the examples, in order."""
        windows = [
            (example, start)
            for example in examples
            for start in range(0, len(example.prompt) + len(example.answer) - 1, seq_len)
            if start + seq_len + 1 > len(example.prompt)
        ]
        return cls(tuple(windows), seq_len)

    def __len__(self) -> int:
        return len(self.windows)

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        """Tokens (padded with 0) and labels (padded with -100) of a sample, each int64 t."""
        example, start = self.windows[index]
        text = bytearray(example.prompt + example.answer)[start : start + self.seq_len + 1]
        window = torch.frombuffer(text, dtype=torch.uint8).to(torch.int64)
        tokens = torch.zeros(self.seq_len, dtype=torch.int64)
        labels = torch.full((self.seq_len,), IGNORED_LABEL)
        tokens[: len(window) - 1] = window[:-1]
        first = max(0, len(example.prompt) - start - 1)  # the label of the prompt's last byte
        labels[first : len(window) - 1] = window[first + 1 :]
        return tokens, labels


@dataclass(frozen=True)
class Side:
    """All samples of one side of the split, numbered through its parts."""

    parts: tuple[Part, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels of sample `index`, each int64 t."""
        for part in self.parts:
            if index < len(part):
                return part.read(index)
            index -= len(part)
        raise IndexError(f"the side has {len(self)} samples only")


def split(corpus: Corpus, seq_len: int) -> tuple[Side, Side, list[str]]:
    """The training and the validation side of a corpus, and what is too short in them."""
    parts: dict[str, list[Part]] = {"training": [], "validation": []}
    problems: list[str] = []
    if corpus.documents:
        for side, runs in zip(parts, split_documents(corpus.documents), strict=True):
            stream = Stream.of(runs, seq_len)
            parts[side].append(stream)
            problems += _too_short(side, stream)
    if corpus.examples:
        for side, examples in zip(parts, split_examples(corpus.examples), strict=True):
            parts[side].append(Examples.of(examples, seq_len))
            if not examples:
                problems.append(
                    f"data: {side} has 0 of the {len(corpus.examples)} .jsonl examples (1 in "
                    f"{VALIDATION_PERIOD} is for validation); give at least 2 different ones"
                )
    return Side(tuple(parts["training"])), Side(tuple(parts["validation"])), problems


def split_documents(documents: Sequence[Document]) -> tuple[list[Run], list[Run]]:
    """The runs of training and those of validation, adjacent pieces joined."""
    pieces: list[Run] = []
    draws: list[int] = []
    for document in documents:
        size = piece_size(len(document))
        first = _draw(document.digest)
        for number, start in enumerate(range(0, len(document), size)):
            pieces.append(Run(document, start, min(start + size, len(document))))
            draws.append((first + number * CIRCLE // VALIDATION_PERIOD) % CIRCLE)
    sides: tuple[list[Run], list[Run]] = ([], [])
    for piece, is_validation in zip(pieces, _validation(draws), strict=True):
        runs = sides[is_validation]
        if runs and runs[-1].document is piece.document and runs[-1].stop == piece.start:
            piece = Run(piece.document, runs.pop().start, piece.stop)
        runs.append(piece)
    return sides


def split_examples(examples: Sequence[Example]) -> tuple[list[Example], list[Example]]:
    """The examples of training and those of validation."""
    sides: tuple[list[Example], list[Example]] = ([], [])
    drawn = _validation([_draw(example.digest) for example in examples])
    for example, is_validation in zip(examples, drawn, strict=True):
        sides[is_validation].append(example)
    return sides


def piece_size(num_tokens: int) -> int:
    """Tokens in a piece of a document: a power of two that cuts it in 64 to 128 where it can."""
    power = 2 ** max(0, (num_tokens // PIECES_PER_DOCUMENT).bit_length() - 1)
    return max(power, SMALLEST_PIECE)


def _draw(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little")


def _validation(draws: Sequence[int]) -> list[bool]:
    """Which draws are validation: the lowest sixteenth of the circle, or else the lowest one."""
    limit = max(CIRCLE // VALIDATION_PERIOD, min(draws) + 1)
    return [draw < limit for draw in draws]


def _too_short(side: str, stream: Stream) -> list[str]:
    if len(stream):
        return []
    need, have = stream.seq_len + 1, stream.num_tokens
    cure = f", or --seq-len {have - 1} or less" if have > 1 else ""
    return [
        f"data: {side} has {have} tokens, but a sample takes --seq-len + 1 = {need} (1 piece in "
        f"{VALIDATION_PERIOD} is for validation); give about {VALIDATION_PERIOD} x {need} = "
        f"{VALIDATION_PERIOD * need} tokens or more{cure}"
    ]
