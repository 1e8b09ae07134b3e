"""`xla-engine run --shard`: one of several jobs over one input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from xla_engine.batch.lines import Line
from xla_engine.batch.output_file import Mode
from xla_engine.batch.resume import FinishedLines
from xla_engine.batch.totals import RunTotals
from xla_engine.errors import ConfigError, OutputError

if TYPE_CHECKING:
    from xla_engine.batch.shards.shard import Shard


def _shard(context: click.Context, option: click.Parameter, value: str | None) -> Shard | None:
    if value is None:
        return None
    from xla_engine.batch.shards.shard import Shard

    try:
        return Shard.parse(value)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


shard_option = click.option(
    "--shard",
    metavar="I/N",
    callback=_shard,
    help="Run only job I of N (from 0) over the same INPUT; `xla-engine merge` joins their outputs.",
)


class ShardOutput:
    """Writes the state files of a shard's outputs when it begins and finishes.

    Without a shard it only checks that the run does not resume a shard's output.
    """

    def __init__(self, shard: Shard | None, output: str, errors: str | None, mode: Mode) -> None:
        """Raises OutputError if an output belongs to another shard, and OSError."""
        from xla_engine.batch.shards.shard import ShardState, check_continued, state_path

        self._outputs = {output: "all"} if errors is None else {output: "results", errors: "errors"}
        self._shard = shard
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
        from xla_engine.batch.shards.shard import ShardLines

        for name, state in self._states.items():
            state.write(name)
        if self._shard is None:
            return lines
        self._lines = ShardLines(lines, self._shard, defaults)
        return iter(self._lines)

    def finish(self, done: FinishedLines, totals: RunTotals, system_fingerprint: str | None) -> None:
        """Record that the shard is finished."""
        results, errors = done.results + totals.ok, done.errors + totals.failed.total()
        counts = {"all": results + errors, "results": results, "errors": errors}
        for name, state in self._states.items():
            replace(
                state,
                finished=True,
                lines=counts[state.holds],
                own_lines=self._lines.own_lines,
                input_lines=self._lines.input_lines,
                input=self._lines.input_digest,
                system_fingerprint=system_fingerprint,
            ).write(name)
