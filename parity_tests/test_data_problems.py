"""Every problem that data can have, with its whole message."""

import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtensor_llm import data
from dtensor_llm.data import sources
from dtensor_llm.data.sources import FOLDER_SUFFIXES

VOCABULARY = 100_000
# Each: the files, the names given, other settings, and all messages. DIR is the test's folder.

RULE = 'a line must be an object {"prompt": text, "answer": text}'
GOOD_LINE = b'{"prompt": "what", "answer": "that"}\n'
Files = dict[str, bytes]
PROBLEMS: dict[str, tuple[Files, list[str], dict[str, int], list[str]]] = {
    "nothing": ({}, [], {}, ["data: nothing is named; give --data stdlib, a file or a folder"]),
    "empty name": (
        {},
        [""],
        {},
        ["data '': the name is empty; give --data stdlib, a file or a folder"],
    ),
    "missing": (
        {},
        ["DIR/no.txt"],
        {},
        ["data DIR/no.txt: no such file or folder in CWD; give stdlib, a file or a folder"],
    ),
    "name too long": (
        {},
        ["DIR/" + "x" * 300],
        {},
        ["data DIR/" + "x" * 300 + ": cannot be read: File name too long"],
    ),
    "empty": ({"a.txt": b""}, ["DIR/a.txt"], {}, ["data DIR/a.txt: the file is empty (0 bytes)"]),
    "empty tokens": (
        {"a.bin": b""},
        ["DIR/a.bin"],
        {},
        ["data DIR/a.bin: the file is empty (0 bytes)"],
    ),
    "no line": (
        {"a.jsonl": b"\n \n"},
        ["DIR/a.jsonl"],
        {},
        ["data DIR/a.jsonl: the file is empty (it has no line with an example)"],
    ),
    "folder without data": (
        {"f.bin/a.png": b"x", "f.bin/b.txt": b""},
        ["DIR/f.bin"],
        {},
        [
            "data DIR/f.bin: a folder without data; of the files that count, those ending in "
            f"{' '.join(FOLDER_SUFFIXES)}, it has 1, all empty"
        ],
    ),
    "odd bytes": (
        {"a.bin": b"12345"},
        ["DIR/a.bin"],
        {},
        [
            "data DIR/a.bin: a .bin file has 2 bytes a token, but 5 bytes = 2 x 2 + 1; is the file "
            "cut short, or of the other kind (.bin is uint16, .u32.bin is uint32)?"
        ],
    ),
    "not whole uint32": (
        {"a.u32.bin": b"123456"},
        ["DIR/a.u32.bin"],
        {},
        [
            "data DIR/a.u32.bin: a .u32.bin file has 4 bytes a token, but 6 bytes = 4 x 1 + 2; is "
            "the file cut short, or of the other kind (.bin is uint16, .u32.bin is uint32)?"
        ],
    ),
    "id beyond the vocabulary": (
        {"a.bin": b"\x01\x00" * 50_000 + b"\x00\x80" + b"\x02\x00" * 1000},
        ["DIR/a.bin"],
        {"vocab_size": 32768},
        [
            "data DIR/a.bin: token 50000 (from 0) has id 32768, but ids must be below --vocab-size "
            "32768; give --vocab-size 32769 or more, or tokenize with the model's own vocabulary"
        ],
    ),
    "only ids beyond the vocabulary": (
        {"a.bin": b"\xff\xff" * 5000},
        ["DIR/a.bin"],
        {"vocab_size": 50257},
        [
            "data DIR/a.bin: token 0 (from 0) has id 65535, but ids must be below --vocab-size "
            "50257; give --vocab-size 65536 or more, or tokenize with the model's own vocabulary"
        ],
    ),
    "uint32 id beyond the vocabulary": (
        {"a.u32.bin": b"\x01\x00\x00\x00" * 999 + b"\xff\xff\xff\xff"},
        ["DIR/a.u32.bin"],
        {"vocab_size": 2},
        [
            "data DIR/a.u32.bin: token 999 (from 0) has id 4294967295, but ids must be below "
            "--vocab-size 2; give --vocab-size 4294967296 or more, or tokenize with the model's "
            "own vocabulary"
        ],
    ),
    "bytes beyond the vocabulary": (
        {"a.txt": b"x" * 4000},
        ["DIR/a.txt"],
        {"vocab_size": 255},
        [
            "data DIR/a.txt: text is read as bytes, 256 different tokens, but --vocab-size is 255; "
            "give --vocab-size 256 or more, or a .bin file of token ids"
        ],
    ),
    "bytes and ids": (
        {"a.jsonl": GOOD_LINE, "b.bin": b"\x01\x00" * 4000},
        ["DIR/b.bin", "DIR/a.jsonl"],
        {},
        [
            "data DIR/a.jsonl is bytes and DIR/b.bin is token ids: one number would mean two "
            "things; give one kind, or tokenize the text into a .bin file"
        ],
    ),
    "both sides too short": (
        {"a.txt": b"x" * 1024},
        ["DIR/a.txt"],
        {"seq_len": 512},
        [
            f"data: {side} has 512 tokens, but a sample takes --seq-len + 1 = 513 (1 piece in 16 "
            "is for validation); give about 16 x 513 = 8208 tokens or more, or --seq-len 511 or "
            "less"
            for side in ("training", "validation")
        ],
    ),
    "training too short": (
        {"a.txt": b"x" * 100},
        ["DIR/a.txt"],
        {},
        [
            "data: training has 0 tokens, but a sample takes --seq-len + 1 = 9 (1 piece in 16 is "
            "for validation); give about 16 x 9 = 144 tokens or more"
        ],
    ),
    "one example": (
        {"a.jsonl": GOOD_LINE * 2},
        ["DIR/a.jsonl"],
        {},
        [
            "data: training has 0 of the 2 .jsonl examples (1 in 16 is for validation); give at "
            "least 2 different ones"
        ],
    ),
    "bad lines": (
        {
            "a.jsonl": GOOD_LINE + b"hello\n\n[1]\n"
            b'{"prompt": "x", "text": ""}\n{}\n{"prompt": 3, "answer": "x"}\n'
        },
        ["DIR/a.jsonl"],
        {},
        [
            "data DIR/a.jsonl:2: not JSON (Expecting value: line 1 column 1 (char 0)); " + RULE,
            "data DIR/a.jsonl:4: holds a list; " + RULE,
            "data DIR/a.jsonl:5: lacks 'answer' (its keys: 'prompt', 'text'); " + RULE,
            "data DIR/a.jsonl:6: lacks 'prompt' and 'answer' (its keys: none); " + RULE,
            "data DIR/a.jsonl:7: 'prompt' is a int; " + RULE,
        ],
    ),
    "many bad lines": (
        {"a.jsonl": GOOD_LINE + b'{"prompt": "x", "answer": ""}\n' * 9},
        ["DIR/a.jsonl"],
        {},
        [
            *(
                f"data DIR/a.jsonl:{line}: prompt of 1 and answer of 0 bytes: the answer needs a "
                "byte, and a byte before it to predict it from; remove the line"
                for line in range(2, 7)
            ),
            "data DIR/a.jsonl: and 4 more problems like these",
        ],
    ),
    "single byte": (
        {"a.jsonl": GOOD_LINE + b'{"prompt": "", "answer": "x"}'},
        ["DIR/a.jsonl"],
        {},
        [
            "data DIR/a.jsonl:2: prompt of 0 and answer of 1 bytes: the answer needs a byte, and a "
            "byte before it to predict it from; remove the line"
        ],
    ),
    "all together": (
        {"a.bin": b"1", "b.txt": b"", "c.txt": b"x" * 5000},
        ["DIR/a.bin", "DIR/no", "DIR/b.txt", "DIR/c.txt"],
        {"vocab_size": 2},
        [
            "data DIR/a.bin: a .bin file has 2 bytes a token, but 1 bytes = 2 x 0 + 1; is the file "
            "cut short, or of the other kind (.bin is uint16, .u32.bin is uint32)?",
            "data DIR/no: no such file or folder in CWD; give stdlib, a file or a folder",
            "data DIR/b.txt: the file is empty (0 bytes)",
            "data DIR/c.txt: text is read as bytes, 256 different tokens, but --vocab-size is 2; "
            "give --vocab-size 256 or more, or a .bin file of token ids",
        ],
    ),
}


def problems(tmp_path: Path, names: list[str], **changes: int) -> list[str]:
    sizes = {"seq_len": 8, "vocab_size": VOCABULARY, **changes}
    found = data.problems([name.replace("DIR", str(tmp_path)) for name in names], **sizes)
    return [text.replace(str(tmp_path), "DIR").replace(str(Path.cwd()), "CWD") for text in found]


@pytest.mark.parametrize("case", PROBLEMS)
def test_problem_in_plain_words(case: str, tmp_path: Path) -> None:
    files, names, changes, expected = PROBLEMS[case]
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    assert problems(tmp_path, names, **changes) == expected


def test_broken_links(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/x.bin").symlink_to("gone.bin")
    (tmp_path / "loop").symlink_to("loop")
    assert problems(tmp_path, ["DIR/folder/x.bin", "DIR/folder", "DIR/loop"]) == [
        "data DIR/folder/x.bin: is a link to gone.bin, which does not exist",
        "data DIR/folder/x.bin: cannot be read: No such file or directory",
        "data DIR/loop: is a link to loop, which does not exist",
    ]


def test_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    assert problems(tmp_path, ["DIR/pipe.txt"]) == [
        "data DIR/pipe.txt: is neither a file nor a folder; copy it to a file: data is read many "
        "times"
    ]


def refuse(path: Path, *_: Any, **__: Any) -> Any:
    raise PermissionError(13, "Permission denied", str(path))


@pytest.mark.parametrize("method", ["open", "is_dir"])
def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    (tmp_path / "a.txt").write_bytes(
        bytes(5000)
    )  # root may read everything: the refusal is planted
    monkeypatch.setattr(Path, method, refuse)
    expected = ["data DIR/a.txt: cannot be read: Permission denied"]
    assert problems(tmp_path, ["DIR/a.txt"]) == expected


def test_no_permission_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(5000))
    scandir: Callable[..., Any] = os.scandir
    monkeypatch.setattr(
        os, "scandir", lambda p: refuse(Path(p)) if str(p).endswith("locked") else scandir(p)
    )
    (tmp_path / "locked").mkdir()
    expected = ["data DIR/locked: cannot be read: Permission denied"]
    assert problems(tmp_path, ["DIR"]) == expected


def test_good_data_has_no_problem_and_bad_data_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_bytes(bytes(5000))
    good, bad = str(tmp_path / "good.txt"), str(tmp_path / "bad.txt")
    assert problems(tmp_path, ["DIR/good.txt"]) == []
    assert problems(tmp_path, ["DIR/good.txt"], seq_len=0) == []  # config reports the 0
    with pytest.raises(data.DataError) as error:
        data.load([good, bad], seq_len=8, global_batch_size=2, vocab_size=256)
    assert list(error.value.problems) == data.problems([bad], seq_len=8, vocab_size=256)
    assert str(error.value) == error.value.problems[0]


def write_ids(path: Path, ids: list[int]) -> Path:
    path.write_bytes(array("H", ids).tobytes())
    return path


def test_ids_beyond_the_scan_are_checked_when_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_ids(tmp_path / "a.bin", [*[1] * 5000, *[300] * 5000])
    assert (
        "token 5000 (from 0) has id 300" in data.problems([str(path)], seq_len=8, vocab_size=256)[0]
    )
    monkeypatch.setattr(sources, "SCANNED_TOKENS", 5000)
    late = data.load([str(path)], seq_len=8, global_batch_size=2, vocab_size=256)
    with pytest.raises(data.DataError, match=r"a\.bin: token \d+ \(from 0\) has id 300, but ids"):
        late.take(range(len(late.training)))


def test_the_scan_is_shared_by_all_token_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [str(write_ids(tmp_path / f"{i}.bin", [*[1] * 4000, 300])) for i in range(3)]
    monkeypatch.setattr(sources, "SCANNED_TOKENS", 4001 + 4000)
    (problem,) = data.problems(names, seq_len=8, vocab_size=256)
    assert problem.startswith(f"data {names[0]}: token 4000 ")
