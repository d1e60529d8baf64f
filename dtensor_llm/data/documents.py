"""One file of data: its tokens or its examples, and what can be wrong in it.

What a file is, its name says:

    *.u32.bin            raw little-endian uint32 token ids, memory-mapped
    *.bin (*.u16.bin)    raw little-endian uint16 token ids (as nanoGPT writes them), memory-mapped
    *.jsonl              lines {"prompt": str, "answer": str}; their UTF-8 bytes are the tokens
    anything else        text in whatever encoding; its bytes are the tokens, vocabulary 256
"""

import hashlib
import json
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

TOKEN_DTYPES = {".u32.bin": torch.uint32, ".bin": torch.uint16}
SAME_SIZE_SIGNED = {torch.uint32: torch.int32, torch.uint16: torch.int16}
SCAN_BYTES = 2**16  # small enough that torch starts no threads for it
EXAMPLES_SUFFIX = ".jsonl"
MAPPED_BYTES = 2**24  # text up to this size is read: a map costs a file descriptor
PROBES, PROBE_BYTES = 64, 4096
SHOWN_PROBLEMS = 5


class DataError(ValueError):
    """Data that cannot be trained on; `problems` holds one sentence for each reason."""

    def __init__(self, problems: Iterable[str]):
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True, eq=False)
class Document:
    """The tokens of one file. Read-only, so threads may share it.

    Args:
        name: the path, for messages.
        data: the raw bytes, in memory or memory-mapped.
        dtype: of one token in the file: uint8, uint16 or uint32.
        vocab_size: of the model; ids must be below it.
    """

    name: str
    data: bytes | mmap.mmap
    dtype: torch.dtype
    vocab_size: int

    def __len__(self) -> int:
        return len(self.data) // self.dtype.itemsize

    def tokens(self, start: int, stop: int) -> Tensor:
        """Tokens start to stop (at least one), int64 t.

        Raises: DataError if a token id is not below the vocabulary size.
        """
        size = self.dtype.itemsize
        copied = bytearray(self.data[start * size : stop * size])
        tokens = torch.frombuffer(copied, dtype=self.dtype).to(torch.int64)
        if self.dtype != torch.uint8 and int(tokens.max()) >= self.vocab_size:
            place = int((tokens >= self.vocab_size).nonzero()[0])
            found = int(tokens[place])
            problem = (
                f"data {self.name}: token {start + place} (from 0) has id {found}, but ids must be "
                f"below --vocab-size {self.vocab_size}; give --vocab-size {found + 1} or more, or "
                f"tokenize with the model's own vocabulary"
            )
            raise DataError([problem])
        return tokens

    def check_ids(self, num_tokens: int) -> None:
        """Raise the error of `tokens` if one of the first ids is too large; 0.2 s per 2**28."""
        size = self.dtype.itemsize
        signed = SAME_SIZE_SIGNED[self.dtype]
        lowest = torch.iinfo(signed).min
        buffer = bytearray(SCAN_BYTES)
        chunk = torch.frombuffer(buffer, dtype=signed)
        with memoryview(self.data) as view:
            for start in range(0, num_tokens * size, SCAN_BYTES):
                stop = min(start + SCAN_BYTES, num_tokens * size)
                buffer[: stop - start] = view[start:stop]
                # torch has no maximum of unsigned numbers: with the top bit flipped they are
                # signed ones in the same order.
                ids = chunk[: (stop - start) // size].bitwise_xor_(lowest)
                if int(ids.max()) - lowest >= self.vocab_size:
                    self.tokens(start // size, stop // size)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that identify the content, not the name: of a large file, length and probes."""
        hashed = hashlib.blake2b(f"{self.dtype} {len(self.data)} ".encode(), digest_size=16)
        if len(self.data) <= MAPPED_BYTES:
            hashed.update(self.data)
        else:
            for probe in range(PROBES):
                start = (len(self.data) - PROBE_BYTES) * probe // (PROBES - 1)
                hashed.update(self.data[start : start + PROBE_BYTES])
        return hashed.digest()


@dataclass(frozen=True)
class Example:
    """One line of a .jsonl file as bytes; only the answer is learned."""

    prompt: bytes
    answer: bytes

    @property
    def digest(self) -> bytes:
        """16 bytes that identify the content."""
        length = len(self.prompt).to_bytes(8, "little")
        return hashlib.blake2b(length + self.prompt + self.answer, digest_size=16).digest()


def open_document(path: Path, vocab_size: int) -> Document:
    """Open a text or .bin file.

    Raises: DataError if it is empty or is no whole number of tokens; OSError if it cannot be read.
    """
    name = path.name.lower()
    suffix = next((suffix for suffix in TOKEN_DTYPES if name.endswith(suffix)), "")
    dtype = TOKEN_DTYPES.get(suffix, torch.uint8)
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes == 0:
            raise DataError([f"data {path}: the file is empty (0 bytes)"])
        whole, rest = divmod(num_bytes, dtype.itemsize)
        if rest:
            problem = (
                f"data {path}: a {suffix} file has {dtype.itemsize} bytes a token, but {num_bytes} "
                f"bytes = {dtype.itemsize} x {whole} + {rest}; is the file cut short, or of the "
                f"other kind (.bin is uint16, .u32.bin is uint32)?"
            )
            raise DataError([problem])
        mapped = bool(suffix) or num_bytes > MAPPED_BYTES
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if mapped else file.read()
    return Document(str(path), data, dtype, vocab_size)


def read_examples(path: Path) -> list[Example]:
    """Read a .jsonl file; blank lines and other keys than prompt and answer are passed over.

    Raises: DataError that names the bad lines; OSError if the file cannot be read.
    """
    examples: list[Example] = []
    problems: list[str] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    examples.append(_parse_example(line))
                except ValueError as error:
                    problems.append(f"data {path}:{number}: {error}")
    if not examples and not problems:
        problems.append(f"data {path}: the file is empty (it has no line with an example)")
    if problems:
        raise DataError(problems)
    return examples


def shorten(problems: list[str], subject: str) -> list[str]:
    """The first few problems, and how many more there are of the subject."""
    shown = problems[:SHOWN_PROBLEMS]
    hidden = len(problems) - len(shown)
    return [*shown, f"{subject}: and {hidden} more problems like these"] if hidden else shown


def _parse_example(line: bytes) -> Example:
    rule = 'a line must be an object {"prompt": text, "answer": text}'
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}); {rule}") from error
    if not isinstance(value, dict):
        raise ValueError(f"holds a {type(value).__name__}; {rule}")
    if missing := [key for key in ("prompt", "answer") if key not in value]:
        has = ", ".join(map(repr, value)) or "none"
        raise ValueError(f"lacks {' and '.join(map(repr, missing))} (its keys: {has}); {rule}")
    for key in ("prompt", "answer"):
        if not isinstance(value[key], str):
            raise ValueError(f"{key!r} is a {type(value[key]).__name__}; {rule}")
    prompt, answer = (value[key].encode("utf-8", "surrogatepass") for key in ("prompt", "answer"))
    if not answer or len(prompt) + len(answer) < 2:
        raise ValueError(
            f"prompt of {len(prompt)} and answer of {len(answer)} bytes: the answer needs a byte, "
            f"and a byte before it to predict it from; remove the line"
        )
    return Example(prompt, answer)
