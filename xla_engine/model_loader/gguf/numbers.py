"""Numbers in a GGUF file's metadata and tensors."""

from typing import Any

import numpy as np

from xla_engine.errors import CheckpointError
from xla_engine.model_loader.gguf.reader import GgufReader
from xla_engine.utils.shown import shown

KEY_HEADS = "{arch}.attention.head_count_kv"


def number(file: GgufReader, key: str) -> Any:
    """A number, or None. If the file has a list with one number for each layer, they must be equal."""
    value = file.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if isinstance(value, list) and key == KEY_HEADS:
        values = value = [each for each in values if each != 0] or [0]  # of layers that have any
    for each in values:
        if isinstance(each, bool) or not isinstance(each, int | float):
            raise CheckpointError(
                f"{file.path}: {key} = {shown(value)}: not a number. Download the file again"
            )
    if isinstance(value, list) and len(set(values)) != 1:
        raise CheckpointError(
            f"{file.path}: {key} = {shown(value)}: layers that differ in it are not supported. Use another model"
        )
    return values[0] if values else None


def vector(file: GgufReader, name: str) -> list[float]:
    vector: list[float] = file.weights({}).read(name).astype(np.float64).reshape(-1).tolist()
    return vector
