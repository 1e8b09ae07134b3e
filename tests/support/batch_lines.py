"""Lines of batch files, in and out."""

from __future__ import annotations

import json
from typing import Any

from xla_engine.batch.record_ids import parse_record_id
from xla_engine.openai.requests import LineRequest, parse_line
from xla_engine.openai.results import ResultHeader
from xla_engine.outputs import CompletionOutput, RequestOutput

HEADER = ResultHeader(created=1, model="fake", system_fingerprint="f" * 16)


def line_of(record: dict[str, Any]) -> int:
    identity = parse_record_id(record["id"])
    assert identity is not None
    return identity[0]


def by_line(records: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    numbered = {line_of(record): record for record in records}
    assert len(numbered) == len(records)
    return numbered


def prompts(count: int) -> bytes:
    return b"".join(b'{"prompt": "p%d"}\n' % number for number in range(1, count + 1))


def interrupt_at(step: int) -> Any:
    def on_step(number: int) -> None:
        if number == step:
            raise KeyboardInterrupt

    return on_step


def batch(body: dict[str, Any], /, **changes: Any) -> bytes:
    line = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": body} | changes
    return json.dumps({name: value for name, value in line.items() if value is not ...}).encode()


def parsed(raw: bytes, line: int = 7, **defaults: Any) -> LineRequest:
    request = parse_line(raw, line, defaults)
    assert isinstance(request, LineRequest), request
    return request


MESSAGES = [{"role": "user", "content": "Hello"}]


def finished(text: str = "ab", **changes: Any) -> RequestOutput:
    choice = {"index": 0, "text": text, "token_ids": (5, 6), "finish_reason": "length"} | changes
    return RequestOutput(
        request_id="x",
        prompt=None,
        prompt_token_ids=(1, 2, 3),
        outputs=(CompletionOutput(**choice),),
        finished=True,
    )


def talk(**changes: Any) -> bytes:
    body = {"model": "m", "messages": MESSAGES} | changes
    return batch(
        {name: value for name, value in body.items() if value is not ...}, url="/v1/chat/completions"
    )
