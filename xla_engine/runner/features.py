"""The feature buffer: features of pictures' tiles on the device, for prefill to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.config import EngineConfig
from xla_engine.graphs.inventory import Inventory, Program, program_name
from xla_engine.graphs.vision.config import NO_LAYERS, WINDOW_LAYERS, TowerConfig
from xla_engine.runner.vision_tower import PartlyEncoded, VisionTower
from xla_engine.scheduler import Chunk, Encode

STORE = "store_features"


def place_bytes(config: TowerConfig) -> int:
    """Of one place of the buffer."""
    return 4 * config.place_tokens * config.feature_size


def places_within(config: TowerConfig, num_bytes: int) -> int:
    """The places of a buffer with this room, one at least."""
    return max(num_bytes // place_bytes(config), 1)


def with_lanes_for(vision: TowerConfig, tokens: int, config: EngineConfig) -> EngineConfig:
    """Options whose largest prefill call has room for a tile, if its positions see each other and run in one call.

    tokens: the most of a tile.
    """
    needed = -(-tokens // config.chunk_size)
    if vision.sees_ahead == NO_LAYERS or needed <= config.prefill_lanes[-1]:
        return config
    return replace(config, prefill_lanes=(*config.prefill_lanes[:-1], needed))


class FeatureBuffer:
    """A vision tower and the buffer that it fills.

    rows: f32 `[places * place_tokens, feature_size]`, one row for each token of the tile at each place.
    """

    def __init__(self, tower: VisionTower, num_bytes: int) -> None:
        """num_bytes: of the buffer, which has one place at least."""
        self.tower, self.place_tokens = tower, tower.config.place_tokens
        width = tower.config.feature_size
        self.places = places_within(tower.config, num_bytes)
        self._shape = (self.places * self.place_tokens, width)
        self.blank()
        self._inventory = Inventory()
        rows = jax.ShapeDtypeStruct(self.rows.shape, jnp.float32)
        for count in tower.outputs:
            features = jax.ShapeDtypeStruct((count, width), jnp.float32)
            places = jax.ShapeDtypeStruct((count // self.place_tokens,), jnp.int32)
            store = Program(
                name=program_name(STORE, rows=count),
                function=_store,
                arguments=(rows, features, places),
                donate=(0,),
            )
            self._inventory.compile([store])
        for example in tower.examples:  # first calls
            self._put(tower.glance(example), ())

    def blank(self) -> None:
        """Make the buffer anew, after a failed step may have lost it; the scheduler must have forgotten its places."""
        self.rows = jnp.zeros(self._shape, jnp.float32)
        self._stream: PartlyEncoded | None = (
            None  # what the tower has returned of the tile that is being encoded
        )

    def encode(self, work: Encode) -> None:
        """Start a part of the tower's work. Waits for the part before, so that at most one is ahead of other steps."""
        jax.block_until_ready(self.rows if self._stream is None else self._stream)
        stream = self.tower.advance(
            work.tile, None if work.begin == 0 else self._stream, work.begin, work.end
        )
        self._stream = stream
        if work.end == self.tower.stages(work.tile.shape):
            self._put(stream.features, work.places)
            self._stream = None

    def _put(self, features: Sequence[jax.Array], places: Sequence[int]) -> None:
        """Store the features of a tile, given in parts, at its places."""
        for part in features:
            count = len(part) // self.place_tokens
            own, places = places[:count], places[count:]
            padded = np.full(count, self.places, np.int32)  # spare: nowhere
            padded[: len(own)] = own
            self.rows = self._inventory(program_name(STORE, rows=len(part)), self.rows, part, padded)

    def fields(self, chunks: Sequence[Chunk], lanes: int, width: int) -> dict[str, Any]:
        """The fields of `Lanes` about pictures."""
        given = (chunks, lanes, width)
        return {"feature": self.of_chunks(*given), "reach": self.reach(*given)}

    def of_chunks(self, chunks: Sequence[Chunk], lanes: int, width: int) -> Any:
        """`Lanes.feature` of a prefill call: i32 `[lanes, width]`."""
        found = np.full((lanes, width), -1, np.int32)
        for lane, chunk in enumerate(chunks):
            for span in chunk.features:
                begin = span.place * self.place_tokens + span.row
                rows = np.arange(begin, begin + span.length, dtype=np.int32)
                found[lane, span.at : span.at + span.length] = rows
        return found

    @property
    def turns(self) -> bool:
        """Whether keys and queries of the decoder turn by rows and columns of pictures (M-RoPE)."""
        return bool(self.tower.config.axes)

    @property
    def prefill_form(self) -> dict[str, Any]:
        """The fields of `PrefillForm` about pictures."""
        tower = self.tower.config
        only_windows = tower.sees_ahead == WINDOW_LAYERS
        return {"axes": tower.axes, "only_windows": only_windows, "blank_token": tower.blank_token}

    @property
    def sees_ahead(self) -> bool:
        """Whether the positions of a tile see each other in both directions, in some layers at least."""
        return self.tower.config.sees_ahead != NO_LAYERS

    def reach(self, chunks: Sequence[Chunk], lanes: int, width: int) -> Any:
        """`Lanes.reach` of a prefill call: i32 `[lanes, width]`, of a tile's positions its end."""
        if not self.sees_ahead:
            return None
        found = np.tile(np.arange(1, width + 1, dtype=np.int32), (lanes, 1))
        for lane, chunk in enumerate(chunks):
            for span in chunk.features:
                found[lane, span.at : span.at + span.length] = span.end
            found[lane] += chunk.start
        return found

    def joined(self, chunks: Sequence[Chunk]) -> frozenset[int]:
        """Indices of chunks that run in the call of the chunk before, because they go on with its tile."""
        return frozenset(
            index
            for index, before in enumerate(chunks, 1)
            if self.sees_ahead and before.features and before.features[-1].end > len(before.tokens)
        )

    def close(self) -> None:
        """Free the buffer and the tower's programs."""
        self.rows.delete()
        self._inventory.clear()
        self.tower.close()


def _store(rows: jax.Array, features: jax.Array, places: jax.Array) -> jax.Array:
    """`rows` with the features `[N, D]` of a tile at its places; those behind the last place go nowhere."""
    tokens, width = len(features) // len(places), features.shape[1]
    by_place = rows.reshape(-1, tokens, width)
    return by_place.at[places].set(features.reshape(-1, tokens, width), mode="drop").reshape(rows.shape)
