"""The cache of compiled code: only complete files of this user are loaded, and a start continues whatever the cache
contains."""

from __future__ import annotations

import logging
import multiprocessing
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from xla_engine.runner.native_library import cache as library_cache
from xla_engine.runner.native_library.cache import library, private_directory

ROOT = Path(__file__).parents[2]


class Maker:
    """Writes a library and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, path: Path) -> None:
        self.calls += 1
        path.write_bytes(b"library" * 1000)


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    private_directory.cache_clear()
    monkeypatch.setattr(library_cache, "_temporary", [])


def truncate(path: Path) -> None:
    os.truncate(path, 100)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)


def let_others_write(path: Path) -> None:
    path.chmod(0o722)


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def without_digest(path: Path) -> None:
    path.with_name(f"{path.name}.sha256").unlink()


def give_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, 12345, -1)


DAMAGES = [truncate, flip, let_others_write, link, without_digest, give_away, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_library_that_is_not_ours_or_not_whole_is_made_again(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """Once, a truncated library crashed every start with SIGBUS."""
    directory, make = tmp_path / "a" / "b", Maker()
    path = library(directory, "x.so", make)
    assert library(directory, "x.so", make) == path and make.calls == 1
    damage(path)
    assert library(directory, "x.so", make) == path and make.calls == 2
    assert path.read_bytes() == b"library" * 1000 and not path.is_symlink()
    assert library(directory, "x.so", make) == path and make.calls == 2


def test_directories_and_files_are_private(tmp_path: Path) -> None:
    path = library(tmp_path / "a" / "b", "x.so", Maker())
    for each in (tmp_path / "a", tmp_path / "a" / "b", *path.parent.iterdir()):
        assert stat.S_IMODE(each.stat().st_mode) & 0o077 == 0, each


def writable_by_all(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o777)


def anothers(directory: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    directory.mkdir()
    os.chown(directory, 12345, -1)


def a_file(directory: Path) -> None:
    directory.write_text("no directory")


@pytest.mark.parametrize("spoil", [writable_by_all, anothers, a_file])
def test_a_directory_that_is_not_ours_gives_way_to_a_temporary_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None]
) -> None:
    directory, make = tmp_path / "cache", Maker()
    spoil(directory)
    with caplog.at_level(logging.WARNING):
        path = library(directory, "x.so", make)
        assert library(directory, "y.so", make).parent == path.parent and make.calls == 2
        if spoil is not anothers:  # below a directory that everyone can write nothing is safe
            assert library(directory / "native", "z.so", make).parent == path.parent
    assert tmp_path not in path.parents and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    (record,) = caplog.records
    assert str(directory) in record.getMessage() and "XLA_ENGINE_CACHE" in record.getMessage()


def _first_start(directory: Path, log: Path) -> None:
    def make(path: Path) -> None:
        with open(log, "a") as file:
            file.write("made\n")
        path.write_bytes(b"library" * 1000)

    library(directory, "x.so", make)


def test_a_directory_its_group_could_write_is_closed_and_used(tmp_path: Path) -> None:
    """A umask of 002 creates such directories."""
    directory = tmp_path / "cache"
    directory.mkdir()
    directory.chmod(0o775)
    assert private_directory(directory) == directory
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_first_starts_at_once_make_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    starts = [context.Process(target=_first_start, args=(tmp_path / "c", tmp_path / "log")) for _ in range(3)]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
        assert start.exitcode == 0
    assert (tmp_path / "log").read_text() == "made\n"


def test_nothing_takes_its_place_before_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(library_cache.os, "fsync", lambda number: (done.append("sync"), sync(number)))
    monkeypatch.setattr(
        library_cache.os, "replace", lambda source, target: (done.append("move"), replace(source, target))
    )
    library(tmp_path / "c", "x.so", Maker())
    assert done == ["sync", "move", "sync", "move", "sync"]


def test_no_home_is_no_crash(tmp_path: Path) -> None:
    code = (
        "import pwd\n"
        "def no_entry(number): raise KeyError(number)\n"
        "pwd.getpwuid = no_entry\n"
        "from xla_engine.environment import native_cache_directory\n"
        "print(native_cache_directory())"
    )
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("HOME", "XDG_CACHE_HOME", "XLA_ENGINE_CACHE")
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(tmp_path)


def test_a_directory_from_which_nothing_may_run_gives_way_to_a_temporary_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    executes = library_cache._can_execute
    monkeypatch.setattr(
        library_cache, "_can_execute", lambda place: tmp_path not in place.parents and executes(place)
    )
    with caplog.at_level(logging.WARNING):
        path = library(tmp_path / "cache", "x.so", Maker())
    assert tmp_path not in path.parents
    (record,) = caplog.records
    assert "noexec" in record.getMessage() and str(tmp_path / "cache") in record.getMessage()


MOUNTED = """
import logging, sys
from xla_engine.runner.native_library.build import register
logging.basicConfig(format="LOG %(message)s", stream=sys.stdout)
print("registered", register(parts=("recurrent",)))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "word"), [("noexec,size=200m", "noexec"), ("ro,size=9m", "Read-only"), ("size=16k", "full")]
)
def test_a_cache_on_a_mount_that_cannot_hold_libraries(options: str, word: str, tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o {options} tmpfs {tmp_path} && cd {ROOT} && exec {sys.executable} -"
    environment = os.environ | {"XLA_ENGINE_CACHE": str(tmp_path / "c"), "XLA_ENGINE_ISA": "auto"}
    ran = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount],
        input=MOUNTED,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if "unshare" in ran.stderr or "mount:" in ran.stderr:
        pytest.skip(f"mounts need a user who may make them: {ran.stderr.strip()}")
    assert ran.returncode == 0, ran.stderr
    first, *_, last = ran.stdout.splitlines()
    assert first.startswith("LOG compiled code is not cached") and word in first
    assert last.startswith("registered")
