"""Trains a small configuration on a mesh and compares it with the reference: what most tests do."""

import dataclasses
import importlib
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from dtensor_llm.config import Config, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from dtensor_llm.data import IGNORED_LABEL, Batch
from dtensor_llm.mesh import parse_mesh
from dtensor_llm.parity import Expectation, ParityCheck, Report, Run, reference_arguments
from dtensor_llm.train import Trainer, watched_step
from dtensor_llm.worlds import World, processes, threads
from parity_tests.warm_python import warm_python
from reference.model import Dropout, Model, ModelOptions, initial_weights
from reference.training import Gradients, gradient_norm, options_from
from reference.training import Run as ReferenceRun
from reference.training import train as train_reference

LLAMA: dict[str, Any] = {
    "norm": "rmsnorm",
    "positions": "rope",
    "mlp": "swiglu",
    "bias": False,
    "tied_embeddings": False,
    "kv_heads": 4,
}
ROOT = Path(__file__).resolve().parents[1]
SECONDS = 120.0  # without any communication, before a world counts as hung


def small_config(mesh: str = "1x1x1", **values: Any) -> Config:
    """A model of seconds: 2 layers, 8 heads of 4, 8 tokens, 8 sequences, 2 steps, float64.

    `values` go to whichever section of the configuration has a field of that name.
    """
    defaults: dict[str, Any] = {
        "vocab_size": 61,
        "width": 32,
        "heads": 8,
        "layers": 2,
        "seq_len": 8,
        "global_batch_size": 8,
        "steps": 2,  # the second with weights and moments that the first has changed
        "lr": 1e-3,
        "warmup_steps": 1,
        "dtype": "float64",
        "init_std": 0.05,  # so large that every part of the model matters
        "clip_grad": 0.5,  # so small that it clips
        "mesh": parse_mesh(mesh, None),
    }
    values = defaults | values
    sections = {}
    for name, cls in [
        ("model", ModelConfig),
        ("train", TrainConfig),
        ("parallel", ParallelConfig),
        ("run", RunConfig),
    ]:
        own = {f.name: values.pop(f.name) for f in dataclasses.fields(cls) if f.name in values}
        sections[name] = cls(**own)
    assert not values, f"no section has {sorted(values)}"
    return Config(**sections)


@dataclass(frozen=True)
class RandomBatches:
    """Random tokens; of the labels, `mask` says which are ignored.

    none: all count. even: the same share in every sequence. uneven: from nothing to everything,
    the first sequences nearly empty, so that counts differ between ranks and microbatches.
    """

    vocab_size: int
    seq_len: int
    global_batch_size: int
    mask: str = "uneven"

    def batch(self, step: int, samples: slice | None = None) -> Batch:
        generator = torch.Generator().manual_seed(1000 + step)
        shape = (self.global_batch_size, self.seq_len)
        tokens = torch.randint(self.vocab_size, shape, generator=generator)
        labels = torch.randint(self.vocab_size, shape, generator=generator)
        share = {
            "none": torch.zeros(shape[0]),
            "even": torch.full(shape[:1], 0.25),
            "uneven": torch.linspace(1.0, 0.0, shape[0]).sqrt(),
        }[self.mask]
        ignored = torch.rand(shape, generator=generator) < share[:, None]
        whole = Batch(tokens, labels.masked_fill(ignored, IGNORED_LABEL), torch.arange(shape[0]))
        part = samples or slice(None)
        return Batch(whole.tokens[part], whole.labels[part], whole.sample_ids[part])


def batches_for(config: Config, mask: str = "uneven") -> RandomBatches:
    model = config.model
    size = config.train.global_batch_size
    return RandomBatches(model.vocab_size, model.seq_len, size, mask)


@lru_cache(maxsize=100)  # a run takes some MB
def _reference(model: ModelConfig, train: TrainConfig, mask: str) -> ReferenceRun:
    config = Config(model=model, train=train)
    batches = batches_for(config, mask)
    steps = [batches.batch(step) for step in range(train.steps)]
    return train_reference(**reference_arguments(config, steps))


def reference_for(config: Config, mask: str = "uneven") -> ReferenceRun:
    """The oracle's run of the same training; the mesh does not enter it."""
    one_device = dataclasses.replace(config.train, micro_batch_size=None)
    return _reference(config.model, one_device, mask)


def train_and_compare(
    config: Config, reference: Run, batches: RandomBatches, world: World
) -> Report:
    """One rank's part of a parity check."""
    trainer = Trainer(config, world)
    check = ParityCheck(trainer)
    for step in range(config.train.steps):
        batch = batches.batch(step, trainer.samples)
        watched_step(trainer, step, batch, [check])
    return check.compare(Expectation(reference))


def parity(config: Config, mask: str = "uneven") -> Report:
    """The report of training `config` in the threads world against the oracle."""
    return parity_with(config, reference_for(config, mask), mask)


Strategy = Callable[[Model, torch.Tensor, torch.Tensor, Dropout], tuple[float, Gradients]]


def strategy_parity(config: Config, strategy: Strategy) -> Report:
    """The report of one step of `config` against the reference of one strategy.

    `strategy` is its loss_and_gradients with the sizes filled in.
    """
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=1))
    options = options_from(ModelOptions, dataclasses.asdict(config.model))
    seed = config.train.seed
    model = Model(options, initial_weights(options, seed, torch.float64))
    batch = batches_for(config).batch(0)
    loss, gradients = strategy(model, batch.tokens, batch.labels, Dropout(seed, step=0))
    run = ReferenceRun({}, losses=[loss], gradient_norms=[gradient_norm(gradients)])
    run.tensors_at[0] = {"gradient": gradients}
    return parity_with(config, run)


def parity_with(config: Config, reference: Run, mask: str = "uneven") -> Report:
    """The report of training `config` in the threads world against any recorded run."""
    batches = batches_for(config, mask)

    def main(world: World) -> Report:
        return train_and_compare(config, reference, batches, world)

    return threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS)[0]


def torchrun(num_processes: int, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a script, or -m and a module, under torchrun; no process imports torch anew."""
    python, *launcher = processes.torchrun(num_processes)
    assert python == sys.executable
    warm = warm_python()
    return run_script(warm, *launcher, *command, environment={"PYTHON_EXEC": warm})


@dataclass(frozen=True)
class Finished:
    """What a run of a script left."""

    returncode: int | str | None
    stdout: str
    stderr: str


Script = Callable[[str, str], Finished]
"""The fixture `script` of conftest.py: (name in scripts/, its command line) -> what it left."""


def run_imported(
    name: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Finished:
    """Run a script in this process, as a module: worlds that it spawns find its functions there."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *shlex.split(line)])
    return Finished(importlib.import_module(name).main(), *capsys.readouterr())


def run_script(
    *command: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository's root, `environment` being added to that of the tests."""
    return subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS * 2,
        env={**os.environ, **(environment or {})},
    )
