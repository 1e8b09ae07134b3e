"""Directories of compiled code. The code runs in this process, so it must belong to this user and be complete."""

import atexit
import contextlib
import functools
import hashlib
import logging
import mmap
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

_log = logging.getLogger(__name__)
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOM = 8 << 20  # bytes; the parts that a model needs take less than 1 MB, and compiling them some more
_OTHER_PLACES = ("/dev/shm", "/var/tmp")  # if the usual one is mounted noexec or is full
_DIGEST_SIZE = hashlib.sha256().digest_size
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
            if _can_execute(directory):  # which also shows that it can be written
                return directory
            why = "it is on a file system that executes nothing (noexec)"
    except OSError as error:
        why = str(error)
    return temporary_directory(f"{directory}: {why}")


def is_full(directory: Path) -> bool:
    """Whether the directory's disk has too little room for libraries."""
    try:
        return shutil.disk_usage(directory).free < _ROOM
    except OSError:
        return False


def temporary_directory(why: str) -> Path:
    """One for all that this process cannot keep, so that the log says it once. Raises OSError if there is none."""
    if not _temporary:
        made = _executable_directory()
        _log.warning(
            "compiled code is not cached: %s. It is compiled for this process only, in %s; to keep it, set "
            "XLA_ENGINE_CACHE to a directory of your user, of mode 0700, with room, from which programs may run",
            why,
            made,
        )
        _temporary.append(made)
        atexit.register(shutil.rmtree, made, ignore_errors=True)
    return _temporary[0]


def _executable_directory() -> Path:
    """A new temporary directory with room from which libraries can be loaded, if there is one."""
    last: Path | None = None
    for parent in (None, *_OTHER_PLACES):
        try:
            made = Path(tempfile.mkdtemp(prefix="xla-engine-", dir=parent))
        except OSError:
            continue
        if _can_execute(made) and not is_full(made):
            if last is not None:
                last.rmdir()
            return made
        if last is None:
            last = made
        else:
            made.rmdir()
    if last is None:
        raise OSError(f"no temporary directory can be written; set TMPDIR to one ({tempfile.gettempdir()})")
    return last


def _can_execute(directory: Path) -> bool:
    """Whether libraries in a directory can be loaded. Raises OSError if it cannot be written."""
    with tempfile.TemporaryFile(dir=directory) as file:
        file.truncate(1)  # takes no room
        try:
            mmap.mmap(file.fileno(), 1, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()
        except PermissionError:
            return False
    return True


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


def read_sealed(path: Path) -> bytes | None:
    """What `write_sealed` wrote, and note that it was read; None if it is not there, damaged or not ours."""
    try:
        content = read_own(path)
        path.touch()
    except OSError:
        return None
    digest, sealed = content[:_DIGEST_SIZE], content[_DIGEST_SIZE:]
    return sealed if hashlib.sha256(sealed).digest() == digest else None


def write_sealed(path: Path, content: bytes) -> None:
    """`write_own`, with a checksum. Raises OSError."""
    write_own(path, hashlib.sha256(content).digest() + content)


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
