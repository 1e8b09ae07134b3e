"""Compiled libraries in the package: written when its wheel is built, looked up at start-up.

`libraries/` beside this file holds one for each variant of each instruction set, and a manifest that says what they
were made from. A checkout has none.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from xla_engine.runner.native_library.instruction_sets import InstructionSet

FOLDER = "libraries"
_MANIFEST = "manifest.json"


class Unfit(Exception):
    """The package has a library that does not fit this source, this jaxlib or this machine; the text says why."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the libraries of a folder were made from.

    sources: their digest (`recipe.source_digest`). ffi: version of XLA's foreign-function interface.
    jaxlib, compiler: versions, for people. libraries: sha256 of each file, by the name of its variant.
    """

    sources: str
    ffi: tuple[int, int]
    jaxlib: str
    compiler: str
    libraries: dict[str, str]

    def write(self, folder: Path) -> None:
        (folder / _MANIFEST).write_text(json.dumps(asdict(self), indent=2) + "\n")


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None if there is none. Raises Unfit for one that cannot be read."""
    try:
        fields = json.loads((folder / _MANIFEST).read_text())
        return Manifest(**{**fields, "ffi": tuple(fields["ffi"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise Unfit(f"its manifest cannot be read: {error}") from error


def library(folder: Path, isa: InstructionSet, sources: str, ffi: tuple[int, int]) -> Path | None:
    """The library of a folder for an instruction set and this processor; None if the folder has none for it.

    sources, ffi: as in `Manifest`, of what is installed. Raises Unfit where there is one that must not be loaded: made
    from another source, for another interface of jaxlib, or damaged.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    name = next((name for name in (isa.here().name, isa.name) if name in manifest.libraries), None)
    if name is None:
        return None
    if manifest.sources != sources:
        raise Unfit("it was built from other sources than those installed")
    # XLA accepts interfaces of the same major version that are not newer than its own.
    if manifest.ffi[0] != ffi[0] or manifest.ffi[1] > ffi[1]:
        theirs, ours = (".".join(map(str, version)) for version in (manifest.ffi, ffi))
        raise Unfit(
            f"it was built with jaxlib {manifest.jaxlib} for version {theirs} of XLA's foreign-function interface, "
            f"and the installed jaxlib has {ours}"
        )
    path = folder / file_name(name)
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise Unfit(f"it cannot be read: {error}") from error
    if found != manifest.libraries[name]:
        raise Unfit("it is damaged")
    return path


def file_name(variant: str) -> str:
    return f"native-{variant}.so"
