"""vLLM's `LLM` on this engine, with mutable parameters and with lists in outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from xla_engine import llm, outputs
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.errors import ConfigError, InvalidRequestError
from xla_engine.llm import Adapter
from xla_engine.model_loader.peft.request import LoRARequest
from xla_engine.open_engine import EngineClient
from xla_engine.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from xla_engine.pooling_params import PoolingParams
from xla_engine.prompts import Prompt, per_prompt, prompt_list
from xla_engine.sampling_params import SamplingParams as FixedParams
from xla_engine.text.chat_template import Message
from xla_engine.utils.shown import shown
from xla_engine.vllm.beam_search import BeamSearchOutput, beam_search
from xla_engine.vllm.engine_args import EngineArgs
from xla_engine.vllm.metrics import Metric, metrics
from xla_engine.vllm.outputs import PoolingOutput, RequestOutput, vllm_output
from xla_engine.vllm.sampling_params import BeamSearchParams, SamplingParams
from xla_engine.vllm.tokenizer import VllmTokenizer, tokenised

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model ready to generate; arguments, and errors, are those of `xla_engine.LLM`.

    chat_template: jinja2 source or a file of it, the default for conversations.
    profiler_config: `torch_profiler_dir` is the directory to which `start_profile` writes.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        chat_template: str | Path | None = None,
        profiler_config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(profiler_config, Mapping | None):
            raise ConfigError(
                'profiler_config must be an object, such as {"torch_profiler_dir": "DIRECTORY"}, not '
                f"{shown(profiler_config)}"
            )
        self._profile_directory = (profiler_config or {}).get("torch_profiler_dir")
        self._chat_template = None if chat_template is None else _template(chat_template)
        self._ends = OutputCollector(every_token=False)
        self._queued: dict[str, LoRARequest | None] = {}
        if model is not None and options.get("tokenizer") in (model, str(model)):
            del options["tokenizer"]  # the model's own
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
        lora_request: Adapter = None,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Complete all prompts; results in their order.

        tokenization_kwargs: how to tokenise texts, see `tokenised`; truncation removes a prompt's beginning.
        """
        many = tokenised(prompt_list(prompts), self._llm.tokenizer, tokenization_kwargs, side="left")
        shared = {"use_tqdm": use_tqdm, "lora_request": lora_request, **given(options)}
        return self._shaped(self._llm.generate(many, fixed(sampling_params), **shared), lora_request)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        lora_request: Adapter = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them; results in their order.

        As in vLLM, answers without parameters end after 16 tokens.

        chat_template_content_format: ignored; content may be text or parts of text.
        """
        if tokenization_kwargs:
            raise InvalidRequestError(
                "the chat template determines the tokenisation; leave tokenization_kwargs out"
            )
        shared = {"use_tqdm": use_tqdm, "lora_request": lora_request, **given(options)}
        if (template := chat_template or self._chat_template) is not None:
            shared["chat_template"] = template
        params = fixed(sampling_params) or self._llm.get_default_sampling_params()
        return self._shaped(self._llm.chat(messages, params, **shared), lora_request)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        lora_request: Adapter = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Queue prompts for `wait_for_completion`; returns their ids. Raises InvalidRequestError."""
        many = tokenised(prompt_list(prompts), self._llm.tokenizer, tokenization_kwargs, side="left")
        wanted = fixed(sampling_params) or self._llm.engine.default_params
        each = zip(
            many,
            per_prompt("sampling_params", wanted, FixedParams, len(many)),
            per_prompt("priorities", priority or 0, int, len(many)),
            per_prompt("lora_requests", lora_request, LoRARequest, len(many)),
            strict=True,
        )
        names = []
        for prompt, params, urgency, lora in each:
            options = given({"priority": urgency, "lora_request": lora})
            names.append(self._llm.engine.submit(prompt, params, collector=self._ends, **options))
            self._queued[names[-1]] = lora
        return names

    def wait_for_completion(self, output_type: Any = None, *, use_tqdm: bool = True) -> list[RequestOutput]:
        """Run what `enqueue` has queued; results in that order."""
        engine, queued, ended = self._llm.engine, self._queued, dict[str, RequestOutput]()
        while len(ended) < len(queued):
            if not self._ends:
                engine.advance()
            with engine.lock:
                found = [request.output() for request in self._ends.take() if request.finished]
            for output in found:
                name = output.request_id
                ended[name] = vllm_output(output, self._llm.tokenizer, queued[name])
        self._queued = {}
        return [ended[name] for name in queued]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: Adapter = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest sequences after each prompt; results in their order.

        use_tqdm, concurrency_limit: ignored, because requests wait in the queue. Raises InvalidRequestError.
        """
        many = prompt_list(prompts)
        lora = per_prompt("lora_requests", lora_request, LoRARequest, len(many))
        return beam_search(self._llm, many, params, lora)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = True, **options: Any
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt. Options as in `generate`, but truncation removes the end of a prompt."""
        return self._llm.embed(self._prompts(prompts, options), use_tqdm=use_tqdm, **given(options))

    def classify(
        self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = True, **options: Any
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of each prompt's classes; options as for `embed`."""
        return self._llm.classify(self._prompts(prompts, options), use_tqdm=use_tqdm, **given(options))

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[ScoringRequestOutput]:
        """The relevance of each document in `data_2` to its query. Not related to `xla_engine.LLM.score`."""
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
        """The pooled output of each prompt as an array. pooling_task: "embed" for embeddings, "classify" for classes.

        Raises InvalidRequestError for other tasks, such as those with outputs for each token.
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

    def get_tokenizer(self) -> VllmTokenizer:
        """The checkpoint's tokenizer and chat template. Raises ConfigError where it has none."""
        return VllmTokenizer(self._llm.engine)

    def get_world_size(self, include_dp: bool = True) -> int:
        """The number of devices of an engine, or with `include_dp` of all engines."""
        engines = len(getattr(self._llm.engine, "engines", ())) if include_dp else 1
        return self._llm.engine.config.tensor_parallel_size * max(engines, 1)

    def sleep(self, level: int = 1, mode: str = "abort") -> NoReturn:
        """Raises ConfigError: an engine keeps its memory until it is closed."""
        raise ConfigError(
            "an engine keeps its memory until it is closed: close() it and create it again, which reuses compiled "
            "programs; `AsyncLLM.pause_generation` holds requests, `update_weights` changes weights"
        )

    def wake_up(self, tags: list[str] | None = None) -> NoReturn:
        """Raises ConfigError, as `sleep` does."""
        self.sleep()

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises ConfigError: there are no workers that could run a method."""
        raise ConfigError(
            "there are no workers to call: the engine runs in this process; `llm_engine` has its methods, and "
            "`update_weights` loads new weights"
        )

    def apply_model(self, func: Any) -> NoReturn:
        """Raises ConfigError: the model is compiled, and no module is left to call."""
        self.collective_rpc(func)

    def get_default_sampling_params(self) -> SamplingParams:
        """A copy of the default parameters."""
        return SamplingParams.of(self._llm.get_default_sampling_params())

    def get_metrics(self) -> list[Metric]:
        """Counters under vLLM's names."""
        return metrics(self._llm.engine)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> None:
        """Clear the prefix cache; running requests keep their entries."""
        self._llm.engine.reset_prefix_cache()

    def start_profile(self) -> None:
        """Profile XLA until `stop_profile`. Raises ConfigError without a directory for the profile."""
        if self._profile_directory is None:
            raise ConfigError(
                'no directory for the profile: use LLM(profiler_config={"torch_profiler_dir": "DIRECTORY"})'
            )
        self._llm.engine.start_profile(self._profile_directory)

    def stop_profile(self) -> None:
        """Write the profile, which TensorBoard and Perfetto show."""
        self._llm.engine.stop_profile()

    def _prompts(self, prompts: Prompt | Sequence[Prompt], options: dict[str, Any]) -> list[Prompt]:
        kwargs = options.pop("tokenization_kwargs", None)
        return tokenised(prompt_list(prompts), self._llm.tokenizer, kwargs, side="right")

    def _shaped(self, found: Sequence[outputs.RequestOutput], lora: Adapter) -> list[RequestOutput]:
        adapters = per_prompt("lora_requests", lora, LoRARequest, len(found))
        pairs = zip(found, adapters, strict=True)
        return [vllm_output(output, self._llm.tokenizer, adapter) for output, adapter in pairs]

    def close(self) -> None:
        """Free device memory."""
        self._llm.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fixed(params: Params) -> FixedParams | list[FixedParams] | None:
    """Convert parameters to the engine's type."""
    if params is None or isinstance(params, SamplingParams):
        return None if params is None else params.fixed
    return [each.fixed for each in params]


def _template(source: str | Path) -> str:
    """Jinja2 source, or that of the file of this name. Raises ConfigError."""
    if isinstance(source, str) and ("{" in source or "\n" in source):
        return source
    try:
        return Path(source).read_text("utf-8")
    except OSError as error:
        raise ConfigError(
            f"chat_template {source!s} is neither jinja2 source nor a file ({error})"
        ) from error


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Drop options that are None, by which vLLM's callers mean the default."""
    return {name: value for name, value in options.items() if value is not None}
