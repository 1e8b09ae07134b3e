"""Requests for both paths, and a batch run's answers to them."""

from __future__ import annotations

import io
import json
from typing import Any

from xla_engine.batch.lines import read_lines
from xla_engine.batch.run import BatchRun
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.openai.results import ResultHeader

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [{"role": "user", "content": "def add(a, b):"}]
TEXT: dict[str, Any] = {"prompt": "def fib(n):", "max_tokens": 24, "temperature": 0, "logprobs": 2}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", TEXT),
    ("/v1/completions", {"prompt": [17, 4, 99], "max_tokens": 9, "seed": 3, "n": 2, "logprobs": 0}),
    ("/v1/completions", {"prompt": ["a = ", "for i in"], "max_tokens": 7, "seed": 5, "temperature": 0.8}),
    (
        "/v1/completions",
        {"prompt": "import", "max_tokens": 40, "temperature": 0, "stop": ["\n"], "logprobs": 1},
    ),
    ("/v1/completions", {"prompt": "def f", "max_tokens": 6, "temperature": 0, "echo": True, "logprobs": 1}),
    (
        "/v1/completions",
        {"prompt": [17, 4, 99], "max_tokens": 0, "echo": True, "logprobs": 0, "temperature": 0},
    ),
    (
        "/v1/chat/completions",
        {"messages": CHAT, "max_completion_tokens": 20, "seed": 1, "logprobs": True, "top_logprobs": 2},
    ),
    (
        "/v1/chat/completions",
        {"messages": CHAT, "max_tokens": 30, "seed": 2, "response_format": {"type": "json_object"}},
    ),
]


def offline(engine: XlaBatchEngine, bodies: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """What `xla-engine run` answers to lines with these bodies."""
    lines = [
        {"custom_id": str(number), "method": "POST", "url": url, "body": body}
        for number, (url, body) in enumerate(bodies)
    ]
    source = io.BytesIO("".join(json.dumps(line) + "\n" for line in lines).encode())
    sink = io.BytesIO()
    stamp = ResultHeader(created=0, model="embedded", tokenizer=engine.tokenizer)
    BatchRun(engine, read_lines(source), sink, header=stamp, defaults={"chat_template": TEMPLATE}).run()
    found = {entry["custom_id"]: entry for entry in map(json.loads, sink.getvalue().splitlines())}
    assert all(entry["error"] is None for entry in found.values()), found
    return [found[str(number)]["response"]["body"] for number in range(len(bodies))]


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
