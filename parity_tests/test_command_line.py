"""The command line: good configurations, flags there and back, help."""

import dataclasses
import shlex

import pytest

from dtensor_llm.checks import Surroundings
from dtensor_llm.command_line import FLAGS, flags_of, make_parser, parse_command_line
from dtensor_llm.config import (
    Config,
    MeshSizes,
    ModelConfig,
)
from dtensor_llm.presets import PRESETS
from dtensor_llm.settings import Setting
from parity_tests.bad_configurations import ALONE, read

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
