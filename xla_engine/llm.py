"""`LLM`: the offline front door, shaped like vLLM's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack

from xla_engine import vllm_options
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.protocol import SharedOptions, pop_options
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.errors import ConfigError, EngineClosedError, InvalidRequestError
from xla_engine.outputs import RequestOutput
from xla_engine.prompts import Prompt, prompt_list
from xla_engine.sampling_params import SamplingParams
from xla_engine.text.chat_template import Message
from xla_engine.text.tokenizer import Tokenizer

T = TypeVar("T")


class LLM:
    """A model ready to generate.

    Arguments:
        model: a Hugging Face model directory, a .gguf file or a hub id; None is the small model that ships with the
            package.
        max_num_seqs: requests decoded together; "auto" takes what the device has memory for.
        max_model_len: prompt plus generated tokens at most; None takes the model's limit, 2048 at most.
        dtype: "auto", "bfloat16" or "float32".
        seed: used for requests without a seed of their own.
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
        **engine_options: Any,
    ) -> None:
        options = vllm_options.engine_options(engine_options)
        config = EngineConfig(
            max_num_seqs=max_num_seqs, max_model_len=max_model_len, dtype=dtype, seed=seed, **options
        )
        self.engine = XlaBatchEngine.from_pretrained(model, config)

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
        **options: Unpack[SharedOptions],
    ) -> list[RequestOutput]:
        """Complete all prompts; results in the order of the prompts.

        Arguments:
            prompts: text, token ids, vLLM's `{"prompt": ...}` or `{"prompt_token_ids": ...}`, or a list of these.
            sampling_params: one for all, or one per prompt.
            use_tqdm: show a progress bar.
            priority: -10 (soonest) to 10, one for all or one per prompt.
            options: `deadline_s`, `queue_timeout_s` and `cache_salt`; see `xla_engine.engine.protocol.SharedOptions`.

        Raises InvalidRequestError naming the first bad prompt before any of them runs.
        """
        many = prompt_list(prompts)
        return self._complete(many, sampling_params, use_tqdm=use_tqdm, priority=priority, **options)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them; results in their order.

        Arguments:
            messages: dicts with "role" and "content", or a list of such lists.
            sampling_params, use_tqdm, priority: as in `generate`.
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
            **shared,
        )

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        **options: Unpack[SharedOptions],
    ) -> Iterator[RequestOutput]:
        """Like `generate`, yielding cumulative outputs as tokens arrive; `finished` is true once per request.

        Nothing is submitted before the first output is asked for, and closing the iterator aborts what has not ended.
        Several streams may be read in turns: each read runs the engine for all. For readers that run at the same time
        there is `AsyncLLM`.
        """
        many = prompt_list(prompts)
        outputs = self._run(many, sampling_params, only_finished=False, priority=priority, **options)
        return (output for _, output in outputs)

    def _complete(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: bool,
        **options: Any,
    ) -> list[RequestOutput]:
        done: dict[int, RequestOutput] = {}
        with _progress(len(prompts), enabled=use_tqdm) as bar:
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
        **options: Any,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Outputs with their prompt's place until all have ended; those left when the caller stops are aborted."""
        collector = OutputCollector(every_token=not only_finished)
        places: dict[str, int] = {}  # of what has not ended
        params = _per_prompt(
            "sampling_params", sampling_params or self.engine.default_params, SamplingParams, len(prompts)
        )
        priorities = _per_prompt("priorities", priority, int, len(prompts))
        try:
            for place, (prompt, wanted, urgency) in enumerate(zip(prompts, params, priorities, strict=True)):
                try:
                    request_id = self.engine.submit(
                        prompt, wanted, priority=urgency, collector=collector, **options
                    )
                except InvalidRequestError as error:
                    raise type(error)(f"prompt {place}: {error}") from error
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

    def close(self) -> None:
        """Free device memory; the object is unusable afterwards."""
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


def _per_prompt(name: str, given: T | Sequence[T], kind: type[T], count: int) -> list[T]:
    if isinstance(given, kind) or not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise InvalidRequestError(f"{len(given)} {name} for {count} prompts; give one or {count}")
    return list(given)


def _progress(total: int, *, enabled: bool) -> Any:
    from tqdm.auto import tqdm  # imported where used: the engine core runs without it

    return tqdm(total=total, unit="req", desc="Processed prompts", disable=not enabled)
