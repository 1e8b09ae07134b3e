"""GGUF files by their names: the parts of a split model, and the models in a folder.

llama.cpp's gguf-split cuts a large file into NAME-00001-of-00003.gguf and so on. The first part has the metadata.
"""

import re
from collections.abc import Iterable
from pathlib import Path

SUFFIX = ".gguf"
_PART = re.compile(
    r"(?P<name>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})(?P<suffix>\.gguf)", re.IGNORECASE
)
_PROJECTOR = "mmproj"  # llama.cpp keeps vision towers in files of their own


def parts_of(file: Path) -> tuple[Path, ...]:
    """All parts of the model that a part's name belongs to, whether they exist or not; only `file` for other names."""
    part = _PART.fullmatch(file.name)
    if part is None or not 1 <= int(part["number"]) <= int(part["count"]):
        return (file,)
    names = (
        f"{part['name']}-{number:05d}-of-{part['count']}{part['suffix']}"
        for number in range(1, int(part["count"]) + 1)
    )
    return tuple(file.with_name(name) for name in names)


def unsplit_name(file: Path) -> str:
    """The file's name without the number of a part: NAME.gguf."""
    part = _PART.fullmatch(file.name)
    return file.name if part is None else part["name"] + part["suffix"]


def models_among(files: Iterable[Path]) -> list[Path]:
    """The GGUF models among files, sorted; of a split model, the first part. Projectors of pictures are left out."""
    found = {
        parts_of(file)[0]
        for file in files
        if file.suffix.lower() == SUFFIX and not file.name.lower().startswith(_PROJECTOR)
    }
    return sorted(found)
