"""Configurations: defaults, presets, the command line, and every check with its whole message."""

import contextlib
import dataclasses
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dtensor_llm.checks import Rule, Surroundings, check, problems
from dtensor_llm.checks.machine_rules import MACHINE_RULES
from dtensor_llm.checks.memory_floor import memory_floor
from dtensor_llm.checks.model_rules import MODEL_RULES
from dtensor_llm.command_line import FLAGS, flags_of, make_parser, parse_command_line
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
from parity_tests.bad_configurations import BAD_CONFIGURATIONS

ALONE = Surroundings()
RULES = (*MODEL_RULES, *MACHINE_RULES)


def read(line: str, surroundings: Surroundings = ALONE) -> Config:
    return parse_command_line(shlex.split(line), surroundings)


# Bad input


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


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.find.__name__)
def test_verdict_of_a_rule_depends_on_what_it_reads_alone(rule: Rule) -> None:
    unread = [setting for name, setting in SETTINGS.items() if name not in rule.reads]
    for surroundings, line, _ in BAD_CONFIGURATIONS:
        config = config_of(line, surroundings)
        verdict = any(rule.find(config, surroundings))
        for setting in unread:
            for value in some_values(setting):
                section = getattr(config, setting.section)
                changed = dataclasses.replace(section, **{setting.name: value})
                other = dataclasses.replace(config, **{setting.section: changed})
                assert any(rule.find(other, surroundings)) == verdict, (line, setting.name, value)


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


# Good input


GOOD_CONFIGURATIONS = [
    (ALONE, "--mesh 8x4x16"),
    (ALONE, "--mesh 1x1x1024 --global-batch-size 1024"),
    (Surroundings(8, 8), "--mesh 2x2x2"),
    (Surroundings(8, 8, num_cuda=8), "--mesh 2x2x2 --device cuda"),
    (Surroundings(8, 8, num_cuda=4), "--mesh 2x2x2 --device cpu"),
    (Surroundings(num_cuda=8), "--mesh 2x2x2"),
    (Surroundings(16, 8, num_cuda=8), "--mesh tp=8,dp=2 --model llama3-8b"),
    (Surroundings(memory_bytes=16 * 2**30), "--model gpt2 --global-batch-size 1"),
    (ALONE, "--mesh 4x1x1 --vocab-size 257 --kv-heads 4 --positions rope --mlp swiglu"),
    (ALONE, "--mesh 2x1x1 --seq-len 9 --no-sequence-parallel"),
    (ALONE, "--mesh 2x2x1 --async-tp --gather-again --parallel-block"),
    (ALONE, "--mesh 1x4x4 --global-batch-size 8 --schedule gpipe"),
    (ALONE, "--mesh 1x3x1 --layers 8 --global-batch-size 7"),
    (ALONE, "--steps 1 --lr 0 --clip-grad 0 --eval-every 0 --warmup-steps 1"),
    (ALONE, "--dropout 0.00001 --attention-dropout 0.99999"),
]


@pytest.mark.parametrize(("surroundings", "line"), GOOD_CONFIGURATIONS)
def test_good_configuration_passes(surroundings: Surroundings, line: str) -> None:
    assert isinstance(read(line, surroundings), Config)


@pytest.mark.parametrize(("surroundings", "line"), GOOD_CONFIGURATIONS)
def test_flags_of_a_configuration_give_it_again(surroundings: Surroundings, line: str) -> None:
    config = read(line, surroundings)
    assert parse_command_line(flags_of(config), surroundings) == config


def test_flags_of_a_configuration_name_what_differs_from_the_defaults() -> None:
    assert flags_of(Config()) == ["--mesh", "1x1x1"]
    line = "--mesh pp=2,dp_replicate=2,tp=2 --no-bias --lr 1e-05 --data a b --check-parity"
    assert flags_of(read(f"{line} --dtype float64")) == shlex.split(
        "--mesh pp=2,dp_replicate=2,tp=2 --no-bias --lr 1e-05 --dtype float64 --data a b "
        "--check-parity"
    )


def test_no_flags_give_the_defaults() -> None:
    assert read("") == Config()
    assert read("", Surroundings(8, 8)).parallel.mesh == MeshSizes(dp_shard=8)


EVERY_FLAG = (
    "--vocab-size 500 --width 96 --heads 6 --kv-heads 2 --layers 6 --seq-len 32 --ffn-width 48 "
    "--norm rmsnorm --positions rope --mlp swiglu --no-bias --no-tied-embeddings "
    "--dropout 0.1 --attention-dropout 0.2 --rope-theta 5e5 --norm-eps 1e-6 --init-std 0.01 "
    "--fused-qkv --parallel-block --gather-again "
    "--global-batch-size 32 --micro-batch-size 4 --steps 9 --lr 1e-3 --warmup-steps 2 "
    "--min-lr-ratio 0 --weight-decay 0.2 --clip-grad 0.5 --seed 7 --optimizer sgd "
    "--momentum 0.5 --beta1 0.8 --beta2 0.9 --eps 1e-6 --dtype float64 --eval-every 3 "
    "--eval-samples 5 --mesh 2x2x1 --zero 2 --defer-reduce --schedule gpipe --stage-layers 4,2 "
    "--no-sequence-parallel --world threads --device cpu --timeout 5 --data a b --check-parity "
    "--record run --record-every 7 --metrics run.jsonl",
    "--mesh 2x2x1 --reshard-after-forward --prefetch-depth 2 --offload weights --async-tp",
    "--zero 0 --ddp --ddp-bucket-mb 5 --no-ddp-bucket-view --ddp-static-graph",
    "--mesh 1x2x1 --schedule interleaved-1f1b --stages-per-rank 1",
    "--mesh 1x2x1 --schedule-csv parity_tests/schedule_of_two_ranks.csv --global-batch-size 3",
)
"""Some do not go together."""


def test_every_flag_sets_its_field() -> None:
    given: set[str] = set()
    for line in EVERY_FLAG:
        flags = {word for word in shlex.split(line) if word.startswith("--")}
        config = read(line)
        for flag, setting in FLAGS.items():
            name = flag.replace("--", "--no-") if setting.default is True else flag
            if name in flags:
                assert getattr(getattr(config, setting.section), setting.name) != setting.default
                given.add(flag)
    assert given == FLAGS.keys() - {"--model"}
    config = read(EVERY_FLAG[0])
    assert config.run.data == ("a", "b")
    assert read(shlex.join(flags_of(config))) == config
    assert config.model == ModelConfig(
        500,
        96,
        6,
        2,
        6,
        32,
        48,
        "rmsnorm",
        "rope",
        "swiglu",
        False,
        False,
        0.1,
        0.2,
        5e5,
        1e-6,
        0.01,
        fused_qkv=True,
        parallel_block=True,
    )


def test_flags_override_a_preset() -> None:
    model = read("--model llama3-8b --layers 2 --tied-embeddings --width 512 --seq-len 16").model
    assert model == dataclasses.replace(
        PRESETS["llama3-8b"], layers=2, tied_embeddings=True, width=512, seq_len=16
    )


@pytest.mark.parametrize("setting", FLAGS.values(), ids=FLAGS)
def test_help_says_what_a_flag_means(setting: Setting) -> None:
    text = " ".join(make_parser("train_gpt.py").format_help().split())
    assert f" {setting.flag} " in text or f" {setting.flag}, " in text
    assert setting.metadata["help"] in text
    assert setting.metadata.get("unit", "") in text


def test_help_leaves_with_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        read("--help")
    assert raised.value.code == 0
    assert "--mesh MESH" in capsys.readouterr().out


# What follows from the fields


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


# The memory floor, by hand for tiny: 64 wide, 4 blocks, vocabulary 256, 64 sequences of 64 tokens


KEPT_PER_TOKEN_AND_BLOCK = 4 * 64 + 4 * 64 + 2 * 256


@pytest.mark.parametrize(
    ("line", "states", "activations"),
    [
        ("", 220_544 * 4 * 4, 4096 * (4 * KEPT_PER_TOKEN_AND_BLOCK + 256) * 4),
        ("--micro-batch-size 8", 220_544 * 4 * 4, 512 * (4 * KEPT_PER_TOKEN_AND_BLOCK + 256) * 4),
        (
            "--dtype float64 --optimizer sgd --attention-dropout 0.1",
            220_544 * 3 * 8,
            4096 * (4 * (KEPT_PER_TOKEN_AND_BLOCK + 8 * 64) + 256) * 8,
        ),
        # ZeRO 0 holds dp copies, the reference of a parity check is one more
        (
            "--mesh 1x1x4 --zero 0 --check-parity --dtype float64 --optimizer sgd --momentum 0",
            220_544 * 2 * 8 * 5,
            4096 * (4 * KEPT_PER_TOKEN_AND_BLOCK + 256) * 8,
        ),
        # an offloaded optimizer has weights and gradients of its own
        (
            "--offload optimizer",
            220_544 * 6 * 4,
            4096 * (4 * KEPT_PER_TOKEN_AND_BLOCK + 256) * 4,
        ),
        # 1F1B on 2 stages: 2 and 1 microbatches in flight, 1.5 x 4 blocks
        (
            "--mesh 1x2x1 --micro-batch-size 8",
            220_544 * 4 * 4,
            512 * (6 * KEPT_PER_TOKEN_AND_BLOCK + 256) * 4,
        ),
        # the first stage has 3 blocks or none
        (
            "--mesh 1x2x1 --micro-batch-size 8 --stage-layers 3,1",
            220_544 * 4 * 4,
            512 * (7 * KEPT_PER_TOKEN_AND_BLOCK + 256) * 4,
        ),
        (
            "--mesh 1x2x1 --micro-batch-size 8 --stage-layers 0,4",
            220_544 * 4 * 4,
            512 * (4 * KEPT_PER_TOKEN_AND_BLOCK + 256) * 4,
        ),
        # GPipe holds all 8
        (
            "--mesh 1x2x1 --micro-batch-size 8 --schedule gpipe",
            220_544 * 4 * 4,
            512 * (32 * KEPT_PER_TOKEN_AND_BLOCK + 256) * 4,
        ),
    ],
)
def test_memory_floor(line: str, states: int, activations: int) -> None:
    floor = memory_floor(read(line))
    assert (floor.states, floor.activations) == (states, activations)
    assert floor.total == states + activations
