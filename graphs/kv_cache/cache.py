"""The state that a model keeps for its slots: a list of stores, each of one layer or of several equal layers.

States of recurrent layers are saved and restored as they are, of all these layers at once. The memory that a model and
its slots need on a device is computed from shapes: nothing is allocated.
"""

from typing import Any, NamedTuple

import jax

from xla_engine.graphs.attention.backend import LayerCache
from xla_engine.graphs.config import ModelConfig, whole_spans
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.graphs.recurrent.kind import RecurrentState
from xla_engine.graphs.recurrent.layer import make_state
from xla_engine.graphs.row_state.rows import Pool, make_rows, pack_rows

KVCache = list[LayerCache | RecurrentState]


def make_cache(
    spec: ModelSpec,
    rows: int,
    length: int,
    *,
    num_blocks: int | None = None,
    config: ModelConfig | None = None,
) -> KVCache:
    """Zeroed state of `rows` slots of `length` positions, whole spans: a record for each of `stores(spec)`.

    Layers of attention have keys and values in the layout of the spec's backend, recurrent ones a `RecurrentState`.
    With `num_blocks`, keys and values are a pool of this many blocks of `length` positions each, for block tables;
    other state stays by row. `config`: if its heads are not those of one device. Raises ValueError for a block size
    that the backend cannot read.
    """
    config = spec.local if config is None else config
    cache: KVCache = []
    for store in stores(spec):
        if store.is_state:
            assert config.recurrent is not None
            cache.append(make_state(config.recurrent, rows))
        else:
            slots = rows if num_blocks is None else num_blocks
            cache.append(spec.attention.make_store(config, store.layers, slots, length, spec.dtype))
    return cache


class Store(NamedTuple):
    """The layers of a store of a cache, and whether it holds their recurrent state, or their keys and values."""

    layers: list[int]
    is_state: bool


def stores(spec: ModelSpec) -> list[Store]:
    """The stores of a cache, by their first layers: the keys and values of layers with the same window and heads
    together if the backend shares stores, the state of each recurrent layer alone. Layers that attend to the keys of
    others have no store."""
    config, found = spec.config, dict[Any, Store]()
    for index in range(config.num_hidden_layers):
        if config.attends(index) and config.keys_of(index) == index:
            window, sizes = config.attention(index).window, config.layer(index)
            alike = ("window", window, sizes.num_key_value_heads, sizes.head_dim)
            own = alike if spec.attention.shares_stores else ("keys", index)
            found.setdefault(own, Store([], is_state=False)).layers.append(index)
        if config.is_recurrent(index):
            found["state", index] = Store([index], is_state=True)
    return list(found.values())


class StorePlaces(NamedTuple):
    """Where layers have their parts of a cache: the store and place in it of keys and values; the store of a state."""

    keys: dict[int, tuple[int, int]]
    states: dict[int, int]


def places(spec: ModelSpec) -> StorePlaces:
    """Where the keys and values that each layer attends to, or its state, are in a cache."""
    found, config = StorePlaces({}, {}), spec.config
    for number, store in enumerate(stores(spec)):
        if store.is_state:
            found.states[store.layers[0]] = number
        else:
            found.keys.update((index, (number, place)) for place, index in enumerate(store.layers))
    others = {
        index: found.keys[config.keys_of(index)]
        for index in range(config.num_hidden_layers)
        if config.attends(index)
    }
    return found._replace(keys=others)


States = list[RecurrentState]  # one for each recurrent layer, in order; leaves `[slots or places, ...]`


def make_states(config: ModelConfig, places: int) -> States:
    """Zeroed room for `places` states."""
    form, count = config.recurrent, config.num_hidden_layers
    recurrent = sum(config.is_recurrent(index) for index in range(count))
    return [] if form is None else [make_state(form, places) for _ in range(recurrent)]


def keys_of(cache: KVCache) -> list[LayerCache]:
    """The stores of a cache with keys and values."""
    return [store for store in cache if isinstance(store, LayerCache)]


def with_keys(cache: KVCache, stores: list[LayerCache]) -> KVCache:
    others = iter(stores)
    return [next(others) if isinstance(store, LayerCache) else store for store in cache]


def states_of(cache: KVCache) -> States:
    """The stores of a cache that belong to recurrent layers."""
    return [store for store in cache if isinstance(store, RecurrentState)]


def with_states(cache: KVCache, states: States) -> KVCache:
    others = iter(states)
    return [next(others) if isinstance(store, RecurrentState) else store for store in cache]


def copy_state(target: States, source: States, at: jax.Array, place: jax.Array) -> tuple[States]:
    """`target` with the state of `source` at `place` in position `at`; both scalars i32."""
    return (jax.tree.map(lambda kept, found: kept.at[at].set(found[place]), target, source),)


def read_state(source: States, place: jax.Array) -> tuple[States]:
    """The state of `source` at `place`, a scalar i32; leaves `[1, ...]`."""
    return (jax.tree.map(lambda leaf: leaf[place][None], source),)


def write_state(target: States, at: jax.Array, state: States) -> tuple[States]:
    """The inverse of `read_state`, into any place."""
    return (jax.tree.map(lambda kept, moved: kept.at[at].set(moved[0]), target, state),)


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays of a tree, abstract or not."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def cache_bytes(spec: ModelSpec, rows: int, length: int) -> int:
    """Bytes of the cache of `rows` slots of `length` positions, as the spec's attention lays it out."""
    return tree_bytes(jax.eval_shape(lambda: make_cache(spec, rows, whole_spans(length))))


def block_bytes(spec: ModelSpec, block_size: int) -> int:
    """Bytes of one block: keys, values and tokens."""
    block = jax.eval_shape(lambda: keys_of(make_cache(spec, 1, block_size, num_blocks=1)))
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
        asked = (store for store in cache if not (saves_states and isinstance(store, RecurrentState)))
        return [tree_bytes(store) for store in asked]

    once = whole_spans(length)
    return [2 * size for size in stores(once)] == stores(2 * once)


def rows_bytes(rows: int, stop_width: int, length: int, block_size: int | None = None) -> int:
    """Bytes of the row state of `rows` slots; with `block_size`, without what lies in blocks."""
    pool = None if block_size is None else Pool(0, block_size, whole_spans(length) // block_size)
    return tree_bytes(jax.eval_shape(lambda: pack_rows(make_rows(rows, stop_width, length, pool))))
