"""xla-engine: a JAX/XLA compiled batch engine for language models.

`xla_engine/graphs` and `xla_engine/scheduler` are links to the folders of these names at the top of the repository.
"""

import sys
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xla_engine.async_llm import AsyncLLM as AsyncLLM
    from xla_engine.config import EngineConfig as EngineConfig
    from xla_engine.engine.batch_engine import XlaBatchEngine as XlaBatchEngine
    from xla_engine.errors import XlaEngineError as XlaEngineError
    from xla_engine.llm import LLM as LLM
    from xla_engine.model_loader.peft.request import LoRARequest as LoRARequest
    from xla_engine.outputs import CompletionOutput as CompletionOutput
    from xla_engine.outputs import RequestOutput as RequestOutput
    from xla_engine.pooling_params import PoolingParams as PoolingParams
    from xla_engine.prompts import TextPrompt as TextPrompt
    from xla_engine.prompts import TokensPrompt as TokensPrompt
    from xla_engine.sampling_params import SamplingParams as SamplingParams

if "t" in getattr(sys, "abiflags", ""):
    raise ImportError(
        "xla-engine does not run on a free-threaded build of Python, on which its bits were never checked; use the "
        f"ordinary build, python{sys.version_info.major}.{sys.version_info.minor}"
    )

IMPORTED_AT = time.monotonic()  # the start of this program, as far as it can tell by itself
__version__ = "0.2.0"

_HOME = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "XlaBatchEngine": "engine.batch_engine",
    "EngineConfig": "config",
    "LoRARequest": "model_loader.peft.request",
    "PoolingParams": "pooling_params",
    "SamplingParams": "sampling_params",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "TextPrompt": "prompts",
    "TokensPrompt": "prompts",
    "XlaEngineError": "errors",
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "LoRARequest",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "XlaBatchEngine",
    "XlaEngineError",
]


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that `xla-engine --help` does not wait for jax."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"xla_engine.{_HOME[name]}"), name)
