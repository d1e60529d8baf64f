"""What must hold between settings: of the model, of a step, and of the model on its mesh."""

import math
from collections.abc import Iterator
from dataclasses import replace

from dtensor_llm.checks.pipeline_rules import PIPELINE_RULES
from dtensor_llm.checks.rule import (
    DIVISORS_TRIED,
    Rule,
    Surroundings,
    batch_factors,
    largest_divisor,
    near_multiples,
    propose,
    remainder,
)
from dtensor_llm.config import Config, MeshSizes
from dtensor_llm.mesh import fitting_meshes
from dtensor_llm.refused_pairs import RefusedPair
from dtensor_llm.settings import SETTINGS, join_or

MASK_LEVELS = 65536
"""Dropout masks compare 16-bit random numbers with rate x 65536, rounded."""


def heads_divide_the_width(config: Config, _: Surroundings) -> Iterator[str]:
    width, heads = config.model.width, config.model.heads
    if width % heads:
        fewer = f"--heads {largest_divisor(width, heads) or 1}"
        yield (
            f"--width {width} is not a multiple of --heads {heads}, but "
            f"{RefusedPair.HEADS.reason}: {remainder(width, heads)}; "
            f"{propose('--width', near_multiples(width, heads), fewer)}"
        )
    elif config.model.positions == "rope" and config.model.head_size % 2:
        yield (
            f"{RefusedPair.ROPE.reason}, but the head size is odd: --width {width} "
            f"/ --heads {heads} = {config.model.head_size}; "
            f"{propose('--width', near_multiples(width, 2 * heads))}"
        )


def kv_heads_divide_the_heads(config: Config, _: Surroundings) -> Iterator[str]:
    heads, kv_heads = config.model.heads, config.model.num_kv_heads
    if heads % kv_heads:
        fewer = f"--kv-heads {largest_divisor(heads, kv_heads) or 1}"
        yield (
            f"--heads {heads} is not a multiple of --kv-heads {kv_heads}, but "
            f"{RefusedPair.KV_HEADS.reason}: {remainder(heads, kv_heads)}; "
            f"{propose('--heads', near_multiples(heads, kv_heads), fewer)}"
        )


def dropout_survives_rounding(config: Config, _: Surroundings) -> Iterator[str]:
    for flag, rate in (
        ("--dropout", config.model.dropout),
        ("--attention-dropout", config.model.attention_dropout),
    ):
        if rate and round(rate * MASK_LEVELS) in (0, MASK_LEVELS):
            yield (
                f"{flag} {rate}: masks are drawn with 16 bits, and {rate} x {MASK_LEVELS} rounds "
                f"to {round(rate * MASK_LEVELS)}; 0, or 0.00001 to 0.99999 would do"
            )


def warmup_ends(config: Config, _: Surroundings) -> Iterator[str]:
    train = config.train
    if train.num_warmup_steps > train.steps:
        yield (
            f"--warmup-steps {train.num_warmup_steps} is more than --steps {train.steps}: "
            f"{RefusedPair.WARMUP.reason}; --warmup-steps {train.steps} or less would do"
        )


def batch_divides(config: Config, _: Surroundings) -> Iterator[str]:
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    parts, factors = config.batch_parts, batch_factors(config)
    unit = parts * (micro or 1)
    if batch % unit:
        factors += f" x --micro-batch-size {micro}" if micro else ""
        factors += f" = {unit}" if " x " in factors else ""
        smaller = []
        if micro and batch % parts == 0:
            smaller.append(f"--micro-batch-size {largest_divisor(batch // parts, micro) or 1}")
        pair = RefusedPair.MICRO_BATCH
        if batch % parts:
            pair = RefusedPair.DP if batch % config.dp else RefusedPair.GRID_AND_BATCH
        arithmetic = remainder(batch, unit) if batch > unit else f"{batch} < {unit}"
        yield (
            f"--global-batch-size {batch} is not a multiple of {factors}, but {pair.reason}: "
            f"{arithmetic}; "
            f"{propose('--global-batch-size', near_multiples(batch, unit), *smaller)}"
        )


def tp_grid_is_square(config: Config, _: Surroundings) -> Iterator[str]:
    mesh = config.parallel.mesh
    rows, columns = mesh.tp_row, mesh.tp_col
    if rows != columns:
        legal = [n for n in legal_sides(config) if n > 1] or [1]
        sides = [n for n in legal if n in (rows, columns)] or legal
        yield (
            f"mesh tp={rows}x{columns}: each step of a product broadcasts one row and one column "
            f"of blocks, so there must be as many rows as columns, and {rows} is not {columns}; "
            f"tp={join_or(grids(sides))} would do"
        )
    elif rows > 1 and mesh.tp > 1:
        yield (
            f"mesh tp={mesh.tp} and tp={rows}x{columns}: tensor parallelism is in one dimension "
            "or in two; leave one of them out"
        )


def tp_parts(mesh: MeshSizes) -> tuple[int, str]:
    """The number of parts that tp cuts heads, hidden units and vocabulary into, and its text."""
    if mesh.tp_col > 1:
        return mesh.tp_col, f"tp={mesh.tp_row}x{mesh.tp_col}"
    return mesh.tp, f"tp={mesh.tp}"


def every_row_has_positions(config: Config, _: Surroundings) -> Iterator[str]:
    seq_len, rows = config.model.seq_len, config.parallel.mesh.tp_row
    part = -(-seq_len // rows)
    if config.model.positions == "learned" and (rows - 1) * part >= seq_len:
        yield (
            f"--seq-len {seq_len} is too small for tp={rows}x{config.parallel.mesh.tp_col} and "
            f"--positions learned: {RefusedPair.GRID_AND_POSITIONS.reason}, but in parts of "
            f"ceil({seq_len} / {rows}) = {part} they fill {-(-seq_len // part)} of {rows} rows; "
            f"{propose('--seq-len', near_multiples(seq_len, rows), '--positions rope')}"
        )


def tp_divides_heads_and_ffn(config: Config, _: Surroundings) -> Iterator[str]:
    mesh, model, (tp, text) = config.parallel.mesh, config.model, tp_parts(config.parallel.mesh)
    if mesh.tp_row != mesh.tp_col:
        return  # no size of it fits: see tp_grid_is_square
    parts = {"--heads": model.heads, "--ffn-width": model.num_ffn}
    reasons = {
        "--heads": RefusedPair.TP_AND_HEADS.reason,
        "--ffn-width": RefusedPair.TP_AND_FFN.reason,
        "--kv-heads": RefusedPair.GRID_AND_KV_HEADS.reason,
    }
    square = mesh.tp_col > 1
    if square and model.kv_heads is not None:
        parts["--kv-heads"] = model.kv_heads
    uneven = [
        f"{flag} {remainder(size, tp)} ({reasons[flag]})"
        for flag, size in parts.items()
        if size % tp
    ]
    if uneven:
        legal = grids(legal_sides(config)) if square else legal_tp(config)
        yield (
            f"{text} must divide {', '.join(parts)}{f' into {tp}' * square}: {', '.join(uneven)}; "
            f"tp={join_or(legal)} would do"
        )


def tp_shares_out_kv_heads(config: Config, _: Surroundings) -> Iterator[str]:
    kv_heads, tp = config.model.kv_heads, config.parallel.mesh.tp
    if kv_heads is None or kv_heads % tp == 0:
        return
    if tp % kv_heads:
        yield (
            f"tp={tp} neither divides --kv-heads {kv_heads} nor is a multiple of it, but "
            f"{RefusedPair.TP_AND_KV_HEADS.reason}: "
            f"{remainder(*sorted((kv_heads, tp), reverse=True))}; "
            f"tp={join_or(legal_tp(config))} would do"
        )
    elif config.model.fused_qkv:
        yield (
            f"{RefusedPair.FUSED_QKV.reason}, but with --fused-qkv --kv-heads {kv_heads} are fewer "
            f"groups than tp={tp}; --no-fused-qkv or tp={join_or(legal_tp(config))} would do"
        )


def legal_tp(config: Config) -> list[int]:
    """The sizes of tp that heads and widths allow, ascending."""
    model, kv_heads = config.model, config.model.num_kv_heads
    return [
        n
        for n in divisors_for_tp(model.heads, model.num_ffn)
        if kv_heads % n == 0 or (n % kv_heads == 0 and not model.fused_qkv)
    ]


def legal_sides(config: Config) -> list[int]:
    """The numbers of rows, and of columns, of ranks that heads and widths allow, ascending."""
    model = config.model
    return divisors_for_tp(model.heads, model.num_ffn, model.num_kv_heads)


def grids(sides: list[int]) -> list[str]:
    """As `--mesh tp=` takes them: 1, 2x2, ..."""
    return [f"{n}x{n}" if n > 1 else "1" for n in sides]


def divisors_for_tp(*sizes: int) -> list[int]:
    """The numbers of tp ranks that divide every one of the sizes, ascending."""
    common = math.gcd(*sizes)
    return [n for n in range(1, min(common, DIVISORS_TRIED) + 1) if common % n == 0]


def every_tp_rank_has_vocabulary(config: Config, _: Surroundings) -> Iterator[str]:
    size, (tp, text) = config.model.vocab_size, tp_parts(config.parallel.mesh)
    part = -(-size // tp)
    if (tp - 1) * part >= size:
        yield (
            f"--vocab-size {size} is too small for {text}: "
            f"{RefusedPair.TP_AND_VOCABULARY.reason}, but in parts of "
            f"ceil({size} / {tp}) = {part} they fill {-(-size // part)} of {tp} ranks; "
            f"{propose('--vocab-size', near_multiples(size, tp), 'a smaller tp')}"
        )


def tp_divides_the_sequence(config: Config, _: Surroundings) -> Iterator[str]:
    seq_len, tp = config.model.seq_len, config.parallel.mesh.tp
    if config.parallel.sequence_parallel and seq_len % tp:
        yield (
            f"--seq-len {seq_len} is not a multiple of tp={tp}, but "
            f"{RefusedPair.SEQUENCE_PARALLEL.reason}: {remainder(seq_len, tp)}; "
            f"{propose('--seq-len', near_multiples(seq_len, tp), '--no-sequence-parallel')}"
        )


def async_tp_has_sharded_tokens(config: Config, _: Surroundings) -> Iterator[str]:
    parallel = config.parallel
    if not parallel.async_tp or (parallel.sequence_parallel and parallel.mesh.tp > 1):
        return
    given, cure = f"mesh {tp_parts(parallel.mesh)[1]}", "tp=N of several ranks"
    if parallel.mesh.tp > 1:
        given, cure = "--no-sequence-parallel", "--sequence-parallel"
    yield (
        f"--async-tp with {given}: {RefusedPair.ASYNC_TP.reason}; {cure}, or leaving --async-tp "
        "out, would do"
    )


def axes_are_available(config: Config, _: Surroundings) -> Iterator[str]:
    mesh = config.parallel.mesh
    for axis, size, idea in (("cp", mesh.cp, "context"), ("ep", mesh.ep, "expert")):
        if size > 1:
            yield f"mesh {axis}={size}: {idea} parallelism is not available yet; leave {axis} out"


def reduction_can_be_deferred(config: Config, _: Surroundings) -> Iterator[str]:
    zero = config.parallel.zero
    if config.parallel.defer_reduce and zero < 2:
        yield (
            f"--defer-reduce with --zero {zero}: {RefusedPair.DEFER_REDUCE.reason}; --zero 2, "
            "--zero 3 or leaving --defer-reduce out would do"
        )


def ddp_has_what_it_can_reduce(config: Config, _: Surroundings) -> Iterator[str]:
    parallel, (tp, text) = config.parallel, tp_parts(config.parallel.mesh)
    if parallel.ddp and parallel.zero != 0:
        yield (
            f"--ddp with --zero {parallel.zero}: {RefusedPair.DDP_AND_ZERO.reason}; --zero 0 or "
            "leaving --ddp out would do"
        )
    if parallel.ddp and tp > 1:
        yield (
            f"--ddp with {text}: {RefusedPair.DDP_AND_TP.reason}; tp=1, or leaving --ddp out, "
            "would do"
        )


def static_graph_has_one_microbatch(config: Config, _: Surroundings) -> Iterator[str]:
    parallel, batch, m = config.parallel, config.train.global_batch_size, config.microbatches
    parts = config.batch_parts
    if parallel.ddp and parallel.ddp_static_graph and batch % parts == 0 and m > 1:
        schedule = " with --schedule gpipe" if parallel.mesh.pp > 1 else ""
        yield (
            f"--ddp-static-graph with {m} microbatches: {RefusedPair.STATIC_GRAPH.reason}, but "
            f"--global-batch-size {batch} / ({batch_factors(config)} x micro-batch "
            f"{config.micro_batch_size}) = {m}; --micro-batch-size {batch // parts}{schedule}, "
            "or leaving --ddp-static-graph out, would do"
        )


def options_of_stage_3_have_it(config: Config, _: Surroundings) -> Iterator[str]:
    parallel = config.parallel
    reshard, depth = parallel.reshard_after_forward, parallel.prefetch_depth
    given = {
        "--reshard-after-forward": reshard is True,
        "--no-reshard-after-forward": reshard is False,
        f"--prefetch-depth {depth}": depth != SETTINGS["prefetch_depth"].default,
        "--offload weights": parallel.offload == "weights",
    }
    for flag in (flag for flag, is_given in given.items() if is_given and parallel.zero < 3):
        cure = "--offload optimizer" if flag == "--offload weights" else "leaving it out"
        yield (
            f"{flag} with --zero {parallel.zero}: {RefusedPair.STAGE_3.reason}; --zero 3 or "
            f"{cure} would do"
        )


def parity_has_a_rule(config: Config, _: Surroundings) -> Iterator[str]:
    reorders = config.train.dtype == "float64" and config.needs_control
    if config.run.check_parity and reorders and config.train.global_batch_size == 1:
        yield (
            "--check-parity measures rounding by reordering the sequences of a batch, and "
            "--global-batch-size is 1; --global-batch-size 2, or --steps 3 with the default --lr, "
            "would do"
        )


ON_THE_MESH = (
    Rule(batch_divides, frozenset({"global_batch_size", "micro_batch_size", "mesh"})),
    *PIPELINE_RULES,
    Rule(tp_grid_is_square, frozenset({"mesh"})),
    Rule(every_row_has_positions, frozenset({"seq_len", "positions", "mesh"})),
    Rule(
        tp_divides_heads_and_ffn,
        frozenset({"heads", "kv_heads", "ffn_width", "width", "mlp", "fused_qkv", "mesh"}),
    ),
    Rule(
        tp_shares_out_kv_heads,
        frozenset({"heads", "kv_heads", "ffn_width", "width", "mlp", "fused_qkv", "mesh"}),
    ),
    Rule(every_tp_rank_has_vocabulary, frozenset({"vocab_size", "mesh"})),
    Rule(tp_divides_the_sequence, frozenset({"seq_len", "sequence_parallel", "mesh"})),
    Rule(async_tp_has_sharded_tokens, frozenset({"async_tp", "sequence_parallel", "mesh"})),
)

MODEL_RULES = (
    Rule(heads_divide_the_width, frozenset({"width", "heads", "positions"})),
    Rule(kv_heads_divide_the_heads, frozenset({"heads", "kv_heads"})),
    Rule(dropout_survives_rounding, frozenset({"dropout", "attention_dropout"})),
    Rule(warmup_ends, frozenset({"warmup_steps", "steps"})),
    *ON_THE_MESH,
    Rule(axes_are_available, frozenset({"mesh"})),
    Rule(reduction_can_be_deferred, frozenset({"zero", "defer_reduce"})),
    Rule(ddp_has_what_it_can_reduce, frozenset({"zero", "ddp", "mesh"})),
    Rule(
        static_graph_has_one_microbatch,
        frozenset(
            {"ddp", "ddp_static_graph", "global_batch_size", "micro_batch_size", "mesh"}
            | {"schedule_csv"}
        ),
    ),
    Rule(
        options_of_stage_3_have_it,
        frozenset({"zero", "reshard_after_forward", "prefetch_depth", "offload"}),
    ),
    Rule(
        parity_has_a_rule,
        frozenset({"check_parity", "dtype", "steps", "lr", "eps", "init_std", "global_batch_size"}),
    ),
)


def legal_meshes(config: Config, surroundings: Surroundings) -> list[MeshSizes]:
    """Meshes of the processes started that these settings allow, nearest to the asked one first."""

    def is_legal(mesh: MeshSizes) -> bool:
        other = replace(config, parallel=replace(config.parallel, mesh=mesh))
        return not any(text for rule in ON_THE_MESH for text in rule.find(other, surroundings))

    asked = replace(config.parallel.mesh, cp=1, ep=1)
    return [mesh for mesh in fitting_meshes(surroundings.num_processes, asked) if is_legal(mesh)]
