"""Hostile model directories and GGUF files: whatever they say, a checkpoint or one error of ours.

A case takes a small model of some family and spoils one file of it: fields of config.json, headers and bytes of
safetensors, an index, tokenizers, templates, GGUF metadata, or what lies in the directory at all. The long run:

    python -m tests.support.fuzz_checkpoints --cases 100000
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.gguf_files import Kind, rewrite_gguf, write_gguf
from xla_engine.config import EngineConfig
from xla_engine.engine.inspection import inspect_model
from xla_engine.environment import embedded_model_directory
from xla_engine.errors import XlaEngineError
from xla_engine.model_loader.checkpoint import load_checkpoint
from xla_engine.model_loader.config_json import _CEILINGS, _PLAIN, _ROPE_COMMON, _ROPE_KNOWN
from xla_engine.model_loader.describe import sampling_defaults
from xla_engine.model_loader.families import FAMILIES
from xla_engine.model_loader.model_files import open_model
from xla_engine.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
SLOW_SECONDS = 10.0
READ_BYTES = 50 << 20  # leaves are read where they take no more

_NUMBERS: list[Any] = [0, 1, 2, 3, 5, 7, 8, 16, 40, 64, 199, -1, 0.5, 1.0, 1e-6, 1e4, 1e300, -0.0]
_NUMBERS += [2**31 - 1, 2**31, 2**40, 2**63, 10**30, 10**400, float("nan"), float("inf"), -(2**40)]
_WORDS: list[Any] = ["", "silu", "gelu", "gelu_pytorch_tanh", "relu", "../x", "a\0b", "é" * 50, "bfloat16"]
_WORDS += [
    *_ROPE_KNOWN,
    "full_attention",
    "sliding_attention",
    "linear_attention",
    *FAMILIES,
    "OtherForCausalLM",
]
_READ = (name for family in FAMILIES.values() for name in (*family.reads, *family.defaults))
_FIELDS = sorted({*_PLAIN, *_READ, *_CEILINGS, "auto_map", "rope_theta", "rope_scaling", "rope_parameters"})
_ROPE = sorted({*_ROPE_COMMON, *(name for names in _ROPE_KNOWN.values() for name in names), "full_attention"})
_DTYPES = ["F32", "F16", "BF16", "I8", "F64", "F8_E4M3", "U8", "BOOL", "F4", "Q9", 3, None]


def value(draw: random.Random, depth: int = 0) -> Any:
    """Something that JSON can say."""
    kind = draw.random()
    if kind < 0.45 or depth > 2:
        return draw.choice(_NUMBERS)
    if kind < 0.65:
        return draw.choice(_WORDS)
    if kind < 0.78:
        return draw.choice([None, True, False])
    if kind < 0.9:
        return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {draw.choice(_ROPE): value(draw, depth + 1) for _ in range(draw.randrange(4))}


def spoil_fields(draw: random.Random, fields: dict[str, Any], names: list[str]) -> None:
    """Change, add or remove a few fields, some of them inside an object."""
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        name = draw.choice([*fields, *names])
        inner = fields.get(name)
        if isinstance(inner, dict) and draw.random() < 0.7:
            spoil_fields(draw, inner, _ROPE)
        elif draw.random() < 0.15:
            fields.pop(name, None)
        else:
            fields[name] = value(draw)


def spoil_bytes(draw: random.Random, content: bytes, first: int = 1 << 12) -> bytes:
    """Overwrite, insert, delete or cut, mostly near the front."""
    for _ in range(draw.choice([1, 1, 2, 5])):
        at = draw.randrange(min(len(content), first) + 1)
        kind = draw.random()
        if kind < 0.1:
            content = content[: draw.randrange(len(content) + 1)]
        elif kind < 0.5:
            fresh = draw.choice([b"\x00", b"\xff", b'"', b"9", os_bytes(draw, 4), struct.pack("<Q", 2**63)])
            content = content[:at] + fresh + content[at + len(fresh) :]
        elif kind < 0.75:
            content = content[:at] + os_bytes(draw, draw.randrange(1, 9)) + content[at:]
        else:
            content = content[:at] + content[at + draw.randrange(1, 9) :]
    return content


def os_bytes(draw: random.Random, count: int) -> bytes:
    return bytes(draw.randrange(256) for _ in range(count))


def in_json(name: str, names: list[str]) -> Callable[[random.Random, Path], None]:
    def spoil(draw: random.Random, model: Path) -> None:
        fields = json.loads((model / name).read_text()) if (model / name).exists() else {}
        spoil_fields(draw, fields, names)
        (model / name).write_text(json.dumps(fields))

    return spoil


def in_bytes(*suffixes: str) -> Callable[[random.Random, Path], None]:
    def spoil(draw: random.Random, model: Path) -> None:
        file = draw.choice(sorted(file for file in model.iterdir() if file.name.endswith(suffixes)))
        file.write_bytes(spoil_bytes(draw, file.read_bytes()))

    return spoil


def in_header(draw: random.Random, model: Path) -> None:
    """One tensor's entry of a safetensors header."""
    file = draw.choice(sorted(model.glob("*.safetensors")))
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    name = draw.choice(sorted(header.keys() - {"__metadata__"}))
    entry = header.pop(name)
    field = draw.choice(["dtype", "shape", "data_offsets", "name", "gone"])
    if field == "dtype":
        entry["dtype"] = draw.choice(_DTYPES)
    elif field in ("shape", "data_offsets"):
        entry[field] = [draw.choice([*_NUMBERS, *entry[field]]) for _ in range(draw.randrange(4))]
    if field != "gone":
        header[draw.choice(["x", "lm_head.weight", name + "s"]) if field == "name" else name] = entry
    fresh = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(fresh)) + fresh + content[8 + length :])


def in_index(draw: random.Random, model: Path) -> None:
    """Where tensors are said to be."""
    file = model / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    names = sorted(index["weight_map"])
    shards = sorted(set(index["weight_map"].values()))
    for _ in range(draw.choice([1, 2])):
        name = draw.choice([*names, "x"])
        if draw.random() < 0.3:
            index["weight_map"].pop(name, None)
        else:
            index["weight_map"][name] = draw.choice([*shards, "../x.safetensors", "/etc/passwd", value(draw)])
    if draw.random() < 0.1:
        index["weight_map"] = value(draw)
    file.write_text(json.dumps(index))


def in_directory(draw: random.Random, model: Path) -> None:
    """Files that are gone, empty, directories, links to nowhere or to themselves, or pickles."""
    file = draw.choice(sorted(model.iterdir()))
    kind = draw.randrange(6)
    if kind == 0:
        file.rename(model / "pytorch_model.bin")
        return
    file.unlink()
    if kind == 1:
        file.mkdir()
    elif kind == 2:
        file.touch()
    elif kind == 3:
        file.symlink_to("nowhere")
    elif kind == 4:
        file.symlink_to(file.name)


def in_gguf(draw: random.Random, model: Path) -> None:
    (file,) = model.glob("*.gguf")
    file.write_bytes(spoil_bytes(draw, file.read_bytes(), first=1 << 15))


def in_gguf_fields(draw: random.Random, model: Path) -> None:
    """Metadata with other values, of other types, or gone."""
    (file,) = model.glob("*.gguf")

    def spoil(fields: dict[str, Any]) -> None:
        for _ in range(draw.choice([1, 1, 2, 4])):
            name = draw.choice([name for name in sorted(fields) if name != "general.architecture"])
            if draw.random() < 0.15:
                del fields[name]
            else:
                fields[name] = draw.choice(
                    [*_GGUF_VALUES, [draw.choice(_GGUF_VALUES[:-3])] * draw.randrange(1, 4)]
                )

    rewrite_gguf(file, spoil)


_GGUF_VALUES: list[Any] = [0, 1, 2, 3, 8, 28, 2**31, 2**63, -1, -(2**40), True, False, 0.0, -1.0, 1e-6, 1e30]
_GGUF_VALUES += [float("nan"), float("inf"), "", "llama", "yarn", "none", [0], [""], ["a", "b c"]]
_DIRECTORIES = ("gqa_tied", "untied_odd_heads", "llama3_rope")
_WAYS: dict[str, tuple[float, Callable[[random.Random, Path], None]]] = {
    "config fields": (4, in_json("config.json", _FIELDS)),
    "generation fields": (
        0.5,
        in_json("generation_config.json", ["eos_token_id", "bos_token_id", "top_k", "top_p"]),
    ),
    "template fields": (0.5, in_json("tokenizer_config.json", ["chat_template", "bos_token", "eos_token"])),
    "json bytes": (1, in_bytes(".json")),
    "header fields": (2, in_header),
    "weight bytes": (1, in_bytes(".safetensors")),
    "index": (1, in_index),
    "directory": (0.5, in_directory),
    "gguf bytes": (2, in_gguf),
    "gguf fields": (2, in_gguf_fields),
}


@dataclass(slots=True)
class Bases:
    """The models that are spoiled, copied from here for every case."""

    folder: Path
    plain: list[Path] = field(default_factory=list)
    sharded: list[Path] = field(default_factory=list)
    gguf: list[Path] = field(default_factory=list)

    @classmethod
    def below(cls, folder: Path) -> Bases:
        bases = cls(folder)
        families = sorted(path for path in (GOLDEN / "families").iterdir() if path.is_dir())
        for model in (*(GOLDEN / name for name in _DIRECTORIES), *families):
            (bases.sharded if len(list(model.glob("*.safetensors"))) > 1 else bases.plain).append(model)
        for name, arch in (("qwen3", "qwen3"), ("gemma2", "gemma2"), ("phi3_long", "phi3")):
            place = folder / name
            place.mkdir()
            write_gguf(GOLDEN / "families" / name, place / "model.gguf", arch=arch)
            bases.gguf.append(place)
        place = folder / "tokenizer"
        place.mkdir()
        write_gguf(GOLDEN / "gqa_tied", place / "model.gguf", kind=Kind.F16, tokenizer=_small_tokenizer)
        bases.gguf.append(place)
        return bases

    def base(self, draw: random.Random, way: str) -> Path:
        if way in ("gguf bytes", "gguf fields"):
            return draw.choice(self.gguf)
        return draw.choice(self.sharded if way == "index" else [*self.plain, *self.sharded])


def _small_tokenizer(writer: Any) -> None:
    letters = [chr(number) for number in range(ord("a"), ord("z") + 1)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*letters, "ab", "<|end|>"])
    writer.add_token_types([1] * 27 + [3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(27)
    writer.add_chat_template("{{ messages[0].content }}")


@dataclass(slots=True)
class Report:
    """What became of the cases: outcomes by way, problems, and the slowest case in seconds of processor time."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    slowest: float = 0.0


def fuzz(count: int, *, seed: int = 0, beat: Callable[[int], None] = lambda done: None) -> Report:
    """Run `count` cases."""
    report = Report()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "bases").mkdir()
        bases = Bases.below(folder / "bases")
        for number, (way, draw) in enumerate(cases(seed, count)):
            model = folder / "model"
            shutil.copytree(bases.base(draw, way), model, ignore=shutil.ignore_patterns("*.npz"))
            if "tokenizer.json" not in os.listdir(model) and draw.random() < 0.1:
                shutil.copy(embedded_model_directory() / "tokenizer.json", model)
            _WAYS[way][1](draw, model)
            began = time.process_time()
            outcome, problem = load(model, inspecting=number % 4 == 0)
            seconds = time.process_time() - began
            report.slowest = max(report.slowest, seconds)
            report.outcomes[way, outcome] += 1
            if problem is None and seconds > SLOW_SECONDS:
                problem = f"took {seconds:.0f} s of processor time"
            if problem is not None:
                report.problems.append(f"case {number} of seed {seed} ({way}): {problem}")
            shutil.rmtree(model)
            beat(number + 1)
    return report


def cases(seed: int, count: int) -> Iterator[tuple[str, random.Random]]:
    """A way to spoil a model and the draws for it; the n-th case depends on seed and n only."""
    names, weights = list(_WAYS), [weight for weight, _ in _WAYS.values()]
    for number in range(count):
        draw = random.Random(f"{seed}/{number}")
        yield draw.choices(names, weights)[0], draw


def load(model: Path, *, inspecting: bool = True) -> tuple[str, str | None]:
    """What a start would do with a model's files, after a look at them if `inspecting`: the outcome, and what is wrong
    with it if anything is."""
    try:
        files = open_model(next(iter(sorted(model.glob("*.gguf"))), model))
        if inspecting:
            inspect_model(files, EngineConfig())
        checkpoint = load_checkpoint(files)
        if sum(leaf.size for leaf in _small(checkpoint)) < 0:
            return "impossible", "sizes below zero"
        Tokenizer.of_model(files)
        files.chat_template()
        sampling_defaults(files)
    except XlaEngineError as error:
        return "refused", None if str(model) in str(error) else f"an error that names no file: {error}"
    except Exception as error:
        return "crashed", f"{type(error).__name__}: {error}"
    return "loaded", None


def _small(checkpoint: Any) -> Iterator[Any]:
    if checkpoint.weights.nbytes <= READ_BYTES:
        yield from checkpoint.weights.values()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.monotonic()
    report = fuzz(arguments.cases, seed=arguments.seed)
    print(f"cases    {arguments.cases}, {time.monotonic() - began:.0f} s, the slowest {report.slowest:.2f} s")
    for way in _WAYS:
        parts = {outcome: times for (name, outcome), times in sorted(report.outcomes.items()) if name == way}
        print(f"  {way:<18} {', '.join(f'{outcome} {times}' for outcome, times in parts.items())}")
    print(f"problems {len(report.problems)}")
    for problem in report.problems[:20]:
        print(f"  {problem[:400]}")


if __name__ == "__main__":
    main()
