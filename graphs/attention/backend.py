"""The protocol of attention backends, which own rotation, cache layout, KV write and attention.

A graph passes projected heads to it and never reads a cache itself. All backends share one capacity: whole spans of
`KEY_SPAN` positions. Law 1 rests on them: what a row gets is a function of its own q, k, v, length and cache, bit for
bit, whatever the other rows, the `key_length` and the values behind its own keys.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from xla_engine.graphs.config import KEY_SPAN, ModelConfig, whole_spans
from xla_engine.graphs.forms import AttentionForm
from xla_engine.graphs.row_state.rows import Extents


class LayerCache(NamedTuple):
    """Keys and values for all slots, of one layer or of those that share a store, in the layout of the backend that
    made them. Values that are the keys (`LatentForm`) have an empty array."""

    keys: jax.Array
    values: jax.Array


class AttentionWeights(NamedTuple):
    """Parameters of attention itself, all float32, None if a model has none.

    q_norm, k_norm `[Dh]`: RMS norm of every query and key head, before the rotation or behind it
    (`AttentionForm.norm_last`). sinks `[H]`: one more logit per query head in the softmax's denominator, which carries
    no value (gpt-oss). distances `[H, 2 S]`: what a key's distance adds to its score; that of a key `d` positions
    behind a query stands in column `S + d`. S is at least the `key_length` and a tile more. Prefill only, not on GPUs.
    """

    q_norm: jax.Array | None = None
    k_norm: jax.Array | None = None
    sinks: jax.Array | None = None
    distances: jax.Array | None = None


class AttentionCall(NamedTuple):
    """The arguments about one layer that decode and prefill share. It crosses no jit boundary.

    form: what is static of the layer's attention.
    weights: the layer's own.
    rope: `[..., 2, Dh/2]`, cosines and sines of the call's positions, float32.
    key_length (static): the bucket of keys attended to; no row of the call has more keys.
    compute_dtype (static): of the products.
    block_tables: i32 `[B, max_blocks]`; position p of slot b lies at `p % block_size` of block
        `block_tables[b, p // block_size]` of the store, which is then a pool. Entries behind a slot's last block may
        hold anything. None: slots are contiguous. The bits of a result are the same either way, but for a soft cap in
        float32 under `xla`.
    layer_in_store (static): index of the layer in its store; 0 if each store is one layer's.
    reach: i32 `[P, T]`, in prefill, one past the last key that each query sees: after its own, and at most the end of
        what the call writes to its slot. Windows end where they do without. None: after its own key.
    """

    form: AttentionForm
    weights: AttentionWeights
    rope: jax.Array
    key_length: int
    compute_dtype: jnp.dtype
    block_tables: jax.Array | None = None
    layer_in_store: int = 0
    reach: jax.Array | None = None


class Attention(Protocol):
    """An attention backend. Instances are frozen and hashable: a graph is compiled for one.

    name: its value of `attention_backend`.
    isa: the instruction set of its C++ kernel; None without one.
    bounded_by_length: every row reads its own keys only, so that one graph, whose `key_length` is the whole cache,
        is used for all lengths; otherwise the work grows with `key_length` and the engine compiles key buckets.
    shares_stores: layers that keep as much of a slot share one store, whose leading axis they are. A call pays for
        every buffer it is given and gives back (findings/host_time.md).

    `qkv f32 [N, F]` is the fused projection, query heads first, then what `form.stored_parts` says of keys and values,
    not yet rotated. Without any, the cache is another layer's, which has written this call's keys and values already.
    Results are `[N, H Dh]` in float32 or `compute_dtype`.
    A write that must not happen (row not live, padding of a chunk) changes no byte.
    """

    @property
    def name(self) -> str: ...

    @property
    def isa(self) -> str | None: ...

    @property
    def bounded_by_length(self) -> bool: ...

    @property
    def shares_stores(self) -> bool: ...

    def make_store(
        self, config: ModelConfig, layers: Sequence[int], rows: int, length: int, dtype: jnp.dtype
    ) -> LayerCache:
        """A zeroed store for `layers` of a model that computes in `dtype`: `rows` slots of `length` positions, whole
        spans.

        A layer with a window may be a ring (`kept_positions`): position p lies at `p % capacity`, and what a slot held
        before its window is gone.
        A pool of blocks is a store as well, of `rows` blocks of `length` positions: 16, 32, 64, 128 or 256. Raises
        ValueError where a backend's tiles need longer blocks.
        """
        ...

    def clear_values(self, layer: LayerCache, slot: jax.Array, fresh: jax.Array) -> LayerCache:
        """Make stale values, which may be NaN, harmless in `slot [P]` where `fresh [P]`: it has a new owner. In all
        layers of a store.

        Blocks need none of it: what lies in them behind a row's own positions is never read.
        """
        ...

    def attend_decode(
        self, layer: LayerCache, qkv: jax.Array, call: AttentionCall, *, length: jax.Array, live: jax.Array
    ) -> tuple[LayerCache, jax.Array]:
        """Write one position per live row, then attend to the row's own keys.

        N = B, `call.rope [B, 2, Dh/2]`; `length [B]` is the write index, below `key_length` where `live [B]`. Rows
        that are not live get anything.
        """
        ...

    def attend_prefill(
        self, layer: LayerCache, qkv: jax.Array, call: AttentionCall, lanes: Extents
    ) -> tuple[LayerCache, jax.Array]:
        """Write up to T positions of each lane into its slot, then attend to all keys the slot holds,
        causally or up to `call.reach`.

        N = P T, `call.rope [P, T, 2, Dh/2]`; lanes end at `key_length` at most. All keys are written before any lane
        reads.
        """
        ...

    def read_span(self, layer: LayerCache, slot: jax.Array, span: jax.Array) -> LayerCache:
        """`KEY_SPAN` positions of a slot from `KEY_SPAN * span` on, as they are, of all layers of a store; `slot`,
        `span` i32 scalars.

        Of a ring, what lies in their place. All spans of a slot, written again in order, are the slot again. A block
        is a slot of one span, which may be shorter.
        """
        ...

    def write_span(
        self, layer: LayerCache, slot: jax.Array, span: jax.Array, moved: LayerCache, length: jax.Array
    ) -> LayerCache:
        """Put what `read_span` gave into any slot. The slot's positions from `length` on belong to no request:
        afterwards stale NaN must be harmless in those of this span."""
        ...


def kept_positions(form: AttentionForm, length: int, call_positions: int | None) -> int:
    """Positions that a layer keeps of slots of `length`: whole spans with room for the window of a call's first query
    beside all that the call writes, `call_positions` at most to one slot. None: keep all."""
    if form.window is None or call_positions is None:
        return length
    return min(length, whole_spans(form.window + call_positions))


def check_length(length: int, least: int = 16) -> None:
    """Raise ValueError unless `length` is whole spans (a slot), or divides one and is at least `least` (a block)."""
    if length != whole_spans(length) and (KEY_SPAN % length or length < least):
        sizes = [str(KEY_SPAN >> shift) for shift in range(5) if KEY_SPAN >> shift >= least]
        raise ValueError(f"block_size must be one of {', '.join(reversed(sizes))} here, not {length}")


def read_positions(
    leaf: jax.Array, slot: jax.Array, start: jax.Array, count: int, axis: int = 0
) -> jax.Array:
    """`[KV, count, ...]` of a leaf `[B, KV, positions, ...]`, positions in whatever unit the layout has. `axis`: of B,
    where others lead."""
    begin, sizes = _begin(leaf, slot, start, axis), list(leaf.shape)
    sizes[axis], sizes[axis + 2] = 1, count
    return jax.lax.dynamic_slice(leaf, begin, sizes).squeeze(axis)


def write_positions(
    leaf: jax.Array, slot: jax.Array, start: jax.Array, moved: jax.Array, axis: int = 0
) -> jax.Array:
    """The inverse of `read_positions`."""
    return jax.lax.dynamic_update_slice(leaf, jnp.expand_dims(moved, axis), _begin(leaf, slot, start, axis))


def _begin(leaf: jax.Array, slot: jax.Array, start: jax.Array, axis: int) -> list[jax.Array | int]:
    begin: list[jax.Array | int] = [0] * leaf.ndim
    begin[axis], begin[axis + 2] = slot, start
    return begin
