"""Which weights of a layer adapters change, and how their matrices lie on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.graphs.config import ModelConfig

TARGETS = ("qkv", "output", "gate_up", "down")
# Behind the name of a weight: its two matrices, and the rank that each part of it has of an adapter.
DOWN, UP, RANKS = LEAVES = "_lora_a", "_lora_b", "_lora_rank"


@dataclass(frozen=True, slots=True)
class LoraForm:
    """Room for adapters. slots: adapters at a time. rank: of each at most, a multiple of 4. dtype: of the matrices.
    packed: the second one lies as the C++ operation takes it."""

    slots: int
    rank: int
    dtype: jnp.dtype
    packed: bool

    def shapes(self, config: ModelConfig, target: str) -> dict[str, tuple[int, ...]]:
        """Leaf name to shape: A `[slots, parts, rank, inputs]`, B `[slots, rank, features]` with what scales it, and
        ranks `[slots, parts]`: both matrices are zero from there on; 0 where the adapter leaves the part alone."""
        heads, hidden = config.num_attention_heads * config.head_dim, config.hidden_size
        inputs = {"output": heads, "down": config.intermediate_size}.get(target, hidden)
        ends = part_ends(config, target)
        return {
            target + DOWN: (self.slots, len(ends), self.rank, inputs),
            target + UP: (self.slots, self.rank, ends[-1]),
            target + RANKS: (self.slots, len(ends)),
        }

    def dtype_of(self, leaf: str) -> jnp.dtype:
        """What the entries of a leaf are."""
        return jnp.dtype(jnp.int32) if leaf.endswith(RANKS) else self.dtype

    def stored(self, up: np.ndarray) -> np.ndarray:
        """B of one adapter `[rank, features]` as it lies on the device: packed, sixteen features stand together."""
        if not self.packed:
            return up
        blocks = up.reshape(self.rank, -1, 16).swapaxes(0, 1)
        return np.ascontiguousarray(blocks).reshape(up.shape)

    def stored_rows(self, stored: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Of B as it lies on a device, the features `rows [devices, width]`, each device's as it lies there, side by
        side: `[rank, devices * width]`. -1: zeros."""
        up = stored
        if self.packed:
            up = stored.reshape(-1, self.rank, 16).swapaxes(0, 1).reshape(stored.shape)
        padded = np.pad(up, ((0, 0), (0, 1)))  # what -1 takes
        return np.concatenate([self.stored(padded[:, own]) for own in rows], axis=1)


class Matrices(NamedTuple):
    """Those of all adapters for one weight, as `LoraForm.shapes` says. ends: of its parts, by features."""

    down: jax.Array
    up: jax.Array
    ranks: jax.Array
    ends: tuple[int, ...]


def part_ends(config: ModelConfig, target: str) -> tuple[int, ...]:
    """Where the parts of a weight end that have an A of their own: queries, keys and values, or gates and ups."""
    if target == "qkv":
        keys = config.num_key_value_heads * config.head_dim
        return tuple(config.qkv_features - rest for rest in (2 * keys, keys, 0))
    if target == "gate_up":
        return config.intermediate_size, 2 * config.intermediate_size
    return (config.hidden_size,)
