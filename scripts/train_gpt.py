"""Train a GPT on any tensor x pipeline x data mesh: torchrun scripts/train_gpt.py --mesh 8x4x16."""

import sys
from pathlib import Path

from dtensor_llm.config import Config
from dtensor_llm.data import Dataset
from dtensor_llm.launch import launch, prepare
from dtensor_llm.metrics import Reporter
from dtensor_llm.parity import Expectation, ParityCheck, expect
from dtensor_llm.train import Trainer, TrainingError, train
from dtensor_llm.worlds import World, processes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository, for reference/


def main() -> int:
    config, data = prepare(sys.argv[1:])
    return launch(config, lambda world: run_rank(config, data, world))


def run_rank(config: Config, data: Dataset, world: World) -> int:
    with Reporter(config, world, sys.stdout) as reporter:
        reporter.on_start(data)
        trainer = Trainer(config, world)
        last = config.train.steps - 1
        parity = ParityCheck(trainer, steps=(0, last)) if config.run.check_parity else None
        try:
            train(trainer, data, [parity, reporter] if parity else [reporter])
        except TrainingError as error:  # on every rank alike
            reporter.line(f"stopped: {error}")
            return 1
        if parity is None:
            return 0

        def expected() -> Expectation:
            from reference.training import train as train_reference

            batches = [data.batch(step) for step in range(config.train.steps)]
            return expect(
                config, batches, train_reference, steps=(0, last), on_progress=reporter.progress
            )

        report = parity.compare(world.share(expected))
        reporter.line(str(report))
        return 0 if report.passed else 1


if __name__ == "__main__":
    processes.leave(main())
