"""The hidden marker file next to an output table that records that a run finished it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from xla_engine.batch.datasets.files import exists, file_system, is_url, opened
from xla_engine.batch.lines import Line
from xla_engine.batch.results import line_digest, salt_of
from xla_engine.utils.json_line import dump_line
from xla_engine.utils.new_file import open_new

_BLOCK = 1 << 20


class DigestedLines:
    """Passes lines through, and keeps a digest of them and of the sampling defaults."""

    def __init__(self, lines: Iterable[Line], defaults: Mapping[str, Any]) -> None:
        self._lines = lines
        self._salt = salt_of(defaults)
        self._digest = blake2b(digest_size=16)

    def __iter__(self) -> Iterator[Line]:
        for line in self._lines:
            self._digest.update(line_digest(line.raw, line.size, self._salt).to_bytes(8, "big"))
            yield line

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What a run records about a table that it has written.

    table: digest of its bytes. input: digest of all input lines and the sampling defaults. shard: I/N, or empty.
    """

    table: str
    input: str
    shard: str = ""

    def write(self, out: str) -> None:
        """Write the marker file of a table. Raises OSError."""
        place, data = _place(out), dump_line(asdict(self))
        if is_url(place):
            system, path = file_system(place)
            system.pipe_file(path, data)
            return
        new = Path(f"{place}.new")
        with open_new(new) as file:
            file.write(data)
        os.replace(new, place)

    @classmethod
    def of(cls, out: str) -> Finished | None:
        """Read the marker file of a table; None if there is none or it is for different content. Raises OSError."""
        if not exists(_place(out)):
            return None
        with opened(_place(out)) as file:
            try:
                found = cls(**json.loads(file.read()))
            except (ValueError, TypeError):
                return None
        return found if found.table == digest_of(out) else None


def digest_of(path: str) -> str:
    """Digest of the bytes of a file or URL. Raises OSError."""
    digest = blake2b(digest_size=16)
    with opened(path) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _place(out: str) -> str:
    """The marker's path: a hidden file, so that readers of a folder of tables ignore it."""
    folder, slash, name = out.rpartition("/")
    return f"{folder}{slash}.{name}.finished"
