"""What a run tells: one line a step, a JSON line a step, and how long it will still take.

Only rank 0 reports; the numbers are those of the whole job, whatever the mesh.
"""

import contextlib
import dataclasses
import json
import resource
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import torch

from dtensor_llm.config import Config
from dtensor_llm.data import Dataset
from dtensor_llm.stages import layers_of_stages
from dtensor_llm.train import StepResult, Watcher
from dtensor_llm.worlds import World, processes

GIB = 2**30


def peak_memory(device: torch.device) -> int:
    """Bytes: of this process on CPU (all ranks of a threads world), of this rank's GPU on CUDA."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Reporter(Watcher):
    """Prints and records; to be used as a context manager. On other ranks it does nothing."""

    def __init__(self, config: Config, world: World, out: TextIO) -> None:
        self.config, self.world, self.out = config, world, out
        self.speaks = world.rank == 0
        self.live = self.speaks and out.isatty()
        self.metrics: TextIO | None = None
        self.last = time.perf_counter()
        self.step_seconds: list[float] = []

    def __enter__(self) -> Self:
        path = self.config.run.metrics
        if self.speaks and path is not None:
            self.metrics = Path(path).open("w", encoding="utf-8")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.metrics is not None:
            with contextlib.suppress(OSError):  # told already, when a line was written
                self.metrics.close()

    def line(self, text: str) -> None:
        """Print on rank 0, above the progress display if there is one."""
        if self.speaks:
            self._write(self.out, f"\r\x1b[K{text}\n" if self.live else f"{text}\n")

    def progress(self, text: str) -> None:
        """Say what is being done, on a terminal only; the next line replaces it."""
        if self.live:
            self._write(self.out, f"\r\x1b[K{text}")

    def on_start(self, data: Dataset) -> None:
        """Say what is about to run, and how the batch is cut."""
        config, world = self.config, self.world
        mesh = config.parallel.mesh
        axes = {axis: size for axis, size in dataclasses.asdict(mesh).items() if size > 1}
        cut = " x ".join(f"{axis} {size}" for axis, size in axes.items()) or "one rank"
        if world.kind == "threads":
            self.line(
                f"one process was started for {world.size} ranks: they run as threads of it, with "
                "real numbers; a cluster runs the same with "
                f"torchrun --nnodes NODES --nproc-per-node {world.size}/NODES "
                f"scripts/train_gpt.py --mesh {mesh}"
            )
        rows = f" x {mesh.tp_row} rows of tensor-parallel ranks" * (mesh.tp_row > 1)
        counts = ",".join(str(len(layers)) for layers in layers_of_stages(config))
        schedule = config.parallel.schedule_csv or config.parallel.schedule
        stages = f", stages of {counts} blocks by {schedule}" * (mesh.pp > 1)
        self.line(
            f"mesh {mesh} ({cut}) on {world.device.type}, {world.kind}; "
            f"{config.model.num_parameters:,} parameters{stages}, {config.train.dtype}\n"
            f"{config.train.global_batch_size} sequences of {config.model.seq_len} tokens a step: "
            f"{config.dp} data-parallel ranks{rows} x {config.microbatches} microbatches x "
            f"{config.micro_batch_size}; {len(data.training):,} training and "
            f"{len(data.validation):,} validation sequences"
        )
        self.last = time.perf_counter()

    def on_step(self, result: StepResult) -> None:
        seconds = self._lap()
        self.step_seconds.append(seconds)
        rate = result.num_tokens / seconds
        memory = peak_memory(self.world.device)
        self.line(
            f"step {result.step + 1:>5}  loss {result.loss:#.10g}  "
            f"grad norm {result.gradient_norm:#.10g}  lr {result.learning_rate:.3e}  "
            f"tokens/s {rate:>7,.0f}  time {seconds:.3f} s  memory {memory / GIB:.2f} GiB"
        )
        self._record(
            kind="step",
            step=result.step + 1,
            loss=result.loss,
            gradient_norm=result.gradient_norm,
            learning_rate=result.learning_rate,
            num_tokens=result.num_tokens,
            tokens_per_second=rate,
            seconds=seconds,
            peak_memory_bytes=memory,
        )
        self._show_progress(result.step + 1)

    def on_evaluation(self, steps_done: int, loss: float, num_tokens: int) -> None:
        seconds = self._lap()
        self.line(
            f"eval after {steps_done} steps  validation loss {loss:#.10g}  "
            f"({num_tokens:,} tokens, {seconds:.3f} s)"
        )
        self._record(
            kind="evaluation",
            step=steps_done,
            loss=loss,
            num_tokens=num_tokens,
            seconds=seconds,
        )

    def _lap(self) -> float:
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        return seconds

    def _record(self, **values: Any) -> None:
        if self.metrics is not None:
            self._write(self.metrics, json.dumps(values) + "\n")

    def _show_progress(self, steps_done: int) -> None:
        total = self.config.train.steps
        if not self.live or steps_done == total:
            return
        recent = sorted(self.step_seconds[-20:])
        left = recent[len(recent) // 2] * (total - steps_done)
        filled = 30 * steps_done // total
        bar = "#" * filled + "-" * (30 - filled)
        self._write(
            self.out, f"[{bar}] {steps_done}/{total}, {left // 60:.0f}:{left % 60:02.0f} left"
        )

    def _write(self, file: TextIO, text: str) -> None:
        """Write at once; a full disk or a reader who has left ends the run, in one line."""
        try:
            file.write(text)
            file.flush()
        except OSError as error:
            name = "standard output" if file is self.out else f"--metrics {self.config.run.metrics}"
            print(f"stopped: {name}: {error.strerror}", file=sys.stderr)
            processes.leave(1)
