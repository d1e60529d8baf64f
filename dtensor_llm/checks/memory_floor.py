"""The least memory a run takes, in bytes: what is refused when a machine has less.

Counted low on purpose, since a false refusal is worse than a late one: weights, gradients,
optimizer state and what the backward pass must find again; no gathered copies, no buffers.
"""

from dataclasses import dataclass

from dtensor_llm import pipeline
from dtensor_llm.config import Config, ModelConfig
from dtensor_llm.stages import layers_of_stages


@dataclass(frozen=True)
class MemoryFloor:
    """Bytes of all ranks together: (weights + gradients + moments) x copies, and activations.

    Where ZeRO keeps the weights whole and shares out the rest, there are more copies of those.
    """

    parameters: int
    tensors_per_parameter: int
    copies: int
    more_copies_of_weights: int
    element_size: int
    activations: int

    @property
    def states(self) -> int:
        tensors = self.tensors_per_parameter * self.copies + self.more_copies_of_weights
        return self.parameters * tensors * self.element_size

    @property
    def total(self) -> int:
        return self.states + self.activations


def memory_floor(config: Config) -> MemoryFloor:
    """The least memory of all ranks of a run together.

    States: weights, gradients and the optimizer's moments (two for adamw, one for sgd with
    momentum), an offloaded optimizer's own weights and gradients, once for each replica: dp of them
    at ZeRO stage 0, dp_replicate at the others, of which 1 and 2 have the weights dp times; and one
    more for the reference of a parity check.
    Activations: what each microbatch in flight keeps for its backward pass.
    """
    train, parallel = config.train, config.parallel
    replicas = config.dp if parallel.zero == 0 else parallel.mesh.dp_replicate
    sequences = min(config.batch_parts * config.micro_batch_size, train.global_batch_size)
    tokens = sequences * config.model.seq_len
    blocks = _blocks_in_flight(config)
    kept = blocks * _kept_per_token_and_block(config.model) + config.model.vocab_size
    return MemoryFloor(
        parameters=config.model.num_parameters,
        tensors_per_parameter=2 + train.num_moments + 2 * (parallel.offload == "optimizer"),
        copies=replicas + int(config.run.check_parity),
        more_copies_of_weights=config.dp - replicas if parallel.zero in (1, 2) else 0,
        element_size=train.element_size,
        activations=tokens * kept * train.element_size,
    )


def _blocks_in_flight(config: Config) -> int:
    """Blocks whose activations of a microbatch are held, by all ranks of a pipeline together.

    At the peak of each: so many microbatches, each on one of its stages, and that on its smallest.
    """
    layers = layers_of_stages(config)
    return sum(
        pipeline.live_microbatches(config, rank) * min(len(layers[stage]) for stage in own)
        for rank, own in enumerate(pipeline.placement(config))
    )


def _kept_per_token_and_block(model: ModelConfig) -> int:
    """Elements per token that the backward pass of one block needs.

    Inputs of the norms and of the linears behind them, query, key, value and attention output,
    and the feed-forward part: up and its GELU, or gate, its SiLU, up and the product. The counting
    of Korthikanti et al., arXiv 2205.05198, section 4.1, without what fused attention avoids.
    """
    attention = (2 * model.heads + 2 * model.num_kv_heads) * model.head_size
    if model.attention_dropout_rate > 0:
        attention += model.heads * model.seq_len
    feed_forward = (4 if model.mlp == "swiglu" else 2) * model.num_ffn
    return 2 * model.norms_per_block * model.width + attention + feed_forward
