"""Every mesh, and every pair of options, against one device.

The options of a run are drawn as a covering array: each pair of values of two options meets in some
run, each value with each set of axes, and each factoring of 1, 2, 4 and 8 ranks is a mesh of one
run at least. `-m full` runs the whole product instead.

The fuzz draws all options there are at random, 60 times by default; `--fuzz N --seed S` takes
other draws, and `--draw I` repeats one of them.
"""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from itertools import combinations, cycle, product
from typing import Any

import pytest

from dtensor_llm.checks import Surroundings, check, problems
from dtensor_llm.checks.model_rules import MODEL_RULES
from dtensor_llm.command_line import FLAGS, flags_of, parse_command_line
from dtensor_llm.config import Config, ConfigError
from dtensor_llm.mesh import NAMED_SIZES, parse_mesh
from dtensor_llm.parity import Report
from dtensor_llm.refused_pairs import RefusedPair
from dtensor_llm.settings import SETTINGS, Setting
from dtensor_llm.worlds import World
from dtensor_llm.worlds.processes_spawn import spawn
from parity_tests import fuzz
from parity_tests.harness import (
    LLAMA,
    SECONDS,
    batches_for,
    parity,
    reference_for,
    small_config,
    torchrun,
    train_and_compare,
)
from parity_tests.test_config import NOT_OF_TWO_FEATURES

MESHES = [
    f"{tp}x{pp}x{ranks // (tp * pp)}"
    for ranks in (1, 2, 4, 8)
    for tp in (1, 2, 4, 8)
    for pp in (1, 2, 4, 8)
    if ranks % (tp * pp) == 0
]


def axes_of(mesh: str) -> str:
    """Those of more than one rank."""
    sizes = zip(("tp", "pp", "dp"), mesh.split("x"), strict=True)
    return "-".join(axis for axis, size in sizes if size != "1")


OPTIONS: dict[str, tuple[Any, ...]] = {
    "axes": tuple(dict.fromkeys(map(axes_of, MESHES))),
    "family": ("gpt2", "llama"),
    "dropout": (0.0, 0.1),
    "mask": ("even", "uneven"),
    "microbatches": (1, 4),
    "tied": (True, False),
    "vocab_size": (256, 257),
    "tokens": ("sharded", "whole", "overlapped"),
    "fused_qkv": (False, True),
    "parallel_block": (False, True),
    "stage_layers": ("even", "auto", "by hand"),
}
Case = dict[str, Any]


def covering_array(options: dict[str, tuple[Any, ...]]) -> list[Case]:
    """Few cases in which every pair of values of two options meets; greedy, the same every time."""
    names = list(options)
    missing = {
        ((a, x), (b, y))
        for a, b in combinations(names, 2)
        for x, y in product(options[a], options[b])
    }
    cases = []
    while missing:
        seed = min(missing, key=str)
        case: Case = dict(seed)
        for name in names:
            if name not in case:
                case[name] = max(
                    options[name], key=lambda v: len(pairs(case | {name: v}) & missing)
                )
        missing -= pairs(case)
        cases.append({name: case[name] for name in names})
    return cases


def on_meshes(cases: list[Case]) -> list[Case]:
    """A mesh for the axes of each: those that have the same axes take turns."""
    turns = {
        axes: cycle([mesh for mesh in MESHES if axes_of(mesh) == axes]) for axes in OPTIONS["axes"]
    }
    return [{"mesh": next(turns[case["axes"]])} | case for case in cases]


def pairs(case: Case) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(combinations([(name, case[name]) for name in OPTIONS if name in case], 2))


def configuration(case: Case) -> Config:
    """3 layers or one a stage, 8 heads, 32 sequences; GPipe where 1F1B has too few microbatches."""
    sizes = parse_mesh(case["mesh"], None)
    family = LLAMA | {"kv_heads": 8} if case["family"] == "llama" else {}
    layers, split = max(3, sizes.pp), case["stage_layers"]
    if split == "by hand":
        split = uneven_counts(layers, sizes.pp)
    own = {
        "layers": layers,
        "stage_layers": split,
        "dropout": case["dropout"],
        "tied_embeddings": case["tied"],
        "vocab_size": case["vocab_size"],
        "sequence_parallel": case["tokens"] != "whole",
        "async_tp": case["tokens"] == "overlapped" and sizes.tp > 1,
        "fused_qkv": case["fused_qkv"],
        "parallel_block": case["parallel_block"],
        "global_batch_size": 32,
        "micro_batch_size": 32 // sizes.dp // case["microbatches"],
        "schedule": "gpipe" if case["microbatches"] < sizes.pp else "1f1b",
        # AdamW multiplies the rounding of a gradient of 1e-9 by lr / eps: one device breaks 1e-12.
        "eps": 1e-6,
    }
    return small_config(case["mesh"], **family | own)


def uneven_counts(layers: int, pp: int) -> str:
    """All that the others leave on the last stage but one, the head alone on the last."""
    if pp == 1:
        return str(layers)
    others = [1] * (pp - 2)
    return ",".join(map(str, [*others, layers - len(others), 0]))


def name_of(case: Case) -> str:
    return "-".join(
        str(value) if isinstance(value, str) else f"{option}={value}"
        for option, value in case.items()
        if option != "axes"
    )


CASES = on_meshes(covering_array(OPTIONS))
# As processes: every axis alone, in pairs, and all three, with what else those runs have.
PROCESS_MESHES = ("2x1x1", "1x2x1", "1x1x2", "2x2x1", "2x1x2", "2x2x2")
PROCESS_CASES = [
    next(i for i, case in enumerate(CASES) if case["mesh"] == mesh) for mesh in PROCESS_MESHES
]


def test_every_pair_of_option_values_meets() -> None:
    met = set().union(*(pairs(case) for case in CASES))
    for a, b in combinations(OPTIONS, 2):
        for x, y in product(OPTIONS[a], OPTIONS[b]):
            assert ((a, x), (b, y)) in met
    assert {case["mesh"] for case in CASES} == set(MESHES)
    assert len(MESHES) == 1 + 3 + 6 + 10


def test_cases_are_legal() -> None:
    for case in CASES:
        assert problems(configuration(case), Surroundings()) == []


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_case_equals_one_device(case: Case) -> None:
    report = parity(configuration(case), case["mask"])
    assert report.passed, report


def check_rank(case: Case, world: World) -> Report:
    config, mask = configuration(case), case["mask"]
    return train_and_compare(config, reference_for(config, mask), batches_for(config, mask), world)


@pytest.mark.parametrize("index", PROCESS_CASES, ids=lambda index: name_of(CASES[index]))
def test_case_equals_one_device_in_processes(index: int) -> None:
    num_ranks = configuration(CASES[index]).parallel.mesh.num_ranks
    for report in spawn(num_ranks, partial(check_rank, CASES[index]), timeout=SECONDS):
        assert report.passed, report


def test_case_equals_one_device_under_torchrun() -> None:
    index = next(i for i in PROCESS_CASES if CASES[i]["mesh"] == "2x1x2")
    done = torchrun(4, "-m", "parity_tests.torchrun_case", str(index))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal" in done.stdout


PRODUCT = {"mesh": MESHES, **{name: OPTIONS[name] for name in OPTIONS if name != "axes"}}


@pytest.mark.full
def test_whole_product(values: tuple[Any, ...]) -> None:
    case = dict(zip(PRODUCT, values, strict=True))
    report = parity(configuration(case), case["mask"])
    assert report.passed, report


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The product has 46 000 cases, which take long to collect: only where they are asked for."""
    if "values" in metafunc.fixturenames:
        is_asked = "full" in metafunc.config.getoption("-m").replace("not full", "")
        products = list(product(*PRODUCT.values())) if is_asked else []
        metafunc.parametrize("values", products, ids=lambda values: "-".join(map(str, values)))


# Fuzz


ALONE = Surroundings()
MANY = 500  # draws that are counted, not trained


def test_fuzz(draw: int, pytestconfig: pytest.Config) -> None:
    """A legal draw equals one device; any other is refused in words."""
    run_draw(fuzz.draw(pytestconfig.getoption("--seed"), draw))


def run_draw(case: fuzz.Case) -> None:
    try:
        if problems(case.config, ALONE):
            assert_refused(case.config)
        else:
            report = fuzz.parity_of(case)
            assert report.passed, report
    except Exception as error:
        raise AssertionError(f"{case}\n{error}") from error


def assert_refused(config: Config) -> None:
    """By a message that names flags, the same from code and from the command line."""
    with pytest.raises(ConfigError) as raised:
        check(config, ALONE)
    for text in raised.value.problems:
        assert names_a_feature(text), text
    with pytest.raises(ConfigError) as read:
        parse_command_line(flags_of(config), ALONE)
    assert read.value.problems == raised.value.problems


def names_a_feature(text: str) -> bool:
    axes = re.findall(r"\b(\w+)=\d", text)
    return any(flag in text for flag in FLAGS) or any(axis in NAMED_SIZES for axis in axes)


@cache
def many_draws() -> list[tuple[fuzz.Case, list[str]]]:
    """Each with its problems; from seed 0, whatever is trained."""
    cases = [fuzz.draw(0, index) for index in range(MANY)]
    return [(case, problems(case.config, ALONE)) for case in cases]


def trained() -> list[Config]:
    return [case.config for case, texts in many_draws() if not texts]


def value_of(config: Config, setting: Setting) -> Any:
    return getattr(getattr(config, setting.section), setting.name)


def test_draw_depends_on_seed_and_index_alone() -> None:
    assert fuzz.draw(3, 7) == fuzz.draw(3, 7)
    assert len({str(fuzz.draw(seed, index)) for seed in range(5) for index in range(5)}) == 25
    assert [fuzz.draw(0, index) for index in range(MANY)] == [case for case, _ in many_draws()]


def test_most_draws_are_legal() -> None:
    assert len(trained()) >= 0.7 * MANY


SETTINGS_TO_DRAW = [
    setting
    for setting in SETTINGS.values()
    if setting.section != "run" and setting.name not in fuzz.NOT_DRAWN
]


@pytest.mark.parametrize("setting", SETTINGS_TO_DRAW, ids=lambda setting: setting.name)
def test_every_option_is_drawn(setting: Setting) -> None:
    """A new field has to be drawn, or else listed in NOT_DRAWN with the reason."""
    counts = Counter(value_of(config, setting) for config in trained())
    assert len(counts) > 1, f"always {counts}"


def test_what_is_not_drawn_keeps_its_default() -> None:
    assert fuzz.NOT_DRAWN.keys() <= SETTINGS.keys()
    for name in fuzz.NOT_DRAWN:
        assert {value_of(config, SETTINGS[name]) for config in trained()} == {
            SETTINGS[name].default
        }


def values_to_train(setting: Setting) -> Iterator[Any]:
    """The values of a choice, and None where another setting may decide; none of a plain number."""
    if setting.optional:
        yield None
    if setting.kind is bool:
        yield from (True, False)
    yield from setting.metadata.get("choices", ())
    least, most = (setting.metadata.get(key) for key in ("minimum", "maximum"))
    if setting.kind is int and least is not None and most is not None and most - least < 10:
        yield from range(least, most + 1)


CHOICES = [(setting, value) for setting in SETTINGS_TO_DRAW for value in values_to_train(setting)]


@pytest.mark.parametrize(("setting", "value"), CHOICES, ids=lambda x: getattr(x, "name", str(x)))
def test_every_value_of_a_choice_is_trained(setting: Setting, value: Any) -> None:
    assert sum(value_of(config, setting) == value for config in trained()) >= 10


@pytest.mark.parametrize("axis", fuzz.AXES)
def test_every_axis_is_trained_with_every_other(axis: str) -> None:
    for other in set(fuzz.AXES) - {axis}:
        meshes = [config.parallel.mesh for config in trained()]
        assert any(getattr(mesh, axis) > 1 and getattr(mesh, other) > 1 for mesh in meshes), other
    assert any(mesh.num_ranks == 16 for mesh in meshes)
    assert any(getattr(mesh, axis) not in (1, 2, 4, 8, 16) for mesh in meshes)


@pytest.mark.parametrize("axis", fuzz.AXES[:-1])
def test_grids_are_trained_with_every_axis(axis: str) -> None:
    meshes = [config.parallel.mesh for config in trained()]
    grids = [mesh for mesh in meshes if mesh.tp_row > 1]
    assert len(grids) >= 20
    assert any(getattr(mesh, axis) > 1 for mesh in grids)


@pytest.mark.parametrize("pair", RefusedPair, ids=lambda pair: pair.name)
def test_every_refused_pair_is_drawn(pair: RefusedPair) -> None:
    texts = [text for _, problems in many_draws() for text in problems]
    assert any(pair.reason in text for text in texts)


def refusals_of_one_feature(config: Config) -> set[str]:
    values = {name: value_of(config, setting) for name, setting in SETTINGS.items()}
    alone = {name: text for name, x in values.items() if (text := SETTINGS[name].problem(x))}
    found = set(alone.values())
    for rule in MODEL_RULES:
        if rule.find.__name__ in NOT_OF_TWO_FEATURES and not rule.reads & alone.keys():
            found |= set(rule.find(config, ALONE))
    return found


def test_no_combination_is_refused_without_a_row() -> None:
    reasons = [pair.reason for pair in RefusedPair]
    for case, texts in many_draws():
        for text in set(texts) - refusals_of_one_feature(case.config):
            assert any(reason in text for reason in reasons), (case, text)


def test_command_line_of_a_draw_gives_the_draw_again() -> None:
    for config in trained():
        assert parse_command_line(flags_of(config), ALONE) == config


def test_failing_draw_begins_with_what_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(_: fuzz.Case) -> None:
        raise RuntimeError("shape '[2, 3]' is invalid")

    monkeypatch.setattr(fuzz, "parity_of", crash)
    case = next(case for case, texts in many_draws() if not texts)
    with pytest.raises(AssertionError) as raised:
        run_draw(case)
    first, flags, *_, last = str(raised.value).splitlines()
    assert first == (
        f"python -m pytest parity_tests/test_composition.py --seed 0 --draw {case.index}"
    )
    assert parse_command_line(flags.split(), ALONE) == case.config
    assert last == "shape '[2, 3]' is invalid"
