"""vLLM's `LLM`: the same engine, with parameters that can be changed and outputs of lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xla_engine import llm
from xla_engine.engine.client import EngineClient
from xla_engine.errors import ConfigError, InvalidRequestError
from xla_engine.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from xla_engine.pooling_params import PoolingParams
from xla_engine.prompts import Prompt
from xla_engine.sampling_params import SamplingParams as FixedParams
from xla_engine.text.chat_template import Message
from xla_engine.text.tokenizer import Tokenizer
from xla_engine.vllm.engine_args import EngineArgs
from xla_engine.vllm.metrics import Metric, metrics
from xla_engine.vllm.outputs import PoolingOutput, RequestOutput, vllm_output
from xla_engine.vllm.sampling_params import SamplingParams

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model ready to generate; arguments, and errors, are those of `xla_engine.LLM`.

    profiler_config: `torch_profiler_dir` is where `start_profile` writes.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        profiler_config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._profile_directory = (profiler_config or {}).get("torch_profiler_dir")
        self._llm = llm.LLM(model, **options)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """Load the model and compile."""
        return cls(engine_args.model, **engine_args.options)

    @property
    def llm_engine(self) -> EngineClient:
        """The engine, with this package's methods."""
        return self._llm.engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Complete all prompts; results in their order."""
        found = self._llm.generate(prompts, fixed(sampling_params), use_tqdm=use_tqdm, **given(options))
        return [vllm_output(output, self._llm.tokenizer) for output in found]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them; results in their order."""
        found = self._llm.chat(messages, fixed(sampling_params), use_tqdm=use_tqdm, **given(options))
        return [vllm_output(output, self._llm.tokenizer) for output in found]

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = True, **options: Any
    ) -> list[EmbeddingRequestOutput]:
        """The vector of each prompt."""
        return self._llm.embed(prompts, use_tqdm=use_tqdm, **given(options))

    def classify(
        self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = True, **options: Any
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of each prompt's classes."""
        return self._llm.classify(prompts, use_tqdm=use_tqdm, **given(options))

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[ScoringRequestOutput]:
        """How well each document of `data_2` fits its query; `xla_engine.LLM.score` is another thing."""
        return self._llm.score_documents(data_1, data_2, use_tqdm=use_tqdm, **given(options))

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The numbers of each prompt as an array. pooling_task: "embed" for its vector, "classify" for its classes.

        Raises InvalidRequestError for another task: there are no numbers of each token.
        """
        if pooling_task not in ("embed", "classify"):
            raise InvalidRequestError(
                f'pooling_task must be "embed" or "classify", not {pooling_task!r}: a text has one vector here'
            )
        shared = {"pooling_params": pooling_params, "use_tqdm": use_tqdm, **options}
        numbers = (
            [(each, each.outputs.embedding) for each in self.embed(prompts, **shared)]
            if pooling_task == "embed"
            else [(each, each.outputs.probs) for each in self.classify(prompts, **shared)]
        )
        return [
            PoolingRequestOutput(
                request_id=each.request_id,
                outputs=PoolingOutput(np.array(values, np.float32)),
                prompt_token_ids=each.prompt_token_ids,
                num_cached_tokens=each.num_cached_tokens,
            )
            for each, values in numbers
        ]

    def get_tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        return self._llm.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """A copy of what prompts without parameters get."""
        return SamplingParams.of(self._llm.get_default_sampling_params())

    def get_metrics(self) -> list[Metric]:
        """Counters under vLLM's names."""
        return metrics(self._llm.engine)

    def reset_prefix_cache(self) -> None:
        """Forget what earlier prompts left in the cache."""
        self._llm.engine.reset_prefix_cache()

    def start_profile(self) -> None:
        """Write down what XLA does until `stop_profile`. Raises ConfigError without a directory for it."""
        if self._profile_directory is None:
            raise ConfigError('say where: LLM(profiler_config={"torch_profiler_dir": "DIRECTORY"})')
        self._llm.engine.start_profile(self._profile_directory)

    def stop_profile(self) -> None:
        """Write the profile, which TensorBoard and Perfetto show."""
        self._llm.engine.stop_profile()

    def close(self) -> None:
        """Free device memory."""
        self._llm.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fixed(params: Params) -> FixedParams | list[FixedParams] | None:
    """The parameters as the engine takes them."""
    if params is None or isinstance(params, SamplingParams):
        return None if params is None else params.fixed
    return [each.fixed for each in params]


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Without those that are None, which is how vLLM's callers leave one out."""
    return {name: value for name, value in options.items() if value is not None}
