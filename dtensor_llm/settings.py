"""The fields of the configuration as settings: what the flags and the checks are made from."""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from dtensor_llm.config import Config, MeshSizes

LARGEST_WHOLE_NUMBER = 2**63 - 1


@dataclass(frozen=True)
class Setting:
    """One field of one section of Config.

    Args:
        section: the attribute of Config that it is in: model, train, parallel or run.
        kind: int, float, bool, str, tuple (of texts) or MeshSizes.
        optional: whether None is a value: another setting decides.
    """

    section: str
    name: str
    kind: type
    optional: bool
    default: Any
    metadata: Mapping[str, Any]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def legal(self) -> str:
        """The legal values in words: `a whole number of at least 1 (blocks)`."""
        if choices := self.metadata.get("choices"):
            return join_or(choices)
        if form := self.metadata.get("form"):
            return str(form)
        noun = {
            int: "a whole number",
            float: "a finite number",
            str: f"a {self.metadata.get('metavar')}",
            tuple: f"one or more {self.metadata.get('metavar')}s",
            bool: "True or False",
            MeshSizes: "sizes of at least 1",
        }[self.kind]
        unit = f" ({self.metadata['unit']})" if "unit" in self.metadata else ""
        return " ".join([noun, *self._bounds()]) + unit

    def _bounds(self) -> list[str]:
        words = {
            "minimum": "of at least",
            "above": "above",
            "maximum": "and at most",
            "below": "and below",
        }
        return [f"{words[k]} {self.metadata[k]}" for k in words if k in self.metadata]

    def problem(self, value: Any) -> str | None:
        """What is wrong with `value` taken alone; None where it is legal."""
        if isinstance(value, int) and abs(value) > LARGEST_WHOLE_NUMBER:
            return f"{self.flag} {value}: does not fit 64 bits; must be {self.legal}"
        if (value is None and self.optional) or self._is_legal(value):
            return None
        return self.refusal(" ".join(value) if isinstance(value, tuple) else str(value))

    def refusal(self, given: str) -> str:
        """The message for a value that is not legal, as it was given."""
        close = get_close_matches(given, self.metadata.get("choices", ()), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"{self.flag} {given or 'without a value'}: must be {self.legal}{hint}"

    def _is_legal(self, value: Any) -> bool:
        if isinstance(value, MeshSizes):
            return all(size >= 1 for size in dataclasses.astuple(value))
        if self.kind in (int, float):
            return isinstance(value, int | self.kind) and self._is_in_range(value)
        choices, pattern = self.metadata.get("choices", (value,)), self.metadata.get("pattern")
        if not isinstance(value, self.kind) or value in ("", ()):
            return False
        return value in choices and (pattern is None or bool(re.fullmatch(pattern, str(value))))

    def _is_in_range(self, value: float) -> bool:
        limits = self.metadata
        return (
            math.isfinite(value)
            and value >= limits.get("minimum", value)
            and value <= limits.get("maximum", value)
            and ("above" not in limits or value > limits["above"])
            and ("below" not in limits or value < limits["below"])
        )


def join_or(values: Iterable[object]) -> str:
    """`2, 4 or 8`."""
    texts = [str(value) for value in values]
    return " or ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))


def _settings_of(section: str, sheet: type) -> dict[str, Setting]:
    """The fields of one dataclass as settings."""
    hints = typing.get_type_hints(sheet)
    settings = {}
    for field in dataclasses.fields(sheet):
        hint = hints[field.name]
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        settings[field.name] = Setting(
            section=section,
            name=field.name,
            kind=typing.get_origin(kinds[0]) or kinds[0],
            optional=types.NoneType in kinds,
            default=field.default,
            metadata=field.metadata,
        )
    return settings


SETTINGS: dict[str, Setting] = {
    name: setting
    for section, sheet in typing.get_type_hints(Config).items()
    for name, setting in _settings_of(section, sheet).items()
}
