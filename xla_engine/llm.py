"""`LLM`: the offline front door, shaped like vLLM's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from xla_engine.chat import Message
from xla_engine.config import EngineConfig
from xla_engine.engine import XlaBatchEngine
from xla_engine.errors import InvalidRequestError
from xla_engine.outputs import RequestOutput
from xla_engine.sampling_params import SamplingParams
from xla_engine.tokenizer import Tokenizer

Prompt = str | Sequence[int]


class LLM:
    """A model ready to generate.

    Arguments:
        model: a Hugging Face model directory; None is the small model that ships with the package.
        max_num_seqs: requests decoded together.
        max_model_len: prompt plus generated tokens at most; None takes the model's limit, 2048 at most.
        dtype: "auto", "bfloat16" or "float32".
        seed: used for requests without a seed of their own.
        engine_options: further fields of `EngineConfig`.

    Runnable example::

        with LLM() as llm:
            for output in llm.generate(["def fib(n):"], SamplingParams(temperature=0, max_tokens=48)):
                print(output.outputs[0].text)

    Leaving the `with` block, or `close()`, frees the device memory.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        max_num_seqs: int = 16,
        max_model_len: int | None = None,
        dtype: str = "auto",
        seed: int = 0,
        **engine_options: Any,
    ) -> None:
        config = EngineConfig(
            max_num_seqs=max_num_seqs, max_model_len=max_model_len, dtype=dtype, seed=seed, **engine_options
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

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete all prompts; results in the order of the prompts.

        Arguments:
            prompts: text, a list of token ids, or a list of either.
            sampling_params: one for all, or one per prompt.
            use_tqdm: show a progress bar.

        Raises InvalidRequestError naming the first bad prompt before any of them runs.
        """
        return self._complete(prompts, sampling_params, use_tqdm=use_tqdm, add_special_tokens=True)

    def _complete(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: bool,
        add_special_tokens: bool,
    ) -> list[RequestOutput]:
        order = self._submit_all(prompts, sampling_params, add_special_tokens=add_special_tokens)
        done: dict[str, RequestOutput] = {}
        with _progress(len(order), enabled=use_tqdm) as bar:
            for output in self._run(order, only_finished=True):
                done[output.request_id] = output
                bar.update()
        return [done[request_id] for request_id in order]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them; results in their order.

        Arguments:
            messages: dicts with "role" and "content", or a list of such lists.
            chat_template: jinja2 source to use in place of the checkpoint's.
            options: `tools`, `add_generation_prompt`, `continue_final_message`, `chat_template_kwargs`, as in
                `xla_engine.chat.render_chat`.

        Raises InvalidRequestError naming the first bad conversation before any of them runs; ChatTemplateError, one of
        these, where the checkpoint has no chat template.
        """
        prompts: list[Prompt] = []
        for index, conversation in enumerate(_as_conversations(messages)):
            try:
                prompts.append(self.engine.render_chat(conversation, chat_template=chat_template, **options))
            except InvalidRequestError as error:
                raise type(error)(f"conversation {index}: {error}") from error
        return self._complete(prompts, sampling_params, use_tqdm=use_tqdm, add_special_tokens=False)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, yielding cumulative outputs as tokens arrive; `finished` is true once per request.

        Closing the iterator aborts what it has not yielded to the end.
        """
        return self._run(self._submit_all(prompts, sampling_params), only_finished=False)

    def _run(self, order: list[str], *, only_finished: bool) -> Iterator[RequestOutput]:
        """Outputs of these requests until all have ended; those left when the caller stops early are aborted."""
        unfinished = set(order)
        try:
            while unfinished:
                for output in self.engine.step(only_finished=only_finished):
                    if output.request_id in unfinished:
                        if output.finished:
                            unfinished.remove(output.request_id)
                        yield output
        finally:
            for request_id in unfinished:
                self.engine.abort(request_id)

    def close(self) -> None:
        """Free device memory; the object is unusable afterwards."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        add_special_tokens: bool = True,
    ) -> list[str]:
        many = _as_list(prompts)
        params = _per_prompt(sampling_params, len(many))
        submitted: list[str] = []
        for index, (prompt, wanted) in enumerate(zip(many, params, strict=True)):
            try:
                submitted.append(self.engine.submit(prompt, wanted, add_special_tokens=add_special_tokens))
            except Exception as error:
                for request_id in submitted:
                    self.engine.abort(request_id)
                if isinstance(error, InvalidRequestError):
                    raise type(error)(f"prompt {index}: {error}") from error
                raise
        return submitted


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def _as_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> Sequence[Sequence[Message]]:
    one = bool(messages) and isinstance(messages[0], Mapping)
    return [messages] if one else messages  # type: ignore[list-item,return-value]


def _per_prompt(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * count
    if len(sampling_params) != count:
        raise InvalidRequestError(
            f"{len(sampling_params)} sampling_params for {count} prompts; give one or {count}"
        )
    return list(sampling_params)


def _progress(total: int, *, enabled: bool) -> Any:
    from tqdm.auto import tqdm  # imported where used: the engine core runs without it

    return tqdm(total=total, unit="req", desc="Processed prompts", disable=not enabled)
