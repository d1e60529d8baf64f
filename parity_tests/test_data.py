"""Data: the order of samples, windows and file formats, the split, evaluation."""

import array
import json
import mmap
import random
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from dtensor_llm import data
from dtensor_llm.data import samples
from dtensor_llm.data.documents import Example
from dtensor_llm.data.samples import Examples, split_documents, split_examples
from dtensor_llm.data.sources import open_corpus

VOCABULARY = 100_000
ORDER_OF_SEED_0 = [*(3, 9, 6, 1, 5, 8, 4, 2, 0, 7), *(1, 9, 3, 2, 5, 0, 8, 7, 4, 6)]


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


@pytest.fixture
def numbers(tmp_path: Path) -> data.Dataset:
    """A corpus of 0, 1, 2...: about 2340 training and 150 validation samples of 8 tokens."""
    return load(write_ids(tmp_path / "numbers.u32.bin", range(20_000)))


# ---------------------------------------------------------------- order of training samples


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


# ---------------------------------------------------------------- windows and file formats


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


# ---------------------------------------------------------------- split


def pieces_of(names: list[Path], wanted: Path) -> dict[str, list[tuple[int, int]]]:
    corpus = open_corpus([str(name) for name in names], VOCABULARY)
    sides = zip(("training", "validation"), split_documents(corpus.documents), strict=True)
    return {
        side: [(run.start, run.stop) for run in runs if run.document.name == str(wanted)]
        for side, runs in sides
    }


def test_training_and_validation_share_no_token(numbers: data.Dataset) -> None:
    training, validation = all_tokens(numbers.training), all_tokens(numbers.validation)
    assert not set(training) & set(validation)
    for side in (numbers.training, numbers.validation):
        last_labels = {int(side.read(index)[1][-1]) for index in range(len(side))}
        others = set(validation if side is numbers.training else training)
        assert not last_labels & others


def test_the_two_sides_tile_every_document(tmp_path: Path) -> None:
    paths = [write_text(tmp_path / f"{i}.txt", 512 * (1 + i % 5) + i, i) for i in range(99)]
    documents = open_corpus([str(path) for path in paths], 256).documents
    runs = [run for side in split_documents(documents) for run in side]
    for document in documents:
        own = sorted((run.start, run.stop) for run in runs if run.document is document)
        assert [0, *(stop for _, stop in own)] == [*(start for start, _ in own), len(document)]


@pytest.mark.parametrize("num_bytes", [70_000, 1_000_000, 1_115_394, 3_000_000])
def test_validation_is_five_to_eight_percent_of_any_file(tmp_path: Path, num_bytes: int) -> None:
    for seed in range(6):
        sides = load(write_text(tmp_path / f"{seed}.txt", num_bytes, seed))
        share = len(sides.validation) / (len(sides.training) + len(sides.validation))
        assert 0.05 < share < 0.08


def test_other_files_their_order_and_the_name_do_not_move_the_split(tmp_path: Path) -> None:
    wanted = write_text(tmp_path / "w.txt", 300_000, 0)
    others = [write_text(tmp_path / f"{seed}.txt", 50_000, seed) for seed in (1, 2, 3)]
    alone = pieces_of([wanted], wanted)
    assert alone["training"]
    assert alone["validation"]
    assert pieces_of([*others, wanted], wanted) == alone
    assert pieces_of([wanted, *others[::-1]], wanted) == alone
    renamed = tmp_path / "another name.txt"
    renamed.write_bytes(wanted.read_bytes())
    assert pieces_of([renamed], renamed) == alone
    splits = {str(pieces_of([other], other)) for other in others}
    assert len(splits) > 1  # the content says which piece, not the place


def test_seed_and_seq_len_do_not_move_the_split(numbers: data.Dataset, tmp_path: Path) -> None:
    path = tmp_path / "numbers.u32.bin"
    assert all_tokens(load(path, seed=9).validation) == all_tokens(numbers.validation)
    longer, shorter = (set(all_tokens(load(path, seq_len=t).validation)) for t in (100, 8))
    assert longer < shorter or longer == shorter


def test_equal_files_are_split_equally(tmp_path: Path) -> None:
    paths = [write_text(tmp_path / f"copy {i}.txt", 9000) for i in range(3)]
    first, *others = [pieces_of(paths, path) for path in paths]
    assert first["validation"]
    assert others == [first, first]


def test_examples_are_split_by_their_content() -> None:
    def side_of(count: int, step: int = 1) -> dict[Example, int]:
        lines = [Example(b"q%d" % i, b"a") for i in range(count)][::step]
        return {e: side for side, chosen in enumerate(split_examples(lines)) for e in chosen}

    many = side_of(2000)
    assert len(many) == 2000
    assert 0.04 < sum(many.values()) / 2000 < 0.09
    assert many.items() >= side_of(500).items()
    assert many == side_of(2000, step=-1)
    copies = split_examples([*many, *many])
    assert not set(copies[0]) & set(copies[1])


@pytest.mark.parametrize("count", range(2, 12))
def test_even_a_few_examples_have_two_sides(count: int) -> None:
    training, validation = split_examples([Example(b"", b"a%d" % i) for i in range(count)])
    assert training
    assert validation


def test_fingerprint_is_of_content_and_order(tmp_path: Path) -> None:
    def write(name: str, content: bytes) -> str:
        path = tmp_path / name
        path.write_bytes(content)
        return str(path)

    def fingerprint(*names: str) -> str:
        return open_corpus(names, VOCABULARY).fingerprint

    a, b = write("a.txt", b"x" * 400), write("b.txt", b"y" * 400)
    big = {"size": (2**25, b""), "longer": (2**25 + 2, b""), "head": (2**25, b"head")}
    for name, (size, head) in big.items():
        with Path(write(f"{name}.bin", head)).open("r+b") as file:
            file.truncate(size)
    lines = write("a.jsonl", b'{"prompt": "a", "answer": "bc"}')
    moved = write("b.jsonl", b'{"prompt": "ab", "answer": "c"}')
    different = [(a,), (b,), (a, b), (b, a), (a, a), (write("a.bin", b"x" * 400),), (lines,),
                 (moved,), (write("c.txt", b"x" * 399 + b"z"),),
                 *((str(tmp_path / f"{name}.bin"),) for name in big)]  # fmt: skip
    assert len({fingerprint(*names) for names in different}) == len(different)
    assert fingerprint(write("renamed.txt", b"x" * 400), b) == fingerprint(a, b)


# ---------------------------------------------------------------- evaluation


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 16, 1000])
def test_evaluation_sees_every_sample_once(numbers: data.Dataset, batch_size: int) -> None:
    batches = list(numbers.evaluation_batches(batch_size))
    ids = torch.cat([batch.sample_ids for batch in batches])
    assert all(len(batch.tokens) == batch_size for batch in batches)
    assert ids[ids >= 0].tolist() == list(range(len(numbers.validation)))
    assert (ids < 0).sum() < batch_size
    labels = torch.cat([batch.labels for batch in batches])
    assert (labels[ids < 0] == -100).all()
    tokens = torch.cat([batch.tokens for batch in batches])[ids >= 0]
    assert tokens.flatten().tolist() == all_tokens(numbers.validation)


@pytest.mark.parametrize("dp", [2, 3, 4])
def test_evaluation_is_the_same_for_every_dp(numbers: data.Dataset, dp: int) -> None:
    size = 12 // dp
    ranks = [
        numbers.evaluation_batches(12, slice(rank * size, (rank + 1) * size)) for rank in range(dp)
    ]
    for whole, *parts in zip(numbers.evaluation_batches(12), *ranks, strict=True):
        assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)
        assert torch.equal(torch.cat([part.sample_ids for part in parts]), whole.sample_ids)


def test_evaluation_can_be_limited_to_an_even_choice(numbers: data.Dataset) -> None:
    total = len(numbers.validation)
    batches = list(numbers.evaluation_batches(8, max_samples=20))
    ids = torch.cat([batch.sample_ids for batch in batches])
    chosen = ids[ids >= 0]
    assert len(ids) == 24
    assert len(chosen) == 20
    steps = chosen.diff()
    assert total // 20 <= int(steps.min()) <= int(steps.max()) <= total // 20 + 1
    assert int(chosen[-1]) >= total - total // 20 - 2
    everything = torch.cat(
        [batch.sample_ids for batch in numbers.evaluation_batches(1, max_samples=10**9)]
    )
    assert everything.tolist() == list(range(total))
