"""Train a GPT on any tensor x pipeline x data mesh: torchrun scripts/train_gpt.py --mesh 8x4x16."""

import sys
from pathlib import Path

from dtensor_llm.config import Config
from dtensor_llm.data import Dataset
from dtensor_llm.launch import launch, prepare
from dtensor_llm.metrics import Reporter
from dtensor_llm.parity import Expectation, ParityCheck, expect, find_divergence
from dtensor_llm.parity.meshes import whole_batches
from dtensor_llm.parity.recording import Recording
from dtensor_llm.train import Trainer, TrainingError, Watcher, train
from dtensor_llm.worlds import World, processes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository, for reference/


def main() -> int:
    config, data = prepare(sys.argv[1:])
    return launch(config, lambda world: run_rank(config, data, world))


def run_rank(config: Config, data: Dataset, world: World) -> int:
    with Reporter(config, world, sys.stdout) as reporter:
        reporter.on_start(data)
        trainer = Trainer(config, world)
        first_and_last = (0, config.train.steps - 1)
        parity = ParityCheck(trainer, first_and_last) if config.run.check_parity else None
        watchers: list[Watcher] = [reporter] if parity is None else [parity, reporter]
        if config.run.record is not None:
            watchers.append(Recording(trainer, config.run.record, config.run.record_every))
        try:
            train(trainer, data, watchers)
        except TrainingError as error:  # on every rank alike
            reporter.line(f"stopped: {error}")
            return 1
        return 0 if parity is None else hold_to_reference(config, data, parity, reporter)


def hold_to_reference(
    config: Config, data: Dataset, parity: ParityCheck, reporter: Reporter
) -> int:
    """Print how far the run is from one device, and where it parts from it; the exit status."""
    # From the repository, and slow to import: for this alone.
    from reference.training import train as train_reference

    def expected() -> Expectation:
        steps, progress = (0, config.train.steps - 1), reporter.progress
        batches = whole_batches(config, data)
        return expect(config, batches, train_reference, steps=steps, on_progress=progress)

    world = parity.trainer.world
    report = parity.compare(world.share(expected))
    reporter.line(str(report))
    if report.passed:
        return 0
    reporter.line(str(find_divergence(config, world, data, train_reference, report.first)))
    return 1


if __name__ == "__main__":
    processes.end(main)
