"""A quantised matrix, whatever method stored it: integers or float8 codes, with scales and zero points by group."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from xla_engine.errors import CheckpointError, NotPackableError
from xla_engine.model_loader.tensor_files import Array, TensorFiles, TensorInfo

Indices = np.ndarray[Any, np.dtype[np.int64]]
Rows = Callable[[Indices], Array]
_BLOCK = 32  # columns
SCALE_TYPES = ("F16", "BF16", "F32")
WITH_ZEROS = ("A4", "A8")  # kinds of blocks
REMEDY = "Download the checkpoint again, or use another one"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedMatrix:
    """`[N, K]` weights: `(code - zero) * scale`, computed in float32.

    info: of the tensor that it stands for; its dtype names the form.
    codes: of rows `index [R]`: `[R, K]`, integers or float8.
    scales: the same: `[R, G]`.
    zeros: the same, integers; None if they are zero.
    groups: the group of each column, `[K]`.
    scales_name: the tensor of scales, for messages.
    kind: of blocks (`graphs.ops.coded`) that hold the same numbers, exactly; None if none does (`packed_kind`).
    """

    info: TensorInfo
    codes: Rows
    scales: Rows
    zeros: Rows | None
    groups: Indices
    scales_name: str
    kind: str | None = None

    def rows(self, index: Indices) -> Array:
        """Dequantised rows, float32 `[R, K]`. Raises CheckpointError for scales that cannot be right."""
        values = self.codes(index).astype(np.float32)
        if self.zeros is not None:
            self._by_group(np.subtract, values, self.zeros(index).astype(np.float32))
        self._by_group(np.multiply, values, self.checked_scales(index))
        return values

    def _by_group(self, change: np.ufunc, values: Array, of_groups: Array) -> None:
        """Change values `[R, K]` in place by those of their groups, `[R, G]`."""
        rows, count = of_groups.shape
        if np.array_equal(self.groups, np.repeat(np.arange(count), len(self.groups) // count)):
            parts = values.reshape(rows, count, len(self.groups) // count)
            change(parts, of_groups[:, :, None], out=parts)
        else:
            change(values, of_groups[:, self.groups], out=values)

    def blocks(self, index: Indices) -> Array:
        """Rows as blocks of `kind`, bytes `[R, ...]`. Raises NotPackableError if a scale does not fit float16."""
        assert self.kind is not None
        scales = self.checked_scales(index)
        with np.errstate(over="ignore"):
            halves = scales.astype(np.float16)
        if (halves.astype(np.float32) != scales).any():
            raise NotPackableError(
                f"{self.info.file}: tensor {self.scales_name} holds scales that float16 does not, so the weights "
                "cannot stay packed. Use quantization 'none': they are then dequantised"
            )
        stored, firsts = self.codes(index), self.groups[::_BLOCK]
        codes = stored.astype(np.int16)
        zeros = None if self.zeros is None else self.zeros(index).astype(np.int16)
        if zeros is not None and self.kind not in WITH_ZEROS:
            self._by_group(np.subtract, codes, zeros)
        elif zeros is not None and self.kind == "A8" and stored.dtype == np.uint8:
            codes, zeros = codes - 128, zeros - 128
        blocks = codes.reshape(len(index), -1, _BLOCK)
        return coded_rows(self.kind, blocks, halves[:, firsts], None if zeros is None else zeros[:, firsts])

    def checked_scales(self, index: Indices) -> Array:
        """Scales of rows as float32 `[R, G]`, all finite and above zero. Raises CheckpointError."""
        scales = self.scales(index).astype(np.float32)
        if not (np.isfinite(scales) & (scales > 0)).all():
            bad = "zero" if (scales == 0).any() else "NaN, infinite or negative"
            raise CheckpointError(
                f"{self.info.file}: tensor {self.scales_name} holds scales that are {bad}. {REMEDY}"
            )
        return scales


def packed_kind(info: TensorInfo, groups: Indices, bits: int, *, symmetric: bool) -> str | None:
    """The kind of blocks that holds integers with scales exactly, if blocks of 32 have one group.

    info: of the scales.
    """
    by_block = groups.reshape(-1, _BLOCK) if not len(groups) % _BLOCK else groups[:, None]
    if by_block.shape[1] != _BLOCK or (by_block != by_block[:, :1]).any() or info.dtype == "F32":
        return None
    if not symmetric:
        return "A8" if bits == 8 else "A4"
    return "Q8_0" if bits == 8 else "Q4_0"


def coded_rows(kind: str, codes: Array, scales: Array, zeros: Array | None) -> Array:
    """Bytes of blocks `[R, blocks * size]` of codes `[R, blocks, 32]`, float16 scales and zero points `[R, blocks]`.

    Codes of all kinds but A4 are signed. The layouts are those of ggml (`ggml-common.h`), and in A4 and A8 a zero
    point in float16 follows the scale.
    """
    parts: list[Array] = [np.ascontiguousarray(scales)[:, :, None].view(np.uint8)]
    if kind in WITH_ZEROS:
        assert zeros is not None
        parts.append(zeros.astype(np.float16)[:, :, None].view(np.uint8))
    if kind in ("Q8_0", "A8"):
        parts.append(codes.astype(np.int8).view(np.uint8))
    else:
        stored = (codes + (8 if kind == "Q4_0" else 0)).astype(np.uint8)
        parts.append(stored[..., :16] | stored[..., 16:] << 4)
    return np.concatenate(parts, axis=-1).reshape(len(codes), -1)


def stands_for(files: TensorFiles, form: str, shape: tuple[int, ...], parts: tuple[str, ...]) -> TensorInfo:
    """The entry of a matrix that is stored in the tensors `parts`, codes first."""
    codes, size = files.tensors[parts[0]], sum(files.tensors[name].size for name in parts)
    return TensorInfo(file=codes.file, dtype=form, shape=shape, start=codes.start, size=size)


def checked(files: TensorFiles, name: str, dtypes: tuple[str, ...], dimensions: int = 2) -> TensorInfo:
    """The entry of a stored tensor. Raises CheckpointError if it is missing or has another type."""
    if name not in files.tensors:
        raise CheckpointError(f"{files.names}: tensor {name} is missing. {REMEDY}")
    info = files.tensors[name]
    if info.dtype not in dtypes or len(info.shape) != dimensions:
        raise CheckpointError(
            f"{info.file}: tensor {name} is {info.dtype}{list(info.shape)}; expected are {dimensions} dimensions of "
            f"{' or '.join(dtypes)}. {REMEDY}"
        )
    return info


def check_shape(info: TensorInfo, name: str, shape: tuple[int, ...]) -> None:
    """Raise CheckpointError unless a stored tensor has this shape."""
    if info.shape != shape:
        raise CheckpointError(
            f"{info.file}: tensor {name} has shape {list(info.shape)}, but {list(shape)} by the tensor of its codes "
            f"and quantization_config. Correct config.json, or download both again"
        )


def groups_of(files: TensorFiles, name: str, width: int, count: int) -> Indices:
    """The group of each column: as the tensor `name` gives it, in any order, or without it of equal size, where the
    last may be smaller. Raises CheckpointError."""
    if name not in files.tensors:
        return np.arange(width) // math.ceil(width / count)
    info = checked(files, name, ("I32", "I64"), 1)
    check_shape(info, name, (width,))
    groups = files.read(name).astype(np.int64)
    if groups.min(initial=0) < 0 or groups.max(initial=0) >= count:
        raise CheckpointError(
            f"{info.file}: tensor {name} holds groups outside of 0 to {count - 1}. {REMEDY}"
        )
    return groups


def unpacked(words: Array, bits: int) -> Array:
    """Unsigned codes of `bits` from int32 words `[R, W]`, uint8 `[R, W * 32 / bits]`; the lowest come first."""
    data = np.ascontiguousarray(words).view(np.uint8)  # little endian, as the files
    if bits == 8:
        return data
    found = np.empty((*data.shape, 2), np.uint8)
    np.bitwise_and(data, 15, out=found[..., 0])
    np.right_shift(data, 4, out=found[..., 1])
    return found.reshape(len(data), 2 * data.shape[1])


def picked(words: Array, index: Indices, bits: int, places: Array | None = None) -> Array:
    """The codes of columns `index [C]` of words `[R, W]`: uint8 `[R, C]`. places: in a word, of its columns."""
    each = 32 // bits
    used, at = np.unique(index // each, return_inverse=True)
    within = index % each if places is None else places[index % each]
    return unpacked(columns(words, used), bits)[:, each * at + within]


def columns(array: Array, index: Indices) -> Array:
    """Columns `index` of an array, a view of it if they are neighbours."""
    if len(index) and np.array_equal(index, np.arange(index[0], index[0] + len(index))):
        return array[:, index[0] : index[-1] + 1]
    return array[:, index]
