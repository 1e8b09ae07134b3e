"""Sampling defaults that a checkpoint recommends in its generation_config.json, used only when asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xla_engine.errors import CheckpointError, InvalidRequestError
from xla_engine.model_loader.model_files import ModelFiles, open_model
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


def sampling_defaults(model: ModelFiles | Path | str) -> dict[str, Any]:
    """Fields of `SamplingParams` that a model (`open_model`) recommends; empty where it has no such file.

    Raises CheckpointError naming file, field and remedy.
    """
    fields = open_model(model).generation_config()
    if fields is None:
        return {}
    found = {ours: fields.values[theirs] for theirs, ours in _NAMES.items() if fields.given(theirs)}
    try:
        SamplingParams.from_mapping(found)
    except InvalidRequestError as error:
        raise CheckpointError(
            f"{fields.file}: {error}. Correct the file, or leave its sampling defaults out (generation_config engine)"
        ) from error
    return found
