"""The weights that LoRA adapters change, and the layout of their matrices on the device."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.recurrent_forms import DeltaForm

TARGETS = ("qkv", "output", "gate_up", "down", "projected")
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

    def shapes(self, inputs: int, ends: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The shapes of a weight's leaves, by the suffixes of their names. ends: of its parts (`part_ends`).

        A `[slots, parts, rank, inputs]`; B `[slots, rank, features]`, with the scale applied; ranks `[slots, parts]`,
        beyond which both matrices are zero, or 0 if the adapter does not change the part.
        """
        return {
            DOWN: (self.slots, len(ends), self.rank, inputs),
            UP: (self.slots, self.rank, ends[-1]),
            RANKS: (self.slots, len(ends)),
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


def target_of(leaf: str) -> str | None:
    """The name in `TARGETS` of a weight of a layer; None if adapters leave it as it is."""
    place, _, name = leaf.rpartition(".")
    return name if name in TARGETS and place.startswith("layers.") and "experts" not in place else None


def part_ends(config: ModelConfig, target: str) -> tuple[int, ...]:
    """The ends of the parts of a weight that may each have their own A: queries, keys, values and gates of heads,
    gates and ups, or the parts of a recurrent layer's projection.

    config: of the layer (`ModelConfig.layer`).
    """
    if target == "qkv":
        keys = config.num_key_value_heads * config.head_dim
        queries = config.num_attention_heads * config.head_dim
        gates = (queries,) if config.attn_output_gate else ()
        return _ends(queries, *(config.stored_parts * (keys,)), *gates)
    if target == "gate_up":
        return config.intermediate_size, 2 * config.intermediate_size
    if target == "projected":
        form = config.recurrent
        assert form is not None
        if isinstance(form, DeltaForm):
            keys, decays = form.key_heads * form.key_dim, form.decay_features
            inner = form.inner_features
            return _ends(keys, keys, inner, inner, form.value_heads, decays)
        return (form.projected_features,)
    return (config.hidden_size,)


def _ends(*sizes: int) -> tuple[int, ...]:
    """The ends of parts of these sizes, one behind the other."""
    return tuple(sum(sizes[: count + 1]) for count in range(len(sizes)))
