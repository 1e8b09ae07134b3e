"""vLLM's engines: `LLMEngine`, stepped by its caller, and `AsyncLLM` for event loops."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Literal

from xla_engine import async_llm, llm
from xla_engine.errors import AdaptersBusyError, InvalidRequestError
from xla_engine.prompts import Prompt
from xla_engine.vllm.engine_args import EngineArgs
from xla_engine.vllm.llm import given
from xla_engine.vllm.outputs import OutputStream, RequestOutput
from xla_engine.vllm.sampling_params import SamplingParams
from xla_engine.vllm.tokenizer import VllmTokenizer


class LLMEngine:
    """An engine to which requests are added, and whose `step` returns their new output.

    A request waits here if there is no room for its adapter, and so do all later ones, until others have ended.
    """

    def __init__(self, args: EngineArgs) -> None:
        self._engine = llm.LLM(args.model, **args.options).engine
        self._streams: dict[str, OutputStream] = {}
        self._held: deque[tuple[str, Prompt, SamplingParams, dict[str, Any]]] = deque()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **_: Any) -> LLMEngine:
        """Load the model and compile."""
        return cls(engine_args)

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> None:
        """Queue a prompt. Raises InvalidRequestError."""
        params = SamplingParams.of(self._engine.default_params) if params is None else params.clone()
        self._held.append((request_id, prompt, params, given(options)))
        if len(self._held) == 1:
            self._submit_held()

    def step(self) -> list[RequestOutput]:
        """Run a turn and return an output for each request that has something new."""
        shown = []
        self._submit_held()
        for output in self._engine.step():
            stream = (
                self._streams.pop(output.request_id) if output.finished else self._streams[output.request_id]
            )
            if (found := stream.next(output)) is not None:
                shown.append(found)
        return shown

    def has_unfinished_requests(self) -> bool:
        """Whether there are unfinished requests."""
        return self._engine.has_unfinished or bool(self._held)

    def abort_request(self, request_id: str | list[str]) -> None:
        """Abort requests; the next step returns their last outputs."""
        for each in [request_id] if isinstance(request_id, str) else request_id:
            self._held = deque(one for one in self._held if one[0] != each)
            self._engine.abort(each)

    def reset_prefix_cache(self, **_: Any) -> None:
        """Forget what earlier prompts left in the cache; requests that run keep their slots."""
        self._engine.reset_prefix_cache()

    def get_tokenizer(self) -> VllmTokenizer:
        """The checkpoint's tokenizer and chat template. Raises ConfigError where it has none."""
        return VllmTokenizer(self._engine)

    def close(self) -> None:
        """Free device memory."""
        self._engine.close()

    def _submit_held(self) -> None:
        while self._held:
            request_id, prompt, params, options = self._held.popleft()
            try:
                self._engine.submit(prompt, params.fixed, request_id=request_id, **options)
            except AdaptersBusyError:
                if not self._engine.has_unfinished:
                    raise  # all adapters are pinned
                self._held.appendleft((request_id, prompt, params, options))
                return
            self._streams[request_id] = OutputStream(
                params.output_kind, self._engine.tokenizer, options.get("lora_request")
            )


class AsyncLLM:
    """Streams for the tasks of an event loop."""

    def __init__(self, args: EngineArgs) -> None:
        self._llm = async_llm.AsyncLLM(args.model, **args.options)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **_: Any) -> AsyncLLM:
        """Load the model and compile."""
        return cls(engine_args)

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        """Yield outputs of one request as tokens arrive, in the form of its `output_kind`."""
        engine = self._llm.engine
        stream = OutputStream(sampling_params.output_kind, engine.tokenizer, options.get("lora_request"))
        found = self._llm.generate(prompt, sampling_params.fixed, request_id=request_id, **given(options))
        try:
            async for output in found:
                if (shown := stream.next(output)) is not None:
                    yield shown
        finally:
            await found.aclose()  # type: ignore[attr-defined]

    async def abort(self, request_id: str) -> None:
        """Abort a request; its reader gets a last output."""
        self._llm.abort(request_id)

    async def pause_generation(
        self, *, mode: Literal["abort", "keep"] = "abort", clear_cache: bool = True
    ) -> None:
        """Pause until `resume_generation`; requests added meanwhile wait.

        mode: "keep" pauses live requests, "abort" ends them. clear_cache: clear the prefix cache.
        """
        if mode not in ("abort", "keep"):
            raise InvalidRequestError(
                f'mode must be "abort" or "keep", not {mode!r}: wait until the requests have ended'
            )
        if mode == "abort":
            self._llm.engine.abort_all()
        await self._llm.pause()
        if clear_cache:
            self._llm.engine.reset_prefix_cache()

    async def resume_generation(self) -> None:
        """Resume after `pause_generation`."""
        self._llm.resume()

    async def get_tokenizer(self) -> VllmTokenizer:
        """As `LLMEngine.get_tokenizer`."""
        return VllmTokenizer(self._llm.engine)

    async def reset_prefix_cache(self, **_: Any) -> None:
        """Forget what earlier prompts left in the cache; requests that run keep their slots."""
        self._llm.engine.reset_prefix_cache()

    async def is_paused(self) -> bool:
        """Whether generation is paused."""
        return self._llm.is_paused

    def shutdown(self) -> None:
        """Abort live requests and free device memory."""
        self._llm.engine.close()
