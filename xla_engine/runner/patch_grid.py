"""A picture of any proportions as a tower's patches: pixels, places, learned positions and angles."""

from typing import Any

import numpy as np

from xla_engine.graphs.ops.rope import cosines_and_sines, power
from xla_engine.graphs.vision.patch_config import PatchConfig

Array = np.ndarray[Any, Any]


def patch_inputs(c: PatchConfig, tile: Array, rows: int) -> tuple[list[Array], Array]:
    """Patches, positions near them and their shares, as `patches.embedded` takes them, and the angles of each; all
    with spare rows."""
    patches = patches_of(tile, c.patch_size, c.merge_size)
    height, width = tile.shape[0] // c.patch_size, tile.shape[1] // c.patch_size
    row, column = places(height, width, c.merge_size)
    near, share = interpolated(row, column, height, width, c.position_side)
    turned = angles(np.stack([row, column], axis=1), c.rope_theta, c.head_dim)

    def padded(each: Array) -> Array:
        found = np.zeros((rows, *each.shape[1:]), each.dtype)
        found[: len(each)] = each
        return found

    return [padded(each) for each in (patches, near, share)], padded(turned)


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
