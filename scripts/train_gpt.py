"""Train a GPT on any tensor x pipeline x data mesh: torchrun scripts/train_gpt.py --mesh 8x4x16."""

import sys
from pathlib import Path

from dtensor_llm.config import Config
from dtensor_llm.data import Dataset
from dtensor_llm.launch import launch, prepare
from dtensor_llm.metrics import Reporter
from dtensor_llm.parity import ParityCheck, Report, Run, reference_arguments
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
        parity = ParityCheck(trainer)
        try:
            train(
                trainer,
                data,
                on_gradients=parity.on_gradients if config.run.check_parity else None,
                on_step=reporter.on_step,
                on_evaluation=reporter.on_evaluation,
            )
        except TrainingError as error:  # on every rank alike
            reporter.line(f"stopped: {error}")
            return 1
        if not config.run.check_parity:
            return 0
        report = compare_with_reference(config, data, parity)
        reporter.line(str(report))
        return 0 if report.passed else 1


def compare_with_reference(config: Config, data: Dataset, parity: ParityCheck) -> Report:
    world = parity.trainer.world
    reference = world.share(lambda: reference_run(config, data))
    control = None
    if config.needs_control:
        control = world.share(lambda: reference_run(config, data, reverse=True))
    return parity.compare(reference, control)


def reference_run(config: Config, data: Dataset, *, reverse: bool = False) -> Run:
    """The same training on one device, by the code of the repository's folder reference/."""
    from reference.training import train as train_reference

    batches = [data.batch(step) for step in range(config.train.steps)]
    return train_reference(**reference_arguments(config, batches, reverse=reverse))


if __name__ == "__main__":
    processes.leave(main())
