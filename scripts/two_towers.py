"""Cuts a model of two kinds of layers into pipeline stages by the clock: scripts/two_towers.py.

A vision encoder reads images in many patches, a smaller text decoder then writes what they show.
The stages that hold the encoder are of another kind and cost than the others, and equal numbers of
layers are far from equal work. The script measures each layer forward and backward, cuts the row of
layers so that the slowest stage is as fast as can be, says by simulation of 1F1B what that gains
over equal numbers, and runs both, step by step in turn, on processes with a thread each. Last, the
gradients of both cuts are held to those of one device, in float64. Exit status 1 where they differ,
or where gain and forecast differ by more than the bound.

Two stages that compute need two cores, and gain nothing while others have them: how much of a core
the ranks had while they were measured is printed. With --sleep the stages of the timed pipelines
sleep as long as their layers were measured to take, which shows the cut on any machine.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from towers.model import (
    DECODER_LAYERS,
    ENCODER_LAYERS,
    MICRO_BATCH,
    Batch,
    build_layers,
    loss,
    make_batch,
)

from dtensor_llm.planner.schedule import simulate
from dtensor_llm.planner.stage_times import LayerTime, time_layers, time_transfer, times_of_stages
from dtensor_llm.schedules.torch_orders import make_schedule
from dtensor_llm.stages import balance
from dtensor_llm.worlds import World, processes
from dtensor_llm.worlds.processes_spawn import spawn

PARITY = 1e-12
LEAST_SHARE = 0.9  # of a core, for stages that compute

Cut = tuple[range, ...]


class Stage(nn.Module):
    """Some of the layers, under their numbers in the row."""

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): layer for number, layer in layers.items()})

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x, text)
        return x


class SleepingLayer(nn.Module):
    """Takes and gives what a layer does, and its time, but no core."""

    def __init__(self, seconds: LayerTime, given: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seconds, self.shape = seconds, given.shape

    def forward(self, x: Tensor, text: Tensor) -> Tensor:  # noqa: ARG002 - called alike
        return Sleep.apply(x, self.weight, self.shape, self.seconds)


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shape: torch.Size, seconds: LayerTime) -> Any:
        ctx.shape, ctx.seconds = x.shape, seconds.backward
        time.sleep(seconds.forward)
        return weight.expand(shape).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradients[0].new_zeros(ctx.shape), gradients[0].new_zeros(1), None, None


class Pipeline:
    """One rank's part of a cut: its stage, and torch's 1F1B over all of them.

    `given` is what each layer takes and the last one gives, as by `shapes_between`.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        given: Sequence[Tensor],
        cut: Cut,
        world: World,
        batch: Batch,
    ) -> None:
        self.world, self.batch = world, batch
        own = cut[world.rank]
        stage = PipelineStage(
            Stage({number: layers[number] for number in own}),
            world.rank,
            world.size,
            world.device,
            input_args=given[own.start].detach().requires_grad_(world.rank > 0),
            output_args=given[own.stop].detach().requires_grad_(),
        )
        microbatches = batch.text.shape[0] // MICRO_BATCH
        loss_function = partial(loss, batch.text.numel())
        self.schedule = Schedule1F1B(stage, microbatches, loss_function, scale_grads=False)

    def step(self) -> None:
        """Add the batch's gradients to those that are there."""
        images = (self.batch.images,) if self.world.rank == 0 else ()
        labels = self.batch.labels if self.world.rank == self.world.size - 1 else None
        self.schedule.step(*images, target=labels, text=self.batch.text)

    def seconds(self) -> float:
        """Of one step, from when all ranks are ready until all are done."""
        dist.barrier()
        start = time.perf_counter()
        self.step()
        dist.barrier()
        return time.perf_counter() - start


def shapes_between(layers: Sequence[nn.Module], batch: Batch) -> list[Tensor]:
    """On the meta device: what each layer takes of one microbatch, and what the last one gives."""
    x, text = batch.images[:MICRO_BATCH].to("meta"), batch.text[:MICRO_BATCH].to("meta")
    given = [x]
    with torch.no_grad():
        for layer in layers:
            given.append(copy.deepcopy(layer).to("meta")(given[-1], text))
    return given


def gradients(layers: Mapping[int, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{number}.{name}": weight.grad
        for number, layer in layers.items()
        for name, weight in layer.named_parameters()
        if weight.grad is not None
    }


def largest_error(cuts: Sequence[Cut], microbatches: int, world: World) -> float:
    """Of any gradient by any of the cuts against one device's whole batch, over its largest entry.

    Every rank gets the largest of all ranks.
    """
    batch = make_batch(microbatches * MICRO_BATCH, torch.float64)
    whole = build_layers(torch.float64)
    logits = Stage(dict(enumerate(whole)))(batch.images, batch.text)
    loss(batch.text.numel(), logits, batch.labels).backward()
    expected = gradients(dict(enumerate(whole)))
    largest = torch.zeros((), dtype=torch.float64)
    for cut in cuts:
        layers = build_layers(torch.float64)
        Pipeline(layers, shapes_between(layers, batch), cut, world, batch).step()
        found = gradients({number: layers[number] for number in cut[world.rank]})
        wanted = {n: g for n, g in expected.items() if int(n.split(".")[0]) in cut[world.rank]}
        assert found.keys() == wanted.keys(), "every weight of a stage has its gradient"
        for name, gradient in found.items():
            error = (gradient - wanted[name]).abs().max() / wanted[name].abs().max()
            largest = torch.maximum(largest, error)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


@dataclass(frozen=True)
class Measured:
    """Seconds: of each layer, of a message, and of each round's step by the name of the cut.

    `share` is how much of a core the layers had while they were measured.
    """

    layers: list[LayerTime]
    share: float
    transfer: float
    cuts: dict[str, Cut]
    steps: dict[str, list[float]]


def measure(asked: argparse.Namespace, world: World) -> Measured:
    """All ranks measure at once: so each meets what the others' work costs it."""
    batch = make_batch(asked.microbatches * MICRO_BATCH, torch.float32)
    layers = build_layers(torch.float32)
    given = shapes_between(layers, batch)
    times, share = measured_layers(layers, batch, asked.rounds, world)
    cuts = {
        "equal numbers": balance((1,) * len(layers), world.size),
        "by the clock": balance(tuple(t.whole for t in times), world.size),
    }
    transfer = time_transfer(given[cuts["by the clock"][0].stop], world, repeats=asked.rounds)
    if asked.sleep:
        layers = [SleepingLayer(*pair) for pair in zip(times, given[1:], strict=True)]
    pipelines = {
        name: Pipeline(copy.deepcopy(layers), given, cut, world, batch)
        for name, cut in cuts.items()
    }
    steps: dict[str, list[float]] = {name: [] for name in cuts}
    for _ in range(1 + asked.rounds):
        for name, pipeline in pipelines.items():
            steps[name].append(pipeline.seconds())
    return Measured(
        times, share, transfer, cuts, {name: found[1:] for name, found in steps.items()}
    )


def measured_layers(
    layers: Sequence[nn.Module], batch: Batch, repeats: int, world: World
) -> tuple[list[LayerTime], float]:
    """Means of the ranks' medians, and the share of a core they had; the same on every rank."""
    dist.barrier()
    worked, passed = time.process_time(), time.perf_counter()
    own = time_layers(
        layers,
        batch.images[:MICRO_BATCH],
        loss=lambda logits: loss(batch.text.numel(), logits, batch.labels[:MICRO_BATCH]),
        context={"text": batch.text[:MICRO_BATCH]},
        repeats=repeats,
    )
    share = (time.process_time() - worked) / (time.perf_counter() - passed)
    table = torch.tensor([*own, (share, 0.0)], dtype=torch.float64)
    dist.all_reduce(table)
    *rows, (share, _) = (table / world.size).tolist()
    return [LayerTime(*row) for row in rows], share


def report(found: Measured, asked: argparse.Namespace) -> bool:
    """Print the tables; whether the gain is as forecast."""
    names = ["patches", *["encoder"] * ENCODER_LAYERS, "bridge"]
    names += [*["decoder"] * DECODER_LAYERS, "head"]
    rows = [
        (number, name, 1000 * layer.forward, 1000 * layer.backward)
        for number, (name, layer) in enumerate(zip(names, found.layers, strict=True))
    ]
    print(tabulate(rows, ["layer", "kind", "forward (ms)", "backward (ms)"], floatfmt=".2f"))
    print(
        f"\na message between two stages takes {1000 * found.transfer:.2f} ms; "
        f"the ranks had {found.share:.0%} of a core each\n"
    )
    schedule = make_schedule("1f1b", num_ranks=asked.stages, num_microbatches=asked.microbatches)
    table, simulated, measured = [], [], []
    for name, cut in found.cuts.items():
        times = times_of_stages(found.layers, cut, found.transfer)
        stages = [f + b for f, b in zip(times.forward, times.backward_input, strict=True)]
        simulated.append(simulate(schedule, times).makespan)
        measured.append(statistics.median(found.steps[name]))
        counts = ",".join(str(len(stage)) for stage in cut)
        work = ", ".join(f"{1000 * seconds:.1f}" for seconds in stages)
        table.append((name, counts, work, 1000 * simulated[-1], 1000 * measured[-1]))
    headers = ["cut", "layers of stages", "a microbatch on each (ms)", "simulated step (ms)"]
    print(tabulate(table, [*headers, "measured step (ms)"], floatfmt=".1f"))
    expected = simulated[0] / simulated[1]
    gain = statistics.median(a / b for a, b in zip(*found.steps.values(), strict=True))
    holds = abs(gain / expected - 1) <= asked.bound
    print(
        f"\nthe cut by the clock is {gain:.3f} times as fast, simulated {expected:.3f}: "
        f"ratio {gain / expected:.3f}, {'within' if holds else 'NOT within'} {asked.bound:.0%}"
    )
    if not holds and not asked.sleep and found.share < LEAST_SHARE:
        print("other work has the cores: run it on a quiet machine, or with --sleep")
    return holds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--stages", type=int, default=2, metavar="P", help="processes of the pipeline (2)")
    add("--microbatches", type=int, default=8, metavar="M", help="of a step (8)")
    add("--rounds", type=int, default=9, metavar="N", help="that are timed (9)")
    add("--bound", type=float, default=0.15, metavar="X", help="of measured/simulated - 1 (0.15)")
    add("--sleep", action="store_true", help="let the timed stages sleep, which takes no core")
    add("--parity-only", action="store_true", help="hold the gradients to one device's, no more")
    asked = parser.parse_args()
    if not 2 <= asked.stages <= min(asked.microbatches, ENCODER_LAYERS) or asked.rounds < 1:
        parser.error("2 stages at least, as many microbatches, 4 stages at most; 1 round at least")
    cuts: list[Cut] = []
    if not asked.parity_only:
        found = spawn(asked.stages, partial(measure, asked), timeout=300)[0]
        cuts = list(found.cuts.values())
        holds = report(found, asked)
    else:
        layers, holds = build_layers(torch.float32), True
        sizes = tuple(sum(weight.numel() for weight in layer.parameters()) for layer in layers)
        cuts = [balance((1,) * len(layers), asked.stages), balance(sizes, asked.stages)]
    error = spawn(asked.stages, partial(largest_error, cuts, asked.microbatches), timeout=300)[0]
    print(f"largest error of a gradient against one device, in float64: {error:.1e} of {PARITY}")
    return int(not holds or error > PARITY)


if __name__ == "__main__":
    processes.end(main)
