"""Model directories written for one test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.checkpoints import CONFIG, MakeModel, Tensors, tensors_of, write_shards


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """Write a model directory: CONFIG with the changes in `config`, and fitting weights, or `tensors`, in `shards`."""

    def make(
        name: str = "model",
        *,
        config: Mapping[str, Any] | None = None,
        tensors: Tensors | None = None,
        dtype: Any = np.float32,
        shards: int = 0,
        generation: Mapping[str, Any] | None = None,
    ) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        fields = CONFIG | dict(config or {})
        (directory / "config.json").write_text(json.dumps(fields))
        if generation is not None:
            (directory / "generation_config.json").write_text(json.dumps(generation))
        tensors = tensors_of(fields, dtype) if tensors is None else tensors
        if shards:
            write_shards(directory, tensors, shards)
        else:
            save_file(tensors, directory / "model.safetensors")
        return directory

    return make
