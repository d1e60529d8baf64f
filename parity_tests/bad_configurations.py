"""Command lines that cannot run, each with every problem that must be reported, word for word."""

import shlex

from dtensor_llm.checks import Surroundings
from dtensor_llm.command_line import parse_command_line
from dtensor_llm.config import Config

GIB = 2**30
ALONE = Surroundings()
TOO_LONG = "x" * 256  # file systems take names of 255 bytes


def processes(count: int) -> Surroundings:
    return Surroundings(num_processes=count, local_processes=count)


def read(line: str, surroundings: Surroundings = ALONE) -> Config:
    return parse_command_line(shlex.split(line), surroundings)


BAD_CONFIGURATIONS: list[tuple[Surroundings, str, list[str]]] = [
    (
        ALONE,
        "--mesh 8by4",
        [
            "--mesh 8by4: not TPxPPxDP (tensor x pipeline x data), for example 2x2x2, nor "
            "named sizes, for example tp=2,pp=2,dp=2",
        ],
    ),
    (
        ALONE,
        "--mesh",
        [
            "--mesh without a value: not TPxPPxDP (tensor x pipeline x data), for example "
            "2x2x2, nor named sizes, for example tp=2,pp=2,dp=2",
        ],
    ),
    (ALONE, "--mesh 2x0x2", ["--mesh 2x0x2: pp=0 must be at least 1, or -1 to fill the ranks"]),
    (
        ALONE,
        "--mesh 2x1x-1",
        [
            "--mesh 2x1x-1: dp=-1 fills the ranks, but tp=2 x pp=1 = 2 does not divide 1; with "
            "one process started, give every size",
        ],
    ),
    (
        processes(8),
        "--mesh 3x1x-1",
        [
            "--mesh 3x1x-1: dp=-1 fills the ranks, but tp=3 x pp=1 = 3 does not divide 8; "
            "4x1x2, 2x1x4 or 2x2x2 would fit",
        ],
    ),
    (ALONE, "--mesh cp=2", ["mesh cp=2: context parallelism is not available yet; leave cp out"]),
    (
        ALONE,
        "--mesh dp=4,ep=2",
        [
            "mesh ep=2: expert parallelism is not available yet; leave ep out",
        ],
    ),
    (
        processes(6),
        "--mesh 2x2x2",
        [
            "mesh tp=2 x pp=2 x dp=2 = 8 ranks, but 6 were started; 1x3x2 or 2x3x1 would fit",
        ],
    ),
    (
        processes(8),
        "--mesh 2x1x2",
        [
            "mesh tp=2 x pp=1 x dp=2 = 4 ranks, but 8 were started; 2x1x4, 2x2x2 or 4x1x2 "
            "would fit",
        ],
    ),
    (
        processes(7),
        "--mesh 2x2x2",
        [
            "mesh tp=2 x pp=2 x dp=2 = 8 ranks, but 7 were started; no mesh of 7 ranks fits "
            "these settings",
        ],
    ),
    (
        processes(2),
        "--mesh tp=2,cp=2",
        [
            "mesh cp=2: context parallelism is not available yet; leave cp out",
            "mesh tp=2 x pp=1 x dp=1 x cp=2 = 4 ranks, but 2 were started; 2x1x1, 1x1x2 or "
            "1x2x1 would fit",
        ],
    ),
    (
        ALONE,
        "--world processes --mesh 2x2x2",
        [
            "mesh tp=2 x pp=2 x dp=2 = 8 ranks, but 1 process was started; start 8 with "
            "torchrun --nproc-per-node, or leave --world out to run the ranks as threads",
        ],
    ),
    (
        processes(8),
        "--world threads --mesh 2x2x2",
        [
            "--world threads runs every rank in one process, but 8 were started; start one, or "
            "leave --world out",
        ],
    ),
    (
        ALONE,
        "--mesh 1x1x2048 --global-batch-size 2048",
        [
            "mesh 1x1x2048 = 2048 ranks is more than the threads of one process can run: at "
            "most 1024, which take turns on this machine's cores; a smaller mesh, or torchrun "
            "with a process per rank would do",
        ],
    ),
    (
        ALONE,
        "--device cuda",
        [
            "--device cuda takes a CUDA device for each process: 1 run on this machine, and "
            "torch sees 0; --device cpu would do",
        ],
    ),
    (
        Surroundings(num_processes=8, local_processes=8, num_cuda=2),
        "--device cuda",
        [
            "--device cuda takes a CUDA device for each process: 8 run on this machine, and "
            "torch sees 2; at most 2 processes a machine or --device cpu would do",
        ],
    ),
    (
        Surroundings(num_processes=8, local_processes=8, num_cuda=4),
        "--mesh 2x2x2",
        [
            "--device auto takes a CUDA device for each process: 8 run on this machine, and "
            "torch sees 4; at most 4 processes a machine or --device cpu would do",
        ],
    ),
    (
        Surroundings(num_cuda=8),
        "--mesh 2x2x2 --device cuda",
        [
            "--device cuda: ranks that are threads compute on the CPU; start a process per "
            "device with torchrun --nproc-per-node, or --device cpu would do",
        ],
    ),
    (
        ALONE,
        "--model gpt2-xxl",
        [
            "--model gpt2-xxl: must be tiny, gpt2, gpt2-xl, gpt3-175b, llama3-8b, llama3-70b "
            "or llama3-405b; did you mean gpt2-xl?",
        ],
    ),
    (
        Surroundings(memory_bytes=16 * GIB),
        "--model llama3-405b --global-batch-size 1",
        [
            "memory: the run takes at least 7,256.5 GiB: weights, gradients and optimizer "
            "405,853,388,800 x 4 x 4 bytes = 6,047.7 GiB, activations 1,208.8 GiB; this "
            "machine has 16.0 GiB; a smaller --model would fit",
        ],
    ),
    (
        Surroundings(memory_bytes=1 * GIB),
        "--model gpt2 --global-batch-size 1",
        [
            "memory: the run takes at least 2.6 GiB: weights, gradients and optimizer "
            "124,439,808 x 4 x 4 bytes = 1.9 GiB, activations 0.8 GiB; this machine has 1.0 "
            "GiB; --layers 1 would fit",
        ],
    ),
    (
        Surroundings(memory_bytes=2 * GIB),
        "--model gpt2 --global-batch-size 8 --micro-batch-size 4 --optimizer sgd",
        [
            "memory: the run takes at least 4.4 GiB: weights, gradients and optimizer "
            "124,439,808 x 3 x 4 bytes = 1.4 GiB, activations 3.0 GiB; this machine has 2.0 "
            "GiB; --layers 2 would fit",
        ],
    ),
    (  # fewer layers would be another cut
        Surroundings(memory_bytes=2 * GIB),
        "--model gpt2 --global-batch-size 8 --micro-batch-size 4 --optimizer sgd --stage-layers 12",
        [
            "memory: the run takes at least 4.4 GiB: weights, gradients and optimizer "
            "124,439,808 x 3 x 4 bytes = 1.4 GiB, activations 3.0 GiB; this machine has 2.0 "
            "GiB; a smaller --model would fit",
        ],
    ),
    (
        Surroundings(memory_bytes=4 * GIB),
        "--model gpt2 --global-batch-size 8 --check-parity --dtype float64",
        [
            "memory: the run takes at least 19.5 GiB: weights, gradients and optimizer "
            "124,439,808 x 4 x 8 bytes x 2 copies = 7.4 GiB, activations 12.1 GiB; this machine "
            "has 4.0 GiB; a smaller --model would fit",
        ],
    ),
    (
        Surroundings(memory_bytes=8 * GIB),
        "--model gpt2 --global-batch-size 8 --mesh 1x1x8 --zero 0",
        [
            "memory: the run takes at least 20.9 GiB: weights, gradients and optimizer "
            "124,439,808 x 4 x 4 bytes x 8 copies = 14.8 GiB, activations 6.0 GiB; this "
            "machine has 8.0 GiB; --zero 3 or --layers 1 would fit",
        ],
    ),
    (
        Surroundings(memory_bytes=8 * GIB),
        "--model gpt2 --global-batch-size 8 --mesh 1x1x8 --zero 2",
        [
            "memory: the run takes at least 11.1 GiB: weights, gradients and optimizer "
            "124,439,808 x 4 x 4 bytes, and 7 more copies of the weights = 5.1 GiB, activations "
            "6.0 GiB; this machine has 8.0 GiB; --zero 3 or --layers 7 would fit",
        ],
    ),
    (
        Surroundings(num_processes=8, local_processes=4, memory_bytes=3 * GIB),
        "--model gpt2 --global-batch-size 8 --dtype float64",
        [
            "memory: the run takes at least 15.8 GiB: weights, gradients and optimizer "
            "124,439,808 x 4 x 8 bytes = 3.7 GiB, activations 12.1 GiB; 1/2 of that on this "
            "machine, which has 3.0 GiB; --layers 1 would fit",
        ],
    ),
    (
        Surroundings(memory_bytes=16 * GIB),
        "--layers 1000000000000 --width 1000000000000 --heads 1",
        [
            "memory: the run takes at least 1.8e+29 GiB: weights, gradients and optimizer "
            "12,000,000,000,013,000,000,000,322,000,000,000,000 x 4 x 4 bytes = 1.8e+29 GiB, "
            "activations 2.4e+20 GiB; this machine has 16.0 GiB; a smaller --model would fit",
        ],
    ),
    (ALONE, "--layers four", ["--layers four: must be a whole number of at least 1 (blocks)"]),
    (ALONE, "--layers 4.0", ["--layers 4.0: must be a whole number of at least 1 (blocks)"]),
    (ALONE, "--layers -3", ["--layers -3: must be a whole number of at least 1 (blocks)"]),
    (ALONE, "--width 1e3", ["--width 1e3: must be a whole number of at least 1 (elements)"]),
    (
        ALONE,
        "--width 100000000000000000000",
        [
            "--width 100000000000000000000: does not fit 64 bits; must be a whole number of at "
            "least 1 (elements)",
        ],
    ),
    (ALONE, "--steps", ["--steps without a value: must be a whole number of at least 1 (steps)"]),
    (
        ALONE,
        "--steps --layers 0",
        [
            "--steps without a value: must be a whole number of at least 1 (steps)",
            "--layers 0: must be a whole number of at least 1 (blocks)",
        ],
    ),
    (ALONE, "--steps 0", ["--steps 0: must be a whole number of at least 1 (steps)"]),
    (ALONE, "--vocab-size 0", ["--vocab-size 0: must be a whole number of at least 1 (token ids)"]),
    (ALONE, "--lr nan", ["--lr nan: must be a finite number of at least 0"]),
    (ALONE, "--lr inf", ["--lr inf: must be a finite number of at least 0"]),
    (ALONE, "--lr -1e-3", ["--lr -0.001: must be a finite number of at least 0"]),
    (ALONE, "--weight-decay -0.1", ["--weight-decay -0.1: must be a finite number of at least 0"]),
    (ALONE, "--clip-grad nan", ["--clip-grad nan: must be a finite number of at least 0"]),
    (
        ALONE,
        "--min-lr-ratio 1.5",
        [
            "--min-lr-ratio 1.5: must be a finite number of at least 0 and at most 1",
        ],
    ),
    (ALONE, "--beta1 1", ["--beta1 1.0: must be a finite number of at least 0 and below 1"]),
    (ALONE, "--eps 0", ["--eps 0.0: must be a finite number above 0"]),
    (ALONE, "--momentum 2", ["--momentum 2.0: must be a finite number of at least 0 and below 1"]),
    (
        ALONE,
        "--seed -1",
        [
            "--seed -1: must be a whole number of at least 0 and at most 9223372036854775807",
        ],
    ),
    (
        ALONE,
        "--seed 9223372036854775808",
        [
            "--seed 9223372036854775808: does not fit 64 bits; must be a whole number of at "
            "least 0 and at most 9223372036854775807",
        ],
    ),
    (
        ALONE,
        "--warmup-steps 201",
        [
            "--warmup-steps 201 is more than --steps 120: the learning rate would not reach "
            "its peak; --warmup-steps 120 or less would do",
        ],
    ),
    (ALONE, "--eval-every -1", ["--eval-every -1: must be a whole number of at least 0 (steps)"]),
    (
        ALONE,
        "--timeout 0",
        [
            "--timeout 0.0: must be a finite number above 0 and at most 10000000 (seconds)",
        ],
    ),
    (ALONE, "--dropout 1", ["--dropout 1.0: must be a finite number of at least 0 and below 1"]),
    (
        ALONE,
        "--dropout 0.999999",
        [
            "--dropout 0.999999: masks are drawn with 16 bits, and 0.999999 x 65536 rounds to "
            "65536; 0, or 0.00001 to 0.99999 would do",
        ],
    ),
    (
        ALONE,
        "--attention-dropout 0.000001",
        [
            "--attention-dropout 1e-06: masks are drawn with 16 bits, and 1e-06 x 65536 rounds "
            "to 0; 0, or 0.00001 to 0.99999 would do",
        ],
    ),
    (
        ALONE,
        "--schedule 1f1",
        [
            "--schedule 1f1: must be gpipe, 1f1b, interleaved-1f1b, looped-bfs, "
            "interleaved-zero-bubble, zbv or dualpipev; did you mean 1f1b?"
        ],
    ),
    (ALONE, "--dtype fp32", ["--dtype fp32: must be float32, float64 or bfloat16"]),
    (ALONE, "--optimizer adam", ["--optimizer adam: must be adamw or sgd; did you mean adamw?"]),
    (ALONE, "--norm batchnorm", ["--norm batchnorm: must be layernorm or rmsnorm"]),
    (ALONE, "--positions alibi", ["--positions alibi: must be learned or rope"]),
    (ALONE, "--mlp relu", ["--mlp relu: must be gelu or swiglu; did you mean gelu?"]),
    (
        ALONE,
        "--world thread",
        [
            "--world thread: must be auto, processes or threads; did you mean threads?",
        ],
    ),
    (
        ALONE,
        "--zero 0 --reshard-after-forward --prefetch-depth 2",
        [
            "--reshard-after-forward with --zero 0: only ZeRO stage 3 shards weights and gathers "
            "those in use; --zero 3 or leaving it out would do",
            "--prefetch-depth 2 with --zero 0: only ZeRO stage 3 shards weights and gathers "
            "those in use; --zero 3 or leaving it out would do",
        ],
    ),
    (
        ALONE,
        "--zero 0 --no-reshard-after-forward --offload weights",
        [
            "--no-reshard-after-forward with --zero 0: only ZeRO stage 3 shards weights and "
            "gathers those in use; --zero 3 or leaving it out would do",
            "--offload weights with --zero 0: only ZeRO stage 3 shards weights and gathers "
            "those in use; --zero 3 or --offload optimizer would do",
        ],
    ),
    (
        ALONE,
        "--prefetch-depth -1",
        ["--prefetch-depth -1: must be a whole number of at least 0 (blocks)"],
    ),
    (
        ALONE,
        "--offload optimiser",
        [
            "--offload optimiser: must be none, optimizer or weights; did you mean optimizer?",
        ],
    ),
    (ALONE, "--zero 4", ["--zero 4: must be a whole number of at least 0 and at most 3"]),
    (
        ALONE,
        "--zero 1 --defer-reduce",
        [
            "--defer-reduce with --zero 1: ZeRO stages 0 and 1 reduce gradients once a step "
            "anyway; --zero 2, --zero 3 or leaving --defer-reduce out would do",
        ],
    ),
    (
        ALONE,
        "--ddp --mesh 2x1x2 --ddp-bucket-mb 0",
        [
            "--ddp-bucket-mb 0.0: must be a finite number above 0 and at most 1000000 (MiB)",
            "--ddp with --zero 3: DistributedDataParallel replicates: ZeRO stage 0; --zero 0 or "
            "leaving --ddp out would do",
            "--ddp with tp=2: DistributedDataParallel reduces plain parameters, and tp makes "
            "DTensors of them; tp=1, or leaving --ddp out, would do",
        ],
    ),
    (
        ALONE,
        "--ddp --zero 0 --ddp-static-graph --mesh 1x2x2",
        [
            "--ddp-static-graph with 4 microbatches: DistributedDataParallel learns a static "
            "graph from one backward pass that reduces, but --global-batch-size 64 / (dp=2 x "
            "micro-batch 8) = 4; --micro-batch-size 32 with --schedule gpipe, or leaving "
            "--ddp-static-graph out, would do",
        ],
    ),
    (
        ALONE,
        "--check-parity --dtype float64 --global-batch-size 1 --steps 4",
        [
            "--check-parity measures rounding by reordering the sequences of a batch, and "
            "--global-batch-size is 1; --global-batch-size 2, or --steps 3 with the default --lr, "
            "would do",
        ],
    ),
    (
        ALONE,
        "--width 100",
        [
            "--width 100 is not a multiple of --heads 8, but all heads are equally wide: 100 / 8 "
            "leaves 4; --width 96, 104 or --heads 5 would do",
        ],
    ),
    (
        ALONE,
        "--positions rope --width 72",
        [
            "--positions rope turns pairs of elements, but the head size is odd: --width 72 / "
            "--heads 8 = 9; --width 64 or 80 would do",
        ],
    ),
    (
        ALONE,
        "--kv-heads 3",
        [
            "--heads 8 is not a multiple of --kv-heads 3, but each kv-head serves equally many "
            "heads: 8 / 3 leaves 2; --heads 6, 9 or --kv-heads 2 would do",
        ],
    ),
    (
        ALONE,
        "--mesh 3x1x1 --seq-len 66",
        [
            "tp=3 must divide --heads, --ffn-width: --heads 8 / 3 leaves 2 (a rank takes whole "
            "heads), --ffn-width 256 / 3 leaves 1 (a rank takes an equal part); tp=1, 2, 4 or 8 "
            "would do",
        ],
    ),
    (
        ALONE,
        "--mesh 6x1x1 --heads 12 --kv-heads 4 --width 96 --seq-len 66",
        [
            "tp=6 neither divides --kv-heads 4 nor is a multiple of it, but a rank takes whole "
            "kv-heads, or shares one with equally many others: 6 / 4 leaves 2; tp=1, 2, 4 or 12 "
            "would do",
        ],
    ),
    (
        ALONE,
        "--mesh tp=4x4 --kv-heads 2",
        [
            "tp=4x4 must divide --heads, --ffn-width, --kv-heads into 4: --kv-heads 2 / 4 leaves 2 "
            "(a column takes whole kv-heads); tp=1 or 2x2 would do",
        ],
    ),
    (
        ALONE,
        "--mesh 4x1x1 --kv-heads 2 --fused-qkv",
        [
            "a rank takes whole groups of heads of the fused weight, but with --fused-qkv "
            "--kv-heads 2 are fewer groups than tp=4; --no-fused-qkv or tp=1 or 2 would do",
        ],
    ),
    (
        ALONE,
        "--mesh 8x1x1 --ffn-width 100",
        [
            "tp=8 must divide --heads, --ffn-width: --ffn-width 100 / 8 leaves 4 (a rank takes "
            "an equal part); tp=1, 2 or 4 would do",
        ],
    ),
    (
        ALONE,
        "--mesh tp=2x4",
        [
            "mesh tp=2x4: each step of a product broadcasts one row and one column of blocks, so "
            "there must be as many rows as columns, and 2 is not 4; tp=2x2 or 4x4 would do",
        ],
    ),
    (
        ALONE,
        "--mesh tp=1x2",
        [
            "mesh tp=1x2: each step of a product broadcasts one row and one column of blocks, so "
            "there must be as many rows as columns, and 1 is not 2; tp=2x2 would do",
        ],
    ),
    (
        ALONE,
        "--mesh tp=2x3",
        [
            "mesh tp=2x3: each step of a product broadcasts one row and one column of blocks, so "
            "there must be as many rows as columns, and 2 is not 3; tp=2x2 would do",
        ],
    ),
    (
        ALONE,
        "--mesh tp=3x5 --heads 4 --global-batch-size 63",
        [
            "mesh tp=3x5: each step of a product broadcasts one row and one column of blocks, so "
            "there must be as many rows as columns, and 3 is not 5; tp=2x2 or 4x4 would do",
        ],
    ),
    (
        ALONE,
        "--mesh tp=2x3 --heads 1",
        [
            "mesh tp=2x3: each step of a product broadcasts one row and one column of blocks, so "
            "there must be as many rows as columns, and 2 is not 3; tp=1 would do",
        ],
    ),
    (
        ALONE,
        "--mesh tp=3x3 --global-batch-size 63",
        [
            "tp=3x3 must divide --heads, --ffn-width into 3: --heads 8 / 3 leaves 2 (a rank takes "
            "whole heads), --ffn-width 256 / 3 leaves 1 (a rank takes an equal part); tp=1, 2x2, "
            "4x4 or 8x8 would do",
        ],
    ),
    (
        ALONE,
        "--mesh tp=2x2 --vocab-size 1",
        [
            "--vocab-size 1 is too small for tp=2x2: each rank takes at least one token id, but in "
            "parts of ceil(1 / 2) = 1 they fill 1 of 2 ranks; --vocab-size 2 or a smaller tp would "
            "do",
        ],
    ),
    (
        ALONE,
        "--mesh tp=2x2 --ddp --zero 0",
        [
            "--ddp with tp=2x2: DistributedDataParallel reduces plain parameters, and tp makes "
            "DTensors of them; tp=1, or leaving --ddp out, would do",
        ],
    ),
    (
        ALONE,
        "--mesh tp=2x2 --seq-len 1",
        [
            "--seq-len 1 is too small for tp=2x2 and --positions learned: each row of ranks takes "
            "at least one position, but in parts of ceil(1 / 2) = 1 they fill 1 of 2 rows; "
            "--seq-len 2 or --positions rope would do",
        ],
    ),
    (
        ALONE,
        "--mesh tp=2x2,dp=3 --global-batch-size 63",
        [
            "--global-batch-size 63 is not a multiple of dp=3 x tp_row=2 = 6, but all rows of "
            "ranks take equally many sequences: 63 / 6 leaves 3; --global-batch-size 60 or 66 "
            "would do",
        ],
    ),
    (
        ALONE,
        "--mesh tp=2x2,pp=4 --global-batch-size 4 --micro-batch-size 1",
        [
            "--schedule 1f1b needs a microbatch for every stage, but --global-batch-size 4 / (dp=1 "
            "x tp_row=2 x micro-batch 1) = 2, fewer than pp=4; --global-batch-size 8 or --schedule "
            "gpipe would do",
        ],
    ),
    (
        processes(6),
        "--mesh tp=2x2,dp=2",
        [
            "mesh tp=2x2 x pp=1 x dp=2 = 8 ranks, but 6 were started; 1x3x2 or 2x3x1 would fit",
        ],
    ),
    (
        processes(6),
        "--mesh tp=2x2,dp=-1",
        [
            "--mesh tp=2x2,dp=-1: dp=-1 fills the ranks, but tp_row=2 x tp_col=2 = 4 does not "
            "divide 6; 1x1x6, 1x2x3 or 2x1x3 would fit",
        ],
    ),
    (
        ALONE,
        "--mesh 4x1x1 --vocab-size 5",
        [
            "--vocab-size 5 is too small for tp=4: each rank takes at least one token id, but in "
            "parts of ceil(5 / 4) = 2 they fill 3 of 4 ranks; --vocab-size 4, 8 or a smaller tp "
            "would do",
        ],
    ),
    (
        ALONE,
        "--mesh 2x1x1 --vocab-size 1",
        [
            "--vocab-size 1 is too small for tp=2: each rank takes at least one token id, but in "
            "parts of ceil(1 / 2) = 1 they fill 1 of 2 ranks; --vocab-size 2 or a smaller tp would "
            "do",
        ],
    ),
    (
        ALONE,
        "--mesh 2x1x1 --seq-len 9",
        [
            "--seq-len 9 is not a multiple of tp=2, but with sequence parallelism all ranks take "
            "equally many tokens: 9 / 2 leaves 1; --seq-len 8, 10 or --no-sequence-parallel would "
            "do",
        ],
    ),
    (
        ALONE,
        "--mesh 2x1x1 --async-tp --no-sequence-parallel",
        [
            "--async-tp with --no-sequence-parallel: only tokens that are sharded over one tp axis "
            "travel beside their products; --sequence-parallel, or leaving --async-tp out, would "
            "do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x1x2 --async-tp",
        [
            "--async-tp with mesh tp=1: only tokens that are sharded over one tp axis travel "
            "beside their products; tp=N of several ranks, or leaving --async-tp out, would do",
        ],
    ),
    (
        ALONE,
        "--mesh tp=2x2 --async-tp",
        [
            "--async-tp with mesh tp=2x2: only tokens that are sharded over one tp axis travel "
            "beside their products; tp=N of several ranks, or leaving --async-tp out, would do",
        ],
    ),
    (
        Surroundings(8, 4, num_cuda=4),
        "--mesh 8x1x1 --async-tp",
        [
            "--async-tp with tp=8 on CUDA: the ranks of a tp axis read each other's memory, and "
            "so are in one machine, but 4 processes run on this one; tp=2 or tp=4 or leaving "
            "--async-tp out would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x8x1",
        [
            "--layers 4 is too few for pp=8: each stage takes at least one block; --layers 8 "
            "or pp=4 would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x4x1 --layers 3",
        [
            "--layers 3 is too few for pp=4: each stage takes at least one block; --layers 4, pp=3 "
            "or --stage-layers auto would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x4x1 --layers 2",
        [
            "--layers 2 is too few for pp=4: each stage takes at least one block; --layers 4, pp=2 "
            "or --stage-layers auto would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x4x1 --layers 1",
        [
            "--layers 1 is too few for pp=4: each stage takes at least one block; --layers 4 or "
            "pp=1 would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x8x1 --stage-layers auto",
        [
            "--layers 4 is too few for pp=8: each stage takes at least one block, but for the "
            "first and the last; --layers 6 or pp=6 would do",
        ],
    ),
    (
        ALONE,
        "--stage-layers auto --layers 513",
        [
            "--layers 513 is more than 512, but --stage-layers auto looks at every cut; "
            "--stage-layers even or --layers 512 would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x2x1 --stage-layers 6,7,7,4",
        [
            "--stage-layers 6,7,7,4 has 4 counts for pp=2, but each stage has a count of blocks; "
            "--stage-layers 2,2 would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x4x1 --layers 12 --stage-layers 6,7,7,4",
        [
            "--stage-layers 6,7,7,4 is 24 blocks of --layers 12, but every block is on one stage; "
            "--stage-layers 3,3,3,3 or --layers 24 would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x4x1 --stage-layers 2,0,0,2",
        [
            "--stage-layers 2,0,0,2 leaves stage 1 and 2 empty, but without a block, only "
            "the first stage (embedding) and the last (head) compute anything; --stage-layers "
            "1,1,1,1 would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x2x1 --stage-layers 1,2,1",
        [
            "--stage-layers 1,2,1 has 3 counts for pp=2, but each stage has a count of blocks; "
            "--stage-layers 2,2 or pp=3 would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x8x1 --stage-layers 1,2,1",
        [
            "--stage-layers 1,2,1 has 3 counts for pp=8, but each stage has a count of blocks; "
            "--stage-layers even with pp=4 or pp=3 would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x2x1 --stage-layers 2;2",
        [
            "--stage-layers 2;2: must be even, auto or one whole number for each stage, for "
            "example 6,7,7,4",
        ],
    ),
    (
        ALONE,
        "--mesh 1x1x3",
        [
            "--global-batch-size 64 is not a multiple of dp=3, but all ranks take equally many "
            "sequences: 64 / 3 leaves 1; --global-batch-size 63 or 66 would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x1x128",
        [
            "--global-batch-size 64 is not a multiple of dp=128, but all ranks take equally many "
            "sequences: 64 < 128; --global-batch-size 128 would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x1x2 --micro-batch-size 5",
        [
            "--global-batch-size 64 is not a multiple of dp=2 x --micro-batch-size 5 = 10, but "
            "all microbatches hold equally many sequences: 64 / 10 leaves 4; --global-batch-size "
            "60, 70 or --micro-batch-size 4 would do",
        ],
    ),
    (
        ALONE,
        "--micro-batch-size 128",
        [
            "--global-batch-size 64 is not a multiple of dp=1 x --micro-batch-size 128 = 128, but "
            "all microbatches hold equally many sequences: 64 < 128; --global-batch-size 128 or "
            "--micro-batch-size 64 would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x4x2 --micro-batch-size 16",
        [
            "--schedule 1f1b needs a microbatch for every stage, but --global-batch-size 64 / "
            "(dp=2 x micro-batch 16) = 2, fewer than pp=4; --micro-batch-size 8, "
            "--global-batch-size 128 or --schedule gpipe would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x4x4 --global-batch-size 8",
        [
            "--schedule 1f1b needs a microbatch for every stage, but --global-batch-size 8 / "
            "(dp=4 x micro-batch 1) = 2, fewer than pp=4; --global-batch-size 16 or --schedule "
            "gpipe would do",
        ],
    ),
    (
        ALONE,
        "--global-batch-size 1000000000000000 --mesh 1x3x1 --micro-batch-size 500000000000000",
        [
            "--schedule 1f1b needs a microbatch for every stage, but --global-batch-size "
            "1000000000000000 / (dp=1 x micro-batch 500000000000000) = 2, fewer than pp=3; "
            "--global-batch-size 1500000000000000 or --schedule gpipe would do",
        ],
    ),
    (ALONE, "--metrics /", ["--metrics / is a folder; --metrics /metrics.jsonl would do"]),
    (
        ALONE,
        "--metrics no-such-folder/run.jsonl",
        [
            "--metrics no-such-folder/run.jsonl: there is no folder no-such-folder; create it "
            "first",
        ],
    ),
    (
        ALONE,
        "--metrics /dev/null/run.jsonl",
        [
            "--metrics /dev/null/run.jsonl: there is no folder /dev/null; create it first",
        ],
    ),
    (
        ALONE,
        f"--metrics {TOO_LONG}",
        [f"--metrics {TOO_LONG} cannot be written: File name too long; another file would do"],
    ),
    (
        ALONE,
        "--metrics scripts/record.jsonl --record scripts",
        ["--metrics scripts/record.jsonl is where --record scripts writes; another file would do"],
    ),
    (
        ALONE,
        "--metrics run --record run",
        ["--metrics run is where --record run writes; another file would do"],
    ),
    (ALONE, "--metrics", ["--metrics without a value: must be a FILE"]),
    (
        ALONE,
        "--record no-such-folder/run --record-every 0",
        [
            "--record-every 0: must be a whole number of at least 1 (steps)",
            "--record no-such-folder/run: there is no folder no-such-folder; create it first",
        ],
    ),
    (
        ALONE,
        f"--record {TOO_LONG}",
        [f"--record {TOO_LONG} cannot be written: File name too long; another folder would do"],
    ),
    (
        ALONE,
        "--record README.md",
        ["--record README.md is a file; the name of a new folder would do"],
    ),
    (ALONE, "--data", ["--data without a value: must be one or more PATHs"]),
    (ALONE, "--laeyrs 8", ["--laeyrs is not a flag; did you mean --layers?"]),
    (ALONE, "hello", ["hello is not the value of any flag"]),
    (ALONE, "--bias true", ["true is not the value of any flag"]),
    (ALONE, "--bias=3", ["3 is not the value of any flag"]),
    (
        ALONE,
        "--heads 6 --lr nan --schedule zb --mesh 2x2x2 --layers four --global-batch-size 63 "
        "--metrics no-such-folder/run.jsonl --stepz 3",
        [
            "--stepz is not a flag; did you mean --steps?",
            "--layers four: must be a whole number of at least 1 (blocks)",
            "--lr nan: must be a finite number of at least 0",
            "--schedule zb: must be gpipe, 1f1b, interleaved-1f1b, looped-bfs, "
            "interleaved-zero-bubble, zbv or dualpipev; did you mean zbv?",
            "--width 64 is not a multiple of --heads 6, but all heads are equally wide: 64 / 6 "
            "leaves 4; --width 60, 66 or --heads 4 would do",
            "--global-batch-size 63 is not a multiple of dp=2, but all ranks take equally many "
            "sequences: 63 / 2 leaves 1; --global-batch-size 62 or 64 would do",
            "--metrics no-such-folder/run.jsonl: there is no folder no-such-folder; create it "
            "first",
        ],
    ),
    (
        ALONE,
        "--model llama-8b --mesh 64x64x1 --steps 0",
        [
            "--model llama-8b: must be tiny, gpt2, gpt2-xl, gpt3-175b, llama3-8b, llama3-70b "
            "or llama3-405b; did you mean llama3-8b?",
            "--steps 0: must be a whole number of at least 1 (steps)",
            "mesh 64x64x1 = 4096 ranks is more than the threads of one process can run: at "
            "most 1024, which take turns on this machine's cores; a smaller mesh, or torchrun "
            "with a process per rank would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x4x1 --schedule dualpipev --global-batch-size 8 --micro-batch-size 2",
        [
            "--schedule dualpipev needs two microbatches for every rank of pp, but "
            "--global-batch-size 8 / (dp=1 x micro-batch 2) = 4, fewer than 2 x pp=4;"
            " --micro-batch-size 1, --global-batch-size 16 or --schedule gpipe would "
            "do",
            "--layers 4 is too few for the 8 stages of pp=4: each stage takes at "
            "least one block; --layers 8, pp=2 or --schedule 1f1b would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x2x1 --schedule interleaved-1f1b --global-batch-size 10 --micro-batch-size 2",
        [
            "an interleaved schedule takes its microbatches in m // pp equal rounds, "
            "but --global-batch-size 10 / (dp=1 x micro-batch 2) = 5, which 5 // pp=2"
            " = 2 rounds do not divide; --micro-batch-size 1, --global-batch-size 12 "
            "or --schedule gpipe would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x2x1 --schedule zbv --stages-per-rank 3",
        [
            "--stages-per-rank 3 with --schedule zbv: gpipe and 1f1b have 1 stage per"
            " rank, zbv and dualpipev the 2 of a V; --stages-per-rank 2 or --schedule"
            " interleaved-1f1b, looped-bfs or interleaved-zero-bubble would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x4x1 --schedule zbv",
        [
            "--layers 4 is too few for the 8 stages of pp=4: each stage takes at "
            "least one block; --layers 8, pp=2 or --schedule 1f1b would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x4x1 --schedule interleaved-1f1b --layers 9 --stages-per-rank 3",
        [
            "--layers 9 is too few for the 12 stages of pp=4: each stage takes at "
            "least one block; --layers 12, --stages-per-rank 2, pp=3 or --schedule "
            "1f1b would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x2x2 --schedule zbv --reshard-after-forward",
        [
            "--reshard-after-forward with --schedule zbv: torch's gradients of the "
            "weights alone are lost where those are not whole all the time; leaving "
            "--reshard-after-forward out, or --schedule 1f1b, would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x2x2 --schedule interleaved-zero-bubble --zero 0 --ddp",
        [
            "--ddp with --schedule interleaved-zero-bubble: DistributedDataParallel "
            "does not hear of gradients of the weights alone; leaving --ddp out, or "
            "--schedule 1f1b, would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x2x2 --schedule-csv parity_tests/schedule_partly_split.csv --layers 4 "
        "--global-batch-size 4 --reshard-after-forward",
        [
            "--reshard-after-forward with --schedule-csv parity_tests/schedule_partly_split.csv: "
            "torch's gradients of the weights alone are lost where those are not whole all the "
            "time; leaving --reshard-after-forward out, or B in place of I and W, would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x2x2 --schedule-csv parity_tests/schedule_partly_split.csv --layers 4 "
        "--global-batch-size 4 --zero 0 --ddp",
        [
            "--ddp with --schedule-csv parity_tests/schedule_partly_split.csv: "
            "DistributedDataParallel does not hear of gradients of the weights alone; leaving "
            "--ddp out, or B in place of I and W, would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x2x1 --schedule-csv parity_tests/schedule_of_two_ranks.csv "
        "--stages-per-rank 2 --global-batch-size 3",
        [
            "--stages-per-rank 2 with --schedule-csv "
            "parity_tests/schedule_of_two_ranks.csv: the file says which stages a "
            "rank has; leaving one of them out would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x4x1 --schedule-csv parity_tests/schedule_of_two_ranks.csv --global-batch-size 3",
        [
            "--schedule-csv parity_tests/schedule_of_two_ranks.csv has 2 rows, but "
            "pp=4, and the file has a row for each rank of pp; pp=2 would do",
        ],
    ),
    (
        ALONE,
        "--schedule-csv parity_tests/schedule_of_two_ranks.csv --global-batch-size 3",
        [
            "--schedule-csv parity_tests/schedule_of_two_ranks.csv has 2 rows, but "
            "pp=1, and the file has a row for each rank of pp; pp=2 would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x2x1 --schedule-csv parity_tests/schedule_of_two_ranks.csv "
        "--global-batch-size 12 --micro-batch-size 6",
        [
            "--schedule-csv parity_tests/schedule_of_two_ranks.csv is for 3 "
            "microbatches: the file says what is done with each, but "
            "--global-batch-size 12 / (dp=1 x micro-batch 6) = 2; --micro-batch-size "
            "4 or --global-batch-size 18 would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x2x1 --schedule-csv parity_tests/schedule_of_two_ranks.csv --layers "
        "3 --global-batch-size 3",
        [
            "--layers 3 is too few for the 4 stages of pp=2: each stage takes at "
            "least one block; --layers 4 or "
            "--stage-layers auto would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x2x1 --schedule-csv no-such.csv",
        [
            "--schedule-csv no-such.csv cannot be read: No such file or directory; "
            "another file would do",
        ],
    ),
    (
        ALONE,
        "--mesh 1x2x1 --schedule-csv parity_tests/schedule_deadlock.csv",
        [
            "--schedule-csv parity_tests/schedule_deadlock.csv: the schedule cannot run:\n"
            "rank 0, step 1: 0B0 waits for 1B0, step 2 of rank 1\n"
            "rank 1, step 1: 1F1 waits for 0F1, step 2 of rank 0\n"
            "move what waits down, or what it waits for up\n"
            "\n"
            "step  rank 0  rank 1\n"
            "0      0F0     1F0\n"
            "1     >0B0<   >1F1<\n"
            "2      0F1     1B0\n"
            "3      0B1     1B1",
        ],
    ),
    (
        ALONE,
        "--mesh 1x2x1 --schedule-csv parity_tests/schedule_out_of_order.csv --global-batch-size 2",
        [
            "--schedule-csv parity_tests/schedule_out_of_order.csv: rank 0 does 3F1 "
            "before 3F0, but torch takes the losses of the last stage in order; the "
            "same cells in the order of the microbatches would do\n"
            "\n"
            "step  rank 0  rank 1\n"
            "0      0F0     1F0\n"
            "1      0F1     2F0\n"
            "2     >3F1<    1F1\n"
            "3     >3F0<    2F1\n"
            "4      3B0     2B0\n"
            "5      3B1     1B0\n"
            "6      0B0     2B1\n"
            "7      0B1     1B1",
        ],
    ),
]
