"""Measure how far meshes are from one device, in each dtype: the tables that README.md shows.

python scripts/parity_table.py            print them
python scripts/parity_table.py --write    put them into README.md, between its two markers

Errors are those of dtensor_llm/parity/difference.py against the float64 reference. In lower
precision, what one device of that dtype is off by stands beside them.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from tabulate import tabulate

from dtensor_llm.config import Config
from dtensor_llm.data import Dataset
from dtensor_llm.launch import read
from dtensor_llm.parity.check import ParityCheck
from dtensor_llm.parity.expect import reference_arguments
from dtensor_llm.parity.meshes import whole_batches
from dtensor_llm.parity.run import Run
from dtensor_llm.parity.verdict import Comparison, compare_runs
from dtensor_llm.train import Trainer, train
from dtensor_llm.worlds import World, processes, threads

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the repository, for reference/

from reference.training import train as train_reference  # noqa: E402 - needs the line above

MODEL = ["--layers=8", "--heads=8", "--seq-len=16", "--global-batch-size=16", "--lr=1e-3"]
MESHES = ("2x1x1", "8x1x1", "1x2x1", "1x8x1", "1x1x2", "1x1x8", "2x2x2")
GROWN_ON = "2x2x2"
DTYPES = ("float64", "float32", "bfloat16")
STEPS, GROWTH = 3, (1, 2, 5, 10, 20, 50)
BEGIN, END = "<!-- parity_table.py: begin -->", "<!-- parity_table.py: end -->"
SECONDS = 600.0  # without any communication, before a world of threads counts as hung


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    asked = parser.parse_args()
    text = f"{by_mesh()}\n\n{by_step()}"
    print(text)
    if asked.write:
        path = ROOT / "README.md"
        before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")
    return 0


def by_mesh() -> str:
    """A row for each mesh: errors of the first gradients and of the weights after three steps."""
    columns: dict[str, list[str]] = {"mesh": ["one device", *MESHES]}
    for dtype in DTYPES:
        config, data = configured("1x1x1", dtype, STEPS)
        reference = on_one_device(config, data, "float64")
        found = [compare_runs(on_one_device(config, data, dtype), reference)]
        if dtype == "float64":
            found = [compare_runs(in_reverse(config, data), reference)]
        for mesh in MESHES:
            progress(f"{dtype}, {mesh}")
            found.append(on_mesh(*configured(mesh, dtype, STEPS), reference))
        for quantity, step in (("gradient", 0), ("weight", STEPS - 1)):
            errors = [one.row(quantity, step, 0.0).error for one in found]
            columns[f"{dtype} {quantity}"] = [f"{error:.1e}" for error in errors]
    return markdown(columns)


def by_step() -> str:
    """A row for each step: errors of loss and weights on one mesh and on one device."""
    columns: dict[str, list[str]] = {"step": [str(step) for step in GROWTH]}
    for dtype in DTYPES:
        config, data = configured(GROWN_ON, dtype, GROWTH[-1])
        progress(f"{dtype}, {GROWTH[-1]} steps")
        reference = on_one_device(config, data, "float64")
        one = compare_runs(
            in_reverse(config, data) if dtype == "float64" else on_one_device(config, data, dtype),
            reference,
        )
        for name, found in (("one device", one), (GROWN_ON, on_mesh(config, data, reference))):
            errors = [found.row("weight", step - 1, 0.0).error for step in GROWTH]
            columns[f"{dtype} {name}"] = [f"{error:.1e}" for error in errors]
    return markdown(columns)


def configured(mesh: str, dtype: str, steps: int) -> tuple[Config, Dataset]:
    flags = ["--mesh", mesh, "--dtype", dtype, "--steps", str(steps), "--world", "threads"]
    flags += ["--eval-every", "0"]
    return read([*MODEL, *flags])


def on_one_device(config: Config, data: Dataset, dtype: str) -> Run:
    return train_reference(**reference_arguments(config, whole_batches(config, data), dtype=dtype))


def in_reverse(config: Config, data: Dataset) -> Run:
    """In float64 a second run of one device differs only if it adds up in another order."""
    batches = whole_batches(config, data)
    return train_reference(**reference_arguments(config, batches, reverse=True))


def on_mesh(config: Config, data: Dataset, reference: Run) -> Comparison:
    main = partial(measure, config, data, reference)
    return threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS)[0]


def measure(config: Config, data: Dataset, reference: Run, world: World) -> Comparison:
    check = ParityCheck(Trainer(config, world))
    train(check.trainer, data, [check])
    return check.measure(reference)


def markdown(columns: Mapping[str, Sequence[str]]) -> str:
    return tabulate(columns, headers="keys", tablefmt="github", disable_numparse=True)


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    processes.end(main)
