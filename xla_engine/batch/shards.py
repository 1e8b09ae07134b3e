"""Independent jobs over one input: which lines each runs, the state file next to its output, and the merge of all.

The hash of a line's custom_id selects its shard. Lines with the same id are therefore in the same shard, which can
detect duplicates alone. Line numbers are those of the whole input, so a request has the same id, noise and result
line in any shard.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from xla_engine.batch.lines import Line
from xla_engine.batch.output_file import Mode
from xla_engine.batch.record_ids import DigestedLines
from xla_engine.batch.resume import FinishedLines, ResultsInOrder, Sink, is_packed
from xla_engine.batch.totals import RunTotals
from xla_engine.errors import ConfigError, OutputError
from xla_engine.openai.requests import custom_id_of
from xla_engine.utils.json_line import dump_line
from xla_engine.utils.new_file import replacing

MAX_SHARDS = 1_000_000


@dataclass(frozen=True, slots=True)
class Shard:
    """Job `index` (from 0) of `count` jobs."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read "I/N". Raises ConfigError."""
        found = re.fullmatch(r"([0-9]{1,7})/([0-9]{1,7})", text.strip())
        if found is None or not int(found[1]) < int(found[2]) <= MAX_SHARDS:
            raise ConfigError(
                f"a shard is I/N, with I from 0 to N - 1 as job indices are, such as 0/4; not {text!r}"
            )
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def owns(self, custom_id: str) -> bool:
        """Whether the line with this id belongs to this shard."""
        digest = blake2b(custom_id.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % self.count == self.index


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardState:
    """Content of the state file next to a shard's output.

    shard, of: the shard's number and the number of shards.
    holds: "all" lines of the shard, or only its "results", or only its "errors".
    finished: whether every line of the shard has its output.
    lines: in the output. own_lines: in the shard. input_lines: in the whole input.
    input: digest of the whole input and the sampling defaults.
    system_fingerprint: the engine's; None if the shard had no line to run.
    """

    shard: int
    of: int
    holds: str
    finished: bool = False
    lines: int = 0
    own_lines: int = 0
    input_lines: int = 0
    input: str = ""
    system_fingerprint: str | None = None

    def write(self, output: Path | str) -> None:
        """Write or replace the state file of an output atomically."""
        with replacing(state_path(output)) as file:
            file.write(dump_line(asdict(self)))


def state_path(output: Path | str) -> Path:
    return Path(f"{output}.shard.json")


def read_state(output: Path | str) -> ShardState | None:
    """Read the state file of an output; None if there is none. Raises OutputError if it is not a state file."""
    path = state_path(output)
    try:
        fields = json.loads(path.read_bytes())
        return ShardState(**fields)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise OutputError(f"{path} does not say what {output} is a shard of: {error}") from error


def is_empty(output: Path | str) -> bool:
    """Whether an output is that of a finished shard without lines. Raises OutputError."""
    state = read_state(output)
    return state is not None and state.finished and not state.lines


def check_continued(output: Path | str, shard: Shard | None) -> None:
    """Raise OutputError if the output to resume was begun as a different shard, or unsharded."""
    begun = read_state(output)
    if begun is None:
        if shard is not None and Path(output).exists() and Path(output).stat().st_size:
            raise OutputError(
                f"{output} was not written as a shard: there is no {state_path(output).name} beside it"
            )
        return
    was = Shard(begun.shard, begun.of)
    if was != shard:
        now = "without --shard" if shard is None else f"as shard {shard}"
        raise OutputError(
            f"{output} was begun as shard {was} and cannot go on {now}; give --shard {was}, or another output"
        )


class ShardOutput:
    """Writes the state files of a shard's outputs when it begins and finishes.

    Without a shard it only checks that the run does not resume a shard's output.
    """

    def __init__(self, shard: Shard | None, output: str, errors: str | None, mode: Mode) -> None:
        """Raises OutputError if an output belongs to another shard, and OSError."""
        self._outputs = {output: "all"} if errors is None else {output: "results", errors: "errors"}
        self._shard = shard
        self._input_lines = self._own_lines = 0  # read so far, in the input and of this shard
        if shard is not None and "-" in self._outputs:
            raise OutputError("a shard writes its results to a file; name one with -o")
        for name in self._outputs:
            if mode in (Mode.RESUME, Mode.RETRY) and name != "-":
                check_continued(name, shard)
            elif shard is None and mode is Mode.OVERWRITE and name != "-":
                state_path(name).unlink(missing_ok=True)
        self._states = {
            name: ShardState(shard=shard.index, of=shard.count, holds=holds)
            for name, holds in self._outputs.items()
            if shard is not None
        }

    def begin(self, lines: Iterator[Line], defaults: Mapping[str, Any]) -> Iterator[Line]:
        """Record that the shard is unfinished, and return its lines."""
        for name, state in self._states.items():
            state.write(name)
        if self._shard is None:
            return lines
        self._input = DigestedLines(lines, defaults, size=8)
        return self._own(self._shard)

    def _own(self, shard: Shard) -> Iterator[Line]:
        """The lines of the shard, of those of the whole input."""
        for line in self._input:
            self._input_lines += 1
            if shard.owns(custom_id_of(line.raw, line.number)):
                self._own_lines += 1
                yield line

    def finish(self, done: FinishedLines, totals: RunTotals, system_fingerprint: str | None) -> None:
        """Record that the shard is finished."""
        results, errors = done.results + totals.ok, done.errors + totals.failed.total()
        counts = {"all": results + errors, "results": results, "errors": errors}
        for name, state in self._states.items():
            replace(
                state,
                finished=True,
                lines=counts[state.holds],
                own_lines=self._own_lines,
                input_lines=self._input_lines,
                input=self._input.digest,
                system_fingerprint=system_fingerprint,
            ).write(name)


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
            stack.enter_context(contextlib.closing(opened))
            for path, state in zip(paths, states, strict=True)
            if (opened := _open(path, state, errors)) is not None
        ]
        sink = Sink(stack.enter_context(replacing(output)), packed=is_packed(output))
        count = last = 0
        for number, line in heapq.merge(*sources):
            if number == last:
                raise OutputError(f"line {number} of the input is in two shards")
            sink.write(line)
            count, last = count + 1, number
        sink.close()
    return Merged(shards=len(paths), lines=count, errors=errors[0])


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
        raise OutputError(f"the shards have {own} lines together, but their input has {first.input_lines}")


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
