"""vLLM's API on this engine: `from vllm... import X` in a script becomes `from xla_engine.vllm import X`.

`xla_engine.LLM` differs: its parameters and outputs are immutable, and its log-probabilities are plain numbers.
"""

from xla_engine.model_loader.peft.request import LoRARequest
from xla_engine.pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from xla_engine.pooling_params import PoolingParams
from xla_engine.prompts import TextPrompt, TokensPrompt
from xla_engine.structured_outputs import StructuredOutputsParams
from xla_engine.vllm.beam_search import BeamSearchOutput, BeamSearchSequence
from xla_engine.vllm.engine import AsyncLLM, LLMEngine
from xla_engine.vllm.engine_args import AsyncEngineArgs, EngineArgs, FlexibleArgumentParser
from xla_engine.vllm.llm import LLM
from xla_engine.vllm.metrics import (
    Counter,
    Gauge,
    Histogram,
    Metric,
    Vector,
    cleanup_dist_env_and_memory,
    print_embeddings,
)
from xla_engine.vllm.outputs import CompletionOutput, Logprob, PoolingOutput, RequestOutput
from xla_engine.vllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

AsyncLLMEngine = AsyncLLM  # its name before vLLM's second engine
PoolerConfig = ProfilerConfig = CompilationConfig = dict  # options that group options

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompilationConfig",
    "CompletionOutput",
    "Counter",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "FlexibleArgumentParser",
    "Gauge",
    "Histogram",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "Metric",
    "PoolerConfig",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "ProfilerConfig",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "Vector",
    "cleanup_dist_env_and_memory",
    "print_embeddings",
]
