"""Read the GGUF format: metadata and tensors in one file or in the parts of a split one, validated before any weights
are read.

The format is described in ggml's `docs/gguf.md`; supported are versions 2 and 3, little endian. Every length is
checked against the rest of the file before it is used. The `gguf` library dequantises tensors to float32, block by
block.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NoReturn

import numpy as np

from xla_engine.errors import CheckpointError
from xla_engine.model_loader.gguf.parts import parts_of
from xla_engine.model_loader.stand_ins import stand_in
from xla_engine.model_loader.tensor_files import Array, TensorFiles, TensorInfo

_VERSIONS = (2, 3)
_SCALARS = dict(enumerate(["<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "|b1"]))
_SCALARS |= {10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_PLAIN = {0: "F32", 1: "F16", 30: "BF16"}
_LENGTH = struct.Struct("<Q")  # before a string
_MOST_DIMENSIONS = 4
_TOGETHER, _LONG = 8, 2048
_MOST_ITEMS = 1 << 24  # in a metadata list; vocabularies are the longest


def library() -> ModuleType:
    """Import the `gguf` package; only GGUF files need it."""
    import gguf

    return gguf


@functools.cache
def quantised_kinds(gguf: ModuleType) -> tuple[str, ...]:
    """The quantisation types that the installed `gguf` package can dequantise."""
    found = []
    for kind, (_, size) in gguf.GGML_QUANT_SIZES.items():
        with contextlib.suppress(NotImplementedError):
            gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
            found.append(kind.name)
    return tuple(name for name in found if name not in _PLAIN.values())


class GgufReader:
    """An open GGUF file, or all parts of a split one.

    path: the file; of a split one, the first part. metadata: strings, numbers and lists by key. tensors: by the
    file's names.
    """

    def __init__(self, path: Path) -> None:
        """path: the file, or any part of a split one. Raises CheckpointError."""
        self._maps: dict[Path, mmap.mmap] = {}
        self.path, (self.metadata, self.tensors) = path, self._open(path)
        count = self.metadata.get("split.count", 1)
        if isinstance(count, int) and count > 1:
            self.path, (self.metadata, self.tensors) = self._open_parts(path, count)

    def _open(self, path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        """Map a file and read its header."""
        try:
            with path.open("rb") as stream:
                mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            self._maps[path] = mapped
            return _Header(mapped, path, library()).read()
        except CheckpointError as error:
            if (problem := stand_in(path)) is not None:
                raise CheckpointError(f"{path}: {problem}") from error
            raise
        except (OSError, ValueError) as error:  # ValueError: an empty file, bad UTF-8
            raise CheckpointError(f"{path}: is not readable ({error}). Download the file again") from error

    def _open_parts(
        self, path: Path, count: int
    ) -> tuple[Path, tuple[dict[str, Any], dict[str, TensorInfo]]]:
        """The first part of a split file, its metadata, and the tensors of all parts. path: any of them."""
        files = parts_of(path)
        if len(files) != count:
            raise CheckpointError(
                f"{path}: is one of {count} parts of a split file, and its name does not tell those of the others. "
                f"Restore the name, such as NAME-00001-of-{count:05d}.gguf, or join the parts: gguf-split --merge"
            )
        metadata: dict[str, Any] = {}
        tensors: dict[str, TensorInfo] = {}
        for place, file in enumerate(files):
            if not file.exists():
                raise CheckpointError(f"{file}: part {place + 1} of {count} is missing. Download it")
            part, found = self._open(file)
            if (part.get("split.no"), part.get("split.count")) != (place, count):
                raise CheckpointError(
                    f"{file}: says that it is part {part.get('split.no')} (from 0) of {part.get('split.count')}. "
                    "Download all parts again"
                )
            if twice := tensors.keys() & found.keys():
                raise CheckpointError(
                    f"{file}: tensor {min(twice)!r} is also in another part. Download all parts again"
                )
            metadata = metadata or part
            tensors |= found
        total = metadata.get("split.tensors.count")
        if total not in (None, len(tensors)):
            raise CheckpointError(
                f"{files[0]}: the {count} parts have {len(tensors)} tensors, not {total}. Download all parts again"
            )
        return files[0], (metadata, tensors)

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value; `{arch}` in a key is replaced by the architecture."""
        return self.metadata.get(
            key.replace("{arch}", str(self.metadata.get("general.architecture"))), default
        )

    def weights(self, names: Mapping[str, tuple[str, int | None]]) -> TensorFiles:
        """The tensors, renamed.

        names: maps a name to the file's name and, if the file stacks the tensors of all experts, the index in the
        stack.
        Other tensors keep their names.
        """
        places: dict[str, set[int]] = {}
        for theirs, place in names.values():
            places.setdefault(theirs, set()).update(() if place is None else (place,))
        stacked = {
            name
            for name, found in places.items()
            if name in self.tensors and found == set(range(self.tensors[name].shape[0]))
        }
        tensors = {name: info for name, info in self.tensors.items() if name not in places}
        for name, (theirs, place) in names.items():
            if place is None and theirs in self.tensors:
                tensors[name] = self.tensors[theirs]
            elif place is not None and theirs in stacked:
                tensors[name] = self.tensors[theirs].part(place)
        files, kinds = TensorFiles(self._maps, tensors), quantised_kinds(library())
        files.dtypes += kinds
        quantised = {
            name: QuantisedTensor(files, name) for name, info in tensors.items() if info.dtype in kinds
        }
        return files.with_computed(tensors, quantised, "")


@dataclass(frozen=True, slots=True)
class QuantisedTensor:
    """A quantised tensor of a GGUF file, read as float32 (`tensor_files.Computed`)."""

    files: TensorFiles
    name: str
    kind: ClassVar[None] = None  # its own dtype

    @property
    def info(self) -> TensorInfo:
        return self.files.tensors[self.name]

    def rows(self, index: Array) -> Array:
        if len(self.info.shape) == 1:  # a quantised block spans many entries of a vector
            return self._dequantised(self.blocks(np.arange(1)))[0][index]
        return self._dequantised(self.blocks(index))

    def blocks(self, index: Array) -> Array:
        return self.files.raw_rows(self.name, index)

    def _dequantised(self, rows: Array) -> Array:
        width = self.info.shape[-1]
        if not rows.size:  # a device that has no rows of this weight; the package needs at least one row
            return np.empty((*rows.shape[:-1], width), np.float32)
        gguf = library()
        # The package takes sixteen rows at a time, so a few of these rows become one long one.
        together = math.gcd(len(rows), _TOGETHER) if width <= _LONG else 1
        array: Array = gguf.quants.dequantize(
            rows.reshape(len(rows) // together, -1), gguf.GGMLQuantizationType[self.info.dtype]
        )
        return array.reshape(*rows.shape[:-1], width)


class _Header:
    """A cursor over the header. Raises CheckpointError on a read beyond the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path, gguf: ModuleType) -> None:
        self._data, self._path, self._gguf = data, path, gguf
        self._at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self._take(4) != b"GGUF":
            self._fail("does not begin with the magic word of GGUF files")
        (version,) = self._unpack("<I")
        if version not in _VERSIONS:
            self._fail(f"has version {version} (or another byte order); supported are {_VERSIONS}")
        tensors, pairs = self._unpack("<QQ")
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string()
            if key in metadata:
                self._fail(f"has the key {key!r} twice")
            metadata[key] = self._value(*self._unpack("<I"))
        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(tensors):
            name = self._string()
            if name in entries:
                self._fail(f"has the tensor {name!r} twice")
            (dimensions,) = self._unpack("<I")
            if not 1 <= dimensions <= _MOST_DIMENSIONS:
                self._fail(f"gives tensor {name!r} {dimensions} dimensions")
            shape = tuple(reversed(self._unpack(f"<{dimensions}Q")))
            entries[name] = (shape, *self._unpack("<IQ"))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self._fail(f"has the alignment {alignment!r}")
        begin = -(-self._at // alignment) * alignment
        return metadata, {name: self._tensor(name, begin, *entry) for name, entry in entries.items()}

    def _tensor(self, name: str, begin: int, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
        try:
            known = self._gguf.GGMLQuantizationType(kind)
        except ValueError:
            self._fail(f"stores tensor {name!r} as type {kind}, which is unknown")
        block, size = self._gguf.GGML_QUANT_SIZES[known]
        if shape[-1] % block or offset % 4:
            self._fail(f"has a tensor {name!r} of shape {list(shape)} at {offset}, not whole blocks")
        length = prod(shape) // block * size
        if begin + offset + length > len(self._data):
            self._fail(f"ends before its tensor {name!r} of shape {list(shape)}")
        return TensorInfo(file=self._path, dtype=known.name, shape=shape, start=begin + offset, size=length)

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY and depth < 2:
            inner, count = self._unpack("<IQ")
            if count > _MOST_ITEMS:
                self._fail(f"has a list of {count} items")
            if inner in _SCALARS:
                dtype = np.dtype(_SCALARS[inner])
                return np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
            if inner == _STRING:
                return self._strings(count)
            return [self._value(inner, depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            self._fail(f"has a value of type {kind}, which is unknown")
        dtype = np.dtype(_SCALARS[kind])
        value = np.frombuffer(self._take(dtype.itemsize), dtype)[0]
        # The shortest decimal of a float32 restores the original value: 1e-05, not 9.99999974737875e-06.
        return float(str(value)) if dtype == np.float32 else value.item()

    def _strings(self, count: int) -> list[str]:
        """A vocabulary has some 100,000, so this loop makes no calls that it can avoid."""
        data, at, end = self._data, self._at, len(self._data)
        found, length_at = [], _LENGTH.unpack_from
        for _ in range(count):
            first = at + _LENGTH.size
            if first > end or (at := first + length_at(data, at)[0]) > end:
                self._fail("ends within its header")
            found.append(data[first:at].decode())
        self._at = at
        return found

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        return self._take(length).decode()

    def _unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self._take(struct.calcsize(form)))

    def _take(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            self._fail("ends within its header")
        self._at += count
        return self._data[self._at - count : self._at]

    def _fail(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: {problem}. Download the file again")
