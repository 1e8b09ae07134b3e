"""Recognise what a download leaves in place of a model file: the pointer of Git LFS, or a web page."""

from pathlib import Path

_POINTER = b"version https://git-lfs.github.com/spec/"
_PAGES = (b"<!doctype html", b"<html")
_BEGINNING = 256  # bytes


def stand_in(file: Path) -> str | None:
    """What a file is instead of its content, and the remedy; None if it is neither pointer nor page.

    Also None if it cannot be read.
    """
    try:
        with file.open("rb") as stream:
            beginning = stream.read(_BEGINNING)
    except OSError:
        return None
    if beginning.startswith(_POINTER):
        return (
            f"is a pointer of Git LFS, not the file itself: the repository was cloned without its large files. Fetch "
            f"them: git lfs pull (in {file.parent}), or hf download"
        )
    if beginning.lstrip().lower().startswith(_PAGES):
        return "is a web page, not a model file. Download it again: hf download, or the address with /resolve/ in it"
    return None
