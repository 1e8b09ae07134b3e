"""Blocks on their way between files and the engine: threads look for files, read and write them, and the engine waits
for none of them longer than a fraction of a second.

The content of a block depends on its tokens alone, so a block from a file equals one that is computed. Whether to load
is therefore a question of time only: `worth` compares the rate at which blocks were read with that of prefill.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from xla_engine.runner.prefix_files.files import BlockFiles, DamagedFileError, StoredContent
from xla_engine.runner.stored_blocks import BlockContent, BlockLayout
from xla_engine.scheduler import StoredBlock
from xla_engine.utils.call_thread import CallThread, Pending

_MARGIN = 0.8  # loading must take less than this share of the time of prefill
_TRY_AGAIN = 16  # each so many prefixes that are not worth it, one is loaded anyway, to measure again
_PATIENCE = 2.0  # seconds to wait for a prefix while the rate of prefill is unknown
_ANSWER = 0.2  # seconds that the engine waits to hear which files there are
_UNWRITTEN = 64  # groups of blocks that may wait to be written; more are dropped


@dataclass(slots=True)
class BlockCounts:
    """What happened to blocks and saved states. read: from files onto the device. written: to files. failed: files
    that were missing, damaged or unreadable, and writes that failed. skipped: those that were computed because that
    was faster."""

    read: int = 0
    written: int = 0
    failed: int = 0
    skipped: int = 0


class Rate:
    """A moving average of seconds per unit; None before the first measurement."""

    def __init__(self) -> None:
        self.seconds: float | None = None

    def add(self, seconds: float, units: float) -> None:
        """Add a measurement."""
        new = seconds / units
        self.seconds = new if self.seconds is None else 0.75 * self.seconds + 0.25 * new


@dataclass(slots=True, eq=False)
class BlockReading:
    """Blocks being read in order, until one cannot be had.

    until: when the request stops waiting for it. done: no more will be read. abandoned: no request waits for it.
    """

    request_id: str
    blocks: Sequence[StoredBlock]
    until: float
    done: bool = False
    abandoned: bool = False


class PrefixStorage:
    """Reads and writes the blocks of one engine. See `runner.stored_blocks.BlockStorage`.

    counts: since the start. prefill: seconds per prompt token, measured by the engine.
    on_read: called by a thread when a reading is done.
    """

    def __init__(
        self,
        files: BlockFiles,
        layout: BlockLayout,
        on_read: Callable[[], object],
        state_layout: BlockLayout | None = None,
    ) -> None:
        """layout: of blocks. state_layout: of saved states of recurrent layers."""
        self.counts = BlockCounts()
        self.prefill = Rate()
        self.files = files
        self._layout, self._state_layout = layout, state_layout or layout
        self._on_read = on_read
        self._disk = Rate()  # per byte
        self._content: dict[bytes, BlockContent] = {}
        self._last: BlockReading | None = None
        self._unworthy = 0
        self._look_up: Pending[int] | None = None
        self._finder, self._reader, self._writer = self._threads = [
            CallThread(f"xla-engine-{name}-blocks") for name in ("find", "read", "write")
        ]

    def found(self, keys: Sequence[bytes]) -> int:
        """How many blocks, from the first on, have files. None if the disk does not answer, until it does."""
        if self._look_up is not None and not self._look_up.done.is_set():
            return 0
        self._look_up = look_up = self._finder.ask(partial(self._count, keys))
        if look_up.done.wait(_ANSWER) and isinstance(found := look_up.result(), int):
            return found
        self.counts.failed += 1
        return 0

    def is_worth_reading(self, blocks: Sequence[StoredBlock], tokens: int) -> bool:
        """Whether reading these blocks of a prompt is worth it, compared with computing their `tokens` again."""
        if self._last is not None and not self._last.done and self._last.abandoned:
            return False  # the disk hangs
        if self._disk.seconds is None or self.prefill.seconds is None:
            return True
        num_bytes = sum(self._layout_of(each).num_bytes for each in blocks)
        if self._disk.seconds * num_bytes < _MARGIN * self.prefill.seconds * tokens:
            return True
        self._unworthy += 1
        if self._unworthy % _TRY_AGAIN == 0:
            return True
        self.counts.skipped += len(blocks)
        return False

    def start(self, request_id: str, blocks: Sequence[StoredBlock], tokens: int, now: float) -> BlockReading:
        """Read blocks in the background. Gives up after the time in which `tokens` could be computed.

        now: on the engine's clock.
        """
        rate = self.prefill.seconds
        patience = _PATIENCE if rate is None else rate * tokens
        self._last = reading = BlockReading(request_id, blocks, now + patience)
        self._reader.ask(partial(self._read_all, reading))
        return reading

    def keys(self, reading: BlockReading) -> set[bytes]:
        return {each.key for each in reading.blocks if each.key in self._content}

    def store(self, blocks: Sequence[StoredBlock], groups: Sequence[Any]) -> None:
        """As `BlockStorage.store`. If the disk is behind, the blocks are dropped."""
        if self._writer.num_waiting < _UNWRITTEN:
            self._writer.ask(partial(self._write, blocks, groups))
        else:
            self.counts.failed += len(blocks)

    def take(self, blocks: Sequence[StoredBlock]) -> Mapping[bytes, BlockContent]:
        """As `BlockStorage.take`."""
        self.counts.read += len(blocks)
        return {
            each.key: self._content.pop(each.key) for each in {each.key: each for each in blocks}.values()
        }

    def clear(self) -> None:
        """As `BlockStorage.clear`."""
        self._content.clear()

    def drop(self, reading: BlockReading, wanted: Sequence[StoredBlock] = ()) -> None:
        """Forget the content of a reading, but for what `take` will be asked for."""
        keep = {each.key for each in wanted}
        for each in reading.blocks:
            if each.key not in keep:
                self._content.pop(each.key, None)

    def close(self) -> None:
        """Write what waits, and end the threads. Waits at most ten seconds."""
        for thread in self._threads:
            thread.close()
        until = time.monotonic() + 10
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))

    def flush(self) -> None:
        """Wait until all blocks given so far are written."""
        self._writer.ask(lambda: None).done.wait()

    def _layout_of(self, block: StoredBlock) -> BlockLayout:
        return self._state_layout if block.is_state else self._layout

    def _count(self, keys: Sequence[bytes]) -> int:
        """How many of these blocks, from the first on, have files."""
        found = 0
        with contextlib.suppress(OSError):
            while found < len(keys) and self.files.has(keys[found]):
                found += 1
        return found

    def _read_all(self, reading: BlockReading) -> None:
        for each in reading.blocks:
            if reading.abandoned or not self._read(each):
                break
        reading.done = True
        if reading.abandoned:
            self.drop(reading)
        self._on_read()

    def _read(self, block: StoredBlock) -> bool:
        """Read one block; False if it cannot be had."""
        began, layout = time.perf_counter(), self._layout_of(block)
        try:
            found = self.files.read(block.key)
            if (found.parent, found.tokens, len(found.content)) != (
                block.parent,
                block.tokens,
                layout.num_bytes,
            ):
                raise DamagedFileError("it holds other tokens")
        except DamagedFileError:
            self.files.delete(block.key)  # the next request that shares the block writes it again
            self.counts.failed += 1
            return False
        except (OSError, MemoryError):
            self.counts.failed += 1
            return False
        self._content[block.key] = layout.from_bytes(found.content)
        self._disk.add(time.perf_counter() - began, len(found.content))
        return True

    def _write(self, blocks: Sequence[StoredBlock], groups: Sequence[Any]) -> None:
        most, layout = BlockLayout.blocks_in(groups[0]), self._layout_of(blocks[0])
        for at, block in enumerate(blocks):
            try:
                if self.files.has(block.key):
                    continue
                content = layout.to_bytes(groups[at // most], at % most)
                if content is None:
                    continue  # not finite: a request that failed
                stored = StoredContent(
                    key=block.key, parent=block.parent, tokens=block.tokens, content=content
                )
                self.counts.written += self.files.write(stored)
            except Exception:  # a full disk, a lost device: later requests compute what is not stored
                self.counts.failed += 1
