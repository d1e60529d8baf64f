"""Pipeline parallelism: each rank of the axis holds some of the layers and passes activations on.

The idea in five lines. Cut the model into stages of consecutive blocks. A batch goes through in m
microbatches, so that while the last stage works on the first of them the first stage can work on
another. GPipe runs all forwards, then all backwards, and keeps m activations; 1F1B starts a
microbatch's backward as soon as its forward is done, and keeps at most pp. Both idle for
(pp-1)/(m+pp-1) of the time. Gradients of the microbatches add up; nothing is rescaled.

Two ideas idle less. v smaller stages on each rank fill the pipeline sooner: the first v pp stages
go round the ranks in a loop, or down and up a V (stages r and 2 pp - 1 - r on rank r, so that the
loss is where the embedding is). And a backward cut in two keeps nobody waiting: the gradient of the
input at once, those of the weights when there is nothing else to do.

Papers: Huang et al., GPipe, arXiv 1811.06965, section 2; Narayanan et al., PipeDream-2BW and 1F1B,
arXiv 2006.09503, section 3.2, and interleaved arXiv 2104.04473, section 2.2; Lamy-Poirier, looped
breadth-first, arXiv 2211.05953; Qi et al., zero bubble and ZBV, arXiv 2401.10241; DeepSeek-AI,
DualPipe, arXiv 2412.19437. The schedules are torch's; `schedules/` has them as lists of actions.

| what                               | where                                                     |
|------------------------------------|-----------------------------------------------------------|
| embeddings                         | stage 0                                                   |
| block i                            | one stage, as `stages.layers_of_stages` cuts them         |
| final norm, head, loss             | the last stage                                            |
| tied embedding                     | first and last stage: equal copies, gradients summed;     |
|                                    | where both are on one rank one parameter, or with         |
|                                    | `fully_shard` and `replicate`, which take each stage by   |
|                                    | itself, two copies that need no message                   |

Comm, for each microbatch and pair of neighbour stages on two ranks: one activation forward, its
gradient backward, b t d numbers each (t/tp with tokens sharded); tied: the gradient once a step,
both ways.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

# Private: nothing public runs a list of actions of one's own.
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _Action,
    _PipelineScheduleRuntime,
)

from dtensor_llm import pipeline
from dtensor_llm.config import Config
from dtensor_llm.model import GPT
from dtensor_llm.schedules.actions import Schedule, step_text
from dtensor_llm.schedules.csv_files import load
from dtensor_llm.schedules.torch_orders import LOOP, ONE_STAGE, V_SHAPED
from dtensor_llm.stages import layers_of_stages

TorchSchedule = PipelineScheduleSingle | PipelineScheduleMulti
LossFunction = Callable[..., Tensor]


def build_stages(config: Config, rank: int) -> GPT:
    """The part of the model that a rank of the axis has, on the current default device.

    All of its stages in one, with the gaps between them: see `cut` for each by itself.
    """
    own, layers = pipeline.placement(config)[rank], layers_of_stages(config)
    numbers = [number for stage in own for number in layers[stage]]
    return GPT(config.model, numbers, first=0 in own, last=len(layers) - 1 in own)


def cut(model: GPT, config: Config, rank: int) -> list[GPT]:
    """The stages of the rank that `model` was built for; one alone is the model itself."""
    own, layers = pipeline.placement(config)[rank], layers_of_stages(config)
    if len(own) == 1:
        return [model]
    last = len(layers) - 1
    return [model.part(layers[x], first=x == 0, last=x == last) for x in own]


class Stage(PipelineStage):
    """torch's stage, which also tells when gradients came without autograd adding them up.

    Two things of torch 2.13 are mended. It keeps room for what all microbatches receive, and what
    it has received, from the first step on: here there is room from the receive to the use, so that
    1F1B holds as much whatever the number of microbatches, and in an evaluation, too. (The sends of
    the others torch waits for at the end of a step, and what they send lives till then.) Where two
    neighbour stages are on one rank, an evaluation would ask for gradients that there are not.
    """

    def __init__(self, *args: Any, on_weights: Callable[[], None], **kwargs: Any) -> None:
        """`on_weights` is called after each backward of the weights alone."""
        super().__init__(*args, **kwargs)
        self.on_weights = on_weights

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        if self.has_backward and not self.is_first:  # torch does all of the first stage's at once
            self.on_weights()

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_forward_infra(*args, **kwargs)
        for received in self.args_recv_info.values():
            let_go(received)
        return prepared

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_backward_infra(*args, **kwargs)
        for received in self.grad_recv_info.values():
            let_go(received)
        return prepared

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        make_room(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward:
            make_room(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        let_go(self.args_recv_info[fwd_chunk_id])
        homes = self.stage_index_to_group_rank
        sends = not self.is_last and homes[self.stage_index + 1] != self.group_rank
        if not self.has_backward:
            outputs, _ = self.fwd_cache.pop(fwd_chunk_id)
            self.fwd_cache[fwd_chunk_id] = outputs if sends else (), []
        return output

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        if not self.has_backward:
            self.fwd_cache.pop(fwd_chunk_id)
        return operations

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        let_go(self.grad_recv_info.get(bwd_chunk_id, ()))
        if self.has_backward and loss is not None:
            loss.detach_()  # it is kept, and its graph would keep the input

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


def make_room(received: Sequence[Any], device: torch.device) -> None:
    """Buffers for what a microbatch is to receive."""
    for each in received:
        if not each.is_root_arg:
            meta = each.tensor_meta
            each.buffer = torch.empty_strided(
                meta.shape, meta.stride, dtype=meta.dtype, device=device
            )


def let_go(received: Sequence[Any]) -> None:
    """Whoever has taken what was received keeps it as long as it is needed."""
    for each in received:
        each.buffer = None


def make_schedule(
    config: Config,
    modules: Sequence[nn.Module],
    mesh: DeviceMesh,
    loss_function: LossFunction,
    *,
    hidden_shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    on_weights: Callable[[int], None],
) -> TorchSchedule:
    """torch's schedule over this rank's stages.

    Args:
        config: of the whole run.
        modules: what is called for each of the rank's stages.
        mesh: the axis.
        loss_function: maps (logits, labels, **loss_kwargs) to a scalar.
        hidden_shape: b t/tp d of one local microbatch: knowing it, the stages need not send their
            shapes to each other first.
        dtype: of the hidden states.
        device: of this rank.
        on_weights: told the place in `modules` of a stage of which a backward of the weights alone
            has been done.
    """
    tokens = torch.empty(
        config.micro_batch_size, config.model.seq_len, dtype=torch.int64, device="meta"
    )
    hidden = torch.empty(hidden_shape, dtype=dtype, device="meta", requires_grad=True)
    own = pipeline.placement(config)[mesh.get_local_rank()]
    stages = [
        Stage(
            module,
            index,
            pipeline.num_stages(config),
            device,
            input_args=tokens if index == 0 else hidden,
            output_args=hidden,  # of the last stage nothing is sent
            group=mesh.get_group(),
            on_weights=partial(on_weights, place),
        )
        for place, (index, module) in enumerate(zip(own, modules, strict=True))
    ]
    name, m = config.parallel.schedule, config.microbatches
    if config.parallel.schedule_csv is not None:
        return run_list(load(config.parallel.schedule_csv), stages, loss_function)
    if name in ONE_STAGE:
        return ONE_STAGE[name](stages[0], m, loss_function, scale_grads=False)
    several: Any = (LOOP | V_SHAPED)[name]
    made: PipelineScheduleMulti = several(stages, m, loss_function, scale_grads=False)
    return made


def run_list(
    schedule: Schedule, stages: Sequence[Stage], loss_function: LossFunction
) -> PipelineScheduleMulti:
    """torch's runtime for a list of actions, which adds to it what has to be sent and gathered."""
    runtime = _PipelineScheduleRuntime(
        list(stages), schedule.num_microbatches, loss_function, scale_grads=False
    )
    actions = {
        rank: [_Action.from_str(step_text(step)) for step in program if step]
        for rank, program in enumerate(schedule.programs)
    }
    runtime.pipeline_order = actions
    runtime._prepare_schedule_with_comms(actions)
    return runtime


def sum_tied_gradients(gradient: Tensor, mesh: DeviceMesh, peer: int) -> None:
    """Add up the gradients of the two copies of a tied embedding, so that both stages step alike.

    `gradient` is this rank's part of the embedding's, and becomes the sum; `peer` is the rank of
    the axis that has the other copy.

    Comm: the local gradient sent and received once between the two.
    """
    own = gradient.to(mesh.device_type)  # from the host, where gradients are offloaded
    other = torch.empty_like(own)
    group = mesh.get_group()
    exchange = [
        dist.P2POp(dist.isend, own, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, other, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    gradient.add_(other.to(gradient.device))


def tied_peer(config: Config, rank: int) -> int | None:
    """The rank of the axis that has the other copy of a tied embedding which `rank` has one of.

    None where it has none, or has both.
    """
    home = pipeline.rank_of_stage(config)
    first, last = home[0], home[len(home) - 1]
    if not config.model.tied_embeddings or first == last:
        return None
    return {first: last, last: first}.get(rank)
