"""What the simulator says a step of 1F1B takes, from times that its stages take at that moment."""

import time

import torch
import torch.distributed as dist
from torch import Tensor

from benchmark.plain import Step
from dtensor_llm.config import Config
from dtensor_llm.parallelize import normalized
from dtensor_llm.planner.schedule import simulate
from dtensor_llm.planner.stage_times import LayerTime, time_transfer, times_of_stages
from dtensor_llm.schedules.torch_orders import make_schedule
from dtensor_llm.train import Trainer
from dtensor_llm.worlds import World


class OneMicrobatch(Trainer):
    """Takes the time of one microbatch on its stage, alone, in the place of the whole pipeline.

    Attributes:
        stage: seconds of that microbatch.
    """

    stage: LayerTime

    def forward_backward(self, tokens: Tensor, labels: Tensor, num_tokens: Tensor) -> Tensor:
        (module,) = self.parallel.modules
        x, y, samples = next(self.microbatches(tokens, labels))
        hidden = torch.ones(*x.shape, self.config.model.width)
        taken = x if self.model.first else torch.randn_like(hidden).requires_grad_()
        times = [time.perf_counter()]
        given = module(taken, samples)
        if self.model.last:
            given = normalized(self.parallel.loss_function, given, y, num_tokens=num_tokens)
        times.append(time.perf_counter())
        given.backward(None if self.model.last else hidden)
        times.append(time.perf_counter())
        self.stage = LayerTime(times[1] - times[0], times[2] - times[1])
        return given.detach() if self.model.last else torch.zeros_like(num_tokens)


def forecast_step(config: Config, world: World) -> Step:
    """All ranks take their times at once; a call returns the seconds that a step would take.

    That is the makespan of `config`'s schedule, of one stage a rank, and what a step does before
    and after it on the rank that waits for no other.
    """
    trainer = OneMicrobatch(config, world)
    name, ranks = config.parallel.schedule, world.size
    schedule = make_schedule(name, num_ranks=ranks, num_microbatches=config.microbatches)
    hidden = torch.empty(config.micro_batch_size, config.model.seq_len, config.model.width)

    def step(tokens: Tensor, labels: Tensor) -> float:
        start = time.perf_counter()
        trainer.step(0, tokens, labels)
        rest = time.perf_counter() - start - trainer.stage.whole
        own = torch.tensor([*trainer.stage, rest], dtype=torch.float64)
        of_ranks = [torch.empty_like(own) for _ in range(ranks)]
        dist.all_gather(of_ranks, own)
        transfer = time_transfer(hidden, world, repeats=3)
        table = torch.stack(of_ranks).tolist()
        layers = [LayerTime(forward, backward) for forward, backward, _ in table]
        cut = [range(stage, stage + 1) for stage in range(ranks)]
        makespan = simulate(schedule, times_of_stages(layers, cut, transfer)).makespan
        # The rank that is done first waits for the others in the rest: that is in the makespan.
        return makespan + min(rest for *_, rest in table)

    return step
