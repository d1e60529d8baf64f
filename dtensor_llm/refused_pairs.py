"""What is legal apart and refused together: one table for the checks, the tests and the reader."""

from enum import Enum


class RefusedPair(Enum):
    """Every two features that are legal apart and refused together, and the reason.

    The checks take the reason for their message from here: a refusal without a row is a bug, but
    for --check-parity of a batch of one sequence, which is a limit of what can be measured.
    """

    HEADS = "--heads", "a --width they do not divide", "all heads are equally wide"
    ROPE = "--positions rope", "an odd head size", "--positions rope turns pairs of elements"
    KV_HEADS = "--kv-heads", "--heads they do not divide", "each kv-head serves equally many heads"
    WARMUP = "--warmup-steps", "fewer --steps", "the learning rate would not reach its peak"
    DP = "dp", "a --global-batch-size it does not divide", "all ranks take equally many sequences"
    MICRO_BATCH = (
        "--micro-batch-size",
        "a --global-batch-size / dp it does not divide",
        "all microbatches hold equally many sequences",
    )
    SCHEDULE_1F1B = (
        "--schedule 1f1b",
        "fewer microbatches than pp",
        "--schedule 1f1b needs a microbatch for every stage",
    )
    SCHEDULE_DUALPIPEV = (
        "--schedule dualpipev",
        "fewer microbatches than 2 pp",
        "--schedule dualpipev needs two microbatches for every rank of pp",
    )
    ROUNDS = (
        "--schedule interleaved-1f1b or interleaved-zero-bubble",
        "microbatches that do not make equal rounds",
        "an interleaved schedule takes its microbatches in m // pp equal rounds",
    )
    STAGES_PER_RANK = (
        "--stages-per-rank",
        "a --schedule of another number",
        "gpipe and 1f1b have 1 stage per rank, zbv and dualpipev the 2 of a V",
    )
    FILE_AND_STAGES = (
        "--schedule-csv",
        "--stages-per-rank",
        "the file says which stages a rank has",
    )
    FILE_AND_PP = "--schedule-csv", "pp of another number", "the file has a row for each rank of pp"
    FILE_AND_MICROBATCHES = (
        "--schedule-csv",
        "microbatches of another number",
        "the file says what is done with each",
    )
    SPLIT_AND_RESHARD = (
        "a schedule that splits the backward",
        "--reshard-after-forward",
        "torch's gradients of the weights alone are lost where those are not whole all the time",
    )
    SPLIT_AND_DDP = (
        "a schedule that splits the backward",
        "--ddp",
        "DistributedDataParallel does not hear of gradients of the weights alone",
    )
    PP = "pp", "fewer --layers", "each stage takes at least one block"
    COUNTS_AND_PP = "--stage-layers", "pp of another number", "each stage has a count of blocks"
    COUNTS_AND_LAYERS = (
        "--stage-layers",
        "--layers that are not their sum",
        "every block is on one stage",
    )
    NO_BLOCK = (
        "--stage-layers 0",
        "a stage that is neither first nor last",
        "without a block, only the first stage (embedding) and the last (head) compute anything",
    )
    BALANCED_LAYERS = (
        "--stage-layers auto",
        "very many --layers",
        "--stage-layers auto looks at every cut",
    )
    TP_AND_HEADS = "tp", "--heads it does not divide", "a rank takes whole heads"
    TP_AND_KV_HEADS = (
        "tp",
        "--kv-heads that it neither divides nor is a multiple of",
        "a rank takes whole kv-heads, or shares one with equally many others",
    )
    GRID_AND_KV_HEADS = "tp=RxC", "--kv-heads C does not divide", "a column takes whole kv-heads"
    FUSED_QKV = (
        "--fused-qkv",
        "fewer --kv-heads than tp",
        "a rank takes whole groups of heads of the fused weight",
    )
    TP_AND_FFN = "tp", "a --ffn-width it does not divide", "a rank takes an equal part"
    TP_AND_VOCABULARY = "tp", "too small a --vocab-size", "each rank takes at least one token id"
    GRID_AND_BATCH = (
        "tp=RxC",
        "a --global-batch-size that dp x R does not divide",
        "all rows of ranks take equally many sequences",
    )
    GRID_AND_POSITIONS = (
        "tp=RxC",
        "--positions learned with too small a --seq-len",
        "each row of ranks takes at least one position",
    )
    DEFER_REDUCE = (
        "--defer-reduce",
        "--zero 0 or 1",
        "ZeRO stages 0 and 1 reduce gradients once a step anyway",
    )
    DDP_AND_ZERO = "--ddp", "--zero 1, 2 or 3", "DistributedDataParallel replicates: ZeRO stage 0"
    DDP_AND_TP = (
        "--ddp",
        "tp",
        "DistributedDataParallel reduces plain parameters, and tp makes DTensors of them",
    )
    STATIC_GRAPH = (
        "--ddp-static-graph",
        "several microbatches",
        "DistributedDataParallel learns a static graph from one backward pass that reduces",
    )
    SEQUENCE_PARALLEL = (
        "--sequence-parallel",
        "a --seq-len that tp does not divide",
        "with sequence parallelism all ranks take equally many tokens",
    )
    ASYNC_TP = (
        "--async-tp",
        "--no-sequence-parallel, tp=1 or tp=RxC",
        "only tokens that are sharded over one tp axis travel beside their products",
    )
    STAGE_3 = (
        "--reshard-after-forward, --prefetch-depth or --offload weights",
        "--zero below 3",
        "only ZeRO stage 3 shards weights and gathers those in use",
    )

    def __init__(self, feature: str, other: str, reason: str) -> None:
        self.feature, self.other, self.reason = feature, other, reason
