"""Every mesh with every pair of options, against one device.

The options of a run are drawn as a covering array: each pair of values of two options meets
in some run, and each factoring of 1, 2, 4 and 8 ranks is a mesh of one run at least. `-m full`
runs the whole product instead.
"""

from itertools import combinations, product
from typing import Any

import pytest

from dtensor_llm.checks import Surroundings, problems
from dtensor_llm.config import Config
from dtensor_llm.mesh import parse_mesh
from parity_tests.harness import LLAMA, parity, small_config, torchrun

MESHES = [
    f"{tp}x{pp}x{ranks // (tp * pp)}"
    for ranks in (1, 2, 4, 8)
    for tp in (1, 2, 4, 8)
    for pp in (1, 2, 4, 8)
    if ranks % (tp * pp) == 0
]
OPTIONS: dict[str, tuple[Any, ...]] = {
    "mesh": tuple(MESHES),
    "family": ("gpt2", "llama"),
    "dropout": (0.0, 0.1),
    "mask": ("even", "uneven"),
    "microbatches": (1, 4),
    "tied": (True, False),
    "vocab_size": (256, 257),
    "sequence_parallel": (True, False),
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


def pairs(case: Case) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    order = {name: index for index, name in enumerate(OPTIONS)}
    items = sorted(case.items(), key=lambda item: order[item[0]])
    return set(combinations(items, 2))


def configuration(case: Case) -> Config:
    """8 layers, 8 heads, 32 sequences; GPipe where 1F1B has too few microbatches."""
    sizes = parse_mesh(case["mesh"], None)
    family = LLAMA | {"kv_heads": 8} if case["family"] == "llama" else {}
    own = {
        "layers": 8,
        "dropout": case["dropout"],
        "tied_embeddings": case["tied"],
        "vocab_size": case["vocab_size"],
        "sequence_parallel": case["sequence_parallel"],
        "global_batch_size": 32,
        "micro_batch_size": 32 // sizes.dp // case["microbatches"],
        "schedule": "gpipe" if case["microbatches"] < sizes.pp else "1f1b",
    }
    return small_config(case["mesh"], **family | own)


def name_of(case: Case) -> str:
    return "-".join(
        str(value) if isinstance(value, str) else f"{option}={value}"
        for option, value in case.items()
    )


CASES = covering_array(OPTIONS)
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
    assert len(MESHES) == 1 + 3 + 6 + 10


def test_cases_are_legal() -> None:
    for case in CASES:
        assert problems(configuration(case), Surroundings()) == []


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_case_equals_one_device(case: Case) -> None:
    report = parity(configuration(case), case["mask"])
    assert report.passed, report


@pytest.mark.parametrize("index", PROCESS_CASES, ids=lambda index: name_of(CASES[index]))
def test_case_equals_one_device_under_torchrun(index: int) -> None:
    config = configuration(CASES[index])
    num_ranks = config.parallel.mesh.num_ranks
    done = torchrun(num_ranks, "-m", "parity_tests.torchrun_case", str(index))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal" in done.stdout


@pytest.mark.full
@pytest.mark.parametrize(
    "values", list(product(*OPTIONS.values())), ids=lambda values: "-".join(map(str, values))
)
def test_whole_product(values: tuple[Any, ...]) -> None:
    case = dict(zip(OPTIONS, values, strict=True))
    report = parity(configuration(case), case["mask"])
    assert report.passed, report
