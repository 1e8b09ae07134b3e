"""The weight files of a model directory: which tensor is where, checked before one byte of weights is read.

`model.safetensors`, or shards named by `model.safetensors.index.json`; the single file wins where both exist,
as in transformers. The safetensors library verifies each header (lengths, overlaps, holes, overflow) against
the file; memory maps mean that a file must not be shortened while it is open.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  safetensors finds numpy's "bfloat16" only once this is imported
import numpy as np
from safetensors import safe_open

from xla_engine.checkpoint_json import parse_json, read_json
from xla_engine.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_open: Any = safe_open  # the library's stub leaves its methods without types
_SHARD_NAME = re.compile(
    r"[A-Za-z0-9_][A-Za-z0-9_. -]{0,200}\.safetensors"
)  # no separators, drives or parents
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_OTHERS = (".safetensors", ".gguf", ".h5", ".msgpack")
_HASH_WHOLE = 64 << 20  # files up to this size are hashed whole
_HASH_BLOCKS, _HASH_BLOCK = 256, 4096  # larger ones at this many evenly spaced blocks of this many bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor as its file's header describes it; dtype is safetensors' word ("BF16", "F32", ...)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class WeightFiles:
    """Open weight files of one directory: `tensors` is all that the headers promise, `read` copies one."""

    def __init__(self, handles: dict[Path, Any], tensors: dict[str, TensorInfo]) -> None:
        self.tensors = tensors
        self._handles = handles

    @property
    def names(self) -> str:
        """The files, for messages."""
        first, *others = sorted(self._handles)
        return f"{first} (and {len(others)} more)" if others else str(first)

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """A copy of the tensor `name`, in its stored shape and dtype (F16, BF16 or F32)."""
        info = self.tensors[name]
        with _named(info.file, f"tensor {name}"):
            array: np.ndarray[Any, Any] = self._handles[info.file].get_tensor(name)
            return array

    def fingerprint(self) -> str:
        """Hex sha256 over names, sizes, headers and contents; of large files, over blocks throughout."""
        digest = hashlib.sha256()
        for file in sorted(self._handles):
            with _named(file, "fingerprint"), file.open("rb") as stream:
                size = file.stat().st_size
                digest.update(f"{file.name}\0{size}\0".encode())
                if size <= _HASH_WHOLE:
                    digest.update(stream.read())
                    continue
                (header_length,) = struct.unpack("<Q", stream.read(8))
                digest.update(stream.read(header_length))
                for block in range(_HASH_BLOCKS):
                    stream.seek((size - _HASH_BLOCK) * block // (_HASH_BLOCKS - 1))
                    digest.update(stream.read(_HASH_BLOCK))
        return digest.hexdigest()


@contextmanager
def open_weight_files(directory: Path) -> Iterator[WeightFiles]:
    """Open and check the weight files of `directory`; memory maps are released on exit.

    Raises CheckpointError for pickled or missing weights, an unusable index or header, and duplicate tensors.
    """
    handles: dict[Path, Any] = {}
    tensors: dict[str, TensorInfo] = {}
    try:
        with _named(directory, "directory"):
            if (directory / SINGLE_FILE).exists():
                _open_file(directory / SINGLE_FILE, handles, tensors)
            elif (directory / INDEX_FILE).exists():
                _open_shards(directory, handles, tensors)
            else:
                raise CheckpointError(_why_no_weights(directory))
        yield WeightFiles(handles, tensors)
    finally:
        for handle in handles.values():
            handle.__exit__(None, None, None)


def _open_file(file: Path, handles: dict[Path, Any], tensors: dict[str, TensorInfo]) -> None:
    if not file.is_file():
        raise CheckpointError(f"{file}: no regular file. Download the checkpoint again")
    with _named(file, "header"):
        handle = handles[file] = _open(file, framework="np").__enter__()
        with file.open("rb") as stream:
            (header_length,) = struct.unpack("<Q", stream.read(8))
            parse_json(stream.read(header_length), file)  # refuses repeated names; the library keeps the last
        for name in handle.keys():  # noqa: SIM118  a handle is not a mapping
            if name in tensors:
                other = tensors[name].file.name
                raise CheckpointError(f"{file}: tensor {name!r} is also in {other}. Remove the stray shard")
            view = handle.get_slice(name)
            tensors[name] = TensorInfo(file=file, dtype=view.get_dtype(), shape=tuple(view.get_shape()))


def _open_shards(directory: Path, handles: dict[Path, Any], tensors: dict[str, TensorInfo]) -> None:
    index = directory / INDEX_FILE
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map. Download the file again")
    shards: dict[str, str] = {}  # shard -> one tensor in it
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            raise CheckpointError(
                f"{index}: tensor {name!r}: shard {shard!r} is no .safetensors file name, and nothing "
                "outside the model directory is read. Correct the index or download it again"
            )
        shards.setdefault(shard, name)
    for shard, name in shards.items():
        if not (directory / shard).exists():
            raise CheckpointError(
                f"{directory / shard}: no such file, for tensor {name!r}. Download the shard"
            )
        _open_file(directory / shard, handles, tensors)
    remedy = "Download index and shard again"
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise CheckpointError(f"{index}: tensor {name!r} is not in {shard}. {remedy}")
    for name, info in tensors.items():
        if name not in weight_map:
            raise CheckpointError(f"{info.file}: tensor {name!r} is not in {INDEX_FILE}. {remedy}")


def _why_no_weights(directory: Path) -> str:
    files = sorted(directory.iterdir())
    for file in files:
        if file.suffix in _PICKLES:
            return (
                f"{file}: weights in pickle format can run code and are not opened. Convert them once, where "
                "torch and transformers are installed: "
                f"AutoModelForCausalLM.from_pretrained({str(directory)!r}).save_pretrained(NEW_PATH), or "
                "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
            )
    others = [file.name for file in files if file.suffix in _OTHERS][:4]
    found = f"; found {', '.join(others)}" if others else ""
    return f"{directory / SINGLE_FILE}: no such file, nor {INDEX_FILE}{found}. Save the model as safetensors"


@contextmanager
def _named(file: Path, part: str) -> Iterator[None]:
    """Whatever the library or the system says about `file` becomes one CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # SafetensorError, OSError, and what numpy makes of an unknown dtype
        reason = str(error) or type(error).__name__
        raise CheckpointError(
            f"{file}: {part} is not readable ({reason}). Download the file again"
        ) from error
