"""Read JSON files of a checkpoint directory with size limits, and their fields with checks of types and ranges."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from xla_engine.errors import CheckpointError
from xla_engine.model_loader.stand_ins import stand_in

_SIZE_LIMIT = 64 << 20  # bytes; the largest real index files are a few MB


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises CheckpointError for a missing, oversized or broken file."""
    try:
        if not file.is_file():
            raise CheckpointError(f"{file}: no such file. Name a complete Hugging Face model directory")
        if file.stat().st_size > _SIZE_LIMIT:
            raise CheckpointError(f"{file}: larger than {_SIZE_LIMIT >> 20} MiB. Download the file again")
        content = file.read_bytes()
        if (problem := stand_in(file)) is not None:
            raise CheckpointError(f"{file}: {problem}")
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror}). Check its permissions") from error
    return parse_json(content, file)


def parse_json(content: bytes, file: Path) -> dict[str, Any]:
    """The JSON object in `content`, which is from `file`. Repeated keys are an error."""
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:  # ValueError: bad JSON, bad UTF-8, integers of 4301 digits
        raise CheckpointError(f"{file}: broken JSON ({error}). Download the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: is not a JSON object. Download the file again")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        ((name, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"duplicate key {name!r}")
    return values


class Fields:
    """Typed access to one JSON object. Absent and null are the same. Errors name file, field and value."""

    def __init__(self, file: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.file = file
        self.values = values
        self._prefix = prefix  # path of this object inside the file, for messages

    @classmethod
    def of_file(cls, file: Path) -> Fields:
        return cls(file, read_json(file))

    def fail(self, name: str, problem: str) -> NoReturn:
        """Raise CheckpointError; `problem` should end with the remedy."""
        shown = json.dumps(self.values[name]) if name in self.values else "(missing)"
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        raise CheckpointError(f"{self.file}: {self._prefix}{name} = {shown}: {problem}")

    def with_defaults(self, values: Mapping[str, Any]) -> Fields:
        """The same object, with `values` as defaults."""
        return Fields(self.file, {**values, **self.values}, self._prefix)

    def given(self, name: str) -> bool:
        """Whether the object has `name`, and not null."""
        return self.values.get(name) is not None

    def within(self, name: str) -> Fields | None:
        """The object under `name`, if there is one."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fail(name, "must be a JSON object. Correct the file or download it again")
        return Fields(self.file, value, f"{self._prefix}{name}.")

    def objects(self, *names: str) -> list[Fields]:
        """`within` for each of these names that there is."""
        return [found for name in names if (found := self.within(name)) is not None]

    def integer(self, name: str, *, high: int, low: int = 1, default: int | None = None) -> int:
        """An integer in [low, high]."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.fail(name, f"must be an integer from {low} to {high}. Correct the file or download it again")
        return value

    def number(self, name: str, *, high: float, default: float | None = None) -> float:
        """A number above 0 and at most `high`."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= high:
            self.fail(name, f"must be above 0 and at most {high:g}. Correct the file or download it again")
        return float(value)

    def numbers(self, name: str, *, high: float) -> tuple[float, ...]:
        """A list of numbers above 0 and at most `high`."""
        value = self.values.get(name)
        if not isinstance(value, list) or not value:
            self.fail(name, "must be a list of numbers. Correct the file or download it again")
        return tuple(Fields(self.file, {name: each}).number(name, high=high) for each in value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            self.fail(name, "must be true or false. Correct the file or download it again")
        return default if value is None else value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """One id or a list of ids, in order and without repeats; empty if absent."""
        value = self.values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                self.fail(name, f"token ids go from 0 to {vocab_size - 1}. Correct or remove the field")
        return tuple(dict.fromkeys(ids))
