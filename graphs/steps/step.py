"""What all steps share: their static form, the state that they take, and how their layers read and write the cache."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from xla_engine.graphs.attention.backend import AttentionCall, AttentionWeights, LayerCache
from xla_engine.graphs.kv_cache.cache import KVCache, places
from xla_engine.graphs.model.call import Attend
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.graphs.ops.norms import scaled_queries
from xla_engine.graphs.recurrent.kind import RecurrentState, RecurrentWeights
from xla_engine.graphs.recurrent.layer import PendingInputs
from xla_engine.graphs.recurrent_forms import Recurrent
from xla_engine.graphs.row_state.rows import Rows, Tables

# (a layer's cache, projected, call) -> (the cache, with new keys and values, attention's output)
Attention = Callable[[LayerCache, jax.Array, AttentionCall], tuple[LayerCache, jax.Array]]
# (sizes, a layer's weights, its state, projected) -> (the new state, or what it will follow from; the layer's output)
Recurrence = Callable[
    [Recurrent, RecurrentWeights, RecurrentState, jax.Array],
    tuple[RecurrentState | PendingInputs, jax.Array],
]


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
    only_windows: bool = False,
    pending: dict[int, PendingInputs] | None = None,
) -> Attend:
    """`Call.attend` of a step, which replaces the stores of `cache` by what they are after the layer.

    angles: cosines and sines of the tokens, `[K, ..., 2, Dh/2]`. block_tables: as in `Rows`.
    reach: as in `AttentionCall`. only_windows (static): it is for layers with a sliding window alone.
    pending: receives, by store, what `recurrence` returns in place of a new state.
    """
    spec, where = form.spec, places(form.spec)

    def attend(index: int, projected: jax.Array, own: AttentionWeights | RecurrentWeights) -> jax.Array:
        if not isinstance(own, AttentionWeights):
            store = where.states[index]
            layer = cache[store]
            assert isinstance(layer, RecurrentState) and spec.local.recurrent is not None
            after, out = recurrence(spec.local.recurrent, own, layer, projected)
            if isinstance(after, RecurrentState):
                cache[store] = after
            else:
                assert pending is not None
                pending[store] = after
            return out
        store, layer_in_store = where.keys[index]
        sliding = spec.config.attention(index).window is not None
        call = AttentionCall(
            form=spec.config.attention(index),
            weights=own,
            rope=angles[spec.config.rope_index(index), ..., : spec.config.layer(index).head_dim // 2],
            key_length=form.key_length,
            compute_dtype=spec.dtype,
            block_tables=block_tables,
            layer_in_store=layer_in_store,
            reach=reach if sliding or not only_windows else None,
        )
        keys = cache[store]
        assert isinstance(keys, LayerCache)
        cache[store], out = attention(keys, scaled_queries(spec.local, projected, angles), call)
        return out

    return attend
