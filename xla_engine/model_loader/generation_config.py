"""Sampling defaults that a checkpoint recommends in its generation_config.json, used only when asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xla_engine.errors import CheckpointError, InvalidRequestError
from xla_engine.model_loader.json_fields import Fields
from xla_engine.model_loader.model_files import model_path
from xla_engine.sampling_params import SamplingParams

# Their name to ours: the fields that vLLM takes, too. `do_sample` is not among them, as it is not there.
_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def sampling_defaults(path: Path | str) -> dict[str, Any]:
    """Fields of `SamplingParams` that the model directory `path` recommends; empty where it has no such file.

    Raises CheckpointError naming file, field and remedy.
    """
    file = model_path(path) / "generation_config.json"
    if not file.exists():
        return {}
    values = Fields.of_file(file).values
    found = {ours: values[theirs] for theirs, ours in _NAMES.items() if values.get(theirs) is not None}
    try:
        SamplingParams.from_mapping(found)
    except InvalidRequestError as error:
        raise CheckpointError(
            f"{file}: {error}. Correct the file, or leave its sampling defaults out (generation_config engine)"
        ) from error
    return found
