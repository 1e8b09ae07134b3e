"""Prefixes in files: which requests have one, when it is read, and when the scheduler may use it.

A request whose prefix has files but is not in the pool waits when it is next in line, until the files are read or
prefill would have taken as long. Meanwhile rows decode. What was read is planned as loads, and from then on these
blocks are cached ones like any others.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from xla_engine import graphs
from xla_engine.config import EngineConfig
from xla_engine.runner.code_digest import code_digest
from xla_engine.runner.native_library.build import library_digest
from xla_engine.runner.native_library.instruction_sets import processor
from xla_engine.runner.prefix_files.files import BlockFiles
from xla_engine.runner.prefix_files.storage import BlockReading, PrefixStorage
from xla_engine.runner.runner import Runner
from xla_engine.scheduler import Plan, Request, Scheduler, stored_blocks

_OPTIONS = ("bits", "quantization", "kv_cache_dtype", "block_size")


class StoredPrefixes:
    """The prefixes of one engine.

    storage: its blocks in files. reading: what is being read for the request that is next in line.
    """

    def __init__(self, storage: PrefixStorage) -> None:
        self.storage = storage
        self.reading: BlockReading | None = None
        self._started: dict[int, float] = {}  # when each step in flight was started
        self._last_read = 0.0

    def marked(self, request: Request, scheduler: Scheduler) -> Request:
        """A request that knows how many blocks of its prompt are in files or in the pool, if it is worth to read some
        of them; otherwise the same request."""
        if request.max_cached_tokens == 0:
            return request
        count = stored_blocks.loadable(scheduler, request, self.storage.found)
        marked = replace(request, stored_blocks=count)
        missing = stored_blocks.missing_blocks(scheduler, marked)
        tokens = stored_blocks.gained_tokens(scheduler, marked) if missing else 0
        return marked if tokens and self.storage.is_worth_reading(missing, tokens) else request

    def advance(self, scheduler: Scheduler, now: float) -> None:
        """Give the scheduler what was read, and read for the request that waits, if there is one."""
        reading = self.reading
        if reading is not None and (reading.done or now >= reading.until):
            loads = stored_blocks.load(
                scheduler, reading.request_id, self.storage.keys(reading) if reading.done else ()
            )
            reading.abandoned = not reading.done
            self.storage.drop(reading, loads)
            self.reading = None
        request = None if self.reading is not None else stored_blocks.waiting(scheduler)
        if request is not None and (missing := stored_blocks.missing_blocks(scheduler, request)):
            tokens = stored_blocks.gained_tokens(scheduler, request)
            self.reading = self.storage.start(request.request_id, missing, tokens, now)

    @property
    def until(self) -> float:
        """When the request that waits stops waiting; infinity if none does."""
        return math.inf if self.reading is None else self.reading.until

    def started(self, plan: Plan, now: float) -> None:
        """Note when a step was started."""
        self._started[plan.step] = now

    def read(self, plan: Plan, now: float) -> None:
        """Measure the rate of prefill by a step that was read."""
        began = max(self._started.pop(plan.step, now), self._last_read)
        self._last_read = now
        if (tokens := sum(len(chunk.tokens) for chunk in plan.chunks)) and now > began:
            self.storage.prefill.add(now - began, tokens)

    def restarted(self) -> None:
        """Forget what belongs to a pool that was lost."""
        self._started.clear()
        if self.reading is not None:
            self.reading.abandoned = True
            self.storage.drop(self.reading)
            self.reading = None


def stored_prefixes(
    config: EngineConfig, runner: Runner, fingerprint: str, on_read: Callable[[], object]
) -> StoredPrefixes | None:
    """As the options say; None without `prefix_cache_dir`. Raises ConfigError for a directory that cannot be used.

    fingerprint: of the checkpoint. on_read: called by a thread when something was read.
    """
    if config.prefix_cache_dir is None:
        return None
    directory, about = Path(config.prefix_cache_dir).expanduser(), _about(config, runner, fingerprint)
    files = BlockFiles(directory, about, config.prefix_cache_bytes)
    storage = PrefixStorage(files, runner.block_layout, on_read, runner.state_layout)
    runner.block_storage = storage
    return StoredPrefixes(storage)


def _about(config: EngineConfig, runner: Runner, fingerprint: str) -> dict[str, object]:
    """Everything that the bytes of a block depend on besides its tokens, adapter and salt."""
    assert runner.isa is not None
    states = {"state": runner.state_layout.digest} if config.saves_states else {}
    return states | {
        "model": fingerprint,
        "options": {name: getattr(config, name) for name in _OPTIONS} | {"dtype": runner.spec.dtype.name},
        "layout": runner.block_layout.digest,
        "bytes": runner.block_layout.num_bytes,
        "rope": runner.rope_digest,
        "platform": runner.platform,
        "library": library_digest(runner.isa),
        "isa": runner.isa,
        "processor": hashlib.sha256(processor().encode()).hexdigest(),
        "code": code_digest(*map(Path, graphs.__path__)),
    }
