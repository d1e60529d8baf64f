"""A trainer is recorded: whole tensors of any mesh, the same by threads and by processes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dtensor_llm.data import IGNORED_LABEL, Batch
from dtensor_llm.parity.compare import compare_records
from dtensor_llm.parity.record import Record
from dtensor_llm.parity.recording import Recording
from dtensor_llm.train import Trainer, watched_step
from dtensor_llm.worlds import World, processes, threads
from parity_tests.harness import LLAMA, SECONDS, batches_for, reference_for, small_config


def record_in(world: World, folder: str, mesh: str, every: int, options: dict[str, Any]) -> None:
    """One rank's part of recording a training."""
    config = small_config(mesh, **options)
    trainer, batches = Trainer(config, world), batches_for(config)
    recording = Recording(trainer, folder, every)
    for number in range(config.train.steps):
        watched_step(trainer, number, batches.batch(number, trainer.samples), [recording])


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("1x1x1", {}),
        ("2x2x2", {"dropout": 0.1}),
        ("2x1x2", LLAMA | {"optimizer": "sgd", "zero": 0}),
        ("4x1x2", {"kv_heads": 2, "width": 24}),
        ("tp=2,dp_replicate=2,dp_shard=2", {"vocab_size": 61}),
        ("2x1x2", {"vocab_size": 61, "zero": 1}),
        ("pp=2,dp_replicate=2,dp_shard=2", LLAMA | {"zero": 2, "micro_batch_size": 1}),
        ("tp=2x2,dp=2", {"vocab_size": 61}),
        ("1x1x8", {"optimizer": "sgd", "momentum": 0.0, "width": 8, "ffn_width": 5}),
    ],
)
def test_record_of_a_mesh_equals_the_reference(
    tmp_path: Path, mesh: str, options: dict[str, Any]
) -> None:
    """Whole tensors, from parts that no two ranks count; every quantity of every step."""
    config = small_config(mesh, **options)
    folder = str(tmp_path / "run")
    size = config.parallel.mesh.num_ranks
    threads.run(size, lambda world: record_in(world, folder, mesh, 1, options), timeout=SECONDS)
    record, reference = Record(folder), reference_for(config)
    assert list(record.tensors_at) == [0, 1]
    for number, made in reference.tensors_at.items():
        own = record.tensors_at[number]
        assert own.keys() == made.keys() == record.norms_at[number].keys()
        for quantity, whole in made.items():
            assert own[quantity].keys() == whole.keys()
            for name, x in whole.items():
                torch.testing.assert_close(own[quantity][name], x, rtol=1e-9, atol=1e-12, msg=name)
                norm = record.norms_at[number][quantity][name]
                assert norm == pytest.approx(x.norm().item(), rel=1e-9, abs=1e-12)
    assert record.losses == pytest.approx(reference.losses, rel=1e-12)
    assert record.gradient_norms == pytest.approx(reference.gradient_norms, rel=1e-12)
    rates = [line["learning_rate"] for line in record.steps]
    assert rates == pytest.approx(reference.learning_rates, rel=1e-15)
    assert [line["num_tokens"] for line in record.steps] == reference.tokens


def record_two_ranks(world: World, folder: str) -> None:
    record_in(world, folder, "2x1x1", 2, {"steps": 3})


def test_record_of_processes_equals_that_of_threads(tmp_path: Path) -> None:
    first, second = str(tmp_path / "threads"), str(tmp_path / "processes")
    threads.run(2, lambda world: record_two_ranks(world, first), timeout=SECONDS)
    processes.spawn(2, Spawned(second), timeout=SECONDS)
    assert list(Record(first).tensors_at) == [0, 1, 2], "the first, the second and the last"
    assert compare_records(Record(first), Record(second)).passed


class Spawned:
    """What each process does; it is pickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, world: World) -> None:
        record_two_ranks(world, self.folder)


def test_tensors_of_every_nth_step_and_of_the_last(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    options = {"steps": 6}
    threads.run(1, lambda world: record_in(world, folder, "1x1x1", 4, options), timeout=SECONDS)
    record = Record(folder)
    assert list(record.tensors_at) == [0, 3, 5]
    assert list(record.norms_at) == list(range(6))


def test_optimizer_has_no_state_until_it_has_stepped(tmp_path: Path) -> None:
    """The first step has no valid token."""
    config, folder = small_config(), str(tmp_path / "run")

    def main(world: World) -> None:
        trainer, batches = Trainer(config, world), batches_for(config)
        recording = Recording(trainer, folder, 1)
        for number in range(config.train.steps):
            batch = batches.batch(number)
            if number == 0:
                nothing = torch.full_like(batch.labels, IGNORED_LABEL)
                batch = Batch(batch.tokens, nothing, batch.sample_ids)
            watched_step(trainer, number, batch, [recording])

    threads.run(1, main, timeout=SECONDS)
    first, second = Record(folder).tensors_at.values()
    assert set(first) == {"gradient", "weight"}
    assert set(second) == {"gradient", "weight", "exp_avg", "exp_avg_sq"}
