"""Submit the prompts of a line to the engine."""

from collections.abc import Callable, Mapping
from typing import Any

from xla_engine.batch.requests import LineRequest, Prompt
from xla_engine.engine.protocol import LineEngine
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.prompts import chat_prompt
from xla_engine.sampling_params import SamplingParams
from xla_engine.text.parsers.chats import Chat


def submit_prompt(
    engine: LineEngine,
    request: LineRequest,
    prompt: Prompt,
    request_id: str,
    on_refused: Callable[[Exception], object] | None = None,
    *,
    params: SamplingParams | None = None,
    collector: OutputCollector | None = None,
) -> None:
    """Queue one prompt of a line. Raises if the engine rejects it; a later rejection is passed to `on_refused`.

    params: replaces the line's sampling parameters. collector: as in `LineEngine.submit`.
    """
    adapter = engine.adapter_named(request.model)
    options: Mapping[str, Any] = request.options
    if adapter is not None:
        options = {**options, "lora_request": adapter}
    is_chat = isinstance(prompt, Chat)
    if isinstance(prompt, Chat):
        prompt = chat_prompt(engine.render_chat, prompt.messages, **prompt.options)
    engine.submit(
        prompt,
        params or request.params,
        request_id=request_id,
        on_refused=on_refused,
        collector=collector,
        add_special_tokens=not is_chat,  # a chat template writes special tokens itself
        **options,
    )


def whole_request(request_id: str) -> str:
    """The id of the request that a scheduler's request belongs to: with n above 1, one of its n sequences."""
    return request_id.partition("[")[0]
