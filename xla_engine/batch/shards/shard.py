"""One of several independent jobs over one input: which lines are its own, and what stands beside its output.

A line belongs to the shard that the hash of its custom_id names, so that lines of one id are in one shard, and each
shard finds repeated ids by itself. Line numbers stay those of the whole input: a request has the same id, the same
noise and the same result line in whatever shard it runs.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from xla_engine.batch.lines import Line
from xla_engine.batch.requests import custom_id_of
from xla_engine.batch.results import line_digest, salt_of
from xla_engine.errors import ConfigError, OutputError
from xla_engine.utils.json_line import dump_line
from xla_engine.utils.new_file import open_new

MAX_SHARDS = 1_000_000


@dataclass(frozen=True, slots=True)
class Shard:
    """Number `index`, from 0, of `count` jobs."""

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
        """Whether the line of this id is for this shard."""
        digest = blake2b(custom_id.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % self.count == self.index


class ShardLines:
    """The lines of one shard out of all lines of the input.

    input_lines: lines of the whole input so far. own_lines: those of this shard.
    """

    def __init__(self, lines: Iterable[Line], shard: Shard, defaults: Mapping[str, Any] | None) -> None:
        self._lines, self._shard = lines, shard
        self._salt = salt_of(defaults)
        self._digest = blake2b(digest_size=8)
        self.input_lines = self.own_lines = 0

    def __iter__(self) -> Iterator[Line]:
        for line in self._lines:
            self.input_lines += 1
            self._digest.update(line_digest(line.raw, line.size, self._salt).to_bytes(8, "big"))
            if self._shard.owns(custom_id_of(line.raw, line.number)):
                self.own_lines += 1
                yield line

    @property
    def input_digest(self) -> str:
        """Stands for all lines so far and the sampling defaults."""
        return self._digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardState:
    """What the file beside a shard's output says.

    shard, of: which of how many.
    holds: "all" lines of the shard, or only its "results", or only its "errors".
    finished: whether every line of the shard has its output.
    lines: of the output. own_lines: of the shard. input_lines: of the whole input.
    input: digest of the whole input and the sampling defaults.
    system_fingerprint: of the engine; None where the shard had no line to run.
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
        """Put it beside an output, in place of what is there, at once."""
        path = state_path(output)
        new = path.with_name(f".{path.name}.new")
        with open_new(new) as file:
            file.write(dump_line(asdict(self)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)


def state_path(output: Path | str) -> Path:
    """The file that says what an output is a shard of."""
    return Path(f"{output}.shard.json")


def read_state(output: Path | str) -> ShardState | None:
    """What stands beside an output; None where nothing does. Raises OutputError for what is no such file."""
    path = state_path(output)
    try:
        fields = json.loads(path.read_bytes())
        return ShardState(**fields)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise OutputError(f"{path} does not say what {output} is a shard of: {error}") from error


def check_continued(output: Path | str, shard: Shard | None) -> None:
    """Raise OutputError where an output to go on with was begun as another shard, or not as one."""
    begun = read_state(output)
    if begun is None:
        if shard is not None and Path(output).exists() and Path(output).stat().st_size:
            raise OutputError(
                f"{output} was not begun as a shard: there is no {state_path(output).name} beside it"
            )
        return
    was = Shard(begun.shard, begun.of)
    if was != shard:
        now = "without --shard" if shard is None else f"as shard {shard}"
        raise OutputError(
            f"{output} was begun as shard {was} and cannot go on {now}; give --shard {was}, or another output"
        )
