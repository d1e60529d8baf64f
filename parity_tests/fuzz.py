"""Configurations drawn at random: every option with every other, on meshes of up to 16 ranks.

`draw(seed, index)` is a pure function, so that one draw can be repeated alone. Most draws fit
together by construction. A third then have one or two values drawn anew without a look at the
rest, or out of their range: many of those are illegal, and must be refused by the checks, never by
a crash.
"""

import dataclasses
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from dtensor_llm.command_line import flags_of
from dtensor_llm.config import (
    Config,
    MeshSizes,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from dtensor_llm.data import IGNORED_LABEL, Batch
from dtensor_llm.parity import ParityCheck, Report, expect
from dtensor_llm.schedules.kinds import NAMES, SPLIT
from dtensor_llm.settings import SETTINGS, Setting
from dtensor_llm.stages import MOST_BALANCED
from dtensor_llm.train import Trainer, watched_step
from dtensor_llm.worlds import World, threads
from parity_tests.fuzz_pipelines import draw_file, draw_pipeline
from parity_tests.harness import LLAMA, SECONDS, RandomBatches
from reference.training import train as train_reference

Values = dict[str, Any]

# {number of ranks: how often}
RANKS = {1: 3, 2: 6, 3: 4, 4: 9, 5: 1, 6: 7, 7: 1, 8: 12, 9: 1, 10: 1, 12: 2, 14: 1, 15: 1, 16: 2}
AXES = ("pp", "dp_replicate", "dp_shard", "tp")
MASKS = ("none", "even", "uneven", "empty rank", "empty microbatch", "empty step")
SHARE_OF_UNRULY = 0.33
LEAST_WIDTH = 6  # with 2 or 3 numbers to normalize, the variance is often next to nothing

NOT_DRAWN = {
    "eval_every": "no step is evaluated between two steps that are compared",
    "eval_samples": "no step is evaluated",
}
"""Fields of the model, training and parallelism that keep their default, with the reason."""


@dataclass(frozen=True)
class Case:
    """One draw: a configuration, legal or not, and which labels count (one of MASKS)."""

    seed: int
    index: int
    config: Config
    mask: str

    @property
    def command(self) -> str:
        """What repeats this draw alone."""
        test = "parity_tests/test_composition.py"
        return f"python -m pytest {test} --seed {self.seed} --draw {self.index}"

    def __str__(self) -> str:
        return (
            f"{self.command}\n{shlex.join(flags_of(self.config))}\nlabels that count: {self.mask}"
        )


@dataclass(frozen=True)
class PartlyEmptyBatches(RandomBatches):
    """Random batches; at one step no label counts, and at all others none of some sequences."""

    empty_samples: tuple[int, ...] = ()
    empty_step: int | None = None

    def batch(self, step: int, samples: slice | None = None) -> Batch:
        whole = super().batch(step)
        if step == self.empty_step:
            whole.labels.fill_(IGNORED_LABEL)
        whole.labels[list(self.empty_samples)] = IGNORED_LABEL
        part = samples or slice(None)
        return Batch(whole.tokens[part], whole.labels[part], whole.sample_ids[part])


def batches_of(case: Case) -> PartlyEmptyBatches:
    """Of a legal draw: `empty` labels are those of the last dp rank, or of its last microbatch."""
    config, model = case.config, case.config.model
    size = config.train.global_batch_size
    empty = {"empty rank": size // config.batch_parts, "empty microbatch": config.micro_batch_size}
    some_left = empty.get(case.mask, 0) < size
    return PartlyEmptyBatches(
        model.vocab_size,
        model.seq_len,
        size,
        mask="uneven" if case.mask.startswith("empty") else case.mask,
        empty_samples=tuple(range(size))[size - empty.get(case.mask, 0) :] if some_left else (),
        empty_step=1 if case.mask == "empty step" else None,
    )


def parity_of(case: Case) -> Report:
    """Train a legal draw in the threads world, and compare its first and last step."""
    config, batches = case.config, batches_of(case)
    steps = (0, config.train.steps - 1)
    whole = [batches.batch(step) for step in range(config.train.steps)]
    expected = expect(config, whole, train_reference, steps=steps)

    def main(world: World) -> Report:
        trainer = Trainer(config, world)
        check = ParityCheck(trainer, steps)
        for step in range(config.train.steps):
            watched_step(trainer, step, batches.batch(step, trainer.samples), [check])
        return check.compare(expected)

    return threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS)[0]


def draw(seed: int, index: int) -> Case:
    """Draw `index` of `seed`: the same on every machine, whatever was drawn before."""
    random = Random(f"{seed}/{index}")
    values: Values = {"mesh": draw_mesh(random)} | draw_numbers(random)
    values["check_parity"] = True
    pipeline = draw_pipeline(random, values["mesh"])
    values |= pipeline.values
    values |= draw_model(random, values["mesh"], pipeline.num_stages)
    values |= draw_batch(random, values["mesh"], pipeline.microbatches)
    values |= draw_data_parallel(random, values)
    if pipeline.values["schedule"] in SPLIT and random.random() < 0.9:
        values |= {"async_tp": False, "reshard_after_forward": None}
    if random.random() < SHARE_OF_UNRULY:
        for name in random.sample(list(UNRULY), random.choice((1, 2))):
            values |= UNRULY[name](random, values)
    if values["seq_len"] == 1:
        # Attention to one token has no gradient: the reference's softmax gives exactly zero, the
        # fused kernel what rounding leaves, and then no multiple of the one bounds the other.
        values["dtype"] = "float64"
    return Case(seed, index, configuration(values), random.choice(MASKS))


def configuration(values: Values) -> Config:
    """Values by field, in the sections that the fields are in."""
    sheets = {"model": ModelConfig, "train": TrainConfig, "parallel": ParallelConfig}
    sections = {
        section: sheet(**{n: v for n, v in values.items() if SETTINGS[n].section == section})
        for section, sheet in (sheets | {"run": RunConfig}).items()
    }
    return Config(**sections)


def draw_mesh(random: Random) -> MeshSizes:
    """The prime factors of a number of ranks, each on some axis."""
    (ranks,) = random.choices(list(RANKS), list(RANKS.values()))
    sizes, axes = dict.fromkeys(AXES, 1), AXES
    side = next((side for side in (2, 3) if ranks % side**2 == 0), 1)
    if side > 1 and random.random() < 0.25:
        sizes |= {"tp_row": side, "tp_col": side}
        ranks, axes = ranks // side**2, AXES[:-1]
    for prime in (2, 3, 5, 7):
        while ranks % prime == 0:
            ranks //= prime
            sizes[random.choice(axes)] *= prime
    return MeshSizes(**sizes)


def draw_model(random: Random, mesh: MeshSizes, num_stages: int) -> Values:
    """A small model that the mesh can hold; its sizes are seldom powers of two."""
    tp, rows = mesh.tp * mesh.tp_col, mesh.tp_row
    values = draw_family(random)
    kv_heads = tp * random.randint(1, max(1, 4 // tp))
    group = random.choice((1, 1, 2, 3)) if kv_heads <= 4 else 1
    if mesh.tp > 1 and random.random() < 0.3:  # copies of key/value heads
        kv_heads = random.choice([n for n in range(1, tp) if tp % n == 0])
        group = tp // kv_heads * random.choice((1, 1, 2))
    head_sizes = (2, 4, 6, 8) if values["positions"] == "rope" else (2, 3, 4, 5, 7)
    widths = [kv_heads * group * size for size in head_sizes]
    width = random.choice([width for width in widths if width >= LEAST_WIDTH])
    shards_tokens = random.random() < 0.6
    # No row of a grid is without a position.
    lengths = [t for t in range(1, 12) if (rows - 1) * -(-t // rows) < t]
    seq_len = tp * random.randint(1, max(1, 9 // tp)) if shards_tokens else random.choice(lengths)
    even_vocabularies = [v for v in range(tp, 71) if (tp - 1) * -(-v // tp) < v]
    values |= {
        "heads": kv_heads * group,
        "kv_heads": None if group == 1 and random.random() < 0.7 else kv_heads,
        "fused_qkv": kv_heads % tp == 0 and random.random() < 0.4,
        "parallel_block": random.random() < 0.3,
        "width": width,
        "ffn_width": tp * random.randint(1, max(1, 40 // tp)),
        "layers": num_stages + random.choice((0, 1, 2) if mesh.pp > 1 else (0, 1, 1, 2)),
        "vocab_size": random.choice(even_vocabularies),
        "sequence_parallel": shards_tokens,
        "gather_again": random.random() < 0.4,
        "async_tp": shards_tokens and mesh.tp > 1 and random.random() < 0.5,
        "seq_len": seq_len,
        "dropout": random.choice((0.0, 0.0, 0.1, 0.5)),
        "attention_dropout": random.choice((None, None, 0.0, 0.2)),
        "rope_theta": random.choice((10000.0, 500000.0, 10.0)),
        "norm_eps": random.choice((1e-5, 1e-6, 1e-3)),
    }
    values["stage_layers"] = draw_split(random, values["layers"], num_stages)
    if random.random() < 0.3 and ModelConfig(**values_of(ModelConfig, values)).num_ffn % tp == 0:
        values["ffn_width"] = None
    return values


def draw_split(random: Random, layers: int, pp: int) -> str:
    """Even, by cost or by hand; by hand the first and the last stage may be without a block."""
    kind = random.choice(("even", "auto", "auto", "by hand"))
    if kind != "by hand":
        return kind
    counts = [int(0 < stage < pp - 1) for stage in range(pp)]
    for _ in range(layers - sum(counts)):
        counts[random.randrange(pp)] += 1
    return ",".join(map(str, counts))


def values_of(sheet: type, values: Values) -> Values:
    """Those that the dataclass has a field for."""
    return {f.name: values[f.name] for f in dataclasses.fields(sheet) if f.name in values}


def draw_family(random: Random) -> Values:
    """Like GPT-2, like Llama, or as no model before it."""
    return random.choice(
        [
            {"norm": "layernorm", "positions": "learned", "mlp": "gelu", "bias": True},
            {name: LLAMA[name] for name in ("norm", "positions", "mlp", "bias")},
            {
                "norm": random.choice(("layernorm", "rmsnorm")),
                "positions": random.choice(("learned", "rope")),
                "mlp": random.choice(("gelu", "swiglu")),
                "bias": random.random() < 0.5,
            },
        ]
    ) | {"tied_embeddings": random.random() < 0.5}


def draw_batch(random: Random, mesh: MeshSizes, microbatches: int) -> Values:
    """Sequences that divide over the mesh, in as many microbatches."""
    parts = mesh.dp * mesh.tp_row
    micro_batch = random.choice((1, 1, 2, 3)) if parts * microbatches <= 12 else 1
    return {
        "global_batch_size": parts * microbatches * micro_batch,
        "micro_batch_size": random.choice((None, micro_batch, micro_batch)),
    }


def draw_data_parallel(random: Random, values: Values) -> Values:
    """A ZeRO stage or DDP, and when to reduce."""
    mesh, zero = values["mesh"], random.choice((0, 0, 1, 2, 3))
    splits = mesh.pp > 1 and (values["schedule"] in SPLIT or values["schedule_csv"] is not None)
    ddp = zero == 0 and mesh.tp * mesh.tp_row == 1 and random.random() < (0.1 if splits else 0.9)
    microbatches = values["global_batch_size"] // (mesh.dp * (values["micro_batch_size"] or 1))
    at_once = microbatches == 1 or (values["micro_batch_size"] is None and mesh.pp == 1)
    return {
        "zero": zero,
        "defer_reduce": zero >= 2 and random.random() < 0.3,
        "ddp": ddp,
        "ddp_bucket_mb": random.choice((25.0, 0.001, 0.01)) if ddp else 25.0,
        "ddp_bucket_view": not ddp or random.random() < 0.5,
        "ddp_static_graph": ddp and at_once and random.random() < 0.9,
        **draw_places(random, zero),
    }


def draw_places(random: Random, zero: int) -> Values:
    """Where weights and optimizer state wait, and what stage 3 does with weights not in use."""
    if zero < 3:
        return {"offload": random.choice(("none", "none", "optimizer"))}
    return {
        "reshard_after_forward": random.choice((None, True, False)),
        "prefetch_depth": random.choice((0, 1, 1, 2, 5)),
        "offload": random.choice(("none", "none", "optimizer", "weights")),
    }


def draw_numbers(random: Random) -> Values:
    """Of the optimizer, its schedule and the first weights; few go beyond the fixed bound."""
    steps = random.choice((2, 2, 2, 3))
    lr = random.choice((1e-4, 1e-3, 3e-3, 1e-2))
    values: Values = {
        "steps": steps,
        "lr": lr,
        "warmup_steps": random.choice((None, 0, 1, steps)),
        "min_lr_ratio": random.choice((0.1, 0.0, 1.0)),
        "weight_decay": random.choice((0.1, 0.0, 1.0)),
        "clip_grad": random.choice((0.0, 0.01, 0.5, 100.0)),
        "init_std": random.choice((0.02, 0.05, 0.05, 0.1)),
        "seed": random.choice((0, 1, random.randrange(2**63), 2**63 - 1)),
        "optimizer": random.choice(("adamw", "adamw", "sgd")),
        "momentum": random.choice((0.9, 0.5, 0.0)),
        # AdamW multiplies the rounding of a gradient that is truly zero by lr / eps.
        "eps": lr * random.choice((1e-4, 1e-3)),
        "dtype": random.choices(("float64", "float32", "bfloat16"), (86, 7, 7))[0],
    }
    # With beta1^2 > beta2 a step is not bounded by the learning rate: no bound on errors holds.
    values["beta1"], values["beta2"] = random.choice(((0.9, 0.95), (0.8, 0.999), (0.0, 0.5)))
    if values["dtype"] != "float64":
        values["eps"] = 1e-3  # else the sign of what rounding leaves decides a whole update
    elif random.random() < 0.1:
        values |= random.choice(EXTREMES)
    return values


# Where a control is needed, or nothing moves, or only once.
EXTREMES: Sequence[Values] = (
    {"lr": 0.0},
    {"lr": 0.1, "eps": 1e-5},
    {"steps": 1, "warmup_steps": 0},
    {"steps": 6, "lr": 0.01, "eps": 1e-6},
    {"init_std": 0.0},
    {"init_std": 0.3},
)


Redraw = Callable[[Random, Values], Values]


def number(name: str, least: int, most: int) -> Redraw:
    """Draws a whole number, both limits included."""
    return lambda random, _: {name: random.randint(least, most)}


def out_of_range(random: Random, _: Values) -> Values:
    """Some field just below its least value, above its largest, or with no legal text."""
    drawn = [s for s in SETTINGS.values() if s.section != "run" and illegal_values(s)]
    setting = random.choice(drawn)
    return {setting.name: random.choice(illegal_values(setting))}


SMALLEST_GRID = MeshSizes(tp_row=2, tp_col=2)
GRIDS: Sequence[Values] = (
    {"mesh": SMALLEST_GRID, "seq_len": 1, "positions": "learned"},
    {"mesh": SMALLEST_GRID, "global_batch_size": 3, "micro_batch_size": None},
    {"mesh": MeshSizes(tp_row=2)},
)
"""Each with something that it does not allow."""


BY_NAME: Values = {"stages_per_rank": None, "schedule_csv": None}
SCHEDULES: Sequence[tuple[str, int]] = (
    ("interleaved-1f1b", 5),
    ("interleaved-zero-bubble", 7),
    ("1f1b", 1),
    ("dualpipev", 3),
)
"""Each with a number of microbatches that it does not admit on two ranks."""


def unfit_microbatches(random: Random, _: Values) -> Values:
    name, m = random.choice(SCHEDULES)
    batch = {"global_batch_size": m, "micro_batch_size": 1}
    return {"mesh": MeshSizes(pp=2), "schedule": name, **BY_NAME, **batch}


def illegal_values(setting: Setting) -> Sequence[Any]:
    """Values that are refused whatever the others are; none for switches."""
    limits, kind = setting.metadata, setting.kind
    if kind not in (int, float):
        return ("nothing-like-it",) if limits.keys() & {"choices", "pattern"} else ()
    step = 1 if kind is int else 0.25
    beyond = [limits[key] - step for key in ("minimum",) if key in limits]
    beyond += [limits[key] + step for key in ("maximum",) if key in limits]
    beyond += [limits[key] for key in ("above", "below") if key in limits]
    return [kind(value) for value in beyond]


UNRULY: dict[str, Redraw] = {
    "heads": number("heads", 1, 12),
    "kv_heads": number("kv_heads", 1, 6),
    "width": number("width", LEAST_WIDTH, 60),
    "positions": lambda *_: {"positions": "rope"},
    "ffn_width": number("ffn_width", 1, 60),
    "layers": number("layers", 1, 4),
    "seq_len": number("seq_len", 1, 12),
    "fused_qkv": lambda *_: {"fused_qkv": True, "kv_heads": 1},
    "async_tp": lambda *_: {"async_tp": True},
    "vocab_size": lambda random, values: {"vocab_size": random.randint(1, values["mesh"].tp)},
    "global_batch_size": number("global_batch_size", 1, 24),
    "micro_batch_size": number("micro_batch_size", 1, 4),
    "schedule": lambda random, _: {"schedule": random.choice(NAMES)},
    "microbatches": unfit_microbatches,
    "stages_per_rank": number("stages_per_rank", 1, 3),
    "schedule_csv": lambda random, values: {
        "schedule_csv": draw_file(random, random.choice((2, values["mesh"].pp)), 3, 3),
        "stages_per_rank": random.choice((None, 2)),
    },
    "stage_layers": lambda random, _: random.choice(
        (
            {"stage_layers": ",".join("1" * random.randint(1, 4))},
            {
                "mesh": MeshSizes(pp=3),
                "layers": 3,
                "stage_layers": "2,0,1",
                "schedule": "1f1b",
                **BY_NAME,
            },
            {"stage_layers": "auto", "layers": MOST_BALANCED + 1},
        )
    ),
    "warmup_steps": number("warmup_steps", 0, 8),
    "zero": number("zero", 0, 3),
    "reshard_after_forward": lambda random, _: {"reshard_after_forward": random.random() < 0.5},
    "prefetch_depth": number("prefetch_depth", 0, 3),
    "offload": lambda *_: {"offload": "weights"},
    "defer_reduce": lambda *_: {"defer_reduce": True},
    "ddp": lambda random, _: {"ddp": True, "zero": random.choice((0, 0, 1))},
    "ddp_static_graph": lambda *_: {
        "ddp": True,
        "zero": 0,
        "ddp_static_graph": True,
        "micro_batch_size": 1,
    },
    "mesh": lambda random, _: {"mesh": draw_mesh(random)},
    "grid": lambda random, _: random.choice(GRIDS),
    "absent axis": lambda random, values: {
        "mesh": dataclasses.replace(values["mesh"], **{random.choice(("cp", "ep")): 2})
    },
    "tiny dropout": lambda random, _: {random.choice(("dropout", "attention_dropout")): 1e-6},
    "out of range": out_of_range,
}
"""Values drawn without a look at those that they must fit."""
