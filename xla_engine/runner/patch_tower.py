"""The vision tower of Qwen3-VL and Qwen3.5 on the device: a picture of any proportions in, features out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.graphs.inventory import GraphReport, Inventory
from xla_engine.graphs.ops.rope import cosines_and_sines, power
from xla_engine.graphs.vision.patch_config import BUCKETS, PatchConfig
from xla_engine.graphs.vision.patches import (
    embed_name,
    embed_shapes,
    layer_name,
    layer_shapes,
    merge_name,
    merge_shapes,
    patch_programs,
    tap_name,
    tap_shapes,
)
from xla_engine.model_loader.weights import DTYPES
from xla_engine.runner.vision_tower import VisionTower

Array = np.ndarray[Any, Any]


class _Stream(NamedTuple):
    """A picture between two stages. x: the residual stream. number: of its patches. taps: features so far."""

    x: jax.Array
    angles: jax.Array
    number: jax.Array
    taps: tuple[jax.Array, ...]


class PatchTower:
    """The compiled programs of a tower and its weights.

    A call takes one picture, in the smallest bucket of rows that holds its patches, so that a picture's features are a
    function of its pixels, on one machine and number of threads.
    """

    def __init__(
        self,
        config: PatchConfig,
        dtype: str,
        weights: Mapping[str, Array],
        table: Array,
        fingerprint: str = "given",
        *,
        most_tokens: int = BUCKETS[-1],
    ) -> None:
        """weights: by the names of `patch_shapes`. table: `PatchProcessor.table`. most_tokens: of a picture; there are
        programs for no more.

        fingerprint: of everything that features depend on besides a picture's file; part of an engine's identity.
        """
        self.config, self.fingerprint = config, fingerprint
        most = min(most_tokens * config.merged, BUCKETS[-1])
        self.buckets = tuple(b for a, b in zip((0, *BUCKETS), BUCKETS, strict=False) if a < most)
        self._inventory = Inventory()
        self._inventory.compile(
            [each for rows in self.buckets for each in patch_programs(config, jnp.dtype(DTYPES[dtype]), rows)]
        )

        def placed(names: Mapping[str, Any], prefix: str = "") -> dict[str, jax.Array]:
            return {name: jax.device_put(weights[prefix + name]) for name in names}

        self._embed, self._merge = placed(embed_shapes(config)), placed(merge_shapes(config))
        self._layers = [
            placed(layer_shapes(config), f"layers.{index}.") for index in range(config.num_hidden_layers)
        ]
        self._taps = {
            layer: placed(tap_shapes(config), f"taps.{index}.") for index, layer in enumerate(config.taps)
        }
        self._table = jax.device_put(table)

    def __call__(self, tile: Array) -> Array:
        """The features of a picture: uint8 `[H, W, 3]` to float32 `[tokens, feature_size]`."""
        tokens = self.tokens(tile.shape)
        assert tokens is not None, f"no whole squares of patches: {tile.shape}"
        return np.asarray(self.advance(tile, None, 0, self.stages))[:tokens]

    def glance(self, tile: Array) -> jax.Array:
        """What every program makes of a picture, with the first layer only: features for a check, in little time."""
        stream: _Stream = self.advance(tile, None, 0, 2)
        rows, run = len(stream.x), self._inventory
        taps = tuple(run(tap_name(rows), leaves, stream.x) for leaves in self._taps.values())
        features: jax.Array = self.advance(tile, stream._replace(taps=taps), self.stages - 1, self.stages)
        return features

    def tokens(self, shape: tuple[int, ...]) -> int | None:
        """Tokens of a picture of this shape; None if it does not fit the tower."""
        grid = self.config.grid(shape)
        if grid is None or grid[0] * grid[1] * self.config.merged > self.buckets[-1]:
            return None
        return grid[0] * grid[1]

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Rows and columns of its tokens, by which the decoder's keys and queries turn."""
        return self.config.grid(shape)

    @property
    def axes(self) -> tuple[int, ...]:
        """See `prefill_chunk`."""
        return self.config.axes

    @property
    def stages(self) -> int:
        """Calls for one picture, without taps: patches, each layer, features."""
        return len(self._layers) + 2

    @property
    def outputs(self) -> tuple[int, ...]:
        """Rows of features that the last stage may return; some may be spare."""
        return tuple(rows // self.config.merged for rows in self.buckets)

    @property
    def examples(self) -> list[Array]:
        """A picture for each of `outputs`."""
        side, unit = self.config.merge_size * self.config.patch_size, self.config.merged
        return [np.zeros((side, rows // unit * side, 3), np.uint8) for rows in self.buckets]

    def advance(self, tile: Array, stream: Any, begin: int, end: int) -> Any:
        """Start stages `begin` to `end` for a picture. stream: what the stages before have returned, which is donated.

        Returns a stream, or after the last stage the features, float32 `[outputs, feature_size]`.
        """
        run = self._inventory
        for stage in range(begin, end):
            if stage == 0:
                stream = self._started(tile)
                continue
            rows = len(stream.x)
            if stage == self.stages - 1:
                return run(merge_name(rows), self._merge, list(stream.taps), stream.x)
            leaves = self._layers[stage - 1]
            x = run(layer_name(rows), leaves, stream.x, stream.angles, stream.number)
            taps = stream.taps
            if stage - 1 in self._taps:
                taps = (*taps, run(tap_name(rows), self._taps[stage - 1], x))
            stream = stream._replace(x=x, taps=taps)
        return stream

    def _started(self, tile: Array) -> _Stream:
        c = self.config
        patches = patches_of(tile, c.patch_size, c.merge_size)
        count = len(patches)
        rows = next(each for each in self.buckets if each >= count)
        height, width = tile.shape[0] // c.patch_size, tile.shape[1] // c.patch_size
        row, column = places(height, width, c.merge_size)
        near, share = interpolated(row, column, height, width, c.position_side)
        turned = angles(np.stack([row, column], axis=1), c.rope_theta, c.head_dim)
        given = [np.zeros((rows, *each.shape[1:]), each.dtype) for each in (patches, near, share, turned)]
        for padded, each in zip(given, (patches, near, share, turned), strict=True):
            padded[:count] = each
        x = self._inventory(embed_name(rows), self._embed, self._table, *map(jax.device_put, given[:3]))
        return _Stream(x, jax.device_put(given[3]), jax.device_put(np.int32(count)), ())

    @property
    def reports(self) -> tuple[GraphReport, ...]:
        """What each program cost and needs."""
        return tuple(self._inventory)

    def close(self) -> None:
        """Drop the programs."""
        self._inventory.clear()


Tower = VisionTower | PatchTower


def patches_of(tile: Array, size: int, merge: int) -> Array:
    """The patches of a picture `[H, W, 3]`, square by square of `merge` x `merge`: `[R, 3, size, size]`."""
    height, width = tile.shape[0] // size // merge, tile.shape[1] // size // merge
    cut = tile.reshape(height, merge, size, width, merge, size, 3)
    return cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, size, size)


def places(height: int, width: int, merge: int) -> tuple[Array, Array]:
    """Row and column of each patch of a grid, in the order of `patches_of`: i64 `[R]` each."""
    found = np.indices((height, width)).reshape(2, height // merge, merge, width // merge, merge)
    row, column = found.transpose(0, 1, 3, 2, 4).reshape(2, -1)
    return row, column


def interpolated(row: Array, column: Array, height: int, width: int, side: int) -> tuple[Array, Array]:
    """The learned positions around each patch, of a square of `side`, and their shares: i32 and float32 `[R, 4]`.

    The corners of a picture lie on those of the square, and float32 rounds as in transformers (`vision_utils.py`).
    """

    def along(at: Array, length: int) -> tuple[Array, Array]:
        there = at.astype(np.float32) * np.float32(side - 1) / np.float32(max(length - 1, 1))
        floor = np.floor(there)
        taps = floor.astype(np.int32)[:, None] + np.arange(2, dtype=np.int32)
        far = np.abs(there[:, None] - floor[:, None] - np.arange(2, dtype=np.float32))
        return np.clip(taps, 0, side - 1), np.maximum(np.float32(1) - far, np.float32(0))

    (rows, heights), (columns, widths) = along(row, height), along(column, width)
    near = (rows[:, :, None] * np.int32(side) + columns[:, None, :]).reshape(-1, 4)
    return near, (heights[:, :, None] * widths[:, None, :]).reshape(-1, 4)


def angles(at: Array, theta: float, head_dim: int) -> Array:
    """Cosines and sines of positions `[R, 2]` on two axes, half of the angles each: float32 `[R, 2, Dh/2]`."""
    half = head_dim // 2
    exponents = np.arange(0, half, 2, dtype=np.float32) / np.float32(half)
    wavelengths = np.array([power(theta, float(each)) for each in exponents], np.float32)
    turned = at.astype(np.float32)[:, :, None] * (np.float32(1) / wavelengths)  # [R, 2, Dh/4]
    return cosines_and_sines(turned.reshape(len(at), -1))
