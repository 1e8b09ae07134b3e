"""Submit the prompts of a line to the engine."""

from collections.abc import Callable, Mapping
from typing import Any

from xla_engine import prompts
from xla_engine.engine.protocol import LineEngine
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.openai.requests import LineRequest, Prompt
from xla_engine.prompts import chat_prompt, has_pictures
from xla_engine.text.parsers.chats import Chat


def reads_pictures(prompt: Prompt) -> bool:
    """Whether making the prompt ready may wait for hosts."""
    return has_pictures(prompt.messages) if isinstance(prompt, Chat) else isinstance(prompt, Mapping)


def ready_prompt(engine: LineEngine, prompt: Prompt) -> prompts.Prompt:
    """Render a chat, and read pictures. In any thread. Raises what `render_chat` and `read_pictures` raise."""
    if isinstance(prompt, Chat):
        ready = chat_prompt(engine.render_chat, prompt.messages, **prompt.options)
        return engine.read_pictures(ready, add_special_tokens=False) if isinstance(ready, Mapping) else ready
    return engine.read_pictures(prompt) if isinstance(prompt, Mapping) else prompt


def submit_prompt(
    engine: LineEngine,
    request: LineRequest,
    prompt: Prompt,
    request_id: str,
    on_refused: Callable[[Exception], object] | None = None,
    *,
    ready: prompts.Prompt | None = None,
    collector: OutputCollector | None = None,
) -> None:
    """Queue one prompt of a line. Raises if the engine rejects it; a later rejection is passed to `on_refused`.

    ready: what `ready_prompt` returned; None calls it. collector: as in `LineEngine.submit`.
    """
    adapter = engine.adapter_named(request.model)
    options: Mapping[str, Any] = request.options
    if adapter is not None:
        options = {**options, "lora_request": adapter}
    made = ready_prompt(engine, prompt) if ready is None else ready
    text = prompts.prompt_parts(made).text if isinstance(prompt, Chat) else None
    engine.submit(
        made,
        request.reading.sampling(request.params, text),
        request_id=request_id,
        on_refused=on_refused,
        collector=collector,
        add_special_tokens=not isinstance(prompt, Chat),  # a chat's template adds them
        **options,
    )


def whole_request(request_id: str) -> str:
    """The id of the request that a scheduler's request belongs to: with n above 1, one of its n sequences."""
    return request_id.partition("[")[0]
