"""Files of KV blocks: one block each, named by its key.

A directory of files belongs to one kind of block: the same model, arithmetic, code and layout, whose digest names it.
Whatever else is in a file, a block has one content, so processes write without locks: each writes a temporary file
and moves it into place. A file is read into memory and checked as a whole; one that is short, damaged or foreign is a
miss.

    magic, number of tokens, number of bytes of content    8, 4, 4 bytes
    key, key of the block before it                         32, 32
    tokens                                                  4 each
    content                                                 see `runner.stored_blocks`
    BLAKE2b of all that                                     32

Numbers are little-endian.
"""

import contextlib
import hashlib
import json
import os
import stat
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xla_engine.errors import ConfigError

ABOUT = "about.json"  # in each directory: what its blocks depend on
_MAGIC = b"xlakv-01"
_HEAD = struct.Struct("<8sII32s32s")
_CHECK = 32  # bytes
_STALE = 3600.0  # seconds after which a temporary file was left by a process that died
_TEMPORARY = ".writing-"
_KEPT = 0.9  # share of the limit that deleting old files leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredContent:
    """What a file holds. content: the bytes of a block."""

    key: bytes
    parent: bytes
    tokens: tuple[int, ...]
    content: bytes


class DamagedFileError(ValueError):
    """A file is not a whole block of this kind."""


def encoded(stored: StoredContent) -> bytes:
    """The bytes of a file."""
    head = _HEAD.pack(_MAGIC, len(stored.tokens), len(stored.content), stored.key, stored.parent)
    body = head + struct.pack(f"<{len(stored.tokens)}i", *stored.tokens) + stored.content
    return body + hashlib.blake2b(body, digest_size=_CHECK).digest()


def decoded(data: bytes) -> StoredContent:
    """The inverse of `encoded`. Raises DamagedFileError."""
    if len(data) < _HEAD.size + _CHECK:
        raise DamagedFileError(f"{len(data)} bytes are too few")
    magic, tokens, size, key, parent = _HEAD.unpack_from(data)
    start = _HEAD.size + 4 * tokens
    if magic != _MAGIC or len(data) != start + size + _CHECK:
        raise DamagedFileError("the head does not fit the file")
    body = memoryview(data)[:-_CHECK]
    if hashlib.blake2b(body, digest_size=_CHECK).digest() != data[-_CHECK:]:
        raise DamagedFileError("the checksum does not fit the content")
    ids = struct.unpack_from(f"<{tokens}i", data, _HEAD.size)
    return StoredContent(key=key, parent=parent, tokens=ids, content=data[start : start + size])


class BlockFiles:
    """The files of one kind of block, in a folder of the user's directory.

    about: everything that the bytes of a block depend on besides its tokens. limit: bytes of all kinds together.

    Raises ConfigError if the directory cannot be made or written, or if others can write to it.
    """

    def __init__(self, directory: Path, about: Mapping[str, Any], limit: int) -> None:
        text = json.dumps(about, sort_keys=True, indent=1, default=str)
        self.root = directory
        self.folder = directory / hashlib.sha256(text.encode()).hexdigest()[:32]
        self._limit = limit
        try:
            for each in (directory, self.folder):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_private(directory)
            if not (self.folder / ABOUT).exists():
                self._put(self.folder / ABOUT, text.encode())
            self._bytes = sum(size for _, size, _ in entries(directory))
        except OSError as error:
            raise ConfigError(f"prefix_cache_dir {directory}: {error}; name a directory of yours") from error

    def has(self, key: bytes) -> bool:
        """Whether there is a file, whatever is in it."""
        return self._path(key).exists()

    def read(self, key: bytes) -> StoredContent:
        """Read a block and mark it as used. Raises OSError, and DamagedFileError if it is not this block."""
        path = self._path(key)
        found = read_file(path)
        if found.key != key:
            raise DamagedFileError("it holds another block")
        with contextlib.suppress(OSError):
            os.utime(path)
        return found

    def write(self, stored: StoredContent) -> bool:
        """Write a block unless it is there; False if it is. Raises OSError."""
        path = self._path(stored.key)
        if path.exists():
            return False
        data = encoded(stored)
        if self._bytes + len(data) > self._limit:
            self._bytes = delete_oldest(self.root, int(self._limit * _KEPT) - len(data))
        path.parent.mkdir(mode=0o700, exist_ok=True)
        self._put(path, data)
        self._bytes += len(data)
        return True

    def delete(self, key: bytes) -> None:
        """Delete a file, if it is there."""
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / name[:2] / name

    def _put(self, path: Path, data: bytes) -> None:
        """Write a file, whole or not at all."""
        descriptor, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=self.folder)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def read_file(path: Path) -> StoredContent:
    """Read a file of any kind of block. Raises OSError and DamagedFileError."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise DamagedFileError("it is not a plain file")
        head = os.pread(file.fileno(), _HEAD.size, 0)
        if len(head) < _HEAD.size:
            raise DamagedFileError(f"{len(head)} bytes are too few")
        _, tokens, size, _, _ = _HEAD.unpack(head)
        whole = _HEAD.size + 4 * tokens + size + _CHECK
        if os.fstat(file.fileno()).st_size != whole:  # before memory is taken for what the head claims
            raise DamagedFileError("the head does not fit the file")
        return decoded(file.read(whole + 1))


def check_private(directory: Path) -> None:
    """Raise PermissionError if other users can write to a directory: they could give this engine their blocks."""
    status = directory.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"it belongs to user {status.st_uid}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others can write to it (mode {stat.S_IMODE(status.st_mode):o})")


def _is_stale(place: os.DirEntry[str]) -> bool:
    """Whether a temporary file is of a process that is dead; one that another has just renamed is not."""
    with contextlib.suppress(OSError):
        return place.stat().st_mtime < time.time() - _STALE
    return False


def entries(directory: Path) -> Iterator[tuple[Path, int, float]]:
    """(path, bytes, time of last use) of every file of a block, of all kinds; deletes what dead processes left."""
    for folder in kinds(directory):
        for place in _listed(folder):
            if place.name.startswith(_TEMPORARY) and _is_stale(place):
                with contextlib.suppress(OSError):
                    os.unlink(place.path)
            elif place.is_dir(follow_symlinks=False):
                for each in _listed(Path(place.path)):
                    with contextlib.suppress(OSError):
                        status = each.stat(follow_symlinks=False)
                        yield Path(each.path), status.st_size, status.st_mtime


def kinds(directory: Path) -> list[Path]:
    """The folders of all kinds of blocks."""
    return sorted(Path(each.path) for each in _listed(directory) if (Path(each.path) / ABOUT).exists())


def delete_oldest(directory: Path, limit: int) -> int:
    """Delete the least recently used files until all take at most `limit` bytes; returns what they take.

    One process does so at a time; if another does, nothing is deleted.
    """
    with _lock(directory) as alone:
        found = sorted(entries(directory), key=lambda entry: entry[2])
        total = sum(size for _, size, _ in found)
        for path, size, _ in found if alone else ():
            if total <= max(limit, 0):
                break
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size
    return total


def delete_all(directory: Path, folders: Sequence[Path]) -> int:
    """Delete the files of these kinds of blocks; returns how many. Engines that use them see misses."""
    count = 0
    for path, _, _ in list(entries(directory)):
        if path.parent.parent in folders:
            with contextlib.suppress(OSError):
                path.unlink()
                count += 1
    for folder in folders:
        for each in [*folder.iterdir()]:
            with contextlib.suppress(OSError):
                each.rmdir() if each.is_dir() else each.unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()
    return count


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[bool]:
    """Hold the directory's lock; gives False if another process has it."""
    import fcntl

    with open(os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
