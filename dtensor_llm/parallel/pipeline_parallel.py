"""Pipeline parallelism: each rank of the axis holds some of the layers and passes activations on.

The idea in five lines. Cut the model into stages of consecutive blocks. A batch goes through in m
microbatches, so that while the last stage works on the first of them the first stage can work on
another. GPipe runs all forwards, then all backwards, and keeps m activations; 1F1B starts a
microbatch's backward as soon as its forward is done, and keeps at most pp. Both idle for
(pp-1)/(m+pp-1) of the time. Gradients of the microbatches add up; nothing is rescaled.

Papers: Huang et al., GPipe, arXiv 1811.06965, section 2; Narayanan et al., PipeDream-2BW and 1F1B,
arXiv 2006.09503, section 3.2, and arXiv 2104.04473, section 2.2. The schedules are torch's.

| what                               | where                                                     |
|------------------------------------|-----------------------------------------------------------|
| embeddings                         | stage 0                                                   |
| block i                            | one stage, as `stages.layers_of_stages` cuts them         |
| final norm, head, loss             | stage pp-1                                                |
| tied embedding                     | stages 0 and pp-1: equal copies, gradients summed         |

Comm, for each microbatch and pair of neighbours: one activation forward, its gradient backward,
b t d numbers each (t/tp with tokens sharded); tied: the gradient once a step, both ways.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from dtensor_llm.config import Config
from dtensor_llm.model import GPT
from dtensor_llm.stages import layers_of_stages

SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def build_stage(config: Config, mesh: DeviceMesh) -> GPT:
    """This rank's part of the model, on the current default device."""
    stage, layers = mesh.get_local_rank(), layers_of_stages(config)
    return GPT(config.model, layers[stage], first=stage == 0, last=stage == len(layers) - 1)


def make_schedule(
    name: str,
    module: nn.Module,
    mesh: DeviceMesh,
    loss_function: Callable[..., Tensor],
    *,
    is_first: bool,
    num_microbatches: int,
    tokens_shape: tuple[int, int],
    hidden_shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> PipelineScheduleSingle:
    """torch's schedule over this rank's stage, `module`.

    `tokens_shape` (b, t) and `hidden_shape` (b, t/tp, d) are those of one local microbatch: knowing
    them, the stages need not send their shapes to each other first. `loss_function` maps (logits,
    labels, **loss_kwargs) to a scalar.
    """
    tokens = torch.empty(tokens_shape, dtype=torch.int64, device="meta")
    hidden = torch.empty(hidden_shape, dtype=dtype, device="meta", requires_grad=True)
    stage = PipelineStage(
        module,
        mesh.get_local_rank(),
        mesh.size(),
        device,
        input_args=tokens if is_first else hidden,
        output_args=hidden,  # of the last stage nothing is sent
        group=mesh.get_group(),
    )
    return SCHEDULES[name](stage, num_microbatches, loss_function, scale_grads=False)


def sum_tied_gradients(model: GPT, gradient: Tensor, mesh: DeviceMesh) -> None:
    """Add up the gradients of the two copies of a tied embedding, so that both stages step alike.

    `gradient` is this rank's part of the embedding's, and becomes the sum.

    Comm: the local gradient sent and received once between the first and the last stage.
    """
    own = gradient.to(mesh.device_type)  # from the host, where gradients are offloaded
    other = torch.empty_like(own)
    peer = mesh.size() - 1 if model.first else 0
    group = mesh.get_group()
    exchange = [
        dist.P2POp(dist.isend, own, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, other, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    gradient.add_(other.to(gradient.device))


def holds_tied_copy(model: GPT) -> bool:
    """Whether this stage holds one of the two copies of a tied embedding."""
    return model.config.tied_embeddings and model.first != model.last
