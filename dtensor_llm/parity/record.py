"""Records of runs on disk: what `--record DIR` writes and `scripts/compare_runs.py` reads.

A folder with

    record.jsonl       first a line about the run: {"format": "training record", "version": 1,
                       "dtype": "float64", ...}, then a line a step, from step 1 on:
                       {"step": 1, "loss": ..., "gradient_norm": ..., "learning_rate": ...,
                        "norms": {quantity: {parameter: 2-norm}}, "tensors": "step-000001.pt"}
    step-000001.pt     torch.save of {quantity: {parameter: whole tensor}}, for some of the steps

Quantities are gradient (of the global batch, before clipping), weight, exp_avg, exp_avg_sq and
momentum (after the step). Only step and loss must be there; what both of two records have is
compared. Parameters go by one name on every mesh; those of another trainer must agree with what
they are compared to. `RecordWriter` writes the format for any training loop.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from dtensor_llm.parity.run import Tensors

FORMAT = {"format": "training record", "version": 1}
LINES = "record.jsonl"
NO_TENSORS = (
    "not {quantity: {parameter: tensor}}, tensors being of floating point numbers, and none of "
    "them sparse or empty"
)


class RecordError(ValueError):
    """A record cannot be written or read, or two of them cannot be compared."""


class RecordWriter:
    """Writes a record step by step; what is written stays valid when the run ends early.

    Raises:
        RecordError: a step cannot be written.
    """

    def __init__(self, folder: str | Path, **about: Any) -> None:
        """Start a record in `folder`, which is made if need be.

        Raises:
            RecordError: it already holds one.
        """
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordError(f"{folder} cannot be written: {error.strerror}") from None
        if (self.folder / LINES).exists():
            raise RecordError(f"{folder} already holds a record; take another folder")
        self.steps = 0
        self._write({**FORMAT, **about})

    def step(self, *, loss: float, tensors: Tensors | None = None, **values: Any) -> None:
        """Add the next step: its loss, `gradient_norm`, `learning_rate` or whatever else is known.

        `tensors` are {quantity: {parameter: whole tensor}}; without them, `norms` may be given.
        """
        self.steps += 1
        line: dict[str, Any] = {"step": self.steps, "loss": loss, **values}
        if tensors:
            if not _is_tensors(tensors):
                raise RecordError(f"tensors of step {self.steps}: {NO_TENSORS}")
            line.setdefault("norms", norms_of(tensors))
            line["tensors"] = f"step-{self.steps:06d}.pt"
            whole = {
                q: {n: x.detach().cpu() for n, x in named.items()} for q, named in tensors.items()
            }
            self._save(whole, self.folder / line["tensors"])
        self._write(line)

    def _save(self, whole: Tensors, path: Path) -> None:
        unfinished = path.with_name(f"{path.name}.part")
        try:
            torch.save(whole, unfinished)
            unfinished.rename(path)
        except (OSError, RuntimeError) as error:  # torch's writer has an error of its own
            unfinished.unlink(missing_ok=True)
            raise RecordError(f"{path} cannot be written: {reason_of(error)}") from None

    def _write(self, values: Mapping[str, Any]) -> None:
        path = self.folder / LINES
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")
        except OSError as error:
            raise RecordError(f"{path} cannot be written: {reason_of(error)}") from None


def reason_of(error: Exception) -> str:
    """The first line of what went wrong, or else its kind."""
    text = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
    return text or type(error).__name__


def norms_of(tensors: Tensors) -> dict[str, dict[str, float]]:
    return {
        quantity: {name: torch.linalg.vector_norm(x.double()).item() for name, x in named.items()}
        for quantity, named in tensors.items()
    }


def on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().cpu() for name, x in tensors.items()}


class Record:
    """A record that was read; its tensors are read when they are asked for."""

    def __init__(self, folder: str | Path) -> None:
        """Read the lines of a record.

        Raises:
            RecordError: there is none, or it is not of this format.
        """
        self.folder = Path(folder)
        self.about, *self.steps = self._lines()
        if {key: self.about.get(key) for key in FORMAT} != FORMAT:
            raise RecordError(f"{self._path}: the first line is not that of a record: {FORMAT}")
        if "dtype" in self.about and not _is_floating(self.about["dtype"]):
            raise RecordError(
                f"{self._path}: dtype {self.about['dtype']!r} is none of torch's floating point "
                "types, as float32 is"
            )
        for number, line in enumerate(self.steps, start=1):
            if problem := problem_of(line, number):
                raise RecordError(f"{self._path}, line {number + 1}: {problem}")
        if not self.steps:
            raise RecordError(f"{self._path} has no step")

    @property
    def _path(self) -> Path:
        return self.folder / LINES

    def _lines(self) -> list[dict[str, Any]]:
        try:
            texts = self._path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            raise RecordError(f"{self.folder} holds no record: there is no {self._path}") from None
        except OSError as error:
            raise RecordError(f"{self._path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise RecordError(f"{self._path} is not text in UTF-8") from None
        lines = []
        for number, text in enumerate(texts, start=1):
            try:
                lines.append(json.loads(text))
            except (ValueError, RecursionError):
                if number == len(texts) > 1:
                    break  # the run was cut short while it wrote
                raise RecordError(f"{self._path}, line {number}: not a JSON object") from None
        if not lines or not all(isinstance(line, dict) for line in lines):
            raise RecordError(f"{self._path}: not lines of JSON objects")
        return lines

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.steps]

    @property
    def gradient_norms(self) -> list[float | None]:
        """Of each step; None where it was not recorded."""
        return [line.get("gradient_norm") for line in self.steps]

    @property
    def norms_at(self) -> dict[int, dict[str, dict[str, float]]]:
        """{step, from 0: {quantity: {parameter: 2-norm}}}"""
        return {i: line["norms"] for i, line in enumerate(self.steps) if line.get("norms")}

    @property
    def tensors_at(self) -> Mapping[int, Tensors]:
        return self.tensors_until(len(self.steps))

    def tensors_until(self, end: int) -> Mapping[int, Tensors]:
        """Those of the first steps."""
        lines = enumerate(self.steps[:end])
        return _Files(self.folder, {i: line["tensors"] for i, line in lines if line.get("tensors")})

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the weights; what the first line says, or else the tensors."""
        named = getattr(torch, str(self.about.get("dtype")), None)
        if isinstance(named, torch.dtype):
            return named
        for tensors in self.tensors_at.values():
            for parameters in tensors.values():
                return next(iter(parameters.values())).dtype
        return None


class _Files(Mapping[int, Tensors]):
    """{step: tensors}, each read from its file when asked for, the last one kept."""

    def __init__(self, folder: Path, files: Mapping[int, str]) -> None:
        self.folder, self.files = folder, files
        self.last: tuple[int, Tensors] | None = None

    def __getitem__(self, step: int) -> Tensors:
        if self.last is None or self.last[0] != step:
            path = self.folder / self.files[step]
            try:
                tensors = torch.load(path, map_location="cpu", weights_only=True)
            except UnpicklingError:
                raise RecordError(f"{path} holds more than tensors, or is damaged") from None
            except Exception as error:  # whatever torch makes of a file that is none of its own
                raise RecordError(f"{path} cannot be read: {reason_of(error)}") from None
            if not _is_tensors(tensors):
                raise RecordError(f"{path}: {NO_TENSORS}")
            self.last = step, tensors
        return self.last[1]

    def __contains__(self, step: object) -> bool:
        return step in self.files  # that of Mapping would read the file

    def __iter__(self) -> Iterator[int]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def problem_of(line: Mapping[str, Any], number: int) -> str:
    """What is wrong with the line of a step; empty where it is right."""
    if line.get("step") != number or not is_number(line.get("loss")):
        return f"not step {number} with its loss; a record has every step from 1 on"
    if not (line.get("gradient_norm") is None or is_number(line["gradient_norm"])):
        return f"gradient_norm {line['gradient_norm']!r} is no number"
    norms = line.get("norms") or {}
    if not _is_nested(norms, is_number):
        return "norms are not {quantity: {parameter: number}}"
    file = line.get("tensors")
    if file is not None and (not isinstance(file, str) or Path(file).name != file):
        return f"tensors {file!r} is not the name of a file in the record's folder"
    return ""


def _is_floating(name: Any) -> bool:
    dtype = getattr(torch, str(name), None)
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, float | int):
        return False
    return isinstance(value, float) or abs(value) < 2**1023


def _is_tensors(value: Any) -> bool:
    def is_comparable(x: Any) -> bool:
        dense = isinstance(x, Tensor) and x.layout == torch.strided
        return dense and x.is_floating_point() and x.numel() > 0

    return _is_nested(value, is_comparable)


def _is_nested(value: Any, is_leaf: Callable[[Any], bool]) -> bool:
    """Whether it is {text: {text: leaf}}, none of the inner ones empty."""
    return isinstance(value, dict) and all(
        isinstance(named, dict) and named and all(map(is_leaf, named.values()))
        for named in value.values()
    )
