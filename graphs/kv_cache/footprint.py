"""The memory that a model and its slots need on a device, computed from shapes: nothing is allocated."""

from typing import Any

import jax

from xla_engine.graphs.attention.backend import whole_spans
from xla_engine.graphs.delta_net.layer import DeltaState
from xla_engine.graphs.kv_cache.cache import make_cache
from xla_engine.graphs.kv_cache.recurrent_states import make_states
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.row_state.rows import Pool, make_rows, pack_rows


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays of a tree, abstract or not."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def cache_bytes(spec: ModelSpec, rows: int, length: int) -> int:
    """Bytes of the cache of `rows` slots of `length` positions, as the spec's attention lays it out."""
    return tree_bytes(jax.eval_shape(lambda: make_cache(spec, rows, whole_spans(length))))


def block_bytes(spec: ModelSpec, block_size: int) -> int:
    """Bytes of one block: keys, values and tokens."""
    block = jax.eval_shape(lambda: make_cache(spec, 1, block_size, num_blocks=1))
    return tree_bytes(block) + 4 * block_size


def state_bytes(spec: ModelSpec) -> int:
    """Bytes of one state of all recurrent layers; 0 if there are none."""
    return tree_bytes(jax.eval_shape(lambda: make_states(spec.local, 1)))


def keeps_every_position(spec: ModelSpec, length: int, *, saves_states: bool = False) -> bool:
    """Whether every layer keeps keys and values of all positions of a slot, so that any prefix of one can be reused.

    A window or a recurrent state forgets: its memory does not grow with the number of positions.
    saves_states: do not ask recurrent layers.
    """

    def stores(positions: int) -> list[int]:
        cache = jax.eval_shape(lambda: make_cache(spec, 1, positions))
        asked = (store for store in cache if not (saves_states and isinstance(store, DeltaState)))
        return [tree_bytes(store) for store in asked]

    once = whole_spans(length)
    return [2 * size for size in stores(once)] == stores(2 * once)


def rows_bytes(rows: int, stop_width: int, length: int, block_size: int | None = None) -> int:
    """Bytes of the row state of `rows` slots; with `block_size`, without what lies in blocks."""
    pool = None if block_size is None else Pool(0, block_size, whole_spans(length) // block_size)
    return tree_bytes(jax.eval_shape(lambda: pack_rows(make_rows(rows, stop_width, length, pool))))
