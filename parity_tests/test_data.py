"""Data: windows and file formats."""

import json
import mmap
import time
from pathlib import Path

import pytest
import torch

from dtensor_llm import data
from dtensor_llm.data.documents import Example
from dtensor_llm.data.samples import Examples
from dtensor_llm.data.sources import open_corpus
from parity_tests.corpora import VOCABULARY, all_tokens, load, write_examples, write_ids, write_text


def test_labels_are_the_next_token(numbers: data.Dataset) -> None:
    batch = numbers.batch(0)
    assert batch.tokens.dtype == batch.labels.dtype == batch.sample_ids.dtype == torch.int64
    assert batch.tokens.shape == batch.labels.shape == (12, 8)
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    for index in range(len(numbers.training) - 1):
        assert numbers.training.read(index)[1][-1] == numbers.training.read(index + 1)[0][0]


def test_every_token_but_the_rest_is_in_one_window(numbers: data.Dataset) -> None:
    for side in (numbers.training, numbers.validation):
        tokens = all_tokens(side)
        assert len(tokens) == len(set(tokens)) == 8 * len(side)
    assert 20_000 - 8 * (len(numbers.training) + len(numbers.validation)) <= 2 * 8


def test_text_files_and_folders_are_bytes_in_order_of_path(tmp_path: Path) -> None:
    contents = {"b.txt": b"\xff\xfe1", "a/z.md": b"2", "a.py": b"3", "a/.hidden.txt": b"no",
                ".git/x.txt": b"no", "empty.txt": b"", "photo.png": b"no"}  # fmt: skip
    for name, content in contents.items():
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    alone = tmp_path / "LICENSE"
    alone.write_bytes(b"4")
    corpus = open_corpus([str(alone), str(tmp_path / "folder")], 256)
    assert corpus.problems == ()
    read = [bytes(document.tokens(0, len(document)).tolist()) for document in corpus.documents]
    assert read == [b"4", b"3", b"2", b"\xff\xfe1"]


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("x.bin", [0, 1, 32767, 32768, 65535]),
        ("x.u16.bin", [5, 65535, 7]),
        ("X.BIN", [9, 8]),
        ("x.u32.bin", [0, 65536, 99_999]),
    ],
)
def test_token_files_keep_every_id_and_are_mapped(
    tmp_path: Path, name: str, ids: list[int]
) -> None:
    (document,) = open_corpus([str(write_ids(tmp_path / name, ids))], VOCABULARY).documents
    assert isinstance(document.data, mmap.mmap)
    assert document.tokens(0, len(document)).tolist() == ids
    assert document.tokens(1, 2).tolist() == ids[1:2]


@pytest.mark.parametrize("name", ["sparse.bin", "sparse.txt"])
def test_a_file_is_never_read_whole(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with path.open("wb") as file:
        file.truncate(2**39)  # takes no disk, but minutes to read
    start = time.process_time()
    sparse = load(path, seq_len=1024)
    assert sparse.batch(10**6).tokens.sum() == 0
    assert time.process_time() - start < 10


def test_windows_cross_files(tmp_path: Path) -> None:
    paths = [write_ids(tmp_path / f"{i}.bin", range(i * 100, i * 100 + 100)) for i in range(99)]
    tokens = all_tokens(load(*paths, seq_len=150).training)
    files = dict.fromkeys(token // 100 for token in tokens)
    assert len(files) > 80
    expected = [token for file in files for token in range(file * 100, file * 100 + 100)]
    assert tokens == expected[: len(tokens)]


def test_stdlib_is_the_source_of_python_itself() -> None:
    start = time.process_time()
    library = data.load(["stdlib"], seq_len=64, global_batch_size=64, vocab_size=256)
    assert time.process_time() - start < 4  # 0.3 s on an idle core
    assert len(library.training) > 50_000
    documents = open_corpus(["stdlib"], 256).documents
    names = [document.name for document in documents]
    root = Path(json.__file__).parents[1]
    assert names == sorted(names, key=lambda name: Path(name).relative_to(root).as_posix())
    assert str(Path(json.__file__)) in names
    folders = {part for name in names for part in Path(name).relative_to(root).parts[:-1]}
    assert not folders & {"site-packages", "test", "tests", "idlelib", "__pycache__"}
    assert (
        library.fingerprint
        == data.load(["stdlib"], seq_len=32, global_batch_size=1, vocab_size=512).fingerprint
    )


def test_only_the_answer_is_learned(tmp_path: Path) -> None:
    path = write_examples(tmp_path / "x.jsonl", [("ab", f"xy{i}") for i in range(30)])
    examples = load(path, seq_len=6)
    for index in range(len(examples.training)):
        tokens, labels = examples.training.read(index)
        answer = labels[labels != -100].tolist()
        assert bytes(answer[:2]) == b"xy"
        assert tokens.tolist() == [*b"ab", *answer[:-1]] + [0] * (5 - len(answer))
        assert labels.tolist() == [-100, *answer] + [-100] * (5 - len(answer))
    assert len(examples.training) + len(examples.validation) == 30
    assert examples.num_split_examples == 0
    batch = examples.batch(0)
    assert batch.tokens.shape == batch.labels.shape == (12, 6)


def test_text_of_examples_is_utf8(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('\ufeff{"answer": "\\u00e9\\ud800", "prompt": "", "id": 3}\n\n', "utf-8")
    assert open_corpus([str(path)], 256).examples == (Example(b"", b"\xc3\xa9\xed\xa0\x80"),)


@pytest.mark.parametrize("num_prompt", [0, 1, 2, 5, 6, 7, 8, 15, 19])
def test_every_byte_of_a_long_answer_is_learned_once(num_prompt: int) -> None:
    text = bytes(range(20))
    windows = Examples.of([Example(text[:num_prompt], text[num_prompt:])], 6)
    learned: list[int] = []
    for index in range(len(windows)):
        tokens, labels = windows.read(index)
        pairs = [(x, y) for x, y in zip(tokens.tolist(), labels.tolist(), strict=True) if y >= 0]
        assert pairs  # a window of prompt alone is left out
        assert all(y == x + 1 for x, y in pairs)
        learned += [y for _, y in pairs]
    assert learned == list(range(max(1, num_prompt), 20))


def test_long_examples_are_counted(tmp_path: Path) -> None:
    lines = [("p" * i, "a" * 4) for i in range(20)]  # t + 1 = 9 bytes or fewer up to i = 5
    corpus = load(write_examples(tmp_path / "x.jsonl", lines))
    assert corpus.num_split_examples == 14


def test_text_and_examples_go_together(tmp_path: Path) -> None:
    text = write_text(tmp_path / "a.txt", 20_000)
    lines = write_examples(tmp_path / "b.jsonl", [(f"q{i}", f"a{i}") for i in range(100)])
    both = load(lines, text)
    assert len(both.training) == len(load(text).training) + len(load(lines).training)
    n = len(both.training)
    ids = both.take(range(n)).sample_ids
    assert sorted(ids.tolist()) == list(range(n))
    assert both.training.read(n - 1)[1].tolist().count(-100) > 0
    with pytest.raises(IndexError, match=f"the side has {n} samples only"):
        both.training.read(n)
