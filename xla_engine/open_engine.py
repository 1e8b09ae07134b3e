"""Opens an engine from a model's name and options: one in this process, or several in processes of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.model_loader.model_files import ModelFiles
from xla_engine.utils.startup import StartupProgress, silent
from xla_engine.vllm_options import VLLM_OPTIONS

if TYPE_CHECKING:
    from xla_engine.data_parallel.engine import DataParallelEngine

# An engine as `LLM`, `AsyncLLM` and servers use it; `XlaBatchEngine` documents the methods.
EngineClient: TypeAlias = "XlaBatchEngine | DataParallelEngine"


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """The configuration from options by name, including vLLM's names. Raises ConfigError."""
    return EngineConfig.of(options, VLLM_OPTIONS)


def open_engine(
    model: str | Path | ModelFiles | None,
    config: EngineConfig,
    *,
    engines: int = 1,
    progress: StartupProgress = silent,
) -> EngineClient:
    """Load a model and compile. model, config, progress: as in `XlaBatchEngine.from_pretrained`.

    engines: if more than one, each runs in a process of its own, which opens the model by its name.

    Raises CheckpointError and ConfigError.
    """
    if engines == 1:
        return XlaBatchEngine.from_pretrained(model, config, progress=progress)
    from xla_engine.data_parallel.engine import DataParallelEngine

    assert model is None or isinstance(model, str | Path)
    return DataParallelEngine(model, config, engines=engines, progress=progress)
