"""Composes the strategies, in the one order that is right.

1. pipeline: build only this rank's stages, as one, on the meta device: no memory yet
2. tensor and sequence: place each weight on the tp axis, or in blocks on tp_row x tp_col
3. tie: the head takes the embedding's weight again, now a DTensor
4. data: cut the stages apart, give memory to block after block, shard or replicate it over dp
5. initialize: each rank draws its own elements
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from dtensor_llm.buckets import Buckets
from dtensor_llm.config import Config
from dtensor_llm.initialize import initialize
from dtensor_llm.loss import summed_cross_entropy
from dtensor_llm.mesh import build_mesh
from dtensor_llm.model import GPT
from dtensor_llm.offload import policy
from dtensor_llm.parallel import (
    data_parallel,
    pipeline_parallel,
    sequence_parallel,
    tensor_parallel,
    tensor_parallel_2d,
    zero,
)
from dtensor_llm.plan import apply_plan, materialize

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Parallelized:
    """What one rank needs to train: its part of the model, and how to run it."""

    config: Config
    mesh: DeviceMesh
    axes: Mapping[str, DeviceMesh]  # those of more than one rank
    device: torch.device
    model: GPT  # all that the rank has
    stages: Sequence[GPT]  # the same, each pipeline stage by itself
    modules: Sequence[nn.Module]  # to be called: the stages, or what is around them
    buckets: Buckets  # of the parameters whose rows ZeRO has shared out
    loss_function: Callable[[Tensor, Tensor], Tensor]  # (logits, labels) -> sum over tokens
    schedule: pipeline_parallel.TorchSchedule | None  # None without pipeline parallelism

    def finalize_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Reduce, in place, what data parallelism has left to reduce once a step.

        `gradients` are this rank's parts, by parameter name.
        """
        for axis in ("tp", "tp_row"):
            if axis in self.axes:
                mesh = self.axes[axis]
                sequence_parallel.reduce_partial_gradients(self.model, gradients, mesh)
        tensor_parallel.reduce_copied_gradients(self.model, gradients)
        if "pp" not in self.axes:
            return
        ranks = self.axes["pp"]
        peer = pipeline_parallel.tied_peer(self.config, ranks.get_local_rank())
        if peer is not None:
            tied = gradients["token_embedding.weight"]
            pipeline_parallel.sum_tied_gradients(tied, ranks, peer)


def parallelize(config: Config, device: torch.device) -> Parallelized:
    """Build this rank's part of the model on the mesh of `config`, with its initial weights.

    Comm: none but the making of process groups.
    """
    mesh = build_mesh(config.parallel.mesh, device.type)
    axes = used_axes(mesh)
    placed = place(config, mesh, device)
    initialize(placed.model, config.train.seed)
    loss_function: Callable[[Tensor, Tensor], Tensor] = summed_cross_entropy
    if "tp" in axes:
        loss_function = tensor_parallel.loss_function(config.model.vocab_size, axes["tp"])
    if "tp_row" in axes:
        loss_function = tensor_parallel.loss_function(config.model.vocab_size, axes["tp_col"])
    schedule = None
    if "pp" in axes:
        schedule = make_schedule(config, placed, axes["pp"], loss_function, device)
    return Parallelized(
        config,
        mesh,
        axes,
        device,
        placed.model,
        placed.stages,
        placed.modules,
        placed.buckets,
        loss_function,
        schedule,
    )


def used_axes(mesh: DeviceMesh) -> dict[str, DeviceMesh]:
    """The one-axis meshes of more than one rank."""
    names_and_sizes = zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)
    return {axis: mesh[axis] for axis, size in names_and_sizes if size > 1}


@dataclass(frozen=True)
class Placed:
    """A rank's part of the model; all as in Parallelized."""

    model: GPT
    stages: Sequence[GPT]
    modules: Sequence[nn.Module]
    buckets: Buckets


def place(config: Config, mesh: DeviceMesh, device: torch.device) -> Placed:
    """Steps 1 to 4: this rank's part of the model, every weight placed, none of them initialized.

    On the meta device nothing takes memory, whatever the mesh: all but the numbers is there.
    """
    axes = used_axes(mesh)
    with torch.device("meta"):
        if "pp" in axes:
            model = pipeline_parallel.build_stages(config, axes["pp"].get_local_rank())
        else:
            model = GPT(config.model)
    model.to(DTYPES[config.train.dtype])
    if "tp" in axes:
        apply_tensor_parallel(config, model, axes["tp"])
    if "tp_row" in axes:
        grid = mesh["tp_row", "tp_col"]
        apply_plan(model, grid, tensor_parallel_2d.plan(model, grid))
        apply_plan(model, axes["tp_col"], tensor_parallel_2d.dropout_plan(model))
    model.tie_embeddings()
    stages = [model]
    if "pp" in axes:
        stages = pipeline_parallel.cut(model, config, axes["pp"].get_local_rank())
    modules: Sequence[nn.Module] = stages
    buckets = Buckets()
    if config.dp > 1 and config.parallel.zero in (1, 2):
        materialize(model, device)
        buckets = zero.share_out(
            stages,
            data_mesh(config, mesh),
            microbatches=config.microbatches,
            each_microbatch=config.parallel.reduces_each_microbatch,
        )
    elif config.dp > 1 or config.parallel.offload == "weights":
        over = data_mesh(config, mesh)
        modules = [apply_data_parallel(config, stage, over, device) for stage in stages]
    materialize(model, device)
    return Placed(model, stages, modules, buckets)


def apply_data_parallel(
    config: Config, stage: GPT, mesh: DeviceMesh, device: torch.device
) -> nn.Module:
    """Shard or replicate a stage over dp, at ZeRO stages 3 and 0; what to call then."""
    parallel = config.parallel
    if parallel.ddp:
        options = data_parallel.DDPOptions(
            parallel.ddp_bucket_mb, parallel.ddp_bucket_view, parallel.ddp_static_graph
        )
        return data_parallel.wrap(stage, mesh, device, options)
    if parallel.zero == 3:
        zero.apply(
            stage,
            mesh,
            device,
            reshard=parallel.reshards_after_forward,
            prefetch=parallel.prefetch_depth,
            offload=policy(device) if parallel.offload == "weights" else None,
            overlap=parallel.mesh.pp == 1,
        )
    else:
        data_parallel.apply(stage, mesh, device)
    return stage


def data_mesh(config: Config, mesh: DeviceMesh) -> DeviceMesh:
    """The data-parallel axes: two where sharding is to be hybrid, else one."""
    if config.parallel.mesh.dp_replicate == 1:
        return mesh["dp_shard"]
    both = mesh["dp_replicate", "dp_shard"]
    # Private: torch 2.13 has no public way to make one axis of two.
    return both._flatten("dp") if config.parallel.zero == 0 else both


def apply_tensor_parallel(config: Config, model: GPT, mesh: DeviceMesh) -> None:
    shard_tokens = config.parallel.sequence_parallel
    residual = sequence_parallel.RESIDUAL if shard_tokens else Replicate()
    between = sequence_parallel.plan if shard_tokens else tensor_parallel.replicated_plan
    again = shard_tokens and config.parallel.gather_again
    overlap = shard_tokens and config.parallel.async_tp
    split = tensor_parallel.plan(model, mesh, residual, gather_again=again, overlap=overlap)
    apply_plan(model, mesh, split)
    apply_plan(model, mesh, between(model))


def make_schedule(
    config: Config,
    placed: Placed,
    mesh: DeviceMesh,
    loss_function: Callable[[Tensor, Tensor], Tensor],
    device: torch.device,
) -> pipeline_parallel.TorchSchedule:
    b, t, sizes = config.micro_batch_size, config.model.seq_len, config.parallel.mesh
    own_tokens = t // sizes.tp if config.parallel.sequence_parallel else t

    def on_weights(stage: int) -> None:
        placed.buckets.all_arrived(placed.stages[stage].weights())

    return pipeline_parallel.make_schedule(
        config,
        placed.modules,
        mesh,
        partial(normalized, loss_function),
        hidden_shape=(b, own_tokens, config.model.width // sizes.tp_col),
        dtype=DTYPES[config.train.dtype],
        device=device,
        on_weights=on_weights,
    )


def normalized(
    loss_function: Callable[[Tensor, Tensor], Tensor],
    logits: Tensor,
    labels: Tensor,
    *,
    num_tokens: Tensor,
) -> Tensor:
    """The microbatch's part of the loss: its sum over the valid tokens of the global batch."""
    return loss_function(logits, labels) / num_tokens
