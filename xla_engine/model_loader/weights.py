"""Read the leaves of a model lazily from its weight files."""

import math
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from xla_engine.errors import CheckpointError
from xla_engine.graphs.ops.coded import BLOCK, CodedForm, StoredKinds
from xla_engine.model_loader.families import Source
from xla_engine.model_loader.tensor_files import Array, TensorFiles

Sources = Mapping[str, tuple[Source, ...]]  # by leaf
Indices = np.ndarray[Any, np.dtype[np.int64]]

DTYPES: dict[str, np.dtype[Any]] = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
# Limit on the entries of a matrix: a sum of 2**16 products with inputs up to float16's maximum fits into float32.
LARGEST = 2.0**96
_PART = 4096  # rows read at a time, unless all are read
_ORDERED = 1 << 20  # numbers of reordered rows read at a time
_CODED = 2 << 20  # bytes of blocks packed at a time
_ALIGNMENT = 64  # bytes; jax adopts a host array with this alignment, and copies any other


class Pack(Protocol):
    """Packs rows of a quantised file, in C++ (`native/pack.h`)."""

    def __call__(self, kind: str, form: CodedForm, rows: Array, blocks: Array) -> bool:
        """Fill `blocks`, bytes `[F / 16 * form.block_bytes(kind)]`, from rows `[F, bytes]` of the file.

        Returns whether all scales can be used. F must be a multiple of 16. Threads may pack at the same time.
        """


class StoredWeights(Mapping[str, Array]):
    """Maps leaf names to arrays. Each access reads tensors block by block into a new array and caches nothing.

    Matrices have `dtype`, rounded to nearest even; vectors are float32; rows of queries and keys are in the
    engine's rotary order. An access raises CheckpointError, naming the tensor, for values that are not finite in
    that type, and for entries of matrices so large that products would overflow.
    """

    def __init__(
        self,
        files: TensorFiles,
        sources: Sources,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: str,
    ) -> None:
        """shapes: of the model's leaves; `sources` may have some of them only."""
        self._files = files
        self._sources = sources
        self._shapes = shapes
        self._dtype = dtype

    def __getitem__(self, leaf: str) -> Array:
        sources = self._sources[leaf]
        shape = self._shapes[leaf]
        dtype = DTYPES[self._dtype] if len(shape) > 1 else np.dtype(np.float32)
        try:
            array = _aligned(shape, dtype)
        except MemoryError as error:
            raise CheckpointError(
                f"{self._files.names}: no memory for {leaf}, {prod(shape) * dtype.itemsize / 1e9:.1f} GB of the "
                f"{self.nbytes / 1e9:.1f} GB that the model needs as {self._dtype}. Use bfloat16 or a smaller model"
            ) from error
        rows = array.reshape(-1, *shape[-1:]) if len(shape) > 1 else array
        row = 0
        for source in sources:
            first = row
            for block in self._rows(source, rows.shape[1:]):
                part = rows[row : row + len(block)]
                with np.errstate(invalid="ignore", over="ignore"):  # the check below reports the tensor
                    part[...] = block
                self._check(source, block, part)
                row += len(block)
            if source.turned is not None:
                rows[first : first + len(source.turned)] = rows[first + source.turned]
            if source.offset:
                rows[first:row] += np.float32(source.offset)
        return array

    def rows(self, leaf: str, index: Indices) -> Array:
        """Rows of a leaf, viewed as `[rows, columns]`, equal to those of `__getitem__`; an index of -1 gives zeros.

        Reads only these rows, unless the leaf is a vector or the file stores the matrix in another layout.
        """
        sources, shape, dtype = self._sources[leaf], self._shapes[leaf], DTYPES[self._dtype]
        if len(shape) == 1 or not all(_has_rows(source, shape[-1]) for source in sources):
            return _taken(self[leaf], index)
        array = _aligned((len(index), shape[-1]), dtype)
        array[index < 0] = 0
        first = 0
        for source in sources:
            stored = self._stored_rows(source)
            here = np.flatnonzero((index >= first) & (index < first + len(stored)))
            for part in np.array_split(here, max(1, -(-len(here) // _PART))):
                tensor = self._files.rows(source.name, stored[index[part] - first])
                with np.errstate(invalid="ignore", over="ignore"):
                    taken = tensor.reshape(-1, shape[-1]).astype(dtype)
                self._check(source, tensor, taken)
                array[part] = taken
            first += len(stored)
        return array

    @property
    def forms(self) -> list[str]:
        """The form of each quantised tensor of a safetensors checkpoint."""
        return self._files.forms

    @property
    def stored(self) -> StoredKinds:
        """The storage type of each matrix whose rows the file stores unchanged."""
        return {
            leaf: tuple((self._files.kind(part.name), len(self._stored_rows(part))) for part in sources)
            for leaf, sources in self._sources.items()
            if len(shape := self._shapes[leaf]) > 1
            and all(_has_rows(part, shape[-1]) and part.name in self._files.tensors for part in sources)
        }

    def coded(
        self, leaf: str, form: CodedForm, pack: Pack, array: Array, index: Indices | None = None
    ) -> None:
        """Fill `array`, uint8 `[form.nbytes]`, with a leaf in the coded layout of a device. index: its rows, as in
        `rows`.

        Raises CheckpointError, naming the tensor, if a scale is not finite.
        """
        header = form.header()
        array[: len(header)], at, block = header, len(header), 0
        parts = [(part, self._stored_rows(part)) for part in self._sources[leaf]]
        index = np.arange(form.features) if index is None else index
        index = np.pad(index, (0, -len(index) % (2 * BLOCK)), constant_values=-1)
        for kind, count in form.runs:
            size = form.block_bytes(kind)
            for first in range(0, count, some := max(1, _CODED // size)):
                last = min(first + some, count)
                rows = index[(block + first) * BLOCK : (block + last) * BLOCK]
                self._pack(kind, form, parts, rows, pack, array[at + first * size : at + last * size])
            at, block = at + count * size, block + count

    def _pack(
        self,
        kind: str,
        form: CodedForm,
        parts: list[tuple[Source, Indices]],
        rows: Indices,
        pack: Pack,
        blocks: Array,
    ) -> None:
        """Fill the coded blocks of rows of one storage type."""
        raw: Array | None = None
        source, before = parts[0][0], 0
        for part, stored in parts:
            here = np.flatnonzero((rows >= before) & (rows < before + len(stored)))
            if len(here):
                found, source = self._files.raw_rows(part.name, stored[rows[here] - before]), part
                if len(here) == len(rows):
                    raw = found
                else:
                    raw = np.zeros((len(rows), found.shape[1]), np.uint8) if raw is None else raw
                    raw[here] = found
            before += len(stored)
        if raw is None:  # zeros only
            blocks[...] = 0
        elif not pack(kind, form, raw, blocks):
            power = kind == "MXFP4"
            raise self._unusable(
                source, "scales outside of 2^-125 to 2^93, or NaN" if power else "NaN or infinite values"
            )

    def _stored_rows(self, source: Source) -> Indices:
        """The tensor row of each row of a source, in the leaf's order."""
        stored = np.arange(source.shape[0]) if source.order is None else source.order
        return source.in_engine_order(stored)

    def _check(self, source: Source, stored: Array, converted: Array) -> None:
        """Raise CheckpointError for invalid values in a part of a leaf. stored: the values in the file."""
        if is_below(converted, LARGEST if converted.ndim > 1 else math.inf):
            return
        largest = np.abs(stored.astype(np.float32)).max()
        problem = (
            f"values as large as {largest:.2g}, which overflow as {converted.dtype}"
            if np.isfinite(largest)
            else "NaN or infinite values"
        )
        raise self._unusable(source, problem)

    def _unusable(self, source: Source, problem: str) -> CheckpointError:
        info = self._files.tensors.get(source.name)
        return CheckpointError(
            f"{self._files.names if info is None else info.file}: tensor {source.name} holds {problem}: results "
            f"would not be numbers. {self._files.remedy}"
        )

    def _rows(self, source: Source, row_shape: tuple[int, ...]) -> Iterator[Array]:
        """The rows of a source, in blocks."""
        if source.order is not None:
            numbers = len(source.order) * prod(source.shape[1:])
            for rows in np.array_split(source.order, max(1, numbers // _ORDERED)):
                taken = self._files.rows(source.name, rows)
                yield taken if source.convert is None else source.convert(taken)
            return
        for block in self._files.blocks(source.name):
            if source.convert is not None:
                block = source.convert(block)
            yield block.reshape(-1, *row_shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        shapes = self._shapes.values()
        return sum(prod(shape) * (DTYPES[self._dtype].itemsize if len(shape) > 1 else 4) for shape in shapes)


def read_rows(weights: Mapping[str, Array], leaf: str, index: Indices) -> Array:
    """Rows of a leaf, viewed as `[rows, columns]`; of a vector, its entries. An index of -1 gives zeros."""
    if isinstance(weights, StoredWeights):
        return weights.rows(leaf, index)
    return _taken(weights[leaf], index)


def stored_kinds(weights: Mapping[str, Array]) -> StoredKinds:
    """`StoredWeights.stored`; empty for weights that are not in a file."""
    return weights.stored if isinstance(weights, StoredWeights) else {}


def _has_rows(source: Source, columns: int) -> bool:
    """Whether the tensor's leading axis is the leaf's rows, unchanged."""
    return source.convert is None and prod(source.shape[1:]) == columns


def _taken(whole: Array, index: Indices) -> Array:
    rows = whole.reshape(-1, whole.shape[-1]) if whole.ndim > 1 else whole
    taken = rows[index]
    taken[index < 0] = 0
    return taken


def is_below(array: Array, limit: float) -> bool:
    """Whether all numbers of a contiguous bfloat16 or float32 array have a magnitude below `limit`, which may be
    infinity. Takes one pass for each sign, and no copy."""
    bits = array.dtype.itemsize * 8
    if not array.size:
        return True
    most = int(np.array(limit, array.dtype).view(f"u{bits // 8}"))
    positive = int(array.view(f"i{bits // 8}").max())
    negative = int(array.view(f"u{bits // 8}").max())
    return positive < most and negative < most + (1 << (bits - 1))


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An uninitialised array that jax can adopt without a copy."""
    count = prod(shape) * dtype.itemsize
    raw = np.empty(count + _ALIGNMENT, np.uint8)
    first = -raw.ctypes.data % _ALIGNMENT
    array: Array = raw[first : first + count].view(dtype).reshape(shape)
    return array
