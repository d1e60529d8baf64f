"""How the blocks are cut into pipeline stages: all that asks who holds a block asks here.

A pipeline is as fast as its slowest stage. The first stage also has the embedding, the last one the
final norm, the head and the loss, and a head of a large vocabulary costs as much as several blocks:
equal counts of blocks are then not equal work. `--stage-layers auto` cuts by cost.

The unit of cost: floating-point operations for one token, forward and backward, where a
multiplication and an addition are two. A product with n weights takes 2n forward, and 4n backward:
the gradients of its input and of the weights.

| part      | forward                                        | backward                           |
|-----------|------------------------------------------------|------------------------------------|
| block     | 2 per weight of a linear; attention 4 a h k;   | twice that                         |
|           | norms; d for each of two residual additions    |                                    |
| embedding | a lookup: none; positions, if learned: d       | scatter-add: d; positions: d       |
| head      | the final norm; 2 d v; the loss 4 v            | twice that                         |
| a norm    | LayerNorm 7 d, RMSNorm 4 d                     | twice that                         |

d: width; v: vocabulary; h k: all query heads together; a: tokens that a token attends to, on
average (t + 1) / 2 of a sequence of t, or t where dropout of attention takes the path without a
causal kernel. Softmax, the nonlinearity and biases are left out. tp and dp divide all parts alike.
What an operation takes for its bytes and not for its arithmetic is not seen: `balance` takes
measured times as well.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise
from math import inf

from dtensor_llm.config import Config, ConfigError, ModelConfig
from dtensor_llm.pipeline import num_stages, settings_for, spell
from dtensor_llm.refused_pairs import RefusedPair
from dtensor_llm.settings import join_or

MOST_BALANCED = 512
"""Blocks; the search takes seconds from here on."""


def layers_of_stages(config: Config) -> tuple[range, ...]:
    """The blocks of every stage, in the order of the pipeline.

    Raises:
        ConfigError: `--layers`, the stages and `--stage-layers` do not fit together.
    """
    if problems := list(split_problems(config)):
        raise ConfigError(problems)
    model, split = config.model, config.parallel.stage_layers
    if split == "auto":
        parts = balance(tuple(costs(model)), num_stages(config))
        # Item 0 is the embedding, the last one the head.
        return tuple(range(max(0, p.start - 1), min(p.stop - 1, model.layers)) for p in parts)
    counts = even_counts(config) if split == "even" else counts_by_hand(config)
    return tuple(range(start, stop) for start, stop in pairwise([0, *accumulate(counts)]))


def even_counts(config: Config) -> list[int]:
    """As even as can be, the first stages one more."""
    size, extra = divmod(config.model.layers, num_stages(config))
    return [size + (stage < extra) for stage in range(num_stages(config))]


def is_by_hand(config: Config) -> bool:
    return config.parallel.stage_layers not in ("even", "auto")


def counts_by_hand(config: Config) -> list[int]:
    return [int(text) for text in config.parallel.stage_layers.split(",")]


def split_problems(config: Config) -> Iterator[str]:
    """What is wrong with the cut, in words, with the cure; nothing where it can be made."""
    layers, stages, split = config.model.layers, num_stages(config), config.parallel.stage_layers
    if split == "auto" and layers > MOST_BALANCED:
        yield (
            f"--layers {layers} is more than {MOST_BALANCED}, but "
            f"{RefusedPair.BALANCED_LAYERS.reason}; --stage-layers even or --layers "
            f"{MOST_BALANCED} would do"
        )
    elif split in ("even", "auto"):
        fewest = stages if split == "even" else stages - 2
        exempt = "" if split == "even" else ", but for the first and the last"
        cures = [f"--layers {fewest}", *settings_for(config, layers + stages - fewest)]
        cures += ["--stage-layers auto"] * (split == "even" and layers >= stages - 2)
        if layers < fewest:
            yield (
                f"--layers {layers} is too few for {spell(config)}: "
                f"{RefusedPair.PP.reason}{exempt}; {join_or(cures)} would do"
            )
    else:
        yield from _problems_by_hand(config, counts_by_hand(config))


def _problems_by_hand(config: Config, counts: list[int]) -> Iterator[str]:
    layers, stages, split = config.model.layers, num_stages(config), config.parallel.stage_layers
    others = settings_for(config, layers) or [f"--layers {stages}"]
    cures = [f"--stage-layers even with {join_or(others)}"]
    if layers >= stages - 2:
        even = ",".join(map(str, even_counts(config)))
        cures = [f"--stage-layers {even if layers >= stages else 'auto'}"]
    empty = [str(stage) for stage, n in enumerate(counts) if not n and 0 < stage < len(counts) - 1]
    if len(counts) != stages:
        fits = sum(counts) == layers and not empty
        cures += settings_for(config, len(counts)) if fits else []
        yield (
            f"--stage-layers {split} has {len(counts)} counts for {spell(config)}, but "
            f"{RefusedPair.COUNTS_AND_PP.reason}; {join_or(cures)} would do"
        )
    elif empty:
        yield (
            f"--stage-layers {split} leaves stage {' and '.join(empty)} empty, but "
            f"{RefusedPair.NO_BLOCK.reason}; {join_or(cures)} would do"
        )
    elif sum(counts) != layers:
        cures += [f"--layers {sum(counts)}"] * any(counts)
        yield (
            f"--stage-layers {split} is {sum(counts)} blocks of --layers {layers}, but "
            f"{RefusedPair.COUNTS_AND_LAYERS.reason}; {join_or(cures)} would do"
        )


def costs(model: ModelConfig) -> list[int]:
    """Of the embedding, of each block and of the head: see the table above."""
    d, v = model.width, model.vocab_size
    query, key_value = d, model.num_kv_heads * model.head_size
    weights = d * (2 * query + 2 * key_value) + d * model.num_ffn * (
        3 if model.mlp == "swiglu" else 2
    )
    attention = (2 if model.attention_dropout_rate == 0 else 4) * query
    attention *= model.seq_len + (model.attention_dropout_rate == 0)
    norm = (7 if model.norm == "layernorm" else 4) * d
    block = 2 * weights + attention + model.norms_per_block * norm + 2 * d
    head = norm + 2 * d * v + 4 * v
    embedding = d + 2 * d * (model.positions == "learned")
    return [embedding, *[3 * block] * model.layers, 3 * head]


@cache
def balance(costs: tuple[float, ...], num_parts: int) -> tuple[range, ...]:
    """Cut items in a row into parts, each of one at least, so that the dearest part is cheapest.

    Of all such cuts, the one with the least sum of squares, so that no other part is dearer than it
    must be; of those, the one whose first parts have most items. Exact, by dynamic programming over
    the items left and the parts left.

    Args:
        costs: of each item, in any unit, none negative; a part costs their sum.
        num_parts: 1 or more.

    Raises:
        ValueError: there are fewer items than parts.
    """
    if not 1 <= num_parts <= len(costs):
        raise ValueError(f"{len(costs)} items cannot be cut into {num_parts} parts of one at least")
    sums, end = [0, *accumulate(costs)], len(costs)
    dearest = _best_of_rest(sums, num_parts, max, inf)[num_parts][0]
    squares = _best_of_rest(sums, num_parts, _add_square, dearest)
    cuts = [0]
    for parts_left in range(num_parts - 1, -1, -1):
        start, best = cuts[-1], squares[parts_left + 1][cuts[-1]]
        cuts.append(
            max(
                stop
                for stop in range(start + 1, end + 1)
                if sums[stop] - sums[start] <= dearest
                and _add_square(sums[stop] - sums[start], squares[parts_left][stop]) == best
            )
        )
    return tuple(range(start, stop) for start, stop in pairwise(cuts))


def _add_square(cost: float, rest: float) -> float:
    return cost**2 + rest


def _best_of_rest(
    sums: Sequence[float], num_parts: int, join: Callable[[float, float], float], limit: float
) -> list[list[float]]:
    """[parts][item]: the least that the items from this one on can have in so many parts.

    `sums` are those of the first items; `join` makes it of the cost of one part, which is at most
    `limit`, and of what the rest has, and grows with both.
    """
    num_items = len(sums) - 1
    tables: list[list[float]] = [[inf] * num_items + [0]]
    for rest in range(num_parts):
        best = [inf] * len(sums)
        for start in range(num_items):
            for stop in range(start + 1, num_items - rest + 1):
                cost = sums[stop] - sums[start]
                if cost > limit or join(cost, 0) > best[start]:
                    break  # a longer part only costs more
                best[start] = min(best[start], join(cost, tables[rest][stop]))
        tables.append(best)
    return tables
