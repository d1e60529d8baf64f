"""Initial weights: each rank draws the numbers of its own elements, equal to one device's.

Linears and embeddings are normal with `init_std`; the two projections that end a residual branch
get that over sqrt(2 layers), so that the residual stream does not grow with depth (Radford et al.,
GPT-2, section 2.3). Norms start at one, biases at zero.
"""

import torch

from dtensor_llm import rng
from dtensor_llm.config import ModelConfig
from dtensor_llm.model import GPT
from dtensor_llm.plan import local_slice, local_tensor


def standard_deviation(config: ModelConfig, name: str) -> float:
    """Of the initial elements of the parameter `name`, a matrix."""
    ends_residual_branch = name.endswith(("attention.output.weight", "mlp.down.weight"))
    return config.init_std / (2 * config.layers) ** 0.5 if ends_residual_branch else config.init_std


@torch.no_grad()
def initialize(model: GPT, seed: int) -> None:
    """Fill the local part of every parameter; the stream of numbers is the parameter's name."""
    for name, parameter in (*model.weights().items(), *model.copies().items()):
        part = local_tensor(parameter)
        if parameter.ndim == 1:
            part.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        where = local_slice(parameter)
        values = rng.normal(
            rng.key(seed, name),
            tuple(parameter.shape),
            offset=tuple(s.start for s in where),
            shape=tuple(s.stop - s.start for s in where),
            device=part.device,
        )
        part.copy_(values.mul_(standard_deviation(model.config, name)))
