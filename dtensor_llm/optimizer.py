"""AdamW or SGD on each rank's own elements, the learning rate, the gradient norm and clipping.

An optimizer step works element by element, so it needs no mesh: torch's optimizer steps on plain
tensors that share memory with the local parts of the DTensors. That serves any mix of placements
(the fused and foreach forms refuse parameters of several meshes) and costs no dispatch. Where ZeRO
has shared out no more than the optimizer state, the rank's own elements are rows of a local part.
"""

import math

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dtensor_llm.buckets import Buckets
from dtensor_llm.config import TrainConfig
from dtensor_llm.model import GPT
from dtensor_llm.offload import HostOptimizerMemory
from dtensor_llm.plan import Part, local_tensor, part_of


def learning_rate(config: TrainConfig, step: int) -> float:
    """Of optimizer step 0, 1, ...: linear warm-up, then a cosine down to min_lr_ratio of the peak.

    Paper: Loshchilov and Hutter, SGDR, arXiv 1608.03983, eq. 5, with one period.
    """
    warmup = config.num_warmup_steps
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * cosine)


def is_decayed(name: str) -> bool:
    """Whether weight decay applies: to matrices, and not to norms and biases."""
    return name.endswith(".weight") and "norm" not in name


class Optimizer:
    """torch's AdamW or SGD over this rank's own elements of the model's parameters.

    Attributes:
        weights: {name: parameter}, as the model holds them.
        copies: {name: a second copy of the weight on this rank}, which follows the first.
        held: {name: what of the parameter its local tensor is}.
        owned: {name: what of it this rank reduces and updates}: its local tensor, or rows of that.
        shards: {name: the elements owned, a plain parameter that shares their memory}.
        host: their twins in the host's memory, if the optimizer is offloaded: see `offload`.
    """

    def __init__(
        self,
        model: GPT,
        config: TrainConfig,
        buckets: Buckets | None = None,
        *,
        offload: bool = False,
    ) -> None:
        """`buckets` are the parameters of whose local tensors this rank owns some rows only."""
        self.config = config
        self.buckets = Buckets() if buckets is None else buckets
        self.weights, self.copies = model.weights(), model.copies()
        self.held = {name: part_of(weight) for name, weight in self.weights.items()}
        self.owned = self.held | self.buckets.owned(self.held)
        self.shards = {
            name: nn.Parameter(self.buckets.rows(name, local_tensor(weight).detach()))
            for name, weight in self.weights.items()
        }
        # A rank may own nothing of a small parameter: then there is nothing to step on.
        owned = {name: shard for name, shard in self.shards.items() if shard.numel() > 0}
        self.host = HostOptimizerMemory(owned) if offload else None
        self.stepped = self.host.twins if self.host else owned
        groups = [
            {
                "params": [p for name, p in self.stepped.items() if is_decayed(name) == decayed],
                "weight_decay": config.weight_decay if decayed else 0.0,
            }
            for decayed in (True, False)
        ]
        self.torch_optimizer = make_optimizer(groups, config)

    def take_gradients(self) -> dict[str, Tensor]:
        """Hand each shard its part of the parameter's gradient; {name: that part}.

        Comm: what is left of the reductions of `buckets`.
        """
        parts = self.buckets.take()
        for name, weight in self.weights.items():
            if name not in parts:
                assert weight.grad is not None, f"{name} has no gradient"
                parts[name] = local_tensor(weight.grad)
            self.shards[name].grad = parts[name]
        for name, copy in self.copies.items():
            assert copy.grad is not None, f"the copy of {name} has no gradient"
            parts[name].add_(local_tensor(copy.grad))
        return parts

    def step(self, learning_rate: float) -> None:
        """Update the elements owned, and with them the local tensors.

        Comm: that of `buckets.gather`.
        """
        for group in self.torch_optimizer.param_groups:
            group["lr"] = learning_rate
        if self.host:
            self.host.take_gradients()
        self.torch_optimizer.step()
        if self.host:
            self.host.give_weights()
        self.buckets.gather()
        for name, copy in self.copies.items():
            local_tensor(copy).detach().copy_(local_tensor(self.weights[name]).detach())

    def zero_grad(self) -> None:
        self.buckets.forget()
        for name, weight in self.weights.items():
            weight.grad = self.shards[name].grad = None
        for copy in self.copies.values():
            copy.grad = None

    def state(self, name: str) -> dict[str, Tensor]:
        """The state of a parameter's local part: exp_avg and exp_avg_sq, or momentum_buffer."""
        stepped = self.stepped.get(name)
        return {} if stepped is None else self.torch_optimizer.state.get(stepped, {})


def make_optimizer(groups: list[dict[str, object]], config: TrainConfig) -> torch.optim.Optimizer:
    # A rank may own nothing at all, which torch refuses: a parameter without gradient rests.
    nothing: dict[str, object] = {"params": [nn.Parameter(torch.empty(0))]}
    groups = [group for group in groups if group["params"]] or [nothing]
    if config.optimizer == "sgd":
        # Fused on the CPU, torch 2.13 leaves most elements of a bfloat16 weight as they were
        # and writes a wrong momentum (pytorch issue 191763).
        fused = config.dtype != "bfloat16"
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=fused)
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


def counts_here(part: Part, mesh: DeviceMesh) -> bool:
    """Whether this rank counts its `part` of a parameter in a sum over the whole mesh.

    Along an axis that shards the parameter every rank counts its own; along every other axis the
    ranks hold the same elements and the first one counts, or of neighbours on tp that hold copies
    of a part the first of them. Pipeline stages hold different weights.
    """
    own = part.axes | {"pp"}
    coordinates = zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True)
    return all(
        axis in own
        or coordinate == 0
        or (axis == "tp" and part.tp_copies is not None and coordinate % part.tp_copies == 0)
        for axis, coordinate in coordinates
    )


def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """In float64, whatever the tensors are in.

    On a CPU torch adds float32 up in a few sums: of 4 million elements the squares are 2e-4 off.
    """
    norms = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in tensors]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)


def clip_gradients(shards: list[nn.Parameter], largest_norm: float, norm: float) -> None:
    """Scale the gradients so that `norm`, that of the whole model, is at most `largest_norm`.

    A `largest_norm` of 0 clips nothing. Gradients that are small enough are left alone: torch reads
    and writes them all, to multiply by one. Paper: Pascanu et al., arXiv 1211.5063, algorithm 1;
    torch adds 1e-6 to the norm it divides by.
    """
    if 0.0 < largest_norm < norm + 1e-6:
        total = torch.tensor(norm, dtype=torch.float64)
        torch.nn.utils.clip_grads_with_norm_(shards, largest_norm, total)
