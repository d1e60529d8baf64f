"""The parameters of a rank's pipeline stages in closed form: what costs and memory are made of.

A parameter is divided twice: tensor parallelism cuts one of its dims (in two dimensions, rows and
columns), then ZeRO cuts the rows of what is left. Both cut as `torch.chunk` does: parts of equal
size, but for the last ones.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dtensor_llm import pipeline
from dtensor_llm.config import Config, ModelConfig
from dtensor_llm.stages import layers_of_stages

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """A rank, by its coordinate on each axis."""

    pp: int = 0
    dp_replicate: int = 0
    dp_shard: int = 0
    tp: int = 0
    tp_row: int = 0
    tp_col: int = 0


@dataclass(frozen=True)
class Parameter:
    """One parameter of a stage.

    Args:
        shape: global.
        split: the dim that tp cuts; None where each rank holds the whole.
        meets_residual: it works between the split multiplications, where sequence parallelism
            shards the tokens and so makes its gradient Partial.
        most_parts: into how many parts tp can cut it at most: with more ranks several hold the
            same one.
        on_first_rank: only the first tp rank uses it, so that it counts once in a sum.
        is_copy: the second one on its rank, which follows the first without an optimizer.
    """

    shape: Shape
    split: int | None = None
    meets_residual: bool = False
    most_parts: int | None = None
    on_first_rank: bool = False
    is_copy: bool = False


Group = Mapping[str, Parameter]


def part(size: int, index: int, count: int) -> int:
    """Length of part `index` of `count` of a dim, cut as by `torch.chunk`."""
    largest = -(-size // count)
    return max(0, min(largest, size - index * largest))


def stages_of(config: Config, place: Place) -> tuple[int, ...]:
    """The rank's pipeline stages, in the order of the model."""
    return pipeline.placement(config)[place.pp]


def is_first(config: Config, place: Place) -> bool:
    """Whether the rank holds the embeddings."""
    return 0 in stages_of(config, place)


def is_last(config: Config, place: Place) -> bool:
    """Whether the rank holds the final norm, the head and the loss."""
    return pipeline.num_stages(config) - 1 in stages_of(config, place)


def num_blocks(config: Config, place: Place) -> int:
    """Blocks of all of the rank's stages."""
    return sum(blocks_of(config, stage) for stage in stages_of(config, place))


def blocks_of(config: Config, stage: int) -> int:
    return len(layers_of_stages(config)[stage])


def groups(config: Config, place: Place) -> list[Group]:
    """The rank's parameters as data parallelism takes them together.

    Of each stage each block, then the rest; and what two stages share by itself.
    """
    found: list[Group] = []
    for stage in stages_of(config, place):
        found += [block_parameters(config.model)] * blocks_of(config, stage)
        found += [rest] if (rest := other_parameters(config, stage)) else []
    if shares_table(config) and is_first(config, place):
        found.append({"token_embedding.weight": table(config.model)})
    return found


def shares_table(config: Config) -> bool:
    """Whether the first and the last of several stages have one tied parameter together.

    Not where each of them is wrapped by itself: then they have a copy each.
    """
    is_wrapped = config.dp > 1 and config.parallel.zero in (0, 3)
    apart = is_wrapped or config.parallel.offload == "weights"
    return pipeline.ties_on_one_rank(config) and not apart


def block_parameters(model: ModelConfig) -> Group:
    """Those of one block."""
    d, f, kv = model.width, model.num_ffn, model.num_kv_heads * model.head_size
    found: dict[str, Parameter] = {}
    for name in ["norm"] if model.parallel_block else ["attention_norm", "mlp_norm"]:
        found |= norm_parameters(name, model)
    columns = {"attention.query": (d, d), "attention.key": (kv, d), "attention.value": (kv, d)}
    if model.fused_qkv:
        columns = {"attention.qkv": (d + 2 * kv, d)}
    columns["mlp.up"] = (f, d)
    if model.mlp == "swiglu":
        columns["mlp.gate"] = (f, d)
    for name, shape in columns.items():
        heads = model.num_kv_heads if name in ("attention.key", "attention.value") else None
        found[f"{name}.weight"] = Parameter(shape, split=0, most_parts=heads)
        if model.bias and name != "mlp.gate":
            found[f"{name}.bias"] = Parameter(shape[:1], split=0, most_parts=heads)
    for name, shape in {"attention.output": (d, d), "mlp.down": (d, f)}.items():
        found[f"{name}.weight"] = Parameter(shape, split=1)
        if model.bias:
            found[f"{name}.bias"] = Parameter(
                (d,), meets_residual=True, on_first_rank=model.parallel_block
            )
    return found


def other_parameters(config: Config, stage: int) -> Group:
    """Those of a stage that are in no block, in the order of use, but for what stages share."""
    model = config.model
    first, last = stage == 0, stage == pipeline.num_stages(config) - 1
    shared = shares_table(config)
    found: dict[str, Parameter] = {}
    if first and not shared:
        found["token_embedding.weight"] = table(model)
    if first and model.positions == "learned":
        positions = Parameter((model.seq_len, model.width), meets_residual=True)
        found["position_embedding.weight"] = positions
    if last:
        found |= norm_parameters("final_norm", model)
    if last and not model.tied_embeddings:
        found["head.weight"] = table(model)
    elif last and not first and not shared:
        copy = pipeline.ties_on_one_rank(config)
        found["token_embedding.weight"] = replace(table(model), is_copy=copy)
    return found


def table(model: ModelConfig) -> Parameter:
    """The token embedding's weight, or the head's."""
    return Parameter((model.vocab_size, model.width), split=0)


def in_order_of_gradients(config: Config, stage: int) -> list[Parameter]:
    """The stage's parameters as their gradients come in a backward pass.

    Last module first, in each the bias first. A tied table comes when it has been looked up in, but
    on a stage that has it for the head alone.
    """
    rest, block = dict(other_parameters(config, stage)), block_parameters(config.model)
    late = ["position_embedding", "token_embedding"] if stage == 0 else []
    early = ["head", "final_norm"] if late else ["head", "token_embedding", "final_norm"]
    modules = ["mlp.down", "mlp.up", "mlp.gate", "mlp_norm", "attention.output"]
    modules += ["attention.value", "attention.key", "attention.query", "attention.qkv"]
    modules += ["attention_norm", "norm"]

    def ordered(group: Group, names: list[str]) -> list[Parameter]:
        wanted = [f"{name}.{kind}" for name in names for kind in ("bias", "weight")]
        return [group[name] for name in wanted if name in group]

    blocks = blocks_of(config, stage) * ordered(block, modules)
    return ordered(rest, early) + blocks + ordered(rest, late)


def norm_parameters(name: str, model: ModelConfig) -> dict[str, Parameter]:
    has_bias = model.norm == "layernorm" and model.bias
    kinds = ("weight", "bias") if has_bias else ("weight",)
    return {f"{name}.{k}": Parameter((model.width,), meets_residual=True) for k in kinds}


def tp_shape(parameter: Parameter, config: Config, place: Place) -> Shape:
    """The shape that tensor parallelism leaves to the rank."""
    if config.parallel.mesh.tp_row > 1:
        return grid_shape(parameter.shape, config, place)
    if parameter.split is None:
        return parameter.shape
    shape, copies = list(parameter.shape), num_copies(parameter, config)
    parts = config.parallel.mesh.tp // copies
    shape[parameter.split] = part(shape[parameter.split], place.tp // copies, parts)
    return tuple(shape)


def num_copies(parameter: Parameter, config: Config) -> int:
    """How many tp ranks hold the same part of a parameter that tp cuts."""
    tp = config.parallel.mesh.tp
    return 1 if parameter.most_parts is None else max(1, tp // parameter.most_parts)


def grid_shape(shape: Shape, config: Config, place: Place) -> Shape:
    """The rank's block of a matrix, or its columns' part of a vector, on a q x q grid."""
    q = config.parallel.mesh.tp_col
    rows = [part(size, place.tp_row, q) for size in shape[:-1]]
    return (*rows, part(shape[-1], place.tp_col, q))


def shards_weights(config: Config) -> bool:
    """Whether ZeRO cuts the weights themselves."""
    return config.parallel.zero == 3


def rest_shape(parameter: Parameter, config: Config, place: Place) -> Shape:
    """The shape of what the rank holds of the weight between steps."""
    if shards_weights(config):
        return owned_shape(parameter, config, place)
    return tp_shape(parameter, config, place)


def owned_shape(parameter: Parameter, config: Config, place: Place) -> Shape:
    """The shape of what the rank reduces and updates: rows, but for ZeRO stage 0."""
    shape = tp_shape(parameter, config, place)
    if config.parallel.zero == 0:
        return shape
    return (part(shape[0], place.dp_shard, config.parallel.mesh.dp_shard), *shape[1:])


def padded_numel(parameter: Parameter, config: Config, place: Place) -> int:
    """Elements of the weight on all dp_shard ranks, rows padded so that they hold equally many."""
    shape = tp_shape(parameter, config, place)
    shards = config.parallel.mesh.dp_shard
    return -(-shape[0] // shards) * shards * math.prod(shape[1:])
