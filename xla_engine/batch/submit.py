"""How a line's prompts reach the engine."""

from __future__ import annotations

from xla_engine.batch.requests import Chat, LineRequest, Prompt
from xla_engine.engine.protocol import Engine


def submit_prompt(engine: Engine, request: LineRequest, prompt: Prompt, request_id: str) -> None:
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
