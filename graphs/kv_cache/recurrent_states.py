"""Saving the recurrent state of a slot, and restoring it: bytes move as they are, of all recurrent layers at once."""

import jax

from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.delta_net.layer import DeltaState, make_state
from xla_engine.graphs.kv_cache.types import KVCache

States = list[DeltaState]  # one for each recurrent layer, in order; leaves `[slots or places, ...]`


def make_states(config: ModelConfig, places: int) -> States:
    """Zeroed room for `places` states."""
    linear = sum(config.is_linear(index) for index in range(config.num_hidden_layers))
    return [] if config.delta is None else [make_state(config.delta, places) for _ in range(linear)]


def states_of(cache: KVCache) -> States:
    """The stores of a cache that belong to recurrent layers."""
    return [store for store in cache if isinstance(store, DeltaState)]


def with_states(cache: KVCache, states: States) -> KVCache:
    others = iter(states)
    return [next(others) if isinstance(store, DeltaState) else store for store in cache]


def copy_state(target: States, source: States, at: jax.Array, place: jax.Array) -> tuple[States]:
    """`target` with the state of `source` at `place` in position `at`; both scalars i32."""
    return (jax.tree.map(lambda kept, found: kept.at[at].set(found[place]), target, source),)
