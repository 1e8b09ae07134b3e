"""Digests of the package's code, for what is kept between processes. Does not import jax."""

import functools
import hashlib
import os
from pathlib import Path

from xla_engine import graphs, scheduler

_CODE = (".py", ".cc", ".h")


def code_digest(*folders: Path) -> str:
    """sha256 of the Python and C++ files in folders."""
    found: set[str] = set()
    for top in folders:
        for folder, _, names in os.walk(top):
            found.update(os.path.join(folder, name) for name in names if name.endswith(_CODE))
    digest = hashlib.sha256()
    for path in sorted(found):
        with open(path, "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


@functools.cache
def package_digest() -> str:
    """`code_digest` of the package, as it was when first asked for."""
    return code_digest(Path(__file__).parents[1], *map(Path, (*graphs.__path__, *scheduler.__path__)))
