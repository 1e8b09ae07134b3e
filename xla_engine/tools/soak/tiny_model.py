"""A model of two small layers for a soak, whose steps are so short that the host does most of the work."""

from xla_engine.graphs.config import ModelConfig
from xla_engine.model_loader.checkpoint import Checkpoint, random_checkpoint

_SCALE = 0.3  # of the weights: logits are far from flat


def tiny_model(like: Checkpoint, dtype: str) -> Checkpoint:
    """Random weights, the same in every process, with the vocabulary, positions and end tokens of another model.

    dtype: as in `load_checkpoint`.
    """
    shape = ModelConfig(
        vocab_size=like.config.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=like.config.max_position_embeddings,
    )
    return random_checkpoint(shape, dtype=dtype, seed=1, scale=_SCALE, eos_token_ids=like.eos_token_ids)
