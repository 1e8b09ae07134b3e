"""`LLM`: the offline front door, shaped like vLLM's."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack, cast

from xla_engine import vllm_options
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.protocol import RequestOptions, SharedOptions, pop_options
from xla_engine.engine.requests.callbacks import CallsBack
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.errors import ConfigError, EngineClosedError, InvalidRequestError
from xla_engine.model_loader.peft.request import LoRARequest
from xla_engine.outputs import RequestOutput
from xla_engine.pooling.llm import PoolsPrompts
from xla_engine.prompts import Prompt, per_prompt, prompt_list
from xla_engine.sampling_params import SamplingParams
from xla_engine.scoring import Score, TextOrIds, score_of, score_requests
from xla_engine.text.chat_template import Message
from xla_engine.text.tokenizer import Tokenizer
from xla_engine.utils.progress import prompts_bar
from xla_engine.utils.startup import startup_line

Adapter = LoRARequest | Sequence[LoRARequest | None] | None  # for all prompts, or for each


class LLM(PoolsPrompts, CallsBack):
    """A model ready to generate.

    Arguments:
        model: a Hugging Face model directory, a .gguf file or a hub id; None is the small model that ships with the
            package.
        max_num_seqs: requests decoded together; "auto" takes what the device has memory for.
        max_model_len: prompt plus generated tokens at most; None takes the model's limit, or less
            where that would need more than a quarter of the memory.
        dtype: "auto", "bfloat16" or "float32".
        seed: used for requests without a seed of their own.
        data_parallel_size: so many engines side by side, a process each, which share this machine's devices, cores and
            memory. Results are the same; a process that ends is started again, and its requests run elsewhere.
        engine_options: further fields of `EngineConfig`, and vLLM's options (`xla_engine.vllm_options` says what
            each comes to). Raises ConfigError for one that can have no effect.

    Runnable example::

        with LLM() as llm:
            for output in llm.generate(["def fib(n):"], SamplingParams(temperature=0, max_tokens=48)):
                print(output.outputs[0].text)

    Threads may share one: their requests run in one batch, and each call returns when its own are done.

    Leaving the `with` block, or `close()`, frees the device memory.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        max_num_seqs: int | Literal["auto"] = 16,
        max_model_len: int | None = None,
        dtype: str = "auto",
        seed: int = 0,
        data_parallel_size: int = 1,
        **engine_options: Any,
    ) -> None:
        options = vllm_options.engine_options(engine_options)
        config = EngineConfig(
            max_num_seqs=max_num_seqs, max_model_len=max_model_len, dtype=dtype, seed=seed, **options
        )
        if data_parallel_size == 1:
            with startup_line(sys.stderr) as progress:
                self.engine = XlaBatchEngine.from_pretrained(model, config, progress=progress)
        else:
            from xla_engine.distributed.data_parallel.engine import DataParallelEngine

            with startup_line(sys.stderr) as progress:
                several = DataParallelEngine(model, config, engines=data_parallel_size, progress=progress)
            self.engine = cast("XlaBatchEngine", several)  # an `LLM` uses what both have

    @classmethod
    def from_engine(cls, engine: XlaBatchEngine) -> LLM:
        """Wrap an engine that was made by hand; closing the LLM closes it."""
        llm = cls.__new__(cls)
        llm.engine = engine
        return llm

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engine.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises ConfigError where it has none."""
        if self.engine.tokenizer is None:
            raise ConfigError("the model has no tokenizer.json; prompts are token ids")
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What prompts without parameters get; see `EngineConfig.generation_config`."""
        return self.engine.default_params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        lora_request: Adapter = None,
        **options: Unpack[SharedOptions],
    ) -> list[RequestOutput]:
        """Complete all prompts; results in the order of the prompts.

        Arguments:
            prompts: text, token ids, vLLM's `{"prompt": ...}` or `{"prompt_token_ids": ...}`, or a list of these.
            sampling_params: one for all, or one per prompt.
            use_tqdm: show a progress bar.
            priority: -10 (soonest) to 10, one for all or one per prompt.
            lora_request: an adapter for all, or for each prompt one or None; needs `enable_lora`.
            options: `deadline_s`, `queue_timeout_s` and `cache_salt`; see `xla_engine.engine.protocol.SharedOptions`.

        Raises InvalidRequestError naming the first bad prompt before any of them runs.
        """
        many = prompt_list(prompts)
        return self._complete(
            many, sampling_params, use_tqdm=use_tqdm, priority=priority, lora_request=lora_request, **options
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        lora_request: Adapter = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them; results in their order.

        Arguments:
            messages: dicts with "role" and "content", or a list of such lists.
            sampling_params, use_tqdm, priority, lora_request: as in `generate`.
            options: those of `generate`; `chat_template`, jinja2 source to use in place of the checkpoint's; and
                `tools`, `add_generation_prompt`, `continue_final_message`, `chat_template_kwargs`, as in
                `xla_engine.text.chat_template.render_chat`.

        Raises InvalidRequestError naming the first bad conversation before any of them runs; ChatTemplateError, one of
        these, where the checkpoint has no chat template.
        """
        shared = pop_options(options)
        prompts: list[Prompt] = []
        for index, conversation in enumerate(_as_conversations(messages)):
            try:
                prompts.append(self.engine.render_chat(conversation, **options))
            except InvalidRequestError as error:
                raise type(error)(f"conversation {index}: {error}") from error
        return self._complete(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            priority=priority,
            add_special_tokens=False,
            lora_request=lora_request,
            **shared,
        )

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        lora_request: Adapter = None,
        **options: Unpack[SharedOptions],
    ) -> Iterator[RequestOutput]:
        """Like `generate`, yielding cumulative outputs as tokens arrive; `finished` is true once per request.

        Nothing is submitted before the first output is asked for, and closing the iterator aborts what has not ended.
        Several streams may be read in turns: each read runs the engine for all. For readers that run at the same time
        there is `AsyncLLM`.
        """
        many = prompt_list(prompts)
        outputs = self._run(
            many,
            sampling_params,
            only_finished=False,
            priority=priority,
            lora_request=lora_request,
            **options,
        )
        return (output for _, output in outputs)

    def score(
        self,
        contexts: TextOrIds | Sequence[TextOrIds],
        continuations: TextOrIds | Sequence[TextOrIds],
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        lora_request: Adapter = None,
        **options: Unpack[SharedOptions],
    ) -> list[Score]:
        """The log-likelihood of each continuation after its context; results in their order.

        Arguments:
            contexts, continuations: texts, or token ids; as many of one as of the other, or one context for all. What
                contexts have in common is computed once.
            use_tqdm, priority, lora_request, options: as in `generate`.

        Raises InvalidRequestError naming the first bad pair before any of them runs. A score depends on nothing but
        its pair: not on the others, the number of slots or what the cache holds.
        """
        pairs = score_requests(contexts, continuations, self.tokenizer)
        prompts, params = [ids for ids, _ in pairs], [each for _, each in pairs]
        given = {"priority": priority, "lora_request": lora_request, **options}
        outputs = self._complete(list(prompts), params, use_tqdm=use_tqdm, **given)
        return [score_of(output, each.logprobs_start) for output, each in zip(outputs, params, strict=True)]

    def extend(
        self,
        outputs: RequestOutput | Sequence[RequestOutput],
        max_tokens: int,
        *,
        use_tqdm: bool = True,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Give requests that have ended up to `max_tokens` more tokens each; results in the order of `outputs`.

        outputs: what `generate`, `chat` or `extend` returned for them. An `LLM(keep_finished=N)` keeps the latest N.
        options: those of `XlaBatchEngine.extend`, which says what is returned, and what it raises.
        """
        many = [outputs] if isinstance(outputs, RequestOutput) else list(outputs)
        collector = OutputCollector(every_token=False)

        def queue() -> Iterator[str]:
            for output in many:
                self.engine.extend(output.request_id, max_tokens, collector=collector, **options)
                yield output.request_id

        done: dict[int, RequestOutput] = {}
        with prompts_bar(len(many), enabled=use_tqdm) as bar:
            for place, output in self._read(collector, queue(), only_finished=True):
                done[place] = output
                bar.update()
        return [done[place] for place in range(len(many))]

    def _complete(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: bool,
        **options: Any,
    ) -> list[RequestOutput]:
        done: dict[int, RequestOutput] = {}
        with prompts_bar(len(prompts), enabled=use_tqdm) as bar:
            for place, output in self._run(prompts, sampling_params, only_finished=True, **options):
                done[place] = output
                bar.update()
        return [done[place] for place in range(len(prompts))]

    def _run(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        only_finished: bool,
        priority: int | Sequence[int],
        lora_request: Adapter = None,
        **options: Any,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Outputs with their prompt's place until all have ended; those left when the caller stops are aborted."""
        collector = OutputCollector(every_token=not only_finished)
        params = per_prompt(
            "sampling_params", sampling_params or self.engine.default_params, SamplingParams, len(prompts)
        )
        priorities = per_prompt("priorities", priority, int, len(prompts))
        adapters = per_prompt("lora_requests", lora_request, LoRARequest, len(prompts))

        def queue() -> Iterator[str]:
            every = zip(prompts, params, priorities, adapters, strict=True)
            for place, (prompt, wanted, urgency, adapter) in enumerate(every):
                own = options if adapter is None else {**options, "lora_request": adapter}
                try:
                    yield self.engine.submit(prompt, wanted, priority=urgency, collector=collector, **own)
                except InvalidRequestError as error:
                    raise type(error)(f"prompt {place}: {error}") from error

        yield from self._read(collector, queue(), only_finished=only_finished)

    def _read(
        self, collector: OutputCollector, queued: Iterator[str], *, only_finished: bool
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Outputs of requests with their place among those `queued`, as in `_run`."""
        places: dict[str, int] = {}  # of what has not ended
        try:
            for place, request_id in enumerate(queued):
                places[request_id] = place
            while places:
                self._await_news(collector)
                with self.engine.lock:
                    news = [
                        (request.request_id, request.finished, request.output())
                        for request in collector.take()
                        if request.request_id in places and (request.finished or not only_finished)
                    ]
                for request_id, finished, output in news:
                    yield (places.pop(request_id) if finished else places[request_id]), output
        finally:
            for request_id in places:
                self.engine.abort(request_id)

    def _await_news(self, collector: OutputCollector) -> None:
        """Run a turn, or let another thread run it, unless there are news. Raises EngineClosedError."""
        try:
            if not collector:
                self.engine.advance()
        except EngineClosedError:
            if not collector:  # else another thread saw the end, and it is told there
                raise

    def update_weights(self, weights: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Take new weights, of the names and shapes of the checkpoint; see `XlaBatchEngine.update_weights`."""
        self.engine.update_weights(weights)

    def metrics_text(self) -> str:
        """Counters, gauges and histograms in Prometheus' text format; docs/operators.md explains each."""
        return self.engine.metrics_text()

    def close(self) -> None:
        """Free device memory; the object is unusable afterwards."""
        self.stop(timeout_s=0)
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _as_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> Sequence[Sequence[Message]]:
    one = bool(messages) and isinstance(messages[0], Mapping)
    return [messages] if one else messages  # type: ignore[list-item,return-value]
