"""Every planted bug is caught, and the report names the quantity and the tensor that it broke."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from parity_tests.covering import covering_cases
from parity_tests.faults import BY_NAME, FAULTS, KINDS, Fault
from parity_tests.faults.checks import numbered_dataset
from parity_tests.harness import ROOT, SECONDS, Script, small_config

STRATEGIES = [path.stem for path in (ROOT / "dtensor_llm" / "parallel").glob("[a-z]*.py")]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_caught(fault: Fault) -> None:
    with fault.plant():
        report = fault.check(fault.config)
    assert fault.row_that_names_it(report) is not None, f"{fault.name} was not seen:\n{report}"


def configurations() -> dict[str, tuple[str, dict[str, Any]]]:
    """{fault: its mesh, and its options and check}, of faults that have all there are."""
    found = {}
    for fault in FAULTS:
        options = dict(sorted(fault.options.items())) | {"check": fault.check.__name__}
        found[fault.mesh, repr(options)] = fault.name, (fault.mesh, options)
    return dict(found.values())


@pytest.mark.parametrize("name", covering_cases(configurations()))
def test_same_configuration_passes_without_the_fault(name: str) -> None:
    fault = BY_NAME[name]
    report = fault.check(fault.config)
    assert report.passed, report


def test_there_are_faults_of_every_kind_and_strategy() -> None:
    kinds = Counter(fault.kind for fault in FAULTS)
    assert kinds.keys() == set(KINDS)
    assert min(kinds.values()) >= 7
    assert len(FAULTS) >= 50
    assert set(STRATEGIES) <= {fault.strategy for fault in FAULTS}


def test_names_are_unique_and_descriptions_are_there() -> None:
    names = Counter(fault.name for fault in FAULTS)
    assert max(names.values()) == 1, names.most_common(1)
    for fault in FAULTS:
        for text in (fault.breaks, fault.symptom, fault.sabotaged):
            assert text.strip(), fault.name


def test_the_corpus_of_the_checks_ends_inside_a_batch() -> None:
    """Else a dropped or padded last batch could not be seen."""
    config = small_config()
    data, _ = numbered_dataset(config)
    for side in (data.training, data.validation):
        assert len(side) % config.train.global_batch_size


def test_the_page_on_planted_bugs_counts_them() -> None:
    text = (ROOT / "reference" / "README.md").read_text()
    assert f"plants {len(FAULTS)} bugs" in text
    assert f"catches {len(FAULTS)} of the {len(FAULTS)}" in text


# ---------------------------------------------------------------- scripts/plant_faults.py

FEW = ("tied_gradients_averaged", "gelu_of_the_other_kind", "epoch_order_repeated")


def lines_with(text: str, words: Sequence[str]) -> list[str]:
    return [line for line in text.splitlines() if any(word in line for word in words)]


def test_script_prints_the_gallery(script: Script) -> None:
    done = script("plant_faults.py", f"--only {' '.join(FEW)}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(lines_with(done.stdout, FEW)) == 3
    tied, gelu, order = (lines_with(done.stdout, [name])[0] for name in FEW)
    assert "gradient of token_embedding.weight" in tied
    assert "loss of step" in gelu
    assert "order of epochs of epochs 0 and 1" in order
    assert "3 of 3 caught" in done.stdout
    assert done.stderr == ""


def test_the_page_on_planted_bugs_shows_lines_of_the_gallery(script: Script) -> None:
    text = (ROOT / "reference" / "README.md").read_text()
    page = dict(re.findall(r"^\| `(\w+)`: [^|]+\| (.+) \|$", text, flags=re.MULTILINE))
    done = script("plant_faults.py", f"--only {' '.join(page)}")
    lines = [re.split(r"  +", line) for line in lines_with(done.stdout, [*page])]
    assert len(page) > 5
    assert {name: " | ".join(cells) for name, _, *cells in lines} == page


def test_script_fails_where_a_fault_is_not_caught(script: Script) -> None:
    done = script("plant_faults.py", f"--only {' '.join(FEW)} --disable {FEW[0]} --markdown")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "NOT CAUGHT" in lines_with(done.stdout, FEW[:1])[0]
    assert all("NOT CAUGHT" not in line for line in lines_with(done.stdout, FEW[1:]))
    assert "2 of 3 caught" in done.stdout
    assert lines_with(done.stdout, FEW)[0].startswith("| ")


@pytest.fixture
def new_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("new_memory_is_nan")
def test_gallery_depends_on_no_memory_as_it_comes(script: Script) -> None:
    """Where a fault of messages moves their padding into weights, two galleries would differ."""
    messages = [fault.name for fault in FAULTS if fault.plant.__module__.endswith(".rows")]
    done = script("plant_faults.py", f"--only {' '.join(messages)}")
    assert len(messages) > 5
    assert done.returncode == 0, done.stdout + done.stderr


def test_script_refuses_a_name_that_is_not_there() -> None:
    """In a process of its own, from a folder that is not the repository's."""
    names = ["--only", *FEW, "--disable", "tied_gradient_averaged"]
    command = [sys.executable, str(ROOT / "scripts" / "plant_faults.py"), *names]
    done = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2
    assert done.stdout == ""
    wanted = "no fault is called tied_gradient_averaged; did you mean tied_gradients_averaged?\n"
    assert done.stderr == wanted
