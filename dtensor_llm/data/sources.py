"""What --data names: `stdlib`, files and folders, opened in order into one corpus.

`stdlib` is the running Python's own library (a file of that name is ./stdlib). A folder stands for
the files below it that have one of FOLDER_SUFFIXES, sorted by relative path; hidden names, empty
files and links to folders are passed over.
"""

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dtensor_llm.data.documents import (
    EXAMPLES_SUFFIX,
    DataError,
    Document,
    Example,
    open_document,
    read_examples,
    shorten,
)

BYTE_VOCABULARY = 256
SCANNED_TOKENS = 2**27  # a corpus's first ids are checked at start, all others when they are read
FOLDER_SUFFIXES = (
    *(".bin", ".jsonl", ".txt", ".text", ".md", ".rst", ".tex", ".html", ".css", ".js", ".ts"),
    *(".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".sh", ".sql"),
)
# Tests repeat themselves, and distributions ship these folders as packages of their own: without
# them every machine with the same version of Python has the same corpus.
NOT_IN_STDLIB = frozenset(
    {
        *("test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "distutils"),
        *("tkinter", "turtledemo", "ensurepip", "__pycache__"),
    }
)


@dataclass(frozen=True)
class Corpus:
    """Everything that --data names, in order, and what is wrong with it."""

    documents: tuple[Document, ...]
    examples: tuple[Example, ...]
    problems: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """Identity of the content and its order: equal for equal data under other names."""
        hashed = hashlib.blake2b(digest_size=16)
        for items in (self.documents, self.examples):
            hashed.update(len(items).to_bytes(8, "little"))
            for item in items:
                hashed.update(item.digest)
        return hashed.hexdigest()


def open_corpus(names: Sequence[str], vocab_size: int) -> Corpus:
    """Open all files that the names stand for; bad data becomes problems, never an exception."""
    documents: list[Document] = []
    examples: list[Example] = []
    problems = [] if names else ["data: nothing is named; give --data stdlib, a file or a folder"]
    byte_files: list[Path] = []
    for name in names:
        found: list[str] = []
        for path in _find_files(name, found):
            try:
                if path.name.lower().endswith(EXAMPLES_SUFFIX):
                    examples += read_examples(path)
                    byte_files.append(path)
                else:
                    documents.append(open_document(path, vocab_size))
                    byte_files += [path] if documents[-1].dtype == torch.uint8 else []
            except DataError as error:
                found += error.problems
            except OSError as error:
                found.append(_unreadable(path, error))
        problems += shorten(found, f"data {name}")
    token_files = [document for document in documents if document.dtype != torch.uint8]
    problems += _byte_problems(byte_files, token_files, vocab_size) + _id_problems(token_files)
    return Corpus(tuple(documents), tuple(examples), tuple(problems))


def _find_files(name: str, problems: list[str]) -> list[Path]:
    if name == "stdlib":
        return _stdlib_files(problems)
    if not name:
        problems.append("data '': the name is empty; give --data stdlib, a file or a folder")
        return []
    path = Path(name)
    try:
        if path.is_dir():
            return _folder_files(path, FOLDER_SUFFIXES, frozenset(), problems)
        if path.is_file():
            return [path]
        if path.is_symlink():
            problem = f"is a link to {path.readlink()}, which does not exist"
        elif path.exists():
            problem = "is neither a file nor a folder; copy it to a file: data is read many times"
        else:
            problem = f"no such file or folder in {Path.cwd()}; give stdlib, a file or a folder"
        problems.append(f"data {path}: {problem}")
    except OSError as error:
        problems.append(_unreadable(path, error))
    return []


def _folder_files(
    root: Path, suffixes: tuple[str, ...], excluded: frozenset[str], problems: list[str]
) -> list[Path]:
    """Non-empty files below root with one of the suffixes, sorted by relative path."""
    found: list[str] = []

    def report(error: OSError) -> None:
        found.append(_unreadable(Path(error.filename), error))

    num_empty, files = 0, []
    for folder, subfolders, names in os.walk(root, onerror=report):
        subfolders[:] = [s for s in subfolders if s not in excluded and not s.startswith(".")]
        for name in names:
            if name.startswith(".") or not name.lower().endswith(suffixes):
                continue
            path = Path(folder, name)
            try:
                empty = path.stat().st_size == 0
            except OSError as error:
                report(error)
                continue
            num_empty += empty
            files += [] if empty else [path]
    if not files and not found:
        found.append(
            f"data {root}: a folder without data; of the files that count, those ending in "
            f"{' '.join(suffixes)}, it has {num_empty}, all empty"
        )
    problems += found
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _stdlib_files(problems: list[str]) -> list[Path]:
    """The library's .py files, without those generated for one machine."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [
        path
        for path in _folder_files(root, (".py",), NOT_IN_STDLIB, problems)
        if not path.name.startswith("_sysconfigdata")
        and path.name != "sitecustomize.py"
        and not path.relative_to(root).as_posix().startswith("config-")
    ]


def _byte_problems(
    byte_files: Sequence[Path], token_files: Sequence[Document], vocab_size: int
) -> list[str]:
    problems = []
    if byte_files and vocab_size < BYTE_VOCABULARY:
        problems.append(
            f"data {byte_files[0]}: text is read as bytes, {BYTE_VOCABULARY} different tokens, but "
            f"--vocab-size is {vocab_size}; give --vocab-size {BYTE_VOCABULARY} or more, or a .bin "
            f"file of token ids"
        )
    if byte_files and token_files:
        problems.append(
            f"data {byte_files[0]} is bytes and {token_files[0].name} is token ids: one number "
            f"would mean two things; give one kind, or tokenize the text into a .bin file"
        )
    return problems


def _id_problems(token_files: Sequence[Document]) -> list[str]:
    """Token ids beyond the vocabulary among the first SCANNED_TOKENS; Document checks the rest."""
    problems: list[str] = []
    left = SCANNED_TOKENS
    for document in token_files:
        stop = min(len(document), left)
        left -= stop
        try:
            document.check_ids(stop)
        except DataError as error:
            problems += error.problems
    return shorten(problems, "data")


def _unreadable(path: Path, error: OSError) -> str:
    return f"data {path}: cannot be read: {error.strerror}"
