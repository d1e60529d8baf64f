"""Plants every bug of parity_tests/faults, one after another, and shows how each is caught.

    python scripts/plant_faults.py [--only NAME...] [--disable NAME...] [--markdown]

For each fault the same 6 steps are trained with it and without it, on the mesh where it matters,
with real text: the table says by how much the loss after 6 steps and the gradient norm differ, and
which quantity and tensor the parity check named. Exit code: 0 if every fault is caught, 1 if not,
2 for a name that is not there.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tabulate import tabulate

from dtensor_llm.config import Config
from dtensor_llm.data import Dataset
from dtensor_llm.data.documents import Document, Example
from dtensor_llm.train import StepResult, Trainer
from dtensor_llm.worlds import World, WorldError, processes, threads

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for parity_tests/ and reference/

if TYPE_CHECKING:
    from parity_tests.faults import Fault

STEPS = 6
SECONDS = 120.0  # without any communication, before a run counts as hung
SMALL = 1e-3  # a change of the loss that nobody would notice
HEADERS = ("fault", "kind", "change of the loss", "change of the gradient norm", "caught by")


@dataclass(frozen=True)
class Training:
    """What 6 steps show to a user who watches them."""

    loss: float
    gradient_norms: list[float]
    validation_loss: float


@dataclass(frozen=True)
class Line:
    """One line of the table; changes are relative, `caught_by` is empty for what is not caught."""

    fault: "Fault"
    loss: float
    gradient_norm: float
    caught_by: str

    def cells(self) -> tuple[str, ...]:
        changes = percent(self.loss), percent(self.gradient_norm)
        return (self.fault.name, self.fault.kind, *changes, self.caught_by or "NOT CAUGHT")


def main() -> int:
    from parity_tests.faults import FAULTS

    torch.set_num_threads(1)  # the ranks are threads themselves
    arguments = parse(sys.argv[1:], [fault.name for fault in FAULTS])
    chosen = [fault for fault in FAULTS if not arguments.only or fault.name in arguments.only]
    lines = list(plant_all(chosen, arguments.disable))
    table = tabulate(
        [line.cells() for line in lines],
        headers=HEADERS,
        tablefmt="github" if arguments.markdown else "simple",
        disable_numparse=True,
    )
    caught = sum(bool(line.caught_by) for line in lines)
    small = sum(line.loss < SMALL for line in lines)
    print(table)
    print(
        f"\n{caught} of {len(lines)} caught; {small} of {len(lines)} change the loss after {STEPS} "
        f"steps by less than {percent(SMALL)}"
    )
    return 0 if caught == len(lines) else 1


def parse(argv: Sequence[str], names: Sequence[str]) -> argparse.Namespace:
    """Leaves with exit code 2 and one message for a name that is not there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="plant these alone")
    parser.add_argument(
        "--disable",
        nargs="+",
        metavar="NAME",
        default=[],
        help="switch the parity check off for these, which are then not caught",
    )
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    arguments = parser.parse_args(argv)
    for name in (*arguments.only, *arguments.disable):
        if name not in names:
            close = get_close_matches(name, names, n=1)
            hint = f"; did you mean {close[0]}?" if close else f": {', '.join(names)} are"
            parser.exit(2, f"no fault is called {name}{hint}\n")
    return arguments


def plant_all(faults: Sequence["Fault"], disabled: Sequence[str]) -> Iterable[Line]:
    """The lines of the table, in order; the run without a fault is shared by a configuration."""
    clean: dict[str, Training] = {}
    for number, fault in enumerate(faults, start=1):
        progress(f"{number} of {len(faults)}: {fault.name}")
        config = watched(fault.config)
        key = repr(config)
        if key not in clean:
            clean[key] = train_on_text(config)
        with fault.plant():
            broken = train_on_text(config)
            caught_by = "" if fault.name in disabled else verdict(fault)
        changes = changes_of(fault, clean[key], broken)
        yield Line(fault, *changes, caught_by)
    progress("")


def progress(text: str) -> None:
    """On one line of the terminal, if there is one."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def verdict(fault: "Fault") -> str:
    """What the check names; empty where it sees nothing, or something else."""
    try:
        row = fault.row_that_names_it(fault.check(fault.config))
    except WorldError:  # a crash is not a report
        return ""
    return f"{row.quantity} of {row.worst}" if row else ""


def changes_of(fault: "Fault", clean: Training, broken: Training) -> tuple[float, float]:
    """(of the loss after 6 steps, largest one of the gradient norm), relative.

    The loss is the training loss, or the validation loss for a fault of the evaluation.
    """
    norm = max(map(relative, clean.gradient_norms, broken.gradient_norms))
    if fault.quantity.startswith("evaluation"):
        return relative(clean.validation_loss, broken.validation_loss), norm
    return relative(clean.loss, broken.loss), norm


def relative(before: float, after: float) -> float:
    return abs(after - before) / abs(before)


def percent(share: float) -> str:
    """`12.3 %`, `0.042 %`; rounding (up to 1e-9) counts as none."""
    if share < 1e-9:
        return "none"
    if share < 1e-6:
        return "< 0.0001 %"
    return f"{share:.1%}".replace("%", " %") if share >= 0.01 else f"{100 * share:.2g} %"


def watched(config: Config) -> Config:
    """The fault's configuration with the settings of a real, short run of byte-level text.

    A vocabulary of an even size stays even: a fault may depend on it that all ranks have as much.
    """
    vocab_size = 127 if config.model.vocab_size % 2 else 128
    model = dataclasses.replace(config.model, vocab_size=vocab_size, seq_len=32, init_std=0.02)
    training = dataclasses.replace(config.train, steps=STEPS, lr=3e-3, clip_grad=1.0)
    return dataclasses.replace(config, model=model, train=training)


def train_on_text(config: Config) -> Training:
    """Train on the mesh of `config`, on documents and on prompts with answers of many lengths.

    The corpus is so small that its second epoch begins within the 6 steps.
    """
    from parity_tests.faults.checks import open_dataset

    text = (ROOT / "LICENSE").read_bytes().replace(b"  ", b"")
    document = Document("LICENSE", text[:1450], torch.uint8, config.model.vocab_size)
    pieces = [text[start : start + 33] for start in range(1450, 2050, 50)]
    examples = [Example(piece[: 2 * i + 4], piece[2 * i + 4 :]) for i, piece in enumerate(pieces)]
    data = open_dataset(config, [document], examples)

    def run_rank(world: World) -> Training:
        trainer = Trainer(config, world)
        steps = [train_step(trainer, data, step) for step in range(STEPS)]
        batches = data.evaluation_batches(config.train.global_batch_size, trainer.samples)
        validation_loss, _ = trainer.evaluate(batches)
        return Training(steps[-1].loss, [step.gradient_norm for step in steps], validation_loss)

    return threads.run(config.parallel.mesh.num_ranks, run_rank, timeout=SECONDS)[0]


def train_step(trainer: Trainer, data: Dataset, step: int) -> StepResult:
    batch = data.batch(step, trainer.samples)
    return trainer.step(step, batch.tokens, batch.labels)


if __name__ == "__main__":
    processes.end(main)
