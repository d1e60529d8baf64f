"""What to train and how: frozen dataclasses, one field per command-line flag.

Each field carries its help text, unit and legal values in its metadata; `command_line.py` makes the
flags and `--help` from them, `checks.py` checks the ranges and everything that involves two fields.
"""

from dataclasses import dataclass, field
from textwrap import indent
from typing import Any

from dtensor_llm.mesh_sizes import MeshSizes
from dtensor_llm.schedules.csv_files import microbatches_in
from dtensor_llm.schedules.kinds import NAMES


class ConfigError(ValueError):
    """A configuration that cannot run; `problems` lists everything that is wrong with it."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = [f"  - {indent(problem, '    ')[4:]}" for problem in problems]
        super().__init__("\n".join([f"{count} in the configuration:", *lines]))


def option(default: Any, help: str, **metadata: Any) -> Any:
    """A dataclass field that is also a command-line flag.

    Args:
        default: the value when the flag is not given; None where another field decides.
        help: what the value means, for `--help`.
        metadata: any of unit (text), choices (tuple of legal texts), minimum and maximum
            (inclusive), above and below (exclusive), pattern (regular expression of legal texts)
            and form (text: that in words), metavar (text), follows (text: what decides where the
            default is None).
    """
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model. The defaults are the preset `tiny`."""

    vocab_size: int = option(256, "vocabulary", unit="token ids", minimum=1)
    width: int = option(64, "width of the residual stream", unit="elements", minimum=1)
    heads: int = option(8, "query heads per layer", unit="heads", minimum=1)
    kv_heads: int | None = option(
        None,
        "key and value heads per layer, each shared by heads / kv-heads query heads",
        unit="heads",
        minimum=1,
        follows="heads",
    )
    layers: int = option(4, "transformer blocks", unit="blocks", minimum=1)
    seq_len: int = option(64, "sequence length", unit="tokens", minimum=1)
    ffn_width: int | None = option(
        None,
        "hidden width of the feed-forward part",
        unit="elements",
        minimum=1,
        follows="gelu: 4 x width; swiglu: 8/3 x width rounded up to a multiple of 64",
    )
    norm: str = option("layernorm", "normalization", choices=("layernorm", "rmsnorm"))
    positions: str = option(
        "learned", "positions: a learned table or rotary", choices=("learned", "rope")
    )
    mlp: str = option("gelu", "feed-forward part", choices=("gelu", "swiglu"))
    bias: bool = option(True, "biases in linear layers and LayerNorm")
    tied_embeddings: bool = option(True, "one weight for the token embedding and the output head")
    dropout: float = option(
        0.0, "dropout after the embedding, attention and feed-forward", minimum=0, below=1
    )
    attention_dropout: float | None = option(
        None, "dropout of attention probabilities", minimum=0, below=1, follows="dropout"
    )
    rope_theta: float = option(10000.0, "base of the rotary wavelengths", above=0)
    norm_eps: float = option(1e-5, "added to the variance in norms", above=0)
    init_std: float = option(
        0.02, "standard deviation of initial weights, before the cut by depth", minimum=0
    )
    parallel_block: bool = option(
        False, "blocks add attention and feed-forward of one norm: x + attention(n) + mlp(n)"
    )
    fused_qkv: bool = option(False, "one linear for query, key and value, group by group of heads")

    @property
    def num_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def num_ffn(self) -> int:
        """Hidden width f of the feed-forward part, in elements."""
        if self.ffn_width is not None:
            return self.ffn_width
        if self.mlp == "gelu":
            return 4 * self.width
        return -(-8 * self.width // (3 * 64)) * 64

    @property
    def attention_dropout_rate(self) -> float:
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    @property
    def num_block_parameters(self) -> int:
        """Parameters of one transformer block, in elements."""
        d, f = self.width, self.num_ffn
        query, key_value = self.heads * self.head_size, self.num_kv_heads * self.head_size
        weights = d * (2 * query + 2 * key_value) + d * f * (3 if self.mlp == "swiglu" else 2)
        biases = (query + 2 * key_value + d) + (f + d) if self.bias else 0
        return weights + biases + self.norms_per_block * self._num_norm_parameters

    @property
    def norms_per_block(self) -> int:
        return 1 if self.parallel_block else 2

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, in elements; a tied weight counts once."""
        tables = self.vocab_size * (1 if self.tied_embeddings else 2)
        if self.positions == "learned":
            tables += self.seq_len
        blocks = self.layers * self.num_block_parameters
        return tables * self.width + blocks + self._num_norm_parameters

    @property
    def _num_norm_parameters(self) -> int:
        return self.width * (2 if self.norm == "layernorm" and self.bias else 1)


@dataclass(frozen=True)
class TrainConfig:
    """What one optimizer step does, and how many there are."""

    global_batch_size: int = option(
        64, "sequences in one optimizer step, over all ranks", unit="sequences", minimum=1
    )
    micro_batch_size: int | None = option(
        None,
        "sequences that one rank computes at once",
        unit="sequences",
        minimum=1,
        follows="what makes 1 microbatch, or with pp stages 2 pp of them, pp where 2 pp does not "
        "divide the sequences, single sequences where pp does not",
    )
    steps: int = option(120, "optimizer steps", unit="steps", minimum=1)
    lr: float = option(3e-3, "peak learning rate", minimum=0)
    warmup_steps: int | None = option(
        None, "steps of linear warm-up", unit="steps", minimum=0, follows="a tenth of steps"
    )
    min_lr_ratio: float = option(
        0.1, "learning rate that the cosine falls to, over the peak", minimum=0, maximum=1
    )
    weight_decay: float = option(
        0.1, "weight decay of linear and embedding weights (adamw: decoupled)", minimum=0
    )
    clip_grad: float = option(1.0, "largest gradient norm; 0 does not clip", minimum=0)
    seed: int = option(0, "seed of weights, data order and dropout", minimum=0, maximum=2**63 - 1)
    optimizer: str = option("adamw", "optimizer", choices=("adamw", "sgd"))
    momentum: float = option(0.9, "momentum of sgd", minimum=0, below=1)
    beta1: float = option(0.9, "decay of AdamW's first moment", minimum=0, below=1)
    beta2: float = option(0.95, "decay of AdamW's second moment", minimum=0, below=1)
    eps: float = option(1e-8, "added to AdamW's denominator", above=0)
    dtype: str = option(
        "float32", "type of weights and arithmetic", choices=("float32", "float64", "bfloat16")
    )
    eval_every: int = option(
        50,
        "steps between evaluations, the first before training; 0, or more than --steps: none",
        unit="steps",
        minimum=0,
    )
    eval_samples: int = option(
        512,
        "validation sequences of an evaluation, spread evenly over all there are; 0 takes all",
        unit="sequences",
        minimum=0,
    )

    @property
    def num_moments(self) -> int:
        """Tensors that the optimizer keeps for each weight, of its size."""
        return 2 if self.optimizer == "adamw" else int(self.momentum > 0)

    @property
    def num_warmup_steps(self) -> int:
        return self.steps // 10 if self.warmup_steps is None else self.warmup_steps

    @property
    def element_size(self) -> int:
        """Of weights, gradients, moments and activations, in bytes."""
        return {"float32": 4, "float64": 8, "bfloat16": 2}[self.dtype]


@dataclass(frozen=True)
class ParallelConfig:
    """How the ranks share the work."""

    mesh: MeshSizes = field(
        default=MeshSizes(),
        metadata={
            "help": "TPxPPxDP, for example 8x4x16, or named: tp=8,pp=4,dp=16 (or dp_replicate=4,"
            "dp_shard=4 in place of dp); one size may be -1: what fills the ranks started; "
            "tp=2x2,dp=4: tensor parallelism in two dimensions",
            "unit": "ranks",
            "metavar": "MESH",
            "follows": "1x1x-1",
        },
    )
    zero: int = option(
        3,
        "ZeRO stage over the data-parallel ranks: 0 replicates, 1 shards optimizer state, 2 "
        "gradients too, 3 weights too",
        minimum=0,
        maximum=3,
    )
    reshard_after_forward: bool | None = option(
        None,
        "at ZeRO stage 3, gather a block's weights again for backward, not keep them from forward",
        follows="on, but off with pp, where every microbatch would gather again",
    )
    prefetch_depth: int = option(
        1,
        "at ZeRO stage 3, how far ahead of the computation weights are gathered",
        unit="blocks",
        minimum=0,
    )
    offload: str = option(
        "none",
        "what waits in the host's memory: optimizer state, or (ZeRO stage 3) weights as well",
        choices=("none", "optimizer", "weights"),
    )
    defer_reduce: bool = option(
        False,
        "reduce gradients once a step and not for every microbatch, and hold them whole until "
        "then; with pp, --zero 3 always does",
    )
    ddp: bool = option(
        False, "replicate by torch's DistributedDataParallel (tp=1); its options follow"
    )
    ddp_bucket_mb: float = option(
        25.0, "gradients that travel in one message", unit="MiB", above=0, maximum=10**6
    )
    ddp_bucket_view: bool = option(True, "gradients are views of the messages, not copies")
    ddp_static_graph: bool = option(
        False, "the first step's order of gradients is taken for that of all steps"
    )
    schedule: str = option("1f1b", "pipeline schedule", choices=NAMES)
    stages_per_rank: int | None = option(
        None,
        "pipeline stages of each rank; no effect without pp",
        unit="stages",
        minimum=1,
        follows="the schedule: 1 for gpipe and 1f1b, else 2",
    )
    schedule_csv: str | None = option(
        None,
        "in place of --schedule one of one's own in torch's format: a row for each rank of pp, "
        "cells like 2F0 (stage, one of F B I W, microbatch)",
        metavar="FILE",
        follows="--schedule",
    )
    stage_layers: str = option(
        "even",
        "blocks of each pipeline stage: even counts, auto (the slowest stage as fast as can be, by "
        "FLOPs with embedding and head), or a count for each, in order",
        unit="blocks",
        pattern=r"even|auto|\d{1,18}(,\d{1,18})*",
        form="even, auto or one whole number for each stage, for example 6,7,7,4",
        metavar="COUNTS",
    )
    sequence_parallel: bool = option(
        True, "shard norms and dropout on tokens over the tp ranks; no effect with tp=RxC"
    )
    gather_again: bool = option(
        False, "with tokens sharded over tp: keep shards, and gather them again for backward"
    )
    async_tp: bool = option(False, "with tokens sharded over tp: multiply some as others travel")

    @property
    def reshards_after_forward(self) -> bool:
        """Whether ZeRO stage 3 frees gathered weights between forward and backward."""
        asked = self.reshard_after_forward
        return self.mesh.pp == 1 if asked is None else asked

    @property
    def reduces_each_microbatch(self) -> bool:
        """At ZeRO stages 1 and 2; to share rows with no other rank is to send nothing for it."""
        return self.mesh.dp_shard == 1 or (self.zero == 2 and not self.defer_reduce)


@dataclass(frozen=True)
class RunConfig:
    """Where the ranks live, what they read and what they report."""

    world: str = option(
        "auto",
        "where the ranks live: processes of torchrun, threads of this process, or auto: threads "
        "when a mesh of several ranks is started as one process",
        choices=("auto", "processes", "threads"),
    )
    device: str = option(
        "auto",
        "device of the ranks; auto takes CUDA where there is any",
        choices=("auto", "cpu", "cuda"),
    )
    timeout: float | None = option(
        None,
        "how long a rank waits for the others before the run ends",
        unit="seconds",
        above=0,
        maximum=10**7,
        follows="the world decides",
    )
    data: tuple[str, ...] = option(
        ("stdlib",),
        "text: stdlib (the .py files of Python's own library), or files and folders",
        metavar="PATH",
    )
    check_parity: bool = option(
        False,
        "train the single-device reference beside it, print the largest errors, exit 1 beyond the "
        "bounds of the dtype",
    )
    record: str | None = option(
        None,
        "folder for a record of the run, to be compared with another by compare_runs.py",
        metavar="DIR",
        follows="no record",
    )
    record_every: int = option(
        10,
        "steps between the tensors in a record, which has those of the first and last too",
        unit="steps",
        minimum=1,
    )
    metrics: str | None = option(
        None, "new or empty file for a JSON line per step", metavar="FILE", follows="no file"
    )


@dataclass(frozen=True)
class Config:
    """Everything that one run needs to know."""

    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    run: RunConfig = RunConfig()

    @property
    def dp(self) -> int:
        """Ranks that the global batch is divided over."""
        return self.parallel.mesh.dp

    @property
    def batch_parts(self) -> int:
        """Equal parts of the global batch: one for each dp rank, and there for each row of tp."""
        return self.dp * self.parallel.mesh.tp_row

    @property
    def micro_batch_size(self) -> int:
        """Sequences that one rank computes at once."""
        if self.train.micro_batch_size is not None:
            return self.train.micro_batch_size
        per_rank, pp = self.train.global_batch_size // self.batch_parts, self.parallel.mesh.pp
        wanted = (1,) if pp == 1 else (2 * pp, pp)
        file = self.parallel.schedule_csv
        if file is not None and (m := microbatches_in(file)):
            wanted = (m, *wanted)
        return max(1, next((per_rank // m for m in wanted if per_rank % m == 0), 1))

    @property
    def microbatches(self) -> int:
        """Microbatches of one step: accumulation steps without pp, the schedule's with it."""
        return self.train.global_batch_size // (self.batch_parts * self.micro_batch_size)

    @property
    def needs_control(self) -> bool:
        """Whether a parity check is likely to need a control: see `parity.verdict`.

        AdamW multiplies rounding by lr / eps where a true gradient is zero, and large weights
        multiply it in every block.
        """
        train = self.train
        gain = train.lr * max(1.0, 1e-8 / train.eps)
        fixed = (train.steps <= 3 and gain <= 1e-2) or (train.steps <= 20 and gain <= 1e-3)
        return not fixed or self.model.init_std > 0.1

    def world_kind(self, num_processes: int) -> str:
        """Where the ranks live, `processes` or `threads`, when `num_processes` were started."""
        if self.run.world != "auto":
            return self.run.world
        alone = num_processes == 1 and self.parallel.mesh.num_ranks > 1
        return "threads" if alone else "processes"
