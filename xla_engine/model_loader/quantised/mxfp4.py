"""Decode MXFP4 weights (OCP Microscaling Formats 1.0): 32 4-bit numbers share a power-of-two scale."""

from dataclasses import dataclass
from typing import ClassVar

import ml_dtypes
import numpy as np

from xla_engine.model_loader.quantised.matrix import check_shape, checked, stands_for
from xla_engine.model_loader.tensor_files import Array, TensorFiles, TensorInfo

_CODES, _SCALES = "_blocks", "_scales"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Matrix:
    """The matrices of all experts as one, `[E rows, K]` (`tensor_files.Computed`).

    Stored are uint8 `[E, rows, K / 32, 16]` and scales `[E, rows, K / 32]`.
    """

    files: TensorFiles
    codes: str
    scales: str
    info: TensorInfo
    kind: ClassVar[str] = "MXFP4"

    def rows(self, index: Array) -> Array:
        """Rows in bfloat16."""
        return from_mxfp4(*self._stored(index))

    def blocks(self, index: Array) -> Array:
        """Rows as in GGUF files: a scale, then 16 bytes whose low halves are the first 16 numbers."""
        codes, scales = self._stored(index)
        halves = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*scales.shape, 2, BLOCK_BYTES)
        packed = halves[..., 0, :] | halves[..., 1, :] << 4
        return np.concatenate([scales[..., None], packed], axis=-1).reshape(len(index), -1)

    def _stored(self, index: Array) -> tuple[Array, Array]:
        codes, scales = self.files.read(self.codes), self.files.read(self.scales)
        groups = scales.shape[-1]
        return codes.reshape(-1, groups, BLOCK_BYTES)[index], scales.reshape(-1, groups)[index]


def read_mxfp4(files: TensorFiles) -> dict[str, Mxfp4Matrix]:
    """The matrices of a gpt-oss checkpoint by the name of their numbers. Raises CheckpointError."""
    found = {}
    for codes in (name for name in files.tensors if name.endswith(_CODES)):
        info, scales = checked(files, codes, ("U8",), 4), codes.removesuffix(_CODES) + _SCALES
        experts, rows, groups, _ = info.shape
        check_shape(info, codes, (experts, rows, groups, BLOCK_BYTES))
        check_shape(checked(files, scales, ("U8",), 3), scales, info.shape[:3])
        shape = (experts * rows, groups * 2 * BLOCK_BYTES)
        whole = stands_for(files, "MXFP4", shape, (codes, scales))
        found[codes] = Mxfp4Matrix(files=files, codes=codes, scales=scales, info=whole)
    return found
