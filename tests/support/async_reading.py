"""Tasks that read an asynchronous engine."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from xla_engine import AsyncLLM, SamplingParams
from xla_engine.outputs import RequestOutput

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

PROMPTS = [[n + 1, 7, n + 3] for n in range(20)]  # more than there are slots


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 300))


async def read(
    llm: AsyncLLM,
    prompt: list[int],
    *,
    pause: float = 0.0,
    events: list[RequestOutput] | None = None,
    **options: Any,
) -> RequestOutput:
    """Read a stream to its end, which comes once; tokens only grow."""
    last: RequestOutput | None = None
    async for output in llm.generate(prompt, PARAMS, **options):
        assert last is None or not last.finished
        if last is not None:
            known = last.outputs[0].token_ids
            assert output.outputs[0].token_ids[: len(known)] == known
        last = output
        if events is not None:
            events.append(output)
        await asyncio.sleep(pause)
    assert last is not None and last.finished
    return last
