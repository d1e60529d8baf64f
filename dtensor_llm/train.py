"""One training step, in the order in which a rank does it, and the loop around it.

A step: count the valid tokens of the global batch; forward and backward over the microbatches, each
loss divided by that count; reduce what is left to reduce; add up loss and squared gradient norm
over all ranks; clip; step the optimizer on the rank's own elements.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from dtensor_llm.config import Config
from dtensor_llm.data import Batch, Dataset
from dtensor_llm.loss import count_valid_tokens
from dtensor_llm.optimizer import (
    Optimizer,
    clip_gradients,
    counts_here,
    learning_rate,
    sum_of_squares,
)
from dtensor_llm.parallel import zero
from dtensor_llm.parallelize import Parallelized, normalized, parallelize
from dtensor_llm.plan import Part
from dtensor_llm.worlds import World

# Axes that split the global batch, outermost first.
DATA_AXES = ("dp_replicate", "dp_shard", "tp_row")


class TrainingError(RuntimeError):
    """Training cannot go on: the message names step, rank and parameter."""


@dataclass(frozen=True)
class StepResult:
    """Numbers of one step, the same on every rank and every mesh."""

    step: int
    loss: float  # mean over the valid tokens of the global batch
    num_tokens: int  # valid ones, in the global batch
    gradient_norm: float  # of the whole model, before clipping
    learning_rate: float


class Trainer:
    """One rank's training state."""

    def __init__(self, config: Config, world: World) -> None:
        """Build this rank's part of the model and of the optimizer."""
        self.config, self.world = config, world
        self.parallel: Parallelized = parallelize(config, world.device)
        self.model, self.mesh = self.parallel.model, self.parallel.mesh
        offload = config.parallel.offload == "optimizer"
        buckets = self.parallel.buckets
        self.optimizer = Optimizer(self.model, config.train, buckets, offload=offload)
        self.data_groups = [
            self.parallel.axes[axis].get_group() for axis in DATA_AXES if axis in self.parallel.axes
        ]
        size = config.train.global_batch_size // config.batch_parts
        self.samples = slice(self.data_rank() * size, (self.data_rank() + 1) * size)
        same_loss = [self.parallel.axes[x] for x in ("tp", "tp_col") if x in self.parallel.axes]
        is_first = all(axis.get_local_rank() == 0 for axis in same_loss)
        self.reports_loss = self.model.last and is_first

    def data_rank(self) -> int:
        """Which part of the global batch this rank computes."""
        rank = 0
        for group in self.data_groups:
            rank = rank * group.size() + group.rank()
        return rank

    def step(self, step: int, tokens: Tensor, labels: Tensor) -> StepResult:
        """Train on this rank's part of the global batch: `compute_gradients` and `update`.

        `tokens` and `labels` are b t: the rows `samples` of the batch, as many on every rank.
        """
        result = self.compute_gradients(step, tokens, labels)
        self.update(result)
        return result

    def compute_gradients(self, step: int, tokens: Tensor, labels: Tensor) -> StepResult:
        """Forward, backward and every reduction; the gradients are those of the global batch.

        Raises TrainingError, on every rank, where loss or gradient are not finite; ValueError for
        tokens or labels of another shape than this rank's part has.
        """
        expected = (self.samples.stop - self.samples.start, self.config.model.seq_len)
        if tokens.shape != expected or labels.shape != expected:
            raise ValueError(
                f"tokens {tuple(tokens.shape)}, labels {tuple(labels.shape)}: not this rank's part "
                f"of the batch, (global batch / {self.config.batch_parts}, seq_len) = {expected}; "
                f"take the rows {self.samples.start} to {self.samples.stop - 1} (trainer.samples)"
            )
        self.optimizer.zero_grad()
        self.model.train()
        self.model.set_dropout(seed=self.config.train.seed, step=step)
        tokens, labels = tokens.to(self.world.device), labels.to(self.world.device)
        num_tokens = count_valid_tokens(labels, self.data_groups)
        loss = self.forward_backward(tokens, labels, num_tokens.clamp(min=1))
        self.parallel.finalize_gradients(self.optimizer.take_gradients())
        loss, squares = self.sum_over_ranks(loss, self.own_sum_of_squares())
        # The one place where the host waits for the device.
        numbers = torch.stack([loss, squares.sqrt(), num_tokens.double()]).tolist()
        rate = learning_rate(self.config.train, step)
        result = StepResult(step, numbers[0], int(numbers[2]), numbers[1], rate)
        if not (math.isfinite(result.loss) and math.isfinite(result.gradient_norm)):
            raise TrainingError(self.describe_non_finite(result))
        return result

    def update(self, result: StepResult) -> None:
        """Clip and step; a global batch without a valid token changes nothing."""
        if result.num_tokens == 0:
            return
        shards = list(self.optimizer.shards.values())
        clip_gradients(shards, self.config.train.clip_grad, result.gradient_norm)
        self.optimizer.step(result.learning_rate)

    def forward_backward(self, tokens: Tensor, labels: Tensor, num_tokens: Tensor) -> Tensor:
        """Accumulate the gradients of this rank's sequences; returns its part of the loss."""
        if self.parallel.schedule is not None:
            return self.pipeline(self.parallel.schedule.step, tokens, labels, num_tokens)
        (module,) = self.parallel.modules
        total = torch.zeros((), device=tokens.device)
        for index, (x, y, samples) in enumerate(self.microbatches(tokens, labels)):
            self.choose_reduction(is_last=index == self.config.microbatches - 1)
            logits = module(x, samples)
            loss = normalized(self.parallel.loss_function, logits, y, num_tokens=num_tokens)
            loss.backward()
            total = total + loss.detach()
        return total

    def pipeline(
        self,
        run: Callable[..., object],
        tokens: Tensor,
        labels: Tensor,
        num_tokens: Tensor,
    ) -> Tensor:
        """Send the microbatches through the stages: `run` is the schedule's step or its eval.

        Returns the loss of this rank's sequences over `num_tokens`, 0 on all but the last stage.
        """
        losses: list[Tensor] = []
        run(
            *([tokens] if self.model.first else []),
            samples=self.places(tokens.device),
            target=labels if self.model.last else None,
            losses=losses,
            return_outputs=False,
            loss_kwargs={"num_tokens": num_tokens},
        )
        return torch.stack(losses).sum().detach() if losses else torch.zeros_like(num_tokens)

    def microbatches(
        self, tokens: Tensor, labels: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(tokens, labels, places in the global batch) of each."""
        whole = (tokens, labels, self.places(tokens.device))
        return zip(*(x.chunk(self.config.microbatches) for x in whole), strict=True)

    def places(self, device: torch.device) -> Tensor:
        return torch.arange(self.samples.start, self.samples.stop, device=device)

    def choose_reduction(self, *, is_last: bool) -> None:
        """Reduce in the last microbatch alone; without --defer-reduce, ZeRO stage 3 in each.

        Stages 1 and 2 need no word from here: their buckets count microbatches.
        """
        parallel, (module,) = self.config.parallel, self.parallel.modules
        if isinstance(module, DistributedDataParallel):
            module.require_backward_grad_sync = is_last
        elif isinstance(module, FSDPModule) and (parallel.zero == 0 or parallel.defer_reduce):
            module.set_requires_gradient_sync(is_last)

    def own_sum_of_squares(self) -> Tensor:
        """Of the gradient elements that this rank is the one to count.

        The copies that others count add nothing, but for NaN where one of them is not finite.
        """
        counted: list[Tensor] = []
        copies: list[Tensor] = []
        for name, shard in self.optimizer.shards.items():
            if shard.grad is not None:
                counts = self.counts_here(name, self.optimizer.owned[name])
                (counted if counts else copies).append(shard.grad)
        return sum_of_squares(counted) + 0.0 * sum_of_squares(copies)

    def counts_here(self, name: str, part: Part) -> bool:
        """Whether the parameter's `part`, this rank's, enters sums over all ranks from here."""
        is_second_copy = name == "token_embedding.weight" and not self.model.first
        return not is_second_copy and counts_here(part, self.mesh)

    def sum_over_ranks(self, loss: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        """(loss, counted) summed over the ranks that report them.

        Comm: one all-reduce of two float64 over all ranks.
        """
        device = self.world.device
        own_loss = loss.to(device, torch.float64) * float(self.reports_loss)
        sums = torch.stack([own_loss, counted.to(device, torch.float64)])
        if self.world.size > 1:
            dist.all_reduce(sums)
        return sums[0], sums[1]

    def describe_non_finite(self, result: StepResult) -> str:
        """Every rank calls it; the message names the first rank and parameter.

        Comm: all-gather of one string a rank.
        """
        own = next(
            (
                name
                for name, shard in self.optimizer.shards.items()
                if shard.grad is not None and not shard.grad.isfinite().all()
            ),
            None,
        )
        names: list[str | None] = [None] * self.world.size
        dist.all_gather_object(names, own)
        found = [f"rank {rank}, gradient of {name}" for rank, name in enumerate(names) if name]
        return (
            f"step {result.step + 1}: loss {result.loss}, gradient norm {result.gradient_norm}; "
            f"not finite first on {found[0] if found else 'no single gradient'}; "
            "the weights are those of the step before"
        )

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Batch]) -> tuple[float, int]:
        """(mean loss, number of tokens) over the valid tokens of all batches.

        `batches` are this rank's parts of batches that have the global batch size.
        """
        self.model.eval()
        device = self.world.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        count = torch.zeros((), dtype=torch.float64, device=device)
        for batch in batches:
            labels = batch.labels.to(device)
            total += self.forward_only(batch.tokens.to(device), labels).double()
            count += count_valid_tokens(labels)
        for stage in self.parallel.stages:
            zero.free_gathered(stage)
        total, count = self.sum_over_ranks(total, count * float(self.reports_loss))
        return (total / count.clamp(min=1)).item(), int(count.item())

    def forward_only(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The summed loss of this rank's sequences (0 on all but the last stage)."""
        if self.parallel.schedule is not None:
            one = torch.ones((), device=tokens.device)
            return self.pipeline(self.parallel.schedule.eval, tokens, labels, one)
        losses = [
            self.parallel.loss_function(self.model(x, samples), y)
            for x, y, samples in self.microbatches(tokens, labels)
        ]
        return torch.stack(losses).sum()


class Watcher:
    """Is told what happens in a run, on every rank; to be derived from."""

    def on_gradients(self, result: StepResult) -> None:
        """The gradients are those of the global batch, not clipped yet."""

    def on_step(self, result: StepResult) -> None:
        """The weights are those of the next step."""

    def on_evaluation(self, steps_done: int, loss: float, num_tokens: int) -> None:
        """The mean loss over the validation sequences."""


def train(trainer: Trainer, data: Dataset, watchers: Sequence[Watcher] = ()) -> None:
    """Train for `config.train.steps` steps; evaluate first, every `eval_every` steps, and last.

    A run of fewer steps than `eval_every` does not evaluate. Called on every rank.
    """
    config = trainer.config.train
    evaluates = 0 < config.eval_every <= config.steps

    def evaluate(steps_done: int) -> None:
        batches = data.evaluation_batches(
            config.global_batch_size, trainer.samples, config.eval_samples or None
        )
        loss, num_tokens = trainer.evaluate(batches)
        for watcher in watchers:
            watcher.on_evaluation(steps_done, loss, num_tokens)

    for step in range(config.steps):
        if evaluates and step % config.eval_every == 0:
            evaluate(step)
        batch = data.batch(step, trainer.samples)
        watched_step(trainer, step, batch, watchers)
    if evaluates:
        evaluate(config.steps)


def watched_step(
    trainer: Trainer, step: int, batch: Batch, watchers: Sequence[Watcher]
) -> StepResult:
    """One step on this rank's part of a batch."""
    result = trainer.compute_gradients(step, batch.tokens, batch.labels)
    for watcher in watchers:
        watcher.on_gradients(result)
    trainer.update(result)
    for watcher in watchers:
        watcher.on_step(result)
    return result
