"""Published model shapes, by the name that `--model` takes."""

from dataclasses import replace

from dtensor_llm.config import ModelConfig

_GPT2_FAMILY = ModelConfig(vocab_size=50257)

_LLAMA3_FAMILY = ModelConfig(
    vocab_size=128256,
    kv_heads=8,
    seq_len=8192,
    norm="rmsnorm",
    positions="rope",
    mlp="swiglu",
    bias=False,
    tied_embeddings=False,
    rope_theta=500000.0,
)

PRESETS: dict[str, ModelConfig] = {
    # Bytes as tokens: trains on any laptop, and 8x4x16 divides it.
    "tiny": ModelConfig(),
    # Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2; heads
    # from the released checkpoints. The table's 117M and 1542M are 124M and 1558M when counted.
    "gpt2": replace(_GPT2_FAMILY, layers=12, width=768, heads=12, seq_len=1024),
    "gpt2-xl": replace(_GPT2_FAMILY, layers=48, width=1600, heads=25, seq_len=1024),
    # Brown et al. 2020, arXiv 2005.14165, table 2.1; dense attention in every layer here, where
    # theirs alternates with a locally banded one.
    "gpt3-175b": replace(_GPT2_FAMILY, layers=96, width=12288, heads=96, seq_len=2048),
    # Llama Team 2024, arXiv 2407.21783, table 3; vocabulary from the released checkpoints, length
    # of the first pre-training stage.
    "llama3-8b": replace(_LLAMA3_FAMILY, layers=32, width=4096, heads=32, ffn_width=14336),
    "llama3-70b": replace(_LLAMA3_FAMILY, layers=80, width=8192, heads=64, ffn_width=28672),
    "llama3-405b": replace(_LLAMA3_FAMILY, layers=126, width=16384, heads=128, ffn_width=53248),
}
