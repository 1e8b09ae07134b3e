"""Merge the outputs of all shards of a job into one file, in the order of the input."""

import contextlib
import heapq
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xla_engine.batch.datasets.in_order import ResultsInOrder
from xla_engine.batch.resume import FileSystem, is_packed, sink_of
from xla_engine.batch.shards.shard import Shard, ShardState, read_state, state_path
from xla_engine.errors import OutputError
from xla_engine.utils.new_file import open_new


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """Counts of merged lines, of shards, and of error lines."""

    shards: int
    lines: int
    errors: int


def merge(
    paths: Sequence[Path], output: Path, *, overwrite: bool = False, any_engine: bool = False
) -> Merged:
    """Write the lines of all shards to one file, byte for byte, in the order of the input.

    The file equals that of one `--ordered` run over the whole input with the same `created`. All shards are checked
    before anything is written, and a killed merge leaves no output file.

    any_engine: accept shards from different engines (another device, version or option).

    Raises OutputError if a shard is missing, duplicated, unfinished or from another job, ResumeError if one is
    damaged, and OSError.
    """
    if output.exists() and not overwrite:
        raise OutputError(f"{output} already exists; use --overwrite to replace it")
    states = [_state(path) for path in paths]
    _check_one_job(paths, states, any_engine=any_engine)
    with contextlib.ExitStack() as stack:
        errors = [0]
        sources = [
            stack.enter_context(opened)
            for path, state in zip(paths, states, strict=True)
            if (opened := _open(path, state, errors)) is not None
        ]
        lines = _write(heapq.merge(*sources), output)
    return Merged(shards=len(paths), lines=lines, errors=errors[0])


def _state(path: Path) -> ShardState:
    state = read_state(path)
    if state is None:
        raise OutputError(
            f"{path} is no shard: {state_path(path).name}, which `run --shard` writes beside its output, is not there"
        )
    return state


def _check_one_job(paths: Sequence[Path], states: Sequence[ShardState], *, any_engine: bool) -> None:
    """Raise OutputError unless these are all shards of one job, each exactly once and finished."""
    first_path, first = paths[0], states[0]
    seen: dict[int, Path] = {}
    for path, state in zip(paths, states, strict=True):
        name = f"shard {Shard(state.shard, state.of)}"
        if state.of != first.of:
            raise OutputError(f"{first_path} is one of {first.of} shards, {path} one of {state.of}")
        if state.shard in seen:
            raise OutputError(f"{name} is given twice: {seen[state.shard]} and {path}; give each once")
        seen[state.shard] = path
        if not state.finished:
            raise OutputError(f"{name} ({path}) is not finished; run it again with --resume")
        if (state.input, state.input_lines) != (first.input, first.input_lines):
            raise OutputError(
                f"{path} is a shard of another job than {first_path}: its input or its sampling defaults differ"
            )
        if state.holds != first.holds:
            raise OutputError(
                f"{first_path} holds {first.holds}, {path} {state.holds}; merge files of one kind"
            )
    if missing := [str(Shard(index, first.of)) for index in range(first.of) if index not in seen]:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise OutputError(f"missing: shard {shown}; a merge needs all {first.of}")
    made_by = {
        state.system_fingerprint: path
        for path, state in zip(paths, states, strict=True)
        if state.system_fingerprint
    }
    if len(made_by) > 1 and not any_engine:
        (one, its), (other, others), *_ = made_by.items()
        raise OutputError(
            f"{its} was made with engine {one}, {others} with {other}: another model, option, version or device, so "
            f"their bits may differ; use --any-engine to merge them anyway"
        )
    if (own := sum(state.own_lines for state in states)) != first.input_lines:
        raise OutputError(f"the shards have {own} lines together, their input {first.input_lines}")


def _open(path: Path, state: ShardState, errors: list[int]) -> ResultsInOrder | None:
    """The lines of a shard; None if it has none. Counts error lines in `errors[0]`."""
    if not state.lines and not path.exists():
        return None
    shard = Shard(state.shard, state.of)

    def check(number: int, record: dict[str, Any]) -> None:
        if not shard.owns(str(record.get("custom_id"))):
            raise OutputError(
                f"{path} has line {number} of the input, which does not belong to shard {shard}"
            )
        errors[0] += record.get("error") is not None

    opened = ResultsInOrder(path, check)
    if len(opened) != state.lines:
        opened.close()
        raise OutputError(
            f"{path} has {len(opened)} lines, not the {state.lines} of the finished shard; was it copied completely?"
        )
    return opened


def _write(lines: Iterator[tuple[int, bytes]], output: Path) -> int:
    """Write lines in order to a file that gets its final name only when it is complete."""
    new = output.with_name(f".{output.name}.new")
    count = last = 0
    try:
        with open_new(new) as file:
            sink = sink_of(file, packed=is_packed(output), file_system=FileSystem())
            for number, line in lines:
                if number == last:
                    raise OutputError(f"line {number} of the input is in two shards")
                sink.write(line)
                count, last = count + 1, number
            sink.close()
        os.replace(new, output)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    return count
