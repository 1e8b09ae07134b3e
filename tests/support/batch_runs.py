"""One run of a file over the fake engine, and lines of every kind."""

from __future__ import annotations

import io
import json
from typing import Any

from tests.support.batch_lines import HEADER
from tests.support.fake_engine import FakeEngine
from xla_engine.batch.lines import read_lines
from xla_engine.batch.run import BatchRun
from xla_engine.batch.totals import RunTotals

LIMIT = 200  # bytes of a line in these tests


def run(
    data: bytes, engine: FakeEngine | None = None, **options: Any
) -> tuple[list[dict[str, Any]], RunTotals]:
    sink = io.BytesIO()
    lines = read_lines(io.BytesIO(data), LIMIT)
    engine = engine or FakeEngine()
    totals = BatchRun(engine, lines, sink, header=HEADER, **options).run()
    assert len(set(engine.submitted)) == len(engine.submitted)
    return [json.loads(line) for line in sink.getvalue().splitlines()], totals


LINES = {
    "good": b'{"prompt": "text", "max_tokens": 4}',
    "ids": b'{"prompt": [1, 2], "max_tokens": 4}',
    "batch": b'{"method": "POST", "url": "/v1/completions", "body": {"prompt": "text"}}',
    "named": b'{"prompt": "text", "custom_id": "same"}',
    "blank": b"  ",
    "broken": b'{"prompt": "te',
    "NaN": b'{"prompt": "text", "temperature": NaN}',
    "bytes": b'{"prompt": "\xff\xfe"}',
    "long": b'{"prompt": "' + b"x" * LIMIT + b'"}',
    "unknown": b'{"prompt": "text", "what": 1}',
    "zero": b'{"prompt": "text", "max_tokens": 0}',
    "empty": b'{"prompt": ""}',
    "chat": b'{"method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}',
    "chat without content": b'{"messages": [{"role": "user"}]}',
    "talk": b'{"messages": [{"role": "user", "content": "te"}, {"role": "user", "content": "xt"}]}',
    "several": b'{"url": "/v1/completions", "body": {"prompt": ["text", [1, 2], "text"]}}',
    "one of several": b'{"url": "/v1/completions", "body": {"prompt": ["text", "not this!", "text"]}}',
    "patient": b'{"prompt": "text", "priority": -1, "deadline_s": 9, "queue_timeout_s": 3.5, "cache_salt": "a"}',
    "bad priority": b'{"url": "/v1/completions", "body": {"prompt": "text", "priority": "high"}}',
    "over": b'{"prompt": "text", "max_tokens": 97}',
    "refused": b'{"prompt": "not this!"}',
}
