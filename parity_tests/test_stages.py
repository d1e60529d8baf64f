"""How the blocks are cut into stages: what they cost, the best cut, and what is refused."""

import dataclasses
import random
import re
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dtensor_llm.checks import Surroundings, check
from dtensor_llm.config import Config, ConfigError, MeshSizes, ModelConfig, ParallelConfig
from dtensor_llm.model import GPT
from dtensor_llm.planner.placements import plan_stages
from dtensor_llm.presets import PRESETS
from dtensor_llm.stages import (
    MOST_BALANCED,
    balance,
    costs,
    layers_of_stages,
    num_stages,
    split_problems,
)
from parity_tests.harness import LLAMA, ROOT, small_config
from reference import pipeline_parallel as reference


def pipeline(layers: int, pp: int, stage_layers: str = "even", **model: Any) -> Config:
    parallel = ParallelConfig(mesh=MeshSizes(pp=pp), stage_layers=stage_layers)
    return Config(model=ModelConfig(layers=layers, **model), parallel=parallel)


def counts(config: Config) -> list[int]:
    return [len(layers) for layers in layers_of_stages(config)]


# ---------------------------------------------------------------- cuts


@pytest.mark.parametrize("split", ["even", "auto"])
def test_stages_hold_every_layer_once(split: str) -> None:
    for layers in range(1, 13):
        for pp in range(1, layers + (3 if split == "auto" else 1)):
            config = pipeline(layers, pp, split)
            stages = layers_of_stages(config)
            assert len(stages) == num_stages(config) == pp
            assert [layer for stage in stages for layer in stage] == list(range(layers))
            assert all(stages[1:-1])


def test_even_counts_differ_by_one_at_most_and_the_first_stages_have_more() -> None:
    assert counts(pipeline(5, 3)) == [2, 2, 1]
    assert counts(pipeline(12, 4)) == [3, 3, 3, 3]


@pytest.mark.parametrize("split", ["6,7,7,4", "0,12,12,0", "24,0"])
def test_counts_by_hand_are_taken_as_they_are(split: str) -> None:
    by_hand = [int(text) for text in split.split(",")]
    assert counts(pipeline(24, len(by_hand), split)) == by_hand


def test_auto_without_a_head_to_speak_of_is_even() -> None:
    for layers in range(2, 13):
        for pp in range(1, layers + 1):
            items = (0, *[5] * layers, 0)
            sizes = [len(part) for part in balance(items, pp)]
            sizes[0] -= 1  # the embedding
            sizes[-1] -= 1  # the head
            assert sorted(sizes) == sorted(counts(pipeline(layers, pp)))
    assert counts(pipeline(5, 2, "auto", vocab_size=16)) == [3, 2]


def test_a_large_vocabulary_has_a_stage_to_itself() -> None:
    """GPT-2: the head of 50,257 tokens costs as much as 4.9 blocks."""
    model = PRESETS["gpt2"]
    embedding, *blocks, head = costs(model)
    assert 4.9 < head / blocks[0] < 5 and embedding < blocks[0] / 1000
    config = dataclasses.replace(pipeline(12, 4, "auto"), model=model)
    assert counts(config) == [4, 4, 4, 0]
    plans = plan_stages(config)
    assert [plan.num_parameters for plan in plans[1:]] == [
        4 * model.num_block_parameters,
        4 * model.num_block_parameters,
        model.vocab_size * model.width + 2 * model.width,
    ]


def test_table_of_cuts_in_the_reading_guide() -> None:
    text = (ROOT / "reference" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\S+), \d+ blocks (.*) \|$", text, re.MULTILINE)
    assert [name for name, _ in rows] == ["gpt2", "llama3-8b", "gpt3-175b"]
    for name, row in rows:
        _, head, stages, *cuts = (cell.strip() for cell in row.split("|"))
        model, pp = PRESETS[name], int(stages)
        block = costs(model)[1]
        assert float(head) == pytest.approx(costs(model)[-1] / block, abs=0.005)
        for split, spelled, slowest in zip(("even", "auto"), cuts[::2], cuts[1::2], strict=True):
            config = dataclasses.replace(pipeline(1, pp, split), model=model)
            found = counts(config)
            assert spelled in (", ".join(map(str, found)), f"{found[0]} each")
            assert len(set(found)) == 1 or " each" not in spelled
            work = [count + costs(model)[0] / block * (s == 0) for s, count in enumerate(found)]
            work[-1] += costs(model)[-1] / block
            assert float(slowest) == pytest.approx(max(work), abs=0.005)


def test_balance_is_the_best_of_all_cuts() -> None:
    """With small whole costs there are many ties: they are broken as the reference breaks them."""
    drawn = random.Random(0)
    for _ in range(400):
        items = tuple(drawn.choice((0, 1, 2, 3, 7)) for _ in range(drawn.randint(1, 9)))
        num_parts = drawn.randint(1, len(items))
        parts = balance(items, num_parts)
        assert tuple(len(part) for part in parts) == reference.best_cut(items, num_parts)
        assert [item for part in parts for item in part] == list(range(len(items)))


def test_of_equally_slow_cuts_the_one_of_least_squares_is_taken() -> None:
    """8, 8, 2, 4 and 7, 1, 8, 6: 148 and 150, but 1096 and 1072 by cubes."""
    assert [len(part) for part in balance((7, 1, 8, 2, 4), 4)] == [2, 1, 1, 1]


def test_balance_takes_measured_times() -> None:
    """Of milliseconds, in seconds, the slowest part decides, too: 12, and not 13 with 471 < 473."""
    items = (5, 6, 3, 5, 5, 7, 3, 9)
    for unit in (1, 1e-3):
        parts = balance(tuple(unit * item for item in items), 4)
        assert [sum(items[item] for item in part) for part in parts] == [11, 8, 12, 12]
    times = (0.3, 0.1, 0.1, 0.1, 0.05, 0.05, 0.3)
    parts = balance(times, 3)
    assert parts == (range(1), range(1, 5), range(5, 7))
    assert balance(tuple(7 * time for time in times), 3) == parts


@pytest.mark.parametrize("num_parts", [0, 4])
def test_balance_refuses_parts_without_an_item(num_parts: int) -> None:
    with pytest.raises(ValueError, match=f"3 items cannot be cut into {num_parts} parts"):
        balance((1, 2, 3), num_parts)


# ---------------------------------------------------------------- costs


@pytest.mark.parametrize(
    "model",
    [
        {"attention_dropout": 0.1},
        {"attention_dropout": 0.1, **LLAMA, "fused_qkv": True},
        {"attention_dropout": 0.1, "parallel_block": True, "bias": False, "ffn_width": 50},
    ],
    ids=["gpt2", "llama", "parallel block"],
)
def test_costs_are_the_operations_that_torch_counts(model: dict[str, Any]) -> None:
    """Products, forward and backward; torch's counter leaves out what is done by element."""
    config = small_config(**model).model
    d, num_norms = config.width, config.norms_per_block
    norm = 3 * (7 if config.norm == "layernorm" else 4) * d
    _, block, *_, head = costs(config)
    b, t = 2, config.seq_len
    for part, cost in (
        ({"layers": [0], "last": False}, block - num_norms * norm - 3 * 2 * d),
        ({"layers": [], "last": True}, head - norm - 3 * 4 * config.vocab_size),
    ):
        stage = GPT(config, first=False, **part)
        x = torch.randn(b, t, d, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            stage(x, torch.arange(b)).sum().backward()
        assert counter.get_total_flops() == b * t * cost


def test_causal_attention_costs_half() -> None:
    """t (t + 1) / 2 pairs of tokens, where the path that draws masks has t^2."""
    config = small_config(seq_len=7).model
    whole = dataclasses.replace(config, attention_dropout=0.1)
    d, t = config.width, config.seq_len
    assert costs(whole)[1] - costs(config)[1] == 3 * 4 * d * t - 3 * 4 * d * (t + 1) // 2


def test_embedding_costs_its_additions() -> None:
    config = small_config().model
    assert costs(config)[0] == 3 * config.width
    assert costs(dataclasses.replace(config, positions="rope"))[0] == config.width


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("split", ["1,2", "3,1,1", "2,0,2", "5"])
def test_a_cut_that_cannot_be_is_refused_wherever_it_is_asked_for(split: str) -> None:
    config = pipeline(4, 3, split)
    with pytest.raises(ConfigError) as raised:
        layers_of_stages(config)
    with pytest.raises(ConfigError) as checked:
        check(config, Surroundings())
    assert raised.value.problems[0] in checked.value.problems


def test_every_cure_is_one() -> None:
    """Each value that a refusal proposes, in place of the one that was given."""
    splits = ("0", "0,0", "5", "1,2", "2,3", "3,1,1", "2,0,2", "0,4,0,1", "even", "auto")
    num_cures = 0
    for split, layers, pp in product(splits, (1, 2, 4, 5), (1, 2, 3, 4, 5, 7, 9)):
        config = pipeline(layers, pp, split)
        if texts := list(split_problems(config)):
            (text,) = texts
            assert text.endswith(" would do")
            cures = re.split(r", (?=-|pp)| or ", text.rpartition("; ")[2].removesuffix(" would do"))
            for cure in cures:
                assert layers_of_stages(cured(config, cure)), (text, cure)
            num_cures += len(cures)
    assert num_cures > 100


def cured(config: Config, cure: str) -> Config:
    """What is proposed is written as flags, `pp=3` in place of the mesh."""
    values = {"--layers": config.model.layers, "pp": num_stages(config)}
    split = config.parallel.stage_layers
    for name, value in re.findall(r"(--stage-layers|--layers|pp)[ =](\S+)", cure):
        if name == "--stage-layers":
            split = value
        else:
            values[name] = int(value)
    return pipeline(values["--layers"], values["pp"], split)


def test_the_search_is_bounded() -> None:
    assert counts(pipeline(MOST_BALANCED, 2, "auto"))
    with pytest.raises(ConfigError, match=f"--layers {MOST_BALANCED + 1} is more than"):
        layers_of_stages(pipeline(MOST_BALANCED + 1, 2, "auto"))
    assert counts(pipeline(10**12, 2)) == [5 * 10**11] * 2
