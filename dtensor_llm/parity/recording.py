"""Records a trainer's run on any mesh: parts are put together on rank 0, which writes them."""

import dataclasses
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_llm.parallelize import DTYPES
from dtensor_llm.parity.check import own_gradients, own_state
from dtensor_llm.parity.record import RecordError, RecordWriter
from dtensor_llm.parity.run import QUANTITIES
from dtensor_llm.plan import Part
from dtensor_llm.train import StepResult, Trainer, Watcher
from dtensor_llm.worlds import processes

Parts = dict[str, dict[str, Tensor]]  # {quantity: {parameter: this rank's part}}


class Recording(Watcher):
    """Writes the record of a run; one on every rank.

    Norms are recorded at every step; tensors at the first, at every `every`-th and at the last.

    Comm: a step one all-reduce of a float64 a parameter and quantity; where tensors are recorded,
    for each quantity one gather to rank 0 of what each rank has to count.
    """

    def __init__(self, trainer: Trainer, folder: str | Path, every: int) -> None:
        self.trainer, self.every = trainer, every
        config, world = trainer.config, trainer.world
        self.gatherer = Gatherer(trainer)
        self.writer = None
        if world.rank == 0:
            self.writer = RecordWriter(
                folder,
                dtype=config.train.dtype,
                mesh=str(config.parallel.mesh),
                world=world.kind,
                device=world.device.type,
                torch=torch.__version__,
                model=dataclasses.asdict(config.model),
                train=dataclasses.asdict(config.train),
            )
        self.gradients: dict[str, Tensor] = {}
        self.has_state = False  # the optimizer's, once it has stepped

    def on_gradients(self, _: StepResult) -> None:
        own = own_gradients(self.trainer)
        # Clipping scales them in place.
        self.gradients = {name: x.clone() for name, x in own.items()}

    def on_step(self, result: StepResult) -> None:
        self.has_state = self.has_state or result.num_tokens > 0
        shards = self.trainer.optimizer.shards
        weights = {name: shard.detach() for name, shard in shards.items()}
        own = {"gradient": self.gradients, **own_state(self.trainer), "weight": weights}
        parts = {quantity: own.get(quantity, {}) for quantity in self.quantities()}
        norms = self.gatherer.norms(parts)
        tensors = {}
        if self.keeps(result.step):
            tensors = {quantity: self.gatherer.whole(parts[quantity]) for quantity in parts}
        if self.writer is None:
            return
        try:
            self.writer.step(
                loss=result.loss,
                tensors=tensors,
                gradient_norm=result.gradient_norm,
                learning_rate=result.learning_rate,
                num_tokens=result.num_tokens,
                norms=norms,
            )
        except RecordError as error:
            print(f"stopped: --record: {error}", file=sys.stderr)
            processes.leave(1)

    def quantities(self) -> list[str]:
        """The same on every rank, also on one that holds no element of any parameter."""
        train = self.trainer.config.train
        kept = {"gradient", "weight"}
        if self.has_state:
            kept |= {"exp_avg", "exp_avg_sq"} if train.optimizer == "adamw" else set()
            kept |= {"momentum"} if train.optimizer == "sgd" and train.momentum > 0 else set()
        return [quantity for quantity in QUANTITIES if quantity in kept]

    def keeps(self, step: int) -> bool:
        last = self.trainer.config.train.steps - 1
        return step in (0, last) or (step + 1) % self.every == 0


class Gatherer:
    """Knows which rank counts which elements of which parameter.

    Comm, when it is made: an all-gather of that knowledge.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.world, self.dtype = trainer.world, DTYPES[trainer.config.train.dtype]
        self.own = {
            name: part
            for name, part in trainer.optimizer.owned.items()
            if trainer.counts_here(name, part)
        }
        everyone: list[dict[str, Part]] = [self.own]
        if self.world.size > 1:
            everyone = [{} for _ in range(self.world.size)]
            dist.all_gather_object(everyone, self.own)
        self.everyone = everyone
        self.shapes = {name: part.shape for parts in everyone for name, part in parts.items()}
        self.longest = max(sum(part.numel for part in parts.values()) for parts in everyone)

    def norms(self, parts: Parts) -> dict[str, dict[str, float]]:
        """{quantity: {parameter: 2-norm of the whole}}, on every rank."""
        squares = torch.zeros(len(parts), len(self.shapes), dtype=torch.float64)
        place = {name: index for index, name in enumerate(self.shapes)}
        for row, named in enumerate(parts.values()):
            for name in self.own.keys() & named.keys():
                squares[row, place[name]] = named[name].double().square().sum()
        squares = squares.to(self.world.device)
        if self.world.size > 1:
            dist.all_reduce(squares)
        norms = squares.sqrt().tolist()
        return {
            q: dict(zip(self.shapes, row, strict=True)) for q, row in zip(parts, norms, strict=True)
        }

    def whole(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """{parameter: the whole tensor} on rank 0, in the order of names; {} elsewhere."""
        flat = torch.zeros(self.longest, dtype=self.dtype, device=self.world.device)
        start = 0
        for name, part in self.own.items():
            if part.numel:
                flat[start : start + part.numel] = parts[name].flatten()
            start += part.numel
        flats: list[Tensor] = [flat]
        if self.world.size > 1:
            flats = [torch.empty_like(flat) for _ in range(self.world.size)] * (
                self.world.rank == 0
            )
            dist.gather(flat, flats or None)
        whole: dict[str, Tensor] = {}
        for parts_of_rank, numbers in zip(self.everyone, flats, strict=False):
            start = 0
            for name, part in parts_of_rank.items():
                # What nobody counted would stay a NaN.
                target = whole.setdefault(name, torch.full(part.shape, torch.nan, dtype=self.dtype))
                values = numbers[start : start + part.numel].cpu()
                target[part.where] = values.reshape(target[part.where].shape)
                start += part.numel
        return whole
