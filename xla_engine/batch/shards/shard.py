"""One of several independent jobs over one input: which lines it runs, and the state file next to its output.

The hash of a line's custom_id selects its shard. Lines with the same id are therefore in the same shard, which can
detect duplicates alone. Line numbers are those of the whole input, so a request has the same id, noise and result
line in any shard.
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


class ShardLines:
    """Selects the lines of one shard from all lines of the input.

    input_lines: lines of the whole input so far. own_lines: lines of this shard so far.
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
        """Digest of all lines so far and the sampling defaults."""
        return self._digest.hexdigest()


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
        path = state_path(output)
        new = path.with_name(f".{path.name}.new")
        with open_new(new) as file:
            file.write(dump_line(asdict(self)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)


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
