"""Every check of a configuration, made before any process group exists and reported together."""

from collections.abc import Iterable
from dataclasses import replace

from dtensor_llm.checks.machine_rules import MACHINE_RULES
from dtensor_llm.checks.model_rules import MODEL_RULES
from dtensor_llm.checks.rule import Rule, Surroundings
from dtensor_llm.config import Config, ConfigError
from dtensor_llm.settings import SETTINGS

__all__ = ["Rule", "Surroundings", "check", "problems"]


def problems(
    config: Config,
    surroundings: Surroundings,
    *,
    more_rules: Iterable[Rule] = (),
    wrong: frozenset[str] = frozenset(),
) -> list[str]:
    """Everything that is wrong with a configuration, in words; empty where it can run.

    Args:
        config: what is checked.
        surroundings: what was started, and on what machine.
        more_rules: checked after those of this package, for example of the data.
        wrong: fields already reported, whose values in `config` mean nothing.
    """
    texts = []
    known_wrong = set(wrong)
    for name, setting in SETTINGS.items():
        text = setting.problem(getattr(getattr(config, setting.section), name))
        if text is not None:
            texts.append(text)
            known_wrong.add(name)
    readable = _with_defaults(config, known_wrong)
    for rule in (*MODEL_RULES, *MACHINE_RULES, *more_rules):
        if not rule.reads & known_wrong:
            texts.extend(rule.find(readable, surroundings))
    return texts


def _with_defaults(config: Config, names: Iterable[str]) -> Config:
    """The configuration with defaults in place of the named fields: rules may propose by them."""
    for name in names:
        if name in SETTINGS:
            section = getattr(config, SETTINGS[name].section)
            repaired = replace(section, **{name: SETTINGS[name].default})
            config = replace(config, **{SETTINGS[name].section: repaired})
    return config


def check(config: Config, surroundings: Surroundings, *, more_rules: Iterable[Rule] = ()) -> None:
    """Refuse a configuration that cannot run.

    Raises:
        ConfigError: with everything that `problems` found.
    """
    if texts := problems(config, surroundings, more_rules=more_rules):
        raise ConfigError(texts)
