"""What a rank communicates in one optimizer step, in closed form: a function for each purpose.

b sequences of t tokens make a microbatch of a rank and there are m of them; d is the width of the
residual stream; a rank's stage has L blocks. A step moves four kinds of things:

| what                    | over     | operations of a rank                       | payload       |
|-------------------------|----------|--------------------------------------------|---------------|
| activations             | tp       | 4 m L all-reduces, or 4 m L pairs          | b t d         |
| ... of parallel blocks  | tp       | 2 m L all-reduces, or 2 m L pairs          | b t d         |
| ... gathered again      | tp       | 2 m L all-gathers more                     | b t d         |
| ... of neighbour stages | pp       | m sent and m received, for each neighbour  | b t d, t / tp |
| gradients, ZeRO 0       | dp       | 1 all-reduce for each block, and the rest  | the block     |
| weights, ZeRO 1 and 2   | dp_shard | 1 all-gather for each                      | the block     |
| weights, ZeRO 3         | dp_shard | 2 m all-gathers for each block, m the rest | the block     |
| gradients, ZeRO 1       | dp_shard | 1 reduce-scatter for each                  | the block     |
| gradients, ZeRO 2 and 3 | dp_shard | m reduce-scatters for each; 1 if deferred  | the block     |

In two dimensions of tensor parallelism, a product x W^T of n inputs and m outputs takes q steps, a
broadcast and a reduce each, and backward two broadcasts and a reduce: see `grid_costs`.

and some numbers: tokens to count, the loss, the gradient norm. Every line is held equal to what a
real step is seen to communicate (`recorder`), to the byte. Only steps after the first ones: in the
first the stages of a pipeline agree on what they will send, and in the second (third, with a static
graph) DistributedDataParallel has all ranks cut its buckets alike.

A strategy adds a function here and a row in PURPOSES.
"""

import math
from collections.abc import Callable

from dtensor_llm.config import Config
from dtensor_llm.mesh import TP_COPIES
from dtensor_llm.planner.grid_costs import (
    blocks_again,
    grid_gradients,
    grid_norms,
    grid_products,
    grid_tables,
    head_again,
)
from dtensor_llm.planner.parameters import (
    Parameter,
    Place,
    groups,
    in_order_of_gradients,
    is_first,
    is_last,
    num_blocks,
    num_copies,
    owned_shape,
    stages_of,
)
from dtensor_llm.planner.payloads import (
    ALL_AXES,
    activation,
    bytes_of,
    num_tokens,
    over,
    padded_bytes,
    shards_tokens,
    times,
)
from dtensor_llm.planner.pipeline_costs import (
    gathered_groups,
    pipeline_activations,
    tied_gradients,
)
from dtensor_llm.planner.traffic import Traffic, merged, traffic

DATA_AXES = ("dp_replicate", "dp_shard")


def step_traffic(config: Config, place: Place) -> list[Traffic]:
    """What the rank at `place` communicates in one step: one entry per operation and axis."""
    return merged(part for purpose in PURPOSES.values() for part in purpose(config, place))


# --- tensor and sequence parallelism: for every microbatch


def enter(config: Config) -> list[Traffic]:
    """Of the residual stream into a split multiplication, forward and backward.

    Megatron's f: nothing and an all-reduce; with tokens sharded an all-gather and a reduce-scatter.
    Gathered tokens that are not kept are gathered once more.
    """
    again = shards_tokens(config) and config.parallel.gather_again
    more = over(config, "all-gather", ("tp",), activation(config)) if again else []
    return leave(config) + more


def leave(config: Config) -> list[Traffic]:
    """Back to the residual stream: the other way round, forward and backward. Megatron's g."""
    kinds = ["all-gather", "reduce-scatter"] if shards_tokens(config) else ["all-reduce"]
    return [t for kind in kinds for t in over(config, kind, ("tp",), activation(config))]


def tensor_parallel_blocks(config: Config, place: Place) -> list[Traffic]:
    """Attention and MLP each enter and leave: four all-reduces a block, or four pairs. Those of a
    parallel block do so together: half as many."""
    block = config.model.norms_per_block * (enter(config) + leave(config))
    return times(config.microbatches * num_blocks(config, place), block)


def repeated_exchanges(config: Config, place: Place) -> list[Traffic]:
    """With `async_tp`: a split backward does all of the products' backward a second time."""
    if not config.parallel.async_tp:
        return []
    scatter = over(config, "reduce-scatter", ("tp",), activation(config))
    gather = over(config, "all-gather", ("tp",), activation(config))
    entry = scatter + gather * config.parallel.gather_again
    end = [] if config.model.parallel_block else gather  # there no product is left
    found = times(blocks_again(config, place), config.model.norms_per_block * (entry + end))
    return found + times(is_last(config, place) * head_again(config, place), entry)


def tensor_parallel_embedding(config: Config, place: Place) -> list[Traffic]:
    """Each rank embeds its own token ids, and the sum leaves to the residual stream."""
    return times(config.microbatches * is_first(config, place), leave(config))


def tensor_parallel_head(config: Config, place: Place) -> list[Traffic]:
    """The residual stream enters the head, which computes the rank's columns of the logits."""
    return times(config.microbatches * is_last(config, place), enter(config))


def vocabulary_parallel_loss(config: Config, place: Place) -> list[Traffic]:
    """Three numbers a token: the largest logit, then the sum of exponentials and the label's logit.

    In float32 at least. Backward needs nothing. On a grid over its columns.
    """
    size = num_tokens(config) * max(4, config.train.element_size)
    axes = ("tp", "tp_col")
    parts = [
        t for n in (1, 2) for axis in axes for t in over(config, "all-reduce", (axis,), n * size)
    ]
    return times(config.microbatches * is_last(config, place), parts)


def sequence_parallel_gradients(config: Config, place: Place) -> list[Traffic]:
    """Gradients that are Partial over tp, summed once a step in one buffer: norms, positions and
    the biases that are added after a sum, or in parallel blocks to the first rank's part, also
    where tokens are not sharded. Of each what this rank holds after dp has reduced it."""
    elements = sum(
        math.prod(owned_shape(parameter, config, place))
        for group in groups(config, place)
        for parameter in group.values()
        if (parameter.meets_residual if shards_tokens(config) else parameter.on_first_rank)
    )
    if elements == 0:
        return []
    return over(config, "all-reduce", ("tp",), elements * config.train.element_size)


def copied_gradients(config: Config, place: Place) -> list[Traffic]:
    """Gradients of key/value heads that tp_copies ranks hold copies of, summed once a step in one
    buffer. Of each what this rank holds after dp has reduced it."""
    copied = [
        parameter
        for group in groups(config, place)
        for parameter in group.values()
        if num_copies(parameter, config) > 1
    ]
    if not copied:
        return []
    tp, copies = config.parallel.mesh.tp, num_copies(copied[0], config)
    payload = sum(math.prod(owned_shape(p, config, place)) for p in copied)
    payload *= config.train.element_size
    if copies == tp:
        return over(config, "all-reduce", ("tp",), payload)
    return [traffic("all-reduce", TP_COPIES, copies, payload)]


# --- data parallelism: for every group of parameters, a block or the rest of the stage


def data_parallel_gradients(config: Config, place: Place) -> list[Traffic]:
    """ZeRO 0: one all-reduce for each message, once a step, however many microbatches.

    A message is a group, or what DistributedDataParallel makes of the parameters in the order of
    their gradients: it closes a bucket as soon as that holds `ddp_bucket_mb` or more.
    """
    if config.parallel.zero > 0:
        return []
    messages = [list(group.values()) for group in groups(config, place)]
    if config.parallel.ddp:
        messages = [
            b for stage in stages_of(config, place) for b in ddp_buckets(config, stage, place)
        ]
    return [
        t
        for message in messages
        for t in over(config, "all-reduce", DATA_AXES, bytes_of(message, config, place))
    ]


def ddp_buckets(config: Config, stage: int, place: Place) -> list[list[Parameter]]:
    limit = int(config.parallel.ddp_bucket_mb * 2**20)
    buckets: list[list[Parameter]] = []
    is_full = True
    for parameter in in_order_of_gradients(config, stage):
        if is_full:
            buckets.append([])
        buckets[-1].append(parameter)
        is_full = bytes_of(buckets[-1], config, place) >= limit
    return buckets


def zero_weights(config: Config, place: Place) -> list[Traffic]:
    """ZeRO: the all-gathers, of weights whose rows are padded to a multiple of dp_shard.

    Stages 1 and 2 gather what has been updated, once a step.

    Stage 3: a block is gathered before its forward and, if it was freed, again before its backward,
    unless it is whole still. What is not in a block is gathered once and stays until its gradients
    have been reduced. That is after each microbatch; under a pipeline see `gathers`. Prefetch
    changes none of that.
    """
    if config.parallel.zero == 0:
        return []
    parts: list[Traffic] = []
    for gathered in gathered_groups(config, place):
        payload = padded_bytes(gathered.group, config, place)
        parts += times(gathered.times, over(config, "all-gather", ("dp_shard",), payload))
    return parts


def zero_gradients(config: Config, place: Place) -> list[Traffic]:
    """ZeRO: a reduce-scatter over dp_shard, then an all-reduce of the rank's part over
    dp_replicate, for each group. Stage 2 scatters each microbatch and sums the replicas once, stage
    3 does both for each microbatch; deferred, as under a pipeline of stage 3, all is done once."""
    parallel = config.parallel
    deferred = parallel.defer_reduce or (parallel.zero == 3 and parallel.mesh.pp > 1)
    scatters = 1 if deferred or parallel.zero == 1 else config.microbatches
    parts = []
    for group in groups(config, place) if parallel.zero > 0 else []:
        whole = padded_bytes(group, config, place)
        own = whole // parallel.mesh.dp_shard
        parts += times(scatters, over(config, "reduce-scatter", ("dp_shard",), whole))
        sums = over(config, "all-reduce", ("dp_replicate",), own)
        parts += times(scatters if parallel.zero == 3 else 1, sums)
    return parts


# --- numbers that all ranks must agree on


def token_count(config: Config, _: Place) -> list[Traffic]:
    """The valid tokens of the global batch, an int64, summed over one data axis after the other."""
    axes = (*DATA_AXES, "tp_row")
    return [t for axis in axes for t in over(config, "all-reduce", (axis,), 8)]


def loss_and_norm(config: Config, _: Place) -> list[Traffic]:
    """Loss and squared gradient norm: two float64, summed over all ranks."""
    return over(config, "all-reduce", ALL_AXES, 16)


PURPOSES: dict[str, Callable[[Config, Place], list[Traffic]]] = {
    "blocks, tensor parallel": tensor_parallel_blocks,
    "products, done twice": repeated_exchanges,
    "embedding, tensor parallel": tensor_parallel_embedding,
    "head, tensor parallel": tensor_parallel_head,
    "loss, vocabulary parallel": vocabulary_parallel_loss,
    "gradients, sequence parallel": sequence_parallel_gradients,
    "gradients, copied heads": copied_gradients,
    "linears, tensor parallel in 2D": grid_products,
    "embeddings, tensor parallel in 2D": grid_tables,
    "norms, tensor parallel in 2D": grid_norms,
    "gradients, tensor parallel in 2D": grid_gradients,
    "gradients, data parallel": data_parallel_gradients,
    "weights, ZeRO": zero_weights,
    "gradients, ZeRO": zero_gradients,
    "activations, pipeline": pipeline_activations,
    "tied embedding, pipeline": tied_gradients,
    "token count": token_count,
    "loss and gradient norm": loss_and_norm,
}
