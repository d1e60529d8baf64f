"""Checks of a configuration: each with its whole message, and what follows from the fields."""

import contextlib
import dataclasses
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from dtensor_llm.checks import Rule, Surroundings, check, problems
from dtensor_llm.checks.machine_rules import MACHINE_RULES
from dtensor_llm.checks.model_rules import MODEL_RULES
from dtensor_llm.command_line import parse_command_line
from dtensor_llm.config import (
    Config,
    ConfigError,
    MeshSizes,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from dtensor_llm.model import GPT
from dtensor_llm.presets import PRESETS
from dtensor_llm.refused_pairs import RefusedPair
from dtensor_llm.settings import SETTINGS, Setting
from parity_tests.bad_configurations import ALONE, BAD_CONFIGURATIONS, read

RULES = (*MODEL_RULES, *MACHINE_RULES)


@pytest.mark.parametrize(("surroundings", "line", "expected"), BAD_CONFIGURATIONS)
def test_bad_configuration_is_explained(
    surroundings: Surroundings, line: str, expected: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        read(line, surroundings)
    assert raised.value.problems == expected


def test_one_message_holds_all_problems() -> None:
    with pytest.raises(ConfigError) as raised:
        read("--layers 0 --seq-len 9 --mesh 2x1x1")
    assert str(raised.value) == (
        "2 problems in the configuration:\n"
        "  - --layers 0: must be a whole number of at least 1 (blocks)\n"
        "  - --seq-len 9 is not a multiple of tp=2, but with sequence parallelism all ranks take "
        "equally many tokens: 9 / 2 leaves 1; --seq-len 8, 10 or --no-sequence-parallel would do"
    )
    assert str(ConfigError(["--lr nan"])) == "1 problem in the configuration:\n  - --lr nan"


@cache
def config_of(line: str, surroundings: Surroundings) -> Config:
    """What rules see of a command line, with defaults in place of what is wrong alone."""
    seen = []

    def keep(config: Config, _: Surroundings) -> Iterator[str]:
        seen.append(config)
        return iter(())

    with contextlib.suppress(ConfigError):
        parse_command_line(shlex.split(line), surroundings, more_rules=[Rule(keep, frozenset())])
    return seen[0]


def test_table_reaches_every_rule() -> None:
    reached = set()
    for surroundings, line, _ in BAD_CONFIGURATIONS:
        config = config_of(line, surroundings)
        reached |= {rule.find.__name__ for rule in RULES if any(rule.find(config, surroundings))}
    assert reached == {rule.find.__name__ for rule in RULES}


NOT_OF_TWO_FEATURES = {
    "dropout_survives_rounding",
    "file_has_a_schedule",
    "axes_are_available",
    "tp_grid_is_square",
    "parity_has_a_rule",  # refuses no training, only to compare it
}


@pytest.mark.parametrize("rule", MODEL_RULES, ids=lambda rule: rule.find.__name__)
def test_rule_takes_its_reasons_from_the_table_of_refused_pairs(rule: Rule) -> None:
    reasons = [pair.reason for pair in RefusedPair]
    for surroundings, line, _ in BAD_CONFIGURATIONS:
        for text in rule.find(config_of(line, surroundings), surroundings):
            named = any(reason in text for reason in reasons)
            assert named != (rule.find.__name__ in NOT_OF_TWO_FEATURES), text


@pytest.mark.parametrize("pair", RefusedPair, ids=lambda pair: pair.name)
def test_every_row_of_the_table_is_the_reason_of_some_refusal(pair: RefusedPair) -> None:
    assert any(pair.reason in text for *_, texts in BAD_CONFIGURATIONS for text in texts)
    assert [other for other in RefusedPair if pair.reason in other.reason] == [pair]


SOME_VALUES = {
    int: (1, 3),
    float: (0.0, 0.25),
    bool: (True, False),
    str: ("x",),
    tuple: (("x",),),
    MeshSizes: (MeshSizes(), MeshSizes(tp=2)),
}


def some_values(setting: Setting) -> tuple[object, ...]:
    if "pattern" in setting.metadata:
        return tuple(v for v in ("even", "auto", "2,2", "4") if setting.problem(v) is None)
    return setting.metadata.get("choices", SOME_VALUES[setting.kind])


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_verdict_of_a_rule_depends_on_what_it_reads_alone(setting: Setting) -> None:
    others = [rule for rule in RULES if setting.name not in rule.reads]
    for surroundings, line, _ in BAD_CONFIGURATIONS:
        config = config_of(line, surroundings)
        section = getattr(config, setting.section)
        verdicts = [any(rule.find(config, surroundings)) for rule in others]
        for value in some_values(setting):
            changed = dataclasses.replace(section, **{setting.name: value})
            other = dataclasses.replace(config, **{setting.section: changed})
            for rule, verdict in zip(others, verdicts, strict=True):
                case = (rule.find.__name__, line, value)
                assert any(rule.find(other, surroundings)) == verdict, case


def test_wrong_setting_hides_the_rules_that_read_it() -> None:
    """With the default of 4 layers in place of `four`, pp=8 would be refused as well."""
    with pytest.raises(ConfigError) as raised:
        read("--layers four --mesh 1x8x1")
    assert len(raised.value.problems) == 1


def test_configuration_built_in_code_is_checked_alike() -> None:
    config = Config(
        ModelConfig(layers=0, heads=0, kv_heads=-1, dropout=float("nan"), norm="batchnorm"),
        TrainConfig(micro_batch_size=0, lr=float("inf"), seed=2**64),
        ParallelConfig(mesh=MeshSizes(tp=0)),
        RunConfig(data=(), metrics=""),
    )
    assert [text.split(":")[0] for text in problems(config, ALONE)] == [
        "--heads 0",
        "--kv-heads -1",
        "--layers 0",
        "--norm batchnorm",
        "--dropout nan",
        "--micro-batch-size 0",
        "--lr inf",
        "--seed 18446744073709551616",
        "--mesh 0x1x1",
        "--data without a value",
        "--metrics without a value",
    ]


def test_wrong_value_does_not_break_the_proposals_of_other_rules() -> None:
    config = Config(
        train=TrainConfig(micro_batch_size=0), parallel=ParallelConfig(mesh=MeshSizes(tp=2))
    )
    assert len(problems(config, Surroundings(num_processes=4, local_processes=4))) == 2


def test_further_rules_see_the_configuration() -> None:
    def refuse_short(config: Config, _: Surroundings) -> Iterator[str]:
        if config.model.seq_len < 128:
            yield f"data: too short for --seq-len {config.model.seq_len}"

    rule = Rule(refuse_short, frozenset({"seq_len"}))
    with pytest.raises(ConfigError) as raised:
        parse_command_line(["--lr", "nan"], ALONE, more_rules=[rule])
    assert raised.value.problems[1:] == ["data: too short for --seq-len 64"]
    with pytest.raises(ConfigError) as raised:
        parse_command_line(["--seq-len", "0"], ALONE, more_rules=[rule])
    assert len(raised.value.problems) == 1
    check(Config(ModelConfig(seq_len=128)), ALONE, more_rules=[rule])


def test_metrics_check_leaves_files_as_they_are(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert read(f"--metrics {empty}").run.metrics == str(empty)
    read(f"--metrics {tmp_path / 'new.jsonl'}")
    read("--metrics /dev/null")
    assert [path.name for path in tmp_path.iterdir()] == ["empty.jsonl"]
    assert empty.read_text() == ""


@pytest.mark.parametrize("data", ["stdlib", "{folder}/old.jsonl", "{folder}/link.jsonl"])
def test_metrics_overwrite_nothing(tmp_path: Path, data: str) -> None:
    """Neither a file that is there nor, by whatever name, the data that are read."""
    old, link = tmp_path / "old.jsonl", tmp_path / "link.jsonl"
    old.write_text("line\n")
    link.symlink_to(old)
    line = f"--data {data.format(folder=tmp_path)} --metrics {old}"
    with pytest.raises(ConfigError) as raised:
        read(line)
    found = "is there and not empty" if data == "stdlib" else "is among --data"
    assert raised.value.problems == [
        f"--metrics {old} {found}, and is not overwritten; a new file would do"
    ]
    assert old.read_text() == "line\n"
    read(line, Surroundings(first_machine=False))


def test_unwritable_metrics_are_refused_where_rank_0_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    line = f"--metrics {tmp_path}/run.jsonl"
    with pytest.raises(ConfigError) as raised:
        read(line)
    assert raised.value.problems == [
        f"{line} cannot be written: Permission denied; another file would do"
    ]
    read(line, Surroundings(first_machine=False))


def test_record_check_leaves_no_trace_and_refuses_a_folder_with_a_record(tmp_path: Path) -> None:
    assert read(f"--record {tmp_path}").run.record == str(tmp_path)
    read(f"--record {tmp_path / 'new'}")
    assert not list(tmp_path.iterdir())
    (tmp_path / "record.jsonl").write_text("")
    with pytest.raises(ConfigError) as raised:
        read(f"--record {tmp_path}")
    assert raised.value.problems == [
        f"--record {tmp_path} already holds a record; another folder would do"
    ]
    read(f"--record {tmp_path}", Surroundings(first_machine=False))


def test_bad_input_is_found_without_loading_torch() -> None:
    """Every rank reads the command line: it has to be quick."""
    code = (
        "import sys, dtensor_llm.command_line as c, dtensor_llm.checks as k\n"
        "try: c.parse_command_line(['--layers', 'four'], k.Surroundings())\n"
        "except c.ConfigError: sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("line", "micro_batch_size", "microbatches"),
    [
        ("", 64, 1),
        ("--mesh 2x1x4", 16, 1),
        ("--mesh 1x2x1", 16, 4),
        ("--mesh 1x4x4", 2, 8),
        ("--mesh 1x4x4 --global-batch-size 16", 1, 4),
        ("--mesh 1x2x1 --global-batch-size 6", 3, 2),
        ("--mesh 1x3x1 --layers 3 --global-batch-size 7", 1, 7),
        ("--micro-batch-size 8", 8, 8),
        ("--mesh 1x2x2 --micro-batch-size 2", 2, 16),
        ("--mesh tp=2,dp_replicate=2,dp_shard=2 --micro-batch-size 4", 4, 4),
    ],
)
def test_microbatches(line: str, micro_batch_size: int, microbatches: int) -> None:
    config = read(line)
    assert (config.micro_batch_size, config.microbatches) == (micro_batch_size, microbatches)


@pytest.mark.parametrize(
    ("world", "mesh", "num_processes", "kind"),
    [
        ("auto", MeshSizes(), 1, "processes"),
        ("auto", MeshSizes(tp=2), 1, "threads"),
        ("auto", MeshSizes(tp=2), 2, "processes"),
        ("threads", MeshSizes(), 1, "threads"),
        ("processes", MeshSizes(tp=2), 1, "processes"),
    ],
)
def test_world_kind(world: str, mesh: MeshSizes, num_processes: int, kind: str) -> None:
    config = Config(parallel=ParallelConfig(mesh=mesh), run=RunConfig(world=world))
    assert config.world_kind(num_processes) == kind


def test_fields_left_open_follow_others() -> None:
    assert TrainConfig(steps=200).num_warmup_steps == 20
    assert TrainConfig(steps=5).num_warmup_steps == 0
    assert TrainConfig(steps=5, warmup_steps=3).num_warmup_steps == 3
    assert ModelConfig(width=96, heads=6).head_size == 16
    assert ModelConfig(width=96).num_ffn == 384
    assert ModelConfig(width=96, mlp="swiglu").num_ffn == 256  # 8/3 x 96
    assert ModelConfig(width=100, mlp="swiglu").num_ffn == 320  # 8/3 x 100 = 266.7
    assert ModelConfig(dropout=0.1).attention_dropout_rate == 0.1
    assert ModelConfig(dropout=0.1, attention_dropout=0.0).attention_dropout_rate == 0.0
    assert ModelConfig(heads=8).num_kv_heads == 8
    assert ModelConfig(heads=8, kv_heads=2).num_kv_heads == 2


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("gpt3-175b", pytest.approx(175e9, rel=3e-3)),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset: str, published: float) -> None:
    assert PRESETS[preset].num_parameters == published


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--no-bias",
        "--no-tied-embeddings --vocab-size 257",
        "--norm rmsnorm --positions rope --mlp swiglu --no-bias --kv-heads 2",
        "--norm rmsnorm --mlp swiglu --ffn-width 96",
        "--model llama3-405b",
        "--model gpt3-175b",
    ],
)
def test_num_parameters_counts_those_of_the_model(line: str) -> None:
    config = read(line).model
    with torch.device("meta"):
        model = GPT(config)
    model.tie_embeddings()
    assert config.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_legal(name: str) -> None:
    check(Config(PRESETS[name]), ALONE)
