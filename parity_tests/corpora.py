"""Files of tokens, text and examples, and datasets of them."""

import array
import json
import random
from collections.abc import Iterable
from pathlib import Path

from dtensor_llm import data
from dtensor_llm.data import samples

VOCABULARY = 100_000


def write_text(path: Path, num_bytes: int, seed: int = 0) -> Path:
    path.write_bytes(random.Random(seed).randbytes(num_bytes))
    return path


def write_ids(path: Path, ids: Iterable[int]) -> Path:
    """A .bin file; distinct ids make every token of a batch recognizable."""
    path.write_bytes(array.array("I" if path.name.endswith(".u32.bin") else "H", ids).tobytes())
    return path


def write_examples(path: Path, examples: Iterable[tuple[str, str]]) -> Path:
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in examples]
    path.write_text("\n".join(lines))
    return path


def load(*paths: Path | str, **changes: int) -> data.Dataset:
    sizes = {"seq_len": 8, "global_batch_size": 12, "vocab_size": VOCABULARY, **changes}
    return data.load([str(path) for path in paths], **sizes)


def all_tokens(side: samples.Side) -> list[int]:
    return [token for index in range(len(side)) for token in side.read(index)[0].tolist()]
