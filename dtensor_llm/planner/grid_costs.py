"""What tensor parallelism in two dimensions communicates, for every microbatch: Q x Q ranks.

Where a schedule splits the backward, the functions that we wrote ourselves do all of theirs twice
in every stage but the first: autograd cannot tell them that one half is asked for.
"""

import math

from dtensor_llm.config import Config
from dtensor_llm.planner.parameters import (
    Place,
    Shape,
    block_parameters,
    blocks_of,
    groups,
    is_first,
    is_last,
    num_blocks,
    owned_shape,
    part,
    stages_of,
)
from dtensor_llm.planner.payloads import num_tokens, over, times
from dtensor_llm.planner.pipeline_costs import split_backwards
from dtensor_llm.planner.traffic import Traffic


def product_forward(config: Config, place: Place, shape: Shape) -> list[Traffic]:
    """x W^T, W of m n: one line of blocks of W after the other is broadcast down the columns, and
    b t m/q is reduced along the rows."""
    found = []
    for block, result in grid_lines(config, place, shape):
        found += over(config, "broadcast", ("tp_row",), block)
        found += over(config, "reduce", ("tp_col",), result)
    return found


def product_backward(config: Config, place: Place, shape: Shape) -> list[Traffic]:
    """For each line both are broadcast, and the gradient of the block is reduced."""
    found = []
    for block, result in grid_lines(config, place, shape):
        found += over(config, "broadcast", ("tp_row",), block)
        found += over(config, "broadcast", ("tp_col",), result)
        found += over(config, "reduce", ("tp_row",), block)
    return found


def grid_lines(config: Config, place: Place, shape: Shape) -> list[tuple[int, int]]:
    """Of each line of blocks of a matrix: bytes of the block in the rank's column, and of what the
    tokens make of its rows."""
    q, size = config.parallel.mesh.tp_row, config.train.element_size
    columns = part(shape[1], place.tp_col, q)
    rows = [part(shape[0], line, q) for line in range(q)]
    return [(n * columns * size, num_tokens(config) * n * size) for n in rows]


def grid_products(config: Config, place: Place) -> list[Traffic]:
    """Every linear of the blocks, and the head."""
    model, m = config.model, config.microbatches
    shapes = [p.shape for p in block_parameters(model).values() if len(p.shape) == 2]
    head, last = (model.vocab_size, model.width), is_last(config, place)
    found: list[Traffic] = []
    for shape, count, again in (
        *((shape, num_blocks(config, place), blocks_again(config, place)) for shape in shapes),
        (head, int(last), last * head_again(config, place)),
    ):
        found += times(m * count, product_forward(config, place, shape))
        found += times(m * count + again, product_backward(config, place, shape))
    return found


def blocks_again(config: Config, place: Place) -> int:
    """Backwards of blocks that are done twice in a step."""
    return sum(
        blocks_of(config, stage) * split_backwards(config, stage)
        for stage in stages_of(config, place)
    )


def head_again(config: Config, place: Place) -> int:
    """Likewise of what the last of the rank's stages has in no block."""
    return split_backwards(config, stages_of(config, place)[-1])


def grid_tables(config: Config, place: Place) -> list[Traffic]:
    """Embedding and positions: blocks are broadcast forward, their gradients reduced backward."""
    model = config.model
    tables = [(model.vocab_size, model.width)]
    tables += [(model.seq_len, model.width)] * (model.positions == "learned")
    found = [
        t
        for shape in tables
        for block, _ in grid_lines(config, place, shape)
        for operation in ("broadcast", "reduce")
        for t in over(config, operation, ("tp_row",), block)
    ]
    return times(config.microbatches * is_first(config, place), found)


def grid_norms(config: Config, place: Place) -> list[Traffic]:
    """Sums of each token over the width: with a mean two forward and two at once backward."""
    size = num_tokens(config) * max(4, config.train.element_size)
    sums = 2 if config.model.norm == "layernorm" else 1
    forward = sums * over(config, "all-reduce", ("tp_col",), size)
    backward = over(config, "all-reduce", ("tp_col",), sums * size)
    each, last = config.model.norms_per_block, is_last(config, place)
    norms = config.microbatches * (each * num_blocks(config, place) + last)
    again = each * blocks_again(config, place) + last * head_again(config, place)
    return times(norms, forward) + times(norms + again, backward)


def grid_gradients(config: Config, place: Place) -> list[Traffic]:
    """Gradients of vectors, Partial over the rows, summed once a step in one buffer."""
    vectors = [p for g in groups(config, place) for p in g.values() if len(p.shape) == 1]
    elements = sum(math.prod(owned_shape(p, config, place)) for p in vectors)
    if elements == 0:
        return []
    return over(config, "all-reduce", ("tp_row",), elements * config.train.element_size)
