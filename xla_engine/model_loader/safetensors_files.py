"""Open the weight files of a model directory, and validate their headers before any weights are read.

These are `model.safetensors`, or shards listed in `model.safetensors.index.json`; if both exist, the single file
wins, as in transformers. The safetensors library verifies each header against the file (lengths, overlaps, holes,
overflow). Tensors are then read through our own memory maps (`xla_engine.model_loader.tensor_files`).
"""

import mmap
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open

from xla_engine.errors import CheckpointError
from xla_engine.model_loader.json_fields import parse_json, read_json
from xla_engine.model_loader.stand_ins import stand_in
from xla_engine.model_loader.tensor_files import TensorFiles, TensorInfo

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_open: Any = safe_open  # the library's stub has no types for its methods
# A file in the same folder: no separators, drives or parents.
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_. -]{0,200}\.safetensors")
_NUMBERED = re.compile(r".*-[0-9]{5}-of-[0-9]{5}\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_OTHERS = (".safetensors", ".gguf", ".h5", ".msgpack")


def has_weight_files(directory: Path) -> bool:
    """Whether `open_weight_files` finds weights in `directory`, or shards without their index."""
    names = (SINGLE_FILE, INDEX_FILE)
    return any((directory / name).exists() for name in names) or bool(_shards(directory))


def open_weight_files(directory: Path) -> TensorFiles:
    """Validate and map the weight files of `directory`; they stay mapped as long as the result lives.

    Raises CheckpointError for pickled or missing weights, an unusable index or header, and duplicate tensors.
    """
    maps: dict[Path, mmap.mmap] = {}
    tensors: dict[str, TensorInfo] = {}
    with _named(directory, "directory"):
        if (directory / SINGLE_FILE).exists():
            _open_file(directory / SINGLE_FILE, maps, tensors)
        elif (directory / INDEX_FILE).exists():
            _open_shards(directory, maps, tensors)
        else:
            raise CheckpointError(_why_no_weights(directory))
    return TensorFiles(maps, tensors)


def open_tensor_file(file: Path) -> TensorFiles:
    """Validate and map one safetensors file of any name. Raises CheckpointError."""
    maps: dict[Path, mmap.mmap] = {}
    tensors: dict[str, TensorInfo] = {}
    if not file.exists():
        raise CheckpointError(f"{file}: no such file. Save as safetensors; pickled weights are never opened")
    _open_file(file, maps, tensors)
    return TensorFiles(maps, tensors)


_EXPERT = re.compile(r"(.+\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")


def with_experts_apart(files: TensorFiles, wanted: Iterable[str]) -> TensorFiles:
    """The files, whose stacks of experts are also there as a tensor of each expert, if those are wanted.

    A stack is `experts.gate_up_proj` `[E, 2 F, D]`, gates first, or `experts.down_proj` `[E, D, F]` (Qwen3.5).
    """
    tensors, taken = dict(files.tensors), Counter[str]()
    for name in wanted:
        if name in tensors or (expert := _EXPERT.fullmatch(name)) is None:
            continue
        module, place, part = expert[1], int(expert[2]), expert[3]
        stack = f"{module}{'down' if part == 'down' else 'gate_up'}_proj"
        info = files.tensors.get(stack)
        if info is None or len(info.shape) != 3 or place >= info.shape[0]:
            continue
        own = info.part(place)
        tensors[name] = own if part == "down" else own.half(part == "up")
        taken[stack] += tensors[name].size
    whole = {stack for stack, size in taken.items() if size == files.tensors[stack].size}
    return files.with_computed({name: info for name, info in tensors.items() if name not in whole}, {}, "")


def _open_file(file: Path, maps: dict[Path, mmap.mmap], tensors: dict[str, TensorInfo]) -> None:
    if not file.is_file():
        raise CheckpointError(f"{file}: not a regular file. Download the checkpoint again")
    if (problem := stand_in(file)) is not None:
        raise CheckpointError(f"{file}: {problem}")
    with _named(file, "header"), file.open("rb") as stream, _open(file, framework="np") as handle:
        (header_length,) = struct.unpack("<Q", stream.read(8))
        # rejects repeated names, of which the library would keep the last
        header = parse_json(stream.read(header_length), file)
        for name in handle.keys():  # noqa: SIM118  a handle is not a mapping
            if name in tensors:
                other = tensors[name].file.name
                raise CheckpointError(f"{file}: tensor {name!r} is also in {other}. Remove the stray shard")
            entry = header[name]
            begin, end = entry["data_offsets"]
            tensors[name] = TensorInfo(
                file=file,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                start=8 + header_length + begin,
                size=end - begin,
            )
        maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


def _open_shards(directory: Path, maps: dict[Path, mmap.mmap], tensors: dict[str, TensorInfo]) -> None:
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
        _open_file(directory / shard, maps, tensors)
    remedy = "Download index and shard again"
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise CheckpointError(f"{index}: tensor {name!r} is not in {shard}. {remedy}")
    for name, info in tensors.items():
        if name not in weight_map:
            raise CheckpointError(f"{info.file}: tensor {name!r} is not in {INDEX_FILE}. {remedy}")


def _shards(directory: Path) -> list[str]:
    """The names of numbered shards, sorted."""
    return sorted(file.name for file in directory.iterdir() if _NUMBERED.fullmatch(file.name))


def _why_no_weights(directory: Path) -> str:
    if shards := _shards(directory):
        return (
            f"{directory / INDEX_FILE}: no such file, but shards: {shards[0]} .. {shards[-1]}. Download it: it says "
            "which of the shards has which tensor"
        )
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
    """Turn any error of the library or the system into a CheckpointError that names `file`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # SafetensorError, OSError, and numpy's error for an unknown dtype
        reason = str(error) or type(error).__name__
        raise CheckpointError(
            f"{file}: {part} is not readable ({reason}). Download the file again"
        ) from error
