"""What all steps share: their static form, the state that they take, and how their layers read and write the cache."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from xla_engine.graphs.attention.backend import AttentionCall, AttentionWeights, LayerCache
from xla_engine.graphs.delta_net.layer import DeltaState, DeltaWeights
from xla_engine.graphs.kv_cache.cache import KVCache, places
from xla_engine.graphs.model.call import Attend
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.graphs.ops.norms import scaled_queries
from xla_engine.graphs.row_state.rows import Rows, Tables

# (a layer's cache, projected, call) -> (the cache, with new keys and values, attention's output)
Attention = Callable[[LayerCache, jax.Array, AttentionCall], tuple[LayerCache, jax.Array]]
# (index of the store, a layer's state, projected, weights) -> (the new state, the layer's output)
Recurrence = Callable[[int, DeltaState, jax.Array, DeltaWeights], tuple[DeltaState, jax.Array]]


class StepForm(NamedTuple):
    """The static part of a step.

    key_length: the bucket of keys that are attended to. Every row of the step ends in it.
    processed_logprobs: see `sample`.
    """

    spec: ModelSpec
    key_length: int
    processed_logprobs: bool = False


class StepState(NamedTuple):
    """What a step takes from the device: it returns `cache` and `rows` anew, and reads the rest.

    rope: `[K, S, 2, Dh/2]`, see `graphs.ops.rope`.
    """

    weights: list[Any]
    rope: jax.Array
    cache: KVCache
    rows: Rows
    tables: Tables


def attending(
    form: StepForm,
    cache: KVCache,
    angles: jax.Array,
    attention: Attention,
    recurrence: Recurrence,
    *,
    block_tables: jax.Array | None,
    reach: jax.Array | None = None,
) -> Attend:
    """`Call.attend` of a step, which replaces the stores of `cache` by what they are after the layer.

    angles: cosines and sines of the tokens, `[K, ..., 2, Dh/2]`. block_tables: as in `Rows`.
    reach: as in `AttentionCall`.
    """
    spec, where = form.spec, places(form.spec)

    def attend(index: int, projected: jax.Array, own: AttentionWeights | DeltaWeights) -> jax.Array:
        store, layer_in_store = where[index]
        layer = cache[store]
        if isinstance(layer, DeltaState):
            assert isinstance(own, DeltaWeights)
            cache[store], out = recurrence(store, layer, projected, own)
            return out
        assert isinstance(own, AttentionWeights)
        call = AttentionCall(
            form=spec.config.attention(index),
            weights=own,
            rope=angles[spec.config.rope_index(index)],
            key_length=form.key_length,
            compute_dtype=spec.dtype,
            block_tables=block_tables,
            layer_in_store=layer_in_store,
            reach=reach,
        )
        cache[store], out = attention(layer, scaled_queries(spec.local, projected, angles), call)
        return out

    return attend
