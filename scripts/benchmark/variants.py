"""The ways to do the step that bench_step.py compares, and what each is held to."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from benchmark.forecast import forecast_step
from benchmark.plain import Step, plain_ddp_step, plain_fsdp_step, plain_step
from dtensor_llm.config import Config, MeshSizes, ModelConfig, ParallelConfig, TrainConfig
from dtensor_llm.train import Trainer
from dtensor_llm.worlds import World

MODEL = ModelConfig(vocab_size=256, width=384, heads=6, layers=6, seq_len=256)
BATCH, RANKS = 8, 2
TRAIN = TrainConfig(global_batch_size=BATCH, lr=1e-3, steps=10**6, warmup_steps=0)
MICROBATCHES = 4  # of the pipeline


@dataclass(frozen=True)
class Variant:
    """One way to do the step.

    Args:
        make: builds it, on every rank that takes part.
        ranks: 1, with two threads unless `threads` says otherwise, or 2 with one each.
        threads: of each rank.
        target: of its time over that of `one`.
        other: name of the variant that it is compared with, ...
        share: ... of whose time this part counts.
        other_target: of that ratio, ...
        other_least: ... which has a lower bound, too, where it is to be as near one as this.
        forecast: the step returns seconds, and is not timed.
        silent: both ranks do, at the same time, the step of one rank.
    """

    make: Callable[[World], Step]
    ranks: int = RANKS
    threads: int = 1
    target: float | None = None
    other: str = ""
    share: float = 1.0
    other_target: float | None = None
    other_least: float | None = None
    forecast: bool = False
    silent: bool = False

    def is_alone(self, rank: int) -> bool:
        """Whether `rank` does here what a world of one does."""
        return self.silent or (self.ranks == 1 and rank == 0)


def our_step(
    world: World,
    train: TrainConfig = TRAIN,
    *,
    zero: int = 3,
    ddp: bool = False,
    async_tp: bool = False,
    **sizes: int,
) -> Step:
    """`sizes` are those of mesh axes."""
    parallel = ParallelConfig(MeshSizes(**sizes), zero=zero, ddp=ddp, async_tp=async_tp)
    trainer = Trainer(Config(MODEL, train, parallel), world)
    count = iter(range(TRAIN.steps))

    def step(tokens: Tensor, labels: Tensor) -> float:
        own = trainer.samples
        return trainer.step(next(count), tokens[own], labels[own]).loss

    return step


# A pipeline of p stages idles for (p-1) of (m+p-1) microbatches; the work is 1/p of one rank's.
PIPELINED = dataclasses.replace(TRAIN, micro_batch_size=BATCH // MICROBATCHES)
IDEAL_PIPELINE = (MICROBATCHES + RANKS - 1) / (MICROBATCHES * RANKS)


def forecast(world: World) -> Step:
    return forecast_step(Config(MODEL, PIPELINED, ParallelConfig(MeshSizes(pp=RANKS))), world)


ONE = "one"
VARIANTS: dict[str, Variant] = {
    "plain": Variant(partial(plain_step, MODEL), ranks=1, threads=2),
    ONE: Variant(our_step, ranks=1, threads=2, other="plain"),
    "one-thread": Variant(our_step, ranks=1),
    "pair": Variant(our_step, silent=True, other="one-thread"),
    "plain-ddp": Variant(partial(plain_ddp_step, MODEL)),
    "dp": Variant(
        partial(our_step, dp_shard=2, zero=0), target=1.0, other="plain-ddp", other_target=1.03
    ),
    "ddp": Variant(
        partial(our_step, dp_shard=2, zero=0, ddp=True),
        target=1.0,
        other="plain-ddp",
        other_target=1.03,
    ),
    "plain-fsdp": Variant(partial(plain_fsdp_step, MODEL)),
    "fsdp": Variant(
        partial(our_step, dp_shard=2), target=1.05, other="plain-fsdp", other_target=1.03
    ),
    "tp": Variant(partial(our_step, tp=2), target=1.15),
    "tp-async": Variant(partial(our_step, tp=2, async_tp=True), other="tp", other_target=1.0),
    "pp": Variant(
        partial(our_step, train=PIPELINED, pp=2),
        other="one-thread",
        share=IDEAL_PIPELINE,
        other_target=1.06,
    ),
    "pp-forecast": Variant(forecast, forecast=True, other="pp", other_target=1.1, other_least=0.9),
}


def with_others(names: Iterable[str]) -> list[str]:
    wanted = {ONE, *names}
    wanted |= {VARIANTS[name].other for name in wanted}
    return [name for name in VARIANTS if name in wanted]
