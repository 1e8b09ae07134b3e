"""Decode MXFP4 weights (OCP Microscaling Formats 1.0): 32 4-bit numbers share a power-of-two scale."""

from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

BLOCK_BYTES = 16  # bytes of the 32 numbers that share a scale
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)
_FACTORS = np.array([*(2.0 ** (scale - 127) for scale in range(255)), np.nan], np.float32)


def from_mxfp4(blocks: Array, scales: Array) -> Array:
    """Decode uint8 numbers `[..., G, 16]`, low halves of bytes first, with scales `[..., G]`, to bfloat16 `[..., 32
    G]`.

    Exact, because the two significant bits of a number and a power of two fit into bfloat16. A scale of 255 is NaN,
    as in the standard; values too large for bfloat16 become infinite.
    """
    halves = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 2 * BLOCK_BYTES)
    with np.errstate(over="ignore"):
        values: Array = (_VALUES[halves] * _FACTORS[scales][..., None]).astype(ml_dtypes.bfloat16)
    return values.reshape(*scales.shape[:-1], -1)
