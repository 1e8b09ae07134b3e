"""What an attention backend is: rotation, cache layout, KV write and attention, owned together.

A graph hands it projected heads and never looks into a cache. All backends share one capacity: whole blocks of
`KEY_BLOCK` keys. Law 1 rests on them: what a row gets is a function of its own q, k, v, length and cache, bit for
bit, whatever the other rows, the `key_length` and the values behind its own keys.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from graphs.config import AttentionForm, ModelConfig

KEY_BLOCK = 256  # cache lengths and key buckets are multiples of it (findings/007)


class LayerCache(NamedTuple):
    """Keys and values of one layer for all slots, in the layout of the backend that made them."""

    keys: jax.Array
    values: jax.Array


KVCache = list[LayerCache]


class AttentionWeights(NamedTuple):
    """Parameters of attention itself, all float32, None where a model has none.

    q_norm, k_norm `[Dh]`: RMS norm of every query and key head, before rotation. sinks `[H]`: one more logit per query
    head in the softmax's denominator, which carries no value (gpt-oss).
    """

    q_norm: jax.Array | None = None
    k_norm: jax.Array | None = None
    sinks: jax.Array | None = None


class Attention(Protocol):
    """An attention backend. Instances are frozen and hashable: a graph is compiled for one.

    name: what `attention_backend` calls it.
    bounded_by_length: every row reads its own keys only, so that one graph, whose `key_length` is the whole cache,
        serves all lengths; otherwise the work grows with `key_length` and the engine compiles key buckets.

    Arguments are float32: `qkv [N, (H + 2 KV) Dh]` is the fused projection, query heads first, not yet rotated;
    `rope [..., 2, Dh/2]` holds cosines and sines; `form` and `weights` are the layer's. Results are
    `[N, H Dh]` in float32 or `compute_dtype`.
    A write that must not happen (row not live, padding of a chunk) changes no byte.
    """

    @property
    def name(self) -> str: ...

    @property
    def bounded_by_length(self) -> bool: ...

    def make_cache(self, config: ModelConfig, rows: int, length: int, dtype: jnp.dtype) -> KVCache:
        """A zeroed cache of `rows` slots of `length` positions, whole blocks, for a model that computes in `dtype`."""
        ...

    def clear_values(self, layer: LayerCache, slot: jax.Array, fresh: jax.Array) -> LayerCache:
        """Make stale values, which may be NaN, harmless in `slot [P]` where `fresh [P]`: it has a new owner."""
        ...

    def attend_decode(
        self,
        layer: LayerCache,
        qkv: jax.Array,
        *,
        form: AttentionForm,
        weights: AttentionWeights,
        rope: jax.Array,
        length: jax.Array,
        live: jax.Array,
        key_length: int,
        compute_dtype: jnp.dtype,
    ) -> tuple[LayerCache, jax.Array]:
        """Write one position per live row, then attend to the row's own keys.

        N = B, `rope [B, 2, Dh/2]`; `length [B]` is the write index, below `key_length` where `live [B]`. Rows that
        are not live get anything.
        """
        ...

    def attend_prefill(
        self,
        layer: LayerCache,
        qkv: jax.Array,
        *,
        form: AttentionForm,
        weights: AttentionWeights,
        rope: jax.Array,
        slot: jax.Array,
        start: jax.Array,
        count: jax.Array,
        key_length: int,
        compute_dtype: jnp.dtype,
    ) -> tuple[LayerCache, jax.Array]:
        """Write up to T positions of each lane into its slot, then attend causally to all keys the slot holds.

        N = P T, `rope [P, T, 2, Dh/2]`; `slot`, `start`, `count` `[P]`: lane p holds positions
        `start[p] .. start[p] + count[p]` of slot `slot[p]`, at most `key_length`. Consecutive lanes may hold
        consecutive chunks of one prompt: every lane's keys are written before any lane reads.
        """
        ...

    def to_host(self, layer: LayerCache, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of a layer as host arrays `[B, KV, S, Dh]`, whatever the layout."""
        ...

    def from_host(self, keys: np.ndarray, values: np.ndarray) -> LayerCache:
        """The inverse of `to_host`, bit for bit."""
        ...


def is_plain(form: AttentionForm, weights: AttentionWeights, head_dim: int) -> bool:
    """Whether it is the attention of Llama: every key before the query, the usual scale, nothing else."""
    usual = form.scale == head_dim**-0.5 and form.window is None and form.softcap is None
    return usual and all(weight is None for weight in weights)


def whole_blocks(length: int) -> int:
    """`length` rounded up to whole key blocks."""
    return -(-length // KEY_BLOCK) * KEY_BLOCK
