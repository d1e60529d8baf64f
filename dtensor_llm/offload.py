"""Offload: what a step needs only at its end waits in the host's memory, not on the device.

The idea in five lines. AdamW's two moments are touched once a step, element by element, and are
the largest part of what a rank holds. Keep them on the host, with a copy of the weights that the
optimizer steps on. At the end of a step the rank's gradients are copied out, the host's processor
steps, and the new weights are copied in: per element and step one number each way, whatever the
number of microbatches. With ZeRO stage 3 weights and gradients can wait there as well: each
all-gather copies its shard in, and each reduced gradient is copied out.

Paper: Ren et al., ZeRO-Offload, arXiv 2101.06840, sections 3 and 4.1. Its delayed update, which
steps while the next forward pass runs on old weights, is left out: it changes the numbers.

| --offload | on the device          | on the host                 | copied                    |
|-----------|------------------------|-----------------------------|---------------------------|
| optimizer | weights, gradients     | moments, both of these too  | gradients out, weights in |
| weights   | a block's, when in use | weights, gradients, moments | out after each reduction, |
|           |                        |                             | in before each all-gather |

In bytes: `planner/host.py`.

Comm: none. Pinned buffers (on CUDA) let copies run beside the computation; they are made once.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

HOST = torch.device("cpu")


def policy(device: torch.device) -> CPUOffloadPolicy:
    """What `fully_shard` has to know to let shards wait on the host."""
    return CPUOffloadPolicy(pin_memory=device.type == "cuda")


class HostOptimizerMemory:
    """The host's twins of a rank's shards: weights to step on, and room for their gradients.

    Attributes:
        shards: {name: the rank's part on the device}, with gradients at the time of a step.
        twins: {name: the same weights on the host}, made once and used at every step.
    """

    def __init__(self, shards: Mapping[str, nn.Parameter]) -> None:
        self.shards = shards
        self.twins = {name: nn.Parameter(buffer_for(shard)) for name, shard in shards.items()}
        for name, twin in self.twins.items():
            twin.grad = buffer_for(shards[name])
        self.take_weights()

    @torch.no_grad()
    def take_weights(self) -> None:
        """Device to host: for whoever has changed the weights other than by a step."""
        for name, twin in self.twins.items():
            twin.copy_(self.shards[name], non_blocking=True)
        self.wait()

    def take_gradients(self) -> None:
        """Device to host; when it returns, the host can read them."""
        for name, twin in self.twins.items():
            gradient = self.shards[name].grad
            assert gradient is not None and twin.grad is not None, f"{name} has no gradient"
            twin.grad.copy_(gradient, non_blocking=True)
        self.wait()

    @torch.no_grad()
    def give_weights(self) -> None:
        """Host to device, in the order of the device's stream: the next forward comes after it.

        So does the next `take_gradients`, which waits: the host does not step on what is not read.
        """
        for name, twin in self.twins.items():
            self.shards[name].copy_(twin, non_blocking=True)

    def wait(self) -> None:
        """Until the device has done what it was asked to; the one wait of a step."""
        for device in {shard.device for shard in self.shards.values()}:
            if device.type == "cuda":
                done = torch.cuda.Event()
                done.record(torch.cuda.current_stream(device))
                done.synchronize()


def buffer_for(shard: Tensor) -> Tensor:
    """On the host, uninitialized; pinned where the device copies by itself."""
    return torch.empty_like(shard, device=HOST, pin_memory=shard.device.type == "cuda")
