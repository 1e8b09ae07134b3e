"""The feature buffer: features of pictures' tiles on the device, for prefill to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_engine.config import EngineConfig
from xla_engine.graphs.inventory import Inventory, Program
from xla_engine.graphs.vision.config import VisionConfig
from xla_engine.runner.vision_tower import VisionTower
from xla_engine.scheduler import Chunk, Encode

STORE = "store_features"


def tile_bytes(config: VisionConfig) -> int:
    """Of the features of one tile."""
    return 4 * config.tokens * config.text_size


def places_within(config: VisionConfig, num_bytes: int) -> int:
    """The tiles of a buffer with this room, one at least."""
    return max(num_bytes // tile_bytes(config), 1)


def too_few_lanes(vision: VisionConfig, config: EngineConfig) -> str | None:
    """Why no prefill call has room for a tile whose positions see each other, and what to do; None if one has."""
    needed = -(-vision.tokens // config.chunk_size)
    if not vision.averages or needed <= config.prefill_lanes[-1]:
        return None
    return (
        f"the {vision.tokens} tokens of a picture run in one prefill call, and the largest has "
        f"{config.prefill_lanes[-1]} lanes of chunk_size {config.chunk_size}; raise the last of prefill_lanes to "
        f"{needed}"
    )


class FeatureBuffer:
    """A vision tower and the buffer that it fills.

    rows: f32 `[places * tokens, text_size]`, the features of the tile at each place, one row for each of its tokens.
    """

    def __init__(self, tower: VisionTower, num_bytes: int) -> None:
        """num_bytes: of the buffer, which has one place at least."""
        self.tower, self._tokens = tower, tower.config.tokens
        shape = (self._tokens, tower.config.text_size)
        self.places = places_within(tower.config, num_bytes)
        self._shape = (self.places * shape[0], shape[1])
        self.blank()
        self._inventory = Inventory()
        rows = jax.ShapeDtypeStruct(self.rows.shape, jnp.float32)
        features, place = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
        store = Program(name=STORE, function=_store, arguments=(rows, features, place), donate=(0,))
        self._inventory.compile([store])
        side = tower.config.image_size
        self.encode(Encode("", np.zeros((side, side, 3), np.uint8), 0, tower.stages, 0))  # a first call

    def blank(self) -> None:
        """Make the buffer anew, after a failed step may have lost it; the scheduler must have forgotten its places."""
        self.rows = jnp.zeros(self._shape, jnp.float32)
        self._stream: jax.Array | None = None  # the residual stream of the tile that is being encoded

    def encode(self, work: Encode) -> None:
        """Start a part of the tower's work. Waits for the part before, so that at most one is ahead of other steps."""
        jax.block_until_ready(self.rows if self._stream is None else self._stream)
        stream = self.tower.advance(
            work.tile, None if work.begin == 0 else self._stream, work.begin, work.end
        )
        if work.end == self.tower.stages:
            self.rows = self._inventory(STORE, self.rows, stream, np.int32(work.place))
            self._stream = None
        else:
            self._stream = stream

    def of_chunks(self, chunks: Sequence[Chunk], lanes: int, width: int) -> Any:
        """`Lanes.feature` of a prefill call: i32 `[lanes, width]`."""
        found = np.full((lanes, width), -1, np.int32)
        for lane, chunk in enumerate(chunks):
            for at, place, row, length in chunk.features:
                begin = place * self._tokens + row
                found[lane, at : at + length] = np.arange(begin, begin + length, dtype=np.int32)
        return found

    @property
    def group(self) -> int | None:
        """Positions of a tile that see each other in both directions; None if all see only what is before them."""
        return self._tokens if self.tower.config.averages else None

    def joined(self, chunks: Sequence[Chunk]) -> frozenset[int]:
        """Indices of chunks that run in the call of the chunk before, because they go on with its group."""
        return frozenset(
            index
            for index, chunk in enumerate(chunks)
            if self.group and chunk.features and chunk.features[0].at == 0 and chunk.features[0].row > 0
        )

    def close(self) -> None:
        """Free the buffer and the tower's programs."""
        self.rows.delete()
        self._inventory.clear()
        self.tower.close()


def _store(rows: jax.Array, features: jax.Array, place: jax.Array) -> jax.Array:
    """`rows` with the features `[tokens, D]` of a tile at its place."""
    return lax.dynamic_update_slice(rows, features, (place * features.shape[0], jnp.int32(0)))
