"""Read tokenizer.json, and handle failures of the library that reads it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from xla_engine.errors import CheckpointError, XlaEngineError
from xla_engine.model_loader.stand_ins import stand_in

MAX_GROWTH = 64  # factor by which normaliser or decoder may lengthen a text
_MAX_PARTS = 4096  # total objects and lists in both


def read_tokenizer(directory: Path) -> tokenizers.Tokenizer | None:
    """The tokenizer.json of `directory`; None if there is none. Raises CheckpointError for a broken one."""
    file = directory / "tokenizer.json"
    if not file.exists():
        return None
    if (problem := stand_in(file)) is not None:
        raise CheckpointError(f"{file}: {problem}")
    with raising(CheckpointError, f"{file}: not a usable tokenizer. Download the file again"):
        return tokenizers.Tokenizer.from_file(str(file))


def check_growth(text: str | bytes, where: Path) -> bool:
    """Whether a tokenizer.json's normaliser or decoder may lengthen texts, or uses regular expressions.

    Raises CheckpointError if a chain of replacements could lengthen a text by more than `MAX_GROWTH` (forty that
    double it would never end). Returns true for invalid JSON, which the library reports.
    """
    try:
        state = json.loads(text)
    except (ValueError, RecursionError):
        return True
    if not isinstance(state, dict):
        return True
    growth, parts, unusual = 1, 0, False
    values = [state.get("normalizer"), state.get("decoder")]
    while values:
        value = values.pop()
        parts += isinstance(value, dict | list)
        if (
            isinstance(value, dict)
            and isinstance(content := value.get("content"), str)
            and "pattern" in value
        ):
            pattern = value["pattern"]
            literal = pattern.get("String") if isinstance(pattern, dict) else pattern
            if isinstance(literal, str) and literal:
                factor = max(1, -(-len(content) // len(literal)))
            else:  # a regular expression, which may match any length
                unusual, factor = True, max(1, len(content))
            unusual |= factor > 1
            growth *= factor
        if growth > MAX_GROWTH or parts > _MAX_PARTS:
            raise CheckpointError(
                f"{where}: the normaliser and decoder may make a text {growth} times as long, or have more than "
                f"{_MAX_PARTS} parts; at most {MAX_GROWTH} times is allowed. Use the file of the model's authors"
            )
        if isinstance(value, dict | list):
            values += value.values() if isinstance(value, dict) else value
    return unusual


def without_prefix(state: Any) -> Any:
    """A tokenizer.json whose normaliser and pre-tokenizer put no space before a text."""
    if isinstance(state, list):
        return [without_prefix(each) for each in state if not _is_prepend(each)]
    if not isinstance(state, dict):
        return state
    changed = {
        key: None if _is_prepend(each) else each if key in ("model", "added_tokens") else without_prefix(each)
        for key, each in state.items()
    }
    return changed | ({"prepend_scheme": "never"} if state.get("type") == "Metaspace" else {})


def _is_prepend(step: object) -> bool:
    return isinstance(step, dict) and step.get("type") == "Prepend"


@contextmanager
def raising(error_type: type[XlaEngineError], message: str) -> Iterator[None]:
    """Turn any failure of the library into `error_type`. Its panics are BaseExceptions, but not Exceptions."""
    try:
        yield
    except XlaEngineError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise error_type(f"{message} ({error})") from error
