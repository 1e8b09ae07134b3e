"""Where a model is: a directory, a GGUF file, or an id of the Hugging Face hub. What is local is never looked for."""

from __future__ import annotations

import re
from pathlib import Path

from xla_engine.errors import CheckpointError
from xla_engine.model_loader.gguf.file import is_gguf
from xla_engine.model_loader.hub import snapshot

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?", re.ASCII)


def model_path(model: Path | str) -> Path:
    """The directory or GGUF file that `model` names.

    "OWNER/NAME", with "@REVISION" if need be, is an id of the Hugging Face hub unless there is such a path; its
    snapshot is taken from the local cache, or else downloaded. Raises CheckpointError.
    """
    try:
        path = Path(model).expanduser()
        if path.is_dir() or (is_gguf(path) and path.is_file()):
            return path
        found = path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{model!r} is not a usable path ({error}). Name a model directory") from error
    if found:
        raise CheckpointError(
            f"{path}: not a directory. Name the directory that holds config.json, or a .gguf file"
        )
    if not is_gguf(path) and _HUB_ID.fullmatch(str(model)):
        return snapshot(str(model))
    raise CheckpointError(
        f"{path}: no such directory. Name a local model directory, a .gguf file, or an id of the Hugging Face hub "
        "(OWNER/NAME)"
    )
