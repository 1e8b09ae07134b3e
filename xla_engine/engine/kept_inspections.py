"""The reports of `xla-engine inspect` that were made before, so that it imports no jax the next time.

Everything in a report follows from the model's files, the options, the code and the machine, except what depends on
the memory that is available now, which is computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from xla_engine.config import AUTO, EngineConfig
from xla_engine.engine.inspection_report import Inspection
from xla_engine.environment import (
    compile_cache_directory,
    compiler,
    has_accelerator,
    settings_of_programs,
)
from xla_engine.errors import XlaEngineError
from xla_engine.model_loader.model_files import ModelFiles
from xla_engine.runner.code_digest import package_digest
from xla_engine.runner.memory_plan import MemoryPlan
from xla_engine.runner.native_library.bundled import Unfit, read_manifest
from xla_engine.runner.native_library.cache import private_directory, read_sealed, write_sealed
from xla_engine.runner.native_library.compiled import BUNDLE
from xla_engine.runner.native_library.instruction_sets import processor
from xla_engine.utils import host_memory
from xla_engine.utils.cores import cores

_MOST = 100  # files; those that were not read for longest are deleted
_LIBRARIES = ("jax", "jaxlib", "flax", "numpy", "tokenizers", "safetensors")


def inspect_or_recall(files: ModelFiles, config: EngineConfig) -> Inspection:
    """Inspect a model, or reuse the report of an earlier inspection with the same options.

    A reused report is brought up to date with the memory that is available now. Raises what `inspect_model` raises.
    """
    place = _place(files.path, config)
    if place is not None and (content := read_sealed(place)) is not None:
        report = _for_memory(json.loads(content), _budget(config))
        if report is not None:
            return report
    from xla_engine.engine.inspection import inspect_model

    report = inspect_model(files, config)
    if place is not None and report.ok and report.fits:  # an encoder has no table
        with contextlib.suppress(OSError):  # the next one is made again
            write_sealed(place, json.dumps(report.to_json()).encode())
            kept = sorted(place.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)
            for old in kept[:-_MOST]:
                old.unlink(missing_ok=True)
    return report


def _for_memory(kept: dict[str, Any], available: int | None) -> Inspection | None:
    """A report that was kept, with what depends on the available memory; None if the model no longer fits.

    available: bytes for the engine; None if unknown.
    """
    report = Inspection(**kept)
    assert report.memory is not None and report.eos_token_ids is not None
    report.eos_token_ids = tuple(report.eos_token_ids)
    known = {each.name: report.memory[each.name] for each in fields(MemoryPlan)}
    plan = replace(MemoryPlan(**known), available=available)
    report.memory |= {"available": available, "arithmetic": plan.arithmetic()}
    for row in report.fits:
        row["needed"] = {int(slots): needed for slots, needed in row["needed"].items()}
        row["most_slots"] = None if available is None else _most_slots(row["needed"], available)
    return report if plan.fits else None


def _most_slots(needed: dict[int, int], available: int) -> int:
    """As `MemoryPlan.most_slots`. needed: bytes by numbers of slots, of which each needs as much."""
    (few, first), (more, second), *_ = needed.items()
    slot = (second - first) // (more - few)
    return max(0, (available - (first - few * slot)) // slot)


def _budget(config: EngineConfig) -> int | None:
    """The bytes that an engine may use, as `xla_engine.runner.memory` finds them on a CPU."""
    free = host_memory.available()
    return None if free is None else int(free // config.tensor_parallel_size * config.memory_utilization)


def _place(path: Path, config: EngineConfig) -> Path | None:
    """Where the report of a model is kept; None if it depends on more than its name here tells."""
    sizes_by_memory = AUTO in (config.max_num_seqs, config.kv_cache_memory_bytes)
    if not config.compile_cache or config.is_portable or sizes_by_memory or has_accelerator():
        return None
    try:
        known = (
            package_digest(),
            sys.version,
            *(importlib.metadata.version(name) for name in _LIBRARIES),
            *settings_of_programs(),
            str(shutil.which(compiler())),
            repr(read_manifest(BUNDLE)),
            processor(),
            str(cores()),
            str(host_memory.total()),
            repr(config),
            str(path),
            *_listing(path),
        )
        digest = hashlib.sha256("\0".join(known).encode(errors="surrogateescape")).hexdigest()
        return private_directory(compile_cache_directory() / "inspections") / f"{digest[:40]}.json"
    except (OSError, ImportError, Unfit, XlaEngineError):  # `inspect_model` says what is wrong
        return None


def _listing(path: Path) -> Iterator[str]:
    """Names, sizes and times of a model's files: all in its directory and the directories there, or, of a file, it and
    those beside it."""
    patterns = ("*", "*/*") if path.is_dir() else ("*",)
    for pattern in patterns:
        for each in sorted((path if path.is_dir() else path.parent).glob(pattern)):
            if each.is_file():
                status = each.stat()
                yield f"{each} {status.st_size} {status.st_mtime_ns} {status.st_ino}"
