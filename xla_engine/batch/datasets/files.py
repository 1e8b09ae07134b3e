"""Find the files of a table: local paths, folders, glob patterns, and fsspec URLs."""

import contextlib
import gzip
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from glob import glob, has_magic
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from xla_engine.errors import ConfigError
from xla_engine.utils.extras import install

KINDS = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".arrow": "arrow",
    ".feather": "arrow",
}
OUTPUTS = ("parquet", "csv", "tsv")  # table formats that a run can write; any other output is JSON lines


@dataclass(frozen=True, slots=True)
class TableFile:
    """One file: its display name, its kind, a function that opens its bytes, and if it is text, its encoding."""

    name: str
    kind: str
    raw: Callable[[], BinaryIO]
    encoding: str | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open the content, decompressed."""
        with self.raw() as file:
            if not self.name.endswith(".gz"):
                yield file
                return
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield cast("BinaryIO", unpacked)


def is_url(path: str) -> bool:
    return "://" in path


def kind_of(path: str) -> str | None:
    """The kind of a file by its name, with or without `.gz`; None for an unknown kind."""
    return KINDS.get(PurePosixPath(path.removesuffix(".gz")).suffix.lower())


def is_table(path: str) -> bool:
    """Whether an input is, by its name, a table rather than a file of request lines."""
    if path == "-":
        return False
    if not is_url(path) and Path(path).is_dir():
        return True
    return kind_of(path) in (*OUTPUTS, "arrow")


def table_files(source: str) -> list[TableFile]:
    """The files of a table, sorted by name, or in the order that a saved Hugging Face dataset lists them.

    Raises ConfigError if there is no file or one of an unknown kind, and OSError.
    """
    if is_url(source):
        return _remote(source)
    path = Path(source)
    if path.is_dir():
        paths = _saved_dataset(path) or sorted(each for each in path.iterdir() if kind_of(each.name))
    elif has_magic(source) and not path.exists():
        paths = [Path(each) for each in sorted(glob(source))]
    else:
        paths = [path]
    return _checked(source, [(str(each), partial(opened, str(each))) for each in paths])


def _saved_dataset(folder: Path) -> list[Path]:
    """The files that `datasets.Dataset.save_to_disk` wrote to a folder; empty for any other folder."""
    if (folder / "dataset_dict.json").exists():
        raise ConfigError(f"{folder} holds several splits; name the folder of one")
    try:
        state = json.loads((folder / "state.json").read_text())
        return [folder / each["filename"] for each in state["_data_files"]]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return []


def file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it. Raises ConfigError."""
    try:
        import fsspec
    except ImportError as error:
        raise ConfigError(f"{url} needs fsspec: {install('data')}") from error
    try:
        found: tuple[Any, str] = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # no such protocol, or its package is not installed
        raise ConfigError(f"{url}: {error}") from error
    return found


def _remote(url: str) -> list[TableFile]:
    system, path = file_system(url)
    if has_magic(path):
        paths = sorted(system.glob(path))
    elif system.isdir(path):
        paths = sorted(each for each in system.ls(path, detail=False) if kind_of(each))
    else:
        paths = [path]
    return _checked(url, [(each, partial(system.open, each, "rb")) for each in paths])


def _checked(source: str, found: list[tuple[str, Callable[[], BinaryIO]]]) -> list[TableFile]:
    files = []
    for name, opened in found:
        kind = kind_of(name)
        if kind is None:
            raise ConfigError(
                f"{name} is not the name of a table; tables end in .parquet, .csv, .tsv, .json, .jsonl or .arrow, "
                f"or one of these and .gz"
            )
        files.append(TableFile(name, kind, opened))
    if not files:
        what = "the directory has" if Path(source).is_dir() else "there is"
        raise ConfigError(f"{source}: {what} no table: no .parquet, .csv, .tsv, .json, .jsonl or .arrow file")
    return files


def exists(path: str) -> bool:
    """Whether there is a file at a path or URL. Raises ConfigError and OSError."""
    if not is_url(path):
        return os.path.exists(path)
    system, place = file_system(path)
    return bool(system.exists(place))


def opened(path: str) -> BinaryIO:
    """Open a file or URL for reading. Raises ConfigError and OSError."""
    if not is_url(path):
        return open(path, "rb")
    system, place = file_system(path)
    return cast("BinaryIO", system.open(place, "rb"))


def put(local: Path, url: str) -> None:
    """Copy a finished file to a URL. Raises OSError."""
    system, path = file_system(url)
    parent = os.path.dirname(path)
    if parent:
        system.makedirs(parent, exist_ok=True)
    system.put_file(str(local), path)
