"""Named tensors in memory-mapped files, read block by block to keep memory small.

Pages of a map count as the process's memory once they are read. They are released after reading; the system keeps
them cached if it has room. Access beyond the end of a truncated file kills the process with SIGBUS, so each read
checks the file's length first.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from xla_engine.errors import CheckpointError

Array = np.ndarray[Any, Any]

_BLOCK = 4 << 20  # bytes read at a time: small for any model, and fits a CPU cache
_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
_HASH_WHOLE = 64 << 20  # files up to this size are hashed completely
# number and size in bytes of the evenly spaced blocks hashed of larger files
_HASH_BLOCKS, _HASH_BLOCK = 256, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor in its file's header.

    dtype: safetensors' name ("BF16", "F32", ...). start, size: its bytes in the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    def part(self, index: int) -> TensorInfo:
        """One of the tensors stacked in this one."""
        size = self.size // self.shape[0]
        return replace(self, shape=self.shape[1:], start=self.start + index * size, size=size)

    def half(self, second: bool) -> TensorInfo:
        """The first or the second half of its rows."""
        rows, size = self.shape[0] // 2, self.size // self.shape[0]
        first = rows if second else 0
        return replace(self, shape=(rows, *self.shape[1:]), start=self.start + first * size, size=rows * size)


class Computed(Protocol):
    """A tensor that is computed from stored ones; the dtype of its `info` names their form."""

    @property
    def info(self) -> TensorInfo: ...

    @property
    def kind(self) -> str | None:
        """The type of a GGUF file whose blocks mean the same numbers, if there is one."""

    def rows(self, index: Array) -> Array:
        """Its rows `index`. Raises CheckpointError."""

    def blocks(self, index: Array) -> Array:
        """The same rows as bytes of blocks of `kind`. Raises CheckpointError."""


class TensorFiles:
    """Mapped files and their tensors, which are already validated against the files' lengths."""

    dtypes: tuple[str, ...] = ("F32", "F16", "BF16")  # of weights; there may be tensors of other dtypes
    remedy = "Download the file again, or use another checkpoint"  # for invalid values

    def __init__(
        self,
        maps: dict[Path, mmap.mmap],
        tensors: dict[str, TensorInfo],
        computed: Mapping[str, Computed] | None = None,
        setting: str = "",
    ) -> None:
        """computed: more tensors by name. setting: what their values depend on beside the files."""
        self.tensors = tensors
        self._maps = maps
        self._computed = dict(computed or {})
        self._setting = setting

    def with_computed(
        self, tensors: Mapping[str, TensorInfo], computed: Mapping[str, Computed], setting: str
    ) -> TensorFiles:
        """These files with some of their tensors, and computed ones."""
        entries = {name: each.info for name, each in computed.items()}
        found = TensorFiles(self._maps, {**tensors, **entries}, computed, setting)
        found.dtypes = tuple(dict.fromkeys((*self.dtypes, *(info.dtype for info in entries.values()))))
        return found

    @property
    def names(self) -> str:
        """The names of the files, for messages."""
        first, *others = sorted(self._maps)
        return f"{first} (and {len(others)} more)" if others else str(first)

    def read(self, name: str) -> Array:
        """The whole tensor in its stored shape and dtype, as a read-only view of the file.

        Like all other reads, raises CheckpointError if the file was truncated since it was opened.
        """
        info = self.tensors[name]
        if name in self._computed:
            return np.concatenate(list(self.blocks(name)))
        flat = np.frombuffer(self._whole(info.file), _DTYPES[info.dtype], prod(info.shape), info.start)
        return flat.reshape(info.shape)

    def blocks(self, name: str) -> Iterator[Array]:
        """Yield the tensor in blocks of rows, a few MB each; a block's memory is released when the next is read."""
        info = self.tensors[name]
        if name in self._computed:
            rows = max(1, _BLOCK // (4 * prod(info.shape[1:])))
            for first in range(0, info.shape[0], rows):
                yield self._computed[name].rows(np.arange(first, min(first + rows, info.shape[0])))
            _forget(self._maps[info.file], info.start, info.size)
            return
        tensor = np.atleast_1d(self.read(name))
        row_bytes = max(1, tensor.nbytes // max(1, len(tensor)))
        rows = max(1, _BLOCK // row_bytes)
        for first in range(0, len(tensor), rows):
            self._whole(info.file)
            yield tensor[first : first + rows]
            _forget(self._maps[info.file], info.start + first * row_bytes, rows * row_bytes)

    def rows(self, name: str, index: Array) -> Array:
        """A copy of the rows `index` of the tensor; reads only the pages that hold them."""
        if name in self._computed:
            return self._computed[name].rows(index)
        info, taken = self.tensors[name], self.read(name)[index]
        _forget(self._maps[info.file], info.start, info.size)
        return taken

    def kind(self, name: str) -> str:
        """The type of `raw_rows`: the tensor's dtype, or for a computed one, the type of a GGUF file."""
        dtype = self.tensors[name].dtype
        return self._computed[name].kind or dtype if name in self._computed else dtype

    @property
    def forms(self) -> list[str]:
        """The form of each computed tensor."""
        return [each.info.dtype for each in self._computed.values()]

    def raw_rows(self, name: str, index: Array) -> Array:
        """The stored bytes `[len(index), bytes of a row]` of rows of the tensor, in blocks of its `kind`.

        A vector is one row.
        """
        if name in self._computed:
            return self._computed[name].blocks(index)
        info = self.tensors[name]
        flat = np.frombuffer(self._whole(info.file), np.uint8, info.size, info.start)
        taken = flat.reshape(*(info.shape[:-1] or (1,)), -1)[index]
        _forget(self._maps[info.file], info.start, info.size)
        return taken

    def fingerprint(self) -> str:
        """Hex sha256 over names, sizes, headers and contents; of large files, over evenly spaced blocks."""
        digest = hashlib.sha256(self._setting.encode())
        for file in sorted(self._maps):
            data = self._whole(file)
            digest.update(f"{file.name}\0{len(data)}\0".encode())
            if len(data) <= _HASH_WHOLE:
                digest.update(data)
                continue
            first = min((info.start for info in self.tensors.values() if info.file == file), default=0)
            digest.update(memoryview(data)[:first])
            for block in range(_HASH_BLOCKS):
                at = (len(data) - _HASH_BLOCK) * block // (_HASH_BLOCKS - 1)
                digest.update(memoryview(data)[at : at + _HASH_BLOCK])
            _forget(data, 0, len(data))
        return digest.hexdigest()

    def _whole(self, file: Path) -> mmap.mmap:
        """A file's map, after a check that the file still has its full length."""
        data = self._maps[file]
        if (length := data.size()) < len(data):  # of the open file, even if another file now has its name
            raise CheckpointError(
                f"{file}: was cut from {len(data)} to {length} bytes while it was read. Write the file under "
                f"another name, then rename it, and start again"
            )
        return data


class GivenTensors(TensorFiles):
    """Tensors in memory, by name."""

    remedy = "Give other values; nothing was changed"

    def __init__(self, arrays: dict[str, Array]) -> None:
        super().__init__({}, {})
        self._arrays = arrays

    @property
    def names(self) -> str:
        return "the given weights"

    def read(self, name: str) -> Array:
        return self._arrays[name]

    def blocks(self, name: str) -> Iterator[Array]:
        yield self._arrays[name]

    def rows(self, name: str, index: Array) -> Array:
        return self._arrays[name][index]

    def fingerprint(self) -> str:
        """Hex sha256 over names, types, shapes and contents."""
        digest = hashlib.sha256()
        for name, array in sorted(self._arrays.items()):
            digest.update(f"{name}\0{array.dtype}{array.shape}\0".encode())
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
        return digest.hexdigest()


def _forget(mapped: mmap.mmap, start: int, length: int) -> None:
    """Drop a range of the file from this process's memory."""
    if hasattr(mmap, "MADV_DONTNEED"):
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        mapped.madvise(mmap.MADV_DONTNEED, first, min(start + length, len(mapped)) - first)
