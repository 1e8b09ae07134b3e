"""The result of an earlier self-check, cached with the compiled programs.

The check takes as long as a prompt of a thousand tokens or more: seconds where weights are large. The same programs of
the same code, with the same weights and options on the same machine, give the same answer, so a start reads what an
earlier one found. Only a check that found no difference at all is kept.
"""

import contextlib
import hashlib
import json
import time
from dataclasses import asdict, replace
from pathlib import Path

from xla_engine.config import EngineConfig
from xla_engine.environment import compile_cache_directory, xla_flags
from xla_engine.runner.code_digest import package_digest
from xla_engine.runner.native_library.build import library_digest
from xla_engine.runner.native_library.cache import private_directory, read_own, write_own
from xla_engine.runner.native_library.instruction_sets import processor
from xla_engine.runner.runner import Runner
from xla_engine.runner.self_check.check import SelfCheck, WithPool, run_self_check
from xla_engine.utils.cores import cores


def self_check(
    runner: Runner,
    vocab_size: int,
    fingerprint: str,
    with_pool: WithPool | None = None,
    *,
    always: bool = False,
) -> SelfCheck | None:
    """The result of `run_self_check`, or the cached one of an earlier start. fingerprint: of the checkpoint.

    always: run the check, as all hosts must that share a model. With `EngineConfig.compile_cache` off, it always runs,
    too, and its result is not cached.
    """
    if always or not runner.config.compile_cache:
        return run_self_check(runner, vocab_size, with_pool)
    directory = private_directory(compile_cache_directory() / "self_checks")
    path = directory / f"{_key(runner, vocab_size, fingerprint)}.json"
    if (found := _read(path)) is not None:
        return found
    check = run_self_check(runner, vocab_size, with_pool)
    if check is not None and check.ok and not check.differences:
        kept = asdict(replace(check, day=time.strftime("%Y-%m-%d")))
        with contextlib.suppress(OSError):  # the next start checks again
            write_own(path, json.dumps(kept).encode())
    return check


def self_check_config(config: EngineConfig, blocks: int) -> EngineConfig:
    """The options of a runner that is only checked, with a pool of so many blocks."""
    return replace(
        config,
        num_blocks=blocks,
        kv_cache_memory_bytes=None,
        speculative_config=None,
        prefix_cache_dir=None,
        shadow_rate=0.0,
    )


def _key(runner: Runner, vocab_size: int, fingerprint: str) -> str:
    """All that the answer depends on."""
    tower = None if runner.features is None else runner.features.tower
    parts = {
        "code": package_digest(),
        "programs": [each.digest for each in runner.reports],
        "tower": [tower.fingerprint, *(each.digest for each in tower.reports)] if tower else [],
        "library": None if runner.isa is None else library_digest(runner.isa),
        "platform": runner.platform,
        "flags": xla_flags(),
        "processor": processor(),
        "cores": cores(),
        "options": runner.config.options(),
        "context": runner.context_length,
        "vocabulary": vocab_size,
        "checkpoint": fingerprint,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _read(path: Path) -> SelfCheck | None:
    try:
        fields = json.loads(read_own(path))
        return SelfCheck(**fields | {"differences": ()})
    except (OSError, ValueError, TypeError):
        return None
