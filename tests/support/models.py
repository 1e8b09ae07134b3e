"""The small models that tests run, and their engine options."""

from __future__ import annotations

from dataclasses import replace

from xla_engine.config import EngineConfig
from xla_engine.graphs.config import ModelConfig
from xla_engine.model_loader.checkpoint import Checkpoint, random_checkpoint

TINY = ModelConfig(
    vocab_size=199,  # odd, and no multiple of the sampler's block
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=16,
    max_position_embeddings=512,
)
TINY_ENGINE = EngineConfig(
    max_num_seqs=8, max_model_len=300, prefill_lanes=(2,), chunk_size=16, key_buckets=(48,), block_size=16
)
BOTH_LANES = replace(TINY_ENGINE, prefill_lanes=(2, 8))  # what changes with the width of a prefill call shows


def tiny_checkpoint(
    dtype: str = "bfloat16", *, eos: tuple[int, ...] = (0,), model: ModelConfig = TINY
) -> Checkpoint:
    """A random two-layer model whose logits are far from flat."""
    return random_checkpoint(model, dtype=dtype, seed=1, scale=0.3, eos_token_ids=eos)
