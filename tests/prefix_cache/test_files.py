"""Files of blocks: short, damaged and foreign files and links are never used; the oldest are evicted."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path

import pytest

from xla_engine.errors import ConfigError
from xla_engine.runner.prefix_files.files import (
    BlockFiles,
    DamagedFileError,
    StoredContent,
    decoded,
    delete_all,
    delete_oldest,
    encoded,
    entries,
    kinds,
    read_file,
)

ONE = StoredContent(key=bytes(range(32)), parent=b"p" * 32, tokens=(1, 2, 3, 70000), content=b"content" * 9)


def numbered(number: int) -> StoredContent:
    return StoredContent(
        key=number.to_bytes(32, "big"), parent=b"p" * 32, tokens=(number,), content=b"c" * 100
    )


@pytest.fixture
def files(tmp_path: Path) -> BlockFiles:
    return BlockFiles(tmp_path / "cache", {"model": "a"}, 1 << 20)


def path_of(files: BlockFiles, stored: StoredContent) -> Path:
    (path,) = files.folder.glob(f"??/{stored.key.hex()}")
    return path


def test_what_was_written_is_read_and_is_private(files: BlockFiles) -> None:
    assert not files.has(ONE.key)
    assert files.write(ONE) and not files.write(ONE)
    assert files.has(ONE.key) and files.read(ONE.key) == ONE
    assert stat.S_IMODE(path_of(files, ONE).stat().st_mode) == 0o600
    assert stat.S_IMODE(files.root.stat().st_mode) == 0o700


def test_every_flipped_byte_and_every_cut_is_found() -> None:
    whole = encoded(ONE)
    assert decoded(whole) == ONE
    for at in range(len(whole)):
        for wrong in (whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
            with pytest.raises(DamagedFileError):
                decoded(wrong)


def test_a_head_that_claims_much_takes_no_memory(files: BlockFiles) -> None:
    files.write(ONE)
    path = path_of(files, ONE)
    path.write_bytes(path.read_bytes()[:12] + b"\xff\xff\xff\x7f" + path.read_bytes()[16:])
    with pytest.raises(DamagedFileError, match="head"):
        files.read(ONE.key)


def test_links_pipes_and_blocks_of_other_names_are_refused(files: BlockFiles, tmp_path: Path) -> None:
    files.write(ONE)
    path = path_of(files, ONE)
    whole = path.read_bytes()
    path.unlink()
    (tmp_path / "elsewhere").write_bytes(whole)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        files.read(ONE.key)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DamagedFileError, match="plain"):
        files.read(ONE.key)
    path.unlink()
    path.write_bytes(encoded(numbered(7)))
    with pytest.raises(DamagedFileError, match="another"):
        files.read(ONE.key)


def test_the_least_recently_used_go_first_and_the_limit_holds(tmp_path: Path) -> None:
    size = len(encoded(numbered(0)))
    files = BlockFiles(tmp_path / "cache", {"model": "a"}, 20 * size)
    other = BlockFiles(tmp_path / "cache", {"model": "b"}, 20 * size)
    other.write(numbered(1000))
    os.utime(path_of(other, numbered(1000)), (1, 1))
    for number in range(20):
        files.write(numbered(number))
        os.utime(path_of(files, numbered(number)), (number + 10, number + 10))
    files.read(numbered(0).key)  # used now
    for number in range(20, 24):
        files.write(numbered(number))
    assert not other.has(numbered(1000).key), "kinds share the limit"
    assert files.has(numbered(0).key) and not files.has(numbered(1).key)
    assert sum(size for _, size, _ in entries(tmp_path / "cache")) <= 20 * size


def test_what_a_dead_process_left_is_removed(files: BlockFiles) -> None:
    old, new = files.folder / ".writing-old", files.folder / ".writing-new"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    delete_oldest(files.root, 1 << 20)
    assert not old.exists() and new.exists()


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match="others can write"):
        BlockFiles(shared, {}, 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="directory of yours"):
        BlockFiles(tmp_path / "file", {}, 1)


def test_kinds_are_kept_apart_and_cleared_apart(tmp_path: Path) -> None:
    one, two = (BlockFiles(tmp_path, {"model": name}, 1 << 20) for name in "ab")
    one.write(ONE)
    assert not two.has(ONE.key) and len(kinds(tmp_path)) == 2
    assert delete_all(tmp_path, [one.folder]) == 1 and kinds(tmp_path) == [two.folder]
    with pytest.raises(FileNotFoundError):
        one.read(ONE.key)


def test_random_bytes_are_never_a_block(tmp_path: Path) -> None:
    draw = random.Random(5)
    path = tmp_path / "x"
    for _ in range(300):
        path.write_bytes(draw.choice((b"", b"xlakv-01")) + draw.randbytes(draw.randrange(200)))
        with pytest.raises(DamagedFileError):
            read_file(path)
