"""How a line's prompts reach the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from xla_engine.batch.requests import Chat, LineRequest, Prompt
from xla_engine.sampling_params import SamplingParams


class Submits(Protocol):
    """Takes requests, as `XlaBatchEngine` does."""

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str: ...
    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
        priority: int = 0,
        deadline_s: float | None = None,
        queue_timeout_s: float | None = None,
        cache_salt: str = "",
    ) -> str: ...


def submit_prompt(engine: Submits, request: LineRequest, prompt: Prompt, request_id: str) -> None:
    """Queue one prompt of a line. Raises whatever keeps the engine from taking it."""
    is_chat = isinstance(prompt, Chat)
    if isinstance(prompt, Chat):
        prompt = engine.render_chat(prompt.messages, **prompt.options)
    engine.submit(
        prompt,
        request.params,
        request_id=request_id,
        add_special_tokens=not is_chat,  # a chat template writes them itself
        **request.options,
    )


def whole_request(request_id: str) -> str:
    """The request that a scheduler's request belongs to, which is one of its n sequences where n is above 1."""
    return request_id.partition("[")[0]
