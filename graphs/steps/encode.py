"""The program of an encoder: whole texts in, the output of the last layer out. Nothing stays on the device.

Tokens stand in lanes of equal width. A text takes one or more consecutive lanes, and begins a lane. Keys and values
live in one layer's store, which all layers use one after the other.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xla_engine.graphs.attention.backend import AttentionCall, AttentionWeights, LayerCache
from xla_engine.graphs.config import KEY_SPAN
from xla_engine.graphs.linear.products import ROWS_LEFT
from xla_engine.graphs.model.call import Call
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.graphs.recurrent.kind import RecurrentWeights
from xla_engine.graphs.row_state.rows import Extents


class EncodeShape(NamedTuple):
    """The static sizes of a call.

    lanes, width: of tokens. keys: positions of the longest text, whole spans.
    block: positions of a block of the store, which has one for each lane; a table tells which blocks a text has.
        None: there are no blocks, and each lane is a text.
    """

    lanes: int
    width: int
    keys: int
    block: int | None = None

    @property
    def columns(self) -> int:
        """Of a call's work: the tokens of a lane, its five numbers, and the blocks of its text."""
        return self.width + NUMBERS + (0 if self.block is None else self.keys // self.block)


ENCODER_ROWS = 2048  # of the largest call, unless a text has more tokens
SLOT, START, COUNT, LENGTH, SECOND = range(5)
NUMBERS = 5
"""Of each lane, after its tokens: the number of its text, the position of its first token, how many tokens it has, the
length of its text, and the position of the first token of type 1."""


def encode(
    spec: ModelSpec,
    shape: EncodeShape,
    weights: list[jax.Array],
    rope: jax.Array,
    store: LayerCache,
    work: jax.Array,
) -> tuple[LayerCache, jax.Array]:
    """Encode the texts in `work i32 [lanes, columns]`. A lane of count 0 is empty.

    Static: `spec`, `shape`. rope: the tables of `rope_tables`, `[K, positions, 2, Dh/2]`. store: donated. Returns it,
    and float32 `[lanes * width, D]`; rows without a token are finite.
    """
    config, width = spec.config, shape.width
    tokens, numbers = work[:, :width], work[:, width : width + NUMBERS]
    tables = None if shape.block is None else work[:, width + NUMBERS :]
    lanes = Extents(numbers[:, SLOT], numbers[:, START], numbers[:, COUNT])
    offset = jnp.arange(width, dtype=jnp.int32)
    positions = lanes.start[:, None] + offset  # [P, T]
    live = offset < lanes.size[:, None]
    length = numbers[:, LENGTH, None]
    types = (positions >= numbers[:, SECOND, None]).astype(jnp.int32)
    angles = jnp.take(rope, positions, axis=1, mode="clip")  # [K, P, T, 2, Dh/2]
    encoder = None if config.encoder is None else spec.merge_encoder(weights)
    distances = None if encoder is None else encoder.distances(shape.keys + KEY_SPAN)
    if shape.block is None:
        store = spec.attention.clear_values(store, lanes.slot, lanes.size > 0)

    def attend(index: int, qkv: jax.Array, own: AttentionWeights | RecurrentWeights) -> jax.Array:
        nonlocal store
        assert isinstance(own, AttentionWeights)
        form = config.attention(index)
        furthest = length if form.window is None else jnp.minimum(positions + form.window, length)
        reach = jnp.where(live, furthest, positions + 1)
        call = AttentionCall(
            form=form,
            weights=own._replace(distances=distances),
            rope=angles[config.rope_index(index)],
            key_length=shape.keys,
            compute_dtype=spec.dtype,
            block_tables=tables,
            reach=reach,
        )
        store, out = spec.attention.attend_prefill(store, qkv, call, lanes)
        return out

    call = Call(attend=attend, products=(spec.products or ROWS_LEFT).for_rows(live.reshape(-1)))
    types = jnp.where(live, types, 0)
    if encoder is None:
        decoder = spec.merge(weights)
        *_, hidden = decoder.hidden(tokens.reshape(-1), call)
        hidden = decoder.normed(hidden)
    else:
        hidden = encoder(tokens.reshape(-1), positions.reshape(-1), types.reshape(-1), call)
    return store, hidden  # `attend` has replaced the store


def make_store(spec: ModelSpec, shape: EncodeShape) -> LayerCache:
    """The store of a call of this shape. All layers share it, so no window makes it shorter."""
    length, config = (
        shape.keys if shape.block is None else shape.block,
        replace(spec.config, sliding_window=None),
    )
    return spec.attention.make_store(config, (0,), shape.lanes, length, spec.dtype)
