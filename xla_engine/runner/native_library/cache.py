"""Directories of compiled code. The code runs in this process, so it must belong to this user and be complete."""

import atexit
import contextlib
import functools
import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

_log = logging.getLogger(__name__)
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_temporary: list[Path] = []  # made when first needed


@functools.cache
def private_directory(directory: Path) -> Path:
    """`directory`, made with mode 0700 if it is not there, where only this user and root can write into it.

    Otherwise a temporary directory for this process, with a log line that says why.
    """
    try:
        for each in (*reversed(directory.parents), directory):
            with contextlib.suppress(FileExistsError):
                each.mkdir(mode=0o700)
        _close_to_group(directory)
        if (why := _why_not_safe(directory)) is None:
            with tempfile.TemporaryFile(dir=directory):  # it can be written
                return directory
    except OSError as error:
        why = str(error)
    return _temporary_directory(f"{directory}: {why}")


def _temporary_directory(why: str) -> Path:
    """One for all that this process cannot keep, so that the log says it once."""
    if not _temporary:
        _log.warning(
            "compiled code is not cached: %s. It is compiled for this process only; give the directory mode 0700 "
            "and your user as owner, or set XLA_ENGINE_CACHE to another",
            why,
        )
        _temporary.append(Path(tempfile.mkdtemp(prefix="xla-engine-")))
        atexit.register(shutil.rmtree, _temporary[0], ignore_errors=True)
    return _temporary[0]


def library(directory: Path, name: str, make: Callable[[Path], object]) -> Path:
    """The shared library of this name in a directory, with its digest beside it.

    make: writes the library to a path; called where there is none, or one that is damaged or not ours. Of processes
    that come at once, one makes it. Raises OSError and what `make` does.
    """
    directory = private_directory(directory)
    path = directory / name
    if not _is_sound(path):
        with _locked(directory / f".{name}.lock"):
            if not _is_sound(path):
                _put(path, make)
    return path


def _put(path: Path, make: Callable[[Path], object]) -> None:
    """Make a library and its digest on the disk, then move each to its place."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        make(made)
        made.chmod(0o700)
        digest = Path(scratch) / _digest_file(path).name
        digest.write_text(hashlib.sha256(made.read_bytes()).hexdigest(), encoding="ascii")
        digest.chmod(0o600)
        for source, target in ((made, path), (digest, _digest_file(path))):
            with open(source, "rb") as file:
                os.fsync(file.fileno())
            os.replace(source, target)  # whole or not at all
    with contextlib.suppress(OSError):  # not every file system syncs directories
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _is_sound(path: Path) -> bool:
    """Whether a library exists, belongs to this user, and matches its digest."""
    try:
        wanted = read_own(_digest_file(path)).decode("ascii", "replace")
        return hashlib.sha256(read_own(path)).hexdigest() == wanted
    except OSError:
        return False


def read_own(path: Path) -> bytes:
    """A plain file's bytes. Raises OSError for a link, and for a file that others own or can write."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or _why_not_ours(status) is not None:
            raise PermissionError(f"{path} belongs to another user")
        return file.read()


def write_own(path: Path, content: bytes) -> None:
    """Write a file that `read_own` reads, whole or not at all. Raises OSError."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        made.write_bytes(content)
        made.chmod(0o600)
        os.replace(made, path)


def _close_to_group(directory: Path) -> None:
    """Take write permission from the group, which a umask of 002 gives to every directory."""
    status = directory.stat()
    if status.st_uid == os.geteuid() and status.st_mode & _OTHERS_WRITE == stat.S_IWGRP:
        directory.chmod(0o700)


def _why_not_safe(directory: Path) -> str | None:
    """Why others could put files there; None if they cannot."""
    for parent in directory.resolve().parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"everyone can rename files in {parent}"
    return _why_not_ours(directory.stat())


def _why_not_ours(status: os.stat_result) -> str | None:
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & _OTHERS_WRITE:
        return f"others can write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def _digest_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file, as far as the system has such locks; it ends with the process."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "rb") as file:
        with contextlib.suppress(ImportError, OSError):  # some network file systems have none
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
