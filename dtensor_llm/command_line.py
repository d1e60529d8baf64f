"""The command line: flags and `--help` made from the fields of the configuration."""

import argparse
import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from dtensor_llm.checks import Rule, Surroundings, problems
from dtensor_llm.config import Config, ConfigError, MeshSizes
from dtensor_llm.mesh import parse_mesh
from dtensor_llm.presets import PRESETS
from dtensor_llm.settings import SETTINGS, Setting, join_or

PRESET = Setting(
    section="model",
    name="model",
    kind=str,
    optional=False,
    default="tiny",
    metadata={
        "help": f"shape of the model: {join_or(PRESETS)}; the flags below change single values",
        "choices": tuple(PRESETS),
        "metavar": "PRESET",
    },
)

FLAGS = {setting.flag: setting for setting in (PRESET, *SETTINGS.values())}

GROUPS = {
    "model": "model (defaults: those of the preset tiny)",
    "train": "training",
    "parallel": "parallelism",
    "run": "run",
}


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print and leave."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError([message])


def parser_beside_flags(description: str | None) -> argparse.ArgumentParser:
    """For what a script reads itself, which takes the flags of a run too: `parse_beside_flags`."""
    return argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="All flags of train_gpt.py are taken too: see its --help.",
    )


def parse_beside_flags(
    parser: argparse.ArgumentParser, argv: Sequence[str], *, refused: Iterable[str] = ()
) -> tuple[argparse.Namespace, list[str]]:
    """What the script reads itself, and what is left: flags of a run, for `parse_command_line`.

    A flag that is a slip of the script's own, and one of those `refused` since the script does not
    do what they ask for, ends the program.
    """
    asked, left = parser.parse_known_args(join_values(argv))
    names = [word.partition("=")[0] for word in left if word.startswith("-")]
    own = parser._option_string_actions  # private: argparse does not tell its flags otherwise
    for name in names:
        is_known = name.replace("--no-", "--", 1) in FLAGS or name in FLAGS
        if not is_known and (close := closest_flag(name, [*FLAGS, *own])) in own:
            parser.error(f"{name} is not a flag; did you mean {close}?")
    if found := [name for name in refused if name in names]:
        parser.error(f"{' and '.join(found)}: train_gpt.py does that; leave it out")
    return asked, left


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """A parser with a flag for every field, whose values stay texts; no default but the mesh's."""
    parser = _Parser(
        prog=prog,
        argument_default=argparse.SUPPRESS,
        description="Train a GPT on any tensor x pipeline x data mesh, equal to one device.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=100),
    )
    groups = {name: parser.add_argument_group(title) for name, title in GROUPS.items()}
    for setting in FLAGS.values():
        groups[setting.section].add_argument(setting.flag, **_argument(setting))
    parser.set_defaults(mesh=SETTINGS["mesh"].metadata["follows"])
    return parser


def _argument(setting: Setting) -> dict[str, Any]:
    """What argparse needs to know of a setting."""
    if setting.kind is bool:
        action = "store_true" if setting.default is False else argparse.BooleanOptionalAction
        return {"action": action, "help": _help(setting)}
    choices = "{" + ",".join(setting.metadata.get("choices", ())) + "}"
    metavar = {int: "N", float: "X"}.get(setting.kind, setting.metadata.get("metavar", choices))
    nargs = "*" if setting.kind is tuple else None
    return {"metavar": metavar, "nargs": nargs, "help": _help(setting)}


def _help(setting: Setting) -> str:
    """Help, unit and default: `sequence length (tokens; default: 64)`."""
    default = setting.metadata.get("follows", setting.default)
    if setting.kind is bool and not setting.optional:
        default = "on" if setting.default else "off"
    if setting.kind is tuple:
        default = " ".join(setting.default)
    notes = [setting.metadata["unit"]] if "unit" in setting.metadata else []
    return f"{setting.metadata['help']} ({'; '.join([*notes, f'default: {default}'])})"


def parse_command_line(
    argv: Sequence[str], surroundings: Surroundings, *, more_rules: Iterable[Rule] = ()
) -> Config:
    """Read and check a command line; print the help and leave where it asks for that.

    Args:
        argv: the arguments, without the program's name.
        surroundings: what was started, and on what machine; its processes fill a mesh size of -1.
        more_rules: checked after those of `checks`, for example of the data.

    Raises:
        ConfigError: with everything that is wrong, in words.
    """
    given, strangers = make_parser().parse_known_args(join_values(argv))
    texts = _refuse_strangers(strangers)
    values: dict[str, Any] = {}
    wrong: set[str] = set()
    for name, text in vars(given).items():
        try:
            values[name] = _read(name, text, surroundings.num_processes)
        except ConfigError as error:
            texts += error.problems
            wrong.add(name)
    if PRESET.name in wrong:
        wrong |= {name for name, setting in SETTINGS.items() if setting.section == "model"}
    config = _assemble(values)
    texts += problems(config, surroundings, more_rules=more_rules, wrong=frozenset(wrong))
    if texts:
        raise ConfigError(texts)
    return config


def flags_of(config: Config) -> list[str]:
    """The command line that gives this configuration: the mesh, and what differs from defaults.

    `parse_command_line` reads it back, and refuses it for what is wrong with the configuration.
    """
    words = [SETTINGS["mesh"].flag, str(config.parallel.mesh)]
    for setting in SETTINGS.values():
        value = getattr(getattr(config, setting.section), setting.name)
        if value == setting.default or setting.kind is MeshSizes:
            continue
        if setting.kind is bool:
            words.append(setting.flag if value else setting.flag.replace("--", "--no-", 1))
        elif setting.kind is tuple:
            words += [setting.flag, *value]
        else:
            words += [setting.flag, str(value)]
    return words


def join_values(argv: Sequence[str]) -> list[str]:
    """The same arguments in words that argparse does not misread.

    `--lr -1e-3` becomes `--lr=-1e-3`: not two flags. `--lr` without a value becomes `--lr=`, and
    `--bias=3` two words: argparse would leave at once, with this problem alone.
    """
    joined: list[str] = []
    words = deque(argv)
    while words:
        word = words.popleft()
        flag, equals, value = word.partition("=")
        kind = FLAGS[flag].kind if flag in FLAGS else bool
        if equals and kind is bool:
            joined += [flag, value]
        elif equals or kind in (bool, tuple):
            joined.append(word)
        else:
            has_value = words and not words[0].startswith("--")
            joined.append(f"{flag}={words.popleft() if has_value else ''}")
    return joined


def _refuse_strangers(words: list[str]) -> list[str]:
    """A text for each flag that there is not, or else for each word that follows no flag."""
    texts = []
    for word in words:
        if word.startswith("-"):
            name = word.partition("=")[0]
            close = closest_flag(name, FLAGS)
            texts.append(f"{word} is not a flag" + (f"; did you mean {close}?" if close else ""))
    return texts or [f"{word} is not the value of any flag" for word in words]


def closest_flag(name: str, flags: Iterable[str]) -> str | None:
    """The flag that was probably meant."""
    known = list(flags)
    longer = [flag for flag in known if flag.startswith(name)]
    close = longer[:1] or get_close_matches(name, known, n=1, cutoff=0.7)
    return close[0] if close else None


def _read(name: str, text: Any, num_ranks: int) -> Any:
    """The value of a field from what argparse found.

    Raises:
        ConfigError: the text is not of the field's kind.
    """
    setting = FLAGS["--" + name.replace("_", "-")]
    if setting.kind is MeshSizes:
        return parse_mesh(text, num_ranks)
    if setting.kind is tuple:
        return tuple(text)
    if setting.kind in (int, float):
        try:
            return setting.kind(text)
        except ValueError:
            raise ConfigError([setting.refusal(text)]) from None
    if setting is PRESET and text not in PRESETS:
        raise ConfigError([setting.refusal(text)])
    return text


def _assemble(values: dict[str, Any]) -> Config:
    """The configuration with the preset's and the fields' defaults where nothing is given."""
    base = Config(model=PRESETS[values.get(PRESET.name, PRESET.default)])
    sections = {}
    for section in GROUPS:
        changes = {
            name: values[name]
            for name, setting in SETTINGS.items()
            if setting.section == section and name in values
        }
        sections[section] = dataclasses.replace(getattr(base, section), **changes)
    return Config(**sections)
