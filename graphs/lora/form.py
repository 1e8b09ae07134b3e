"""The weights that LoRA adapters change, and the layout of their matrices on the device."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.graphs.config import ModelConfig

TARGETS = ("qkv", "output", "gate_up", "down")
# Suffixes of a weight's name: for its two matrices, and for the rank of each of its parts.
DOWN, UP, RANKS = "_lora_a", "_lora_b", "_lora_rank"


@dataclass(frozen=True, slots=True)
class LoraForm:
    """The space for adapters.

    slots: how many adapters. rank: the highest rank, a multiple of 4. dtype: of the matrices.
    packed: the second matrix is packed for the C++ kernel.
    """

    slots: int
    rank: int
    dtype: jnp.dtype
    packed: bool

    def shapes(self, config: ModelConfig, target: str) -> dict[str, tuple[int, ...]]:
        """The shapes of a weight's leaves by name. config: of the layer (`ModelConfig.layer`).

        A `[slots, parts, rank, inputs]`; B `[slots, rank, features]`, with the scale applied; ranks `[slots, parts]`,
        beyond which both matrices are zero, or 0 if the adapter does not change the part.
        """
        heads, hidden = config.num_attention_heads * config.head_dim, config.hidden_size
        inputs = {"output": heads, "down": config.intermediate_size}.get(target, hidden)
        ends = part_ends(config, target)
        return {
            target + DOWN: (self.slots, len(ends), self.rank, inputs),
            target + UP: (self.slots, self.rank, ends[-1]),
            target + RANKS: (self.slots, len(ends)),
        }

    def dtype_of(self, leaf: str) -> jnp.dtype:
        return jnp.dtype(jnp.int32) if leaf.endswith(RANKS) else self.dtype

    def stored(self, up: np.ndarray) -> np.ndarray:
        """B of one adapter `[rank, features]` in the layout of the device; packed, in groups of sixteen features."""
        if not self.packed:
            return up
        blocks = up.reshape(self.rank, -1, 16).swapaxes(0, 1)
        return np.ascontiguousarray(blocks).reshape(up.shape)

    def stored_rows(self, stored: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Shard B, given in the layout of a device, by its features `rows [devices, width]`, -1 for zeros.

        Returns the shards of all devices, each in the layout of a device, concatenated: `[rank, devices * width]`.
        """
        up = stored
        if self.packed:
            up = stored.reshape(-1, self.rank, 16).swapaxes(0, 1).reshape(stored.shape)
        padded = np.pad(up, ((0, 0), (0, 1)))  # index -1 selects the zeros
        return np.concatenate([self.stored(padded[:, own]) for own in rows], axis=1)


class Matrices(NamedTuple):
    """The matrices of all adapters for one weight, see `LoraForm.shapes`. ends: of the weight's parts, in features."""

    down: jax.Array
    up: jax.Array
    ranks: jax.Array
    ends: tuple[int, ...]


def part_ends(config: ModelConfig, target: str) -> tuple[int, ...]:
    """The ends of the parts of a weight that each have their own A: queries, keys and values, or gates and ups.

    config: of the layer (`ModelConfig.layer`).
    """
    if target == "qkv":
        keys, stored = config.num_key_value_heads * config.head_dim, config.stored_parts
        return tuple(config.qkv_features - rest * keys for rest in reversed(range(stored + 1)))
    if target == "gate_up":
        return config.intermediate_size, 2 * config.intermediate_size
    return (config.hidden_size,)
