"""tokenizer.json, and the failures of the library that reads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tokenizers

from xla_engine.errors import CheckpointError, XlaEngineError


def read_tokenizer(directory: Path) -> tokenizers.Tokenizer | None:
    """The tokenizer.json of `directory`, None where there is none. Raises CheckpointError for a broken one."""
    file = directory / "tokenizer.json"
    if not file.exists():
        return None
    with raising(CheckpointError, f"{file}: not a usable tokenizer. Download the file again"):
        return tokenizers.Tokenizer.from_file(str(file))


@contextmanager
def raising(error_type: type[XlaEngineError], message: str) -> Iterator[None]:
    """Turn any failure of the library into `error_type`; its panics are BaseExceptions, but no Exceptions."""
    try:
        yield
    except XlaEngineError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise error_type(f"{message} ({error})") from error
