"""Which samples are held out, and evaluation on them."""

from pathlib import Path

import pytest
import torch

from dtensor_llm import data
from dtensor_llm.data.documents import Example
from dtensor_llm.data.samples import split_documents, split_examples
from dtensor_llm.data.sources import open_corpus
from parity_tests.corpora import VOCABULARY, all_tokens, load, write_text


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
