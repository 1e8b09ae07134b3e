"""Hostile batch lines by the hundred thousand, and the run that must survive them."""

from __future__ import annotations

import io
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from xla_engine.batch.lines import Line, read_lines
from xla_engine.batch.record_ids import parse_record_id
from xla_engine.batch.run import BatchRun
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.model_loader.chat_templates import ChatTemplate
from xla_engine.openai.results import ResultHeader
from xla_engine.sampling_params import UNSUPPORTED, SamplingParams

SENTINEL_EVERY = 500
# must always get the same bits
SENTINEL = {"prompt": "def f(x):\n", "seed": 5, "max_tokens": 6, "logprobs": 0}
MAX_LINE_BYTES = 2**20

_WORDS = [
    "def f(",
    "x",
    "import os\n",
    "",
    " ",
    "\x00",
    "é",
    "日本",
    "\u202e",
    "👩‍👩‍👧",
    "a" * 3000,
    "\ufffd",
]
_NUMBERS = [
    0,
    1,
    2,
    3,
    -1,
    7,
    0.5,
    1.0,
    -0.0,
    1e-3,
    1e-300,
    1e308,
    2**31,
    2**32,
    2**63 - 1,
    2**64 - 1,
    -(2**63),
]
_RAW = [b"NaN", b"-Infinity", b"1e999", b"9" * 400, rb'"\ud800"', rb'"\udc00x"', b"[" * 900, b'{"a":' * 200]


def cases(seed: int) -> Iterator[bytes]:
    """Lines without their newlines, without end; the same ones for the same seed."""
    chance = random.Random(seed)
    while True:
        raw = json.dumps(_record(chance), ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")
        for _ in range(chance.choice([0] * 9 + [1, 1, 3])):
            raw = _mutated(chance, raw)
        yield raw.replace(b"\n", b" ")


def _record(chance: random.Random) -> Any:
    kind = chance.choice(["plain", "plain", "plain", "ids", "chat", "openai", "openai", "openai chat", "any"])
    if kind == "any":
        return _any(chance, 4)
    body: dict[str, Any] = {"max_tokens": chance.choice([1, 1, 2, 3])}
    if "chat" in kind:
        body["messages"] = chance.choice(
            [[{"role": "user", "content": "Hi"}], [], [{}], "x", _any(chance, 3), [{"role": 1}] * 50]
        )
    else:
        ids = [chance.randrange(-1, 3000) for _ in range(chance.choice([0, 1, 3, 100]))]
        body["prompt"] = ids if kind == "ids" else chance.choice(["def f(", "x = ", *_WORDS])
        if kind == "openai" and chance.random() < 0.2:
            many = chance.choice([1, 2, 3, 200])
            body["prompt"] = [chance.choice(["a", "def f(", [1, 2], [3], "", 3]) for _ in range(many)]
    for _ in range(chance.choice([0, 0, 1, 2, 5])):
        name = chance.choice(_NAMES)
        body[name] = _value(chance, name)
    if not kind.startswith("openai"):
        return body | chance.choice([{}, {}, {"custom_id": _value(chance, "custom_id")}])
    url = "/v1/chat/completions" if "chat" in kind else "/v1/completions"
    record = {"custom_id": str(chance.random()), "method": "POST", "url": url, "body": body}
    if chance.random() < 0.1:
        record[chance.choice(["method", "url", "body", "custom_id", "extra"])] = _any(chance, 2)
    return record


_NAMES = sorted(
    {entry.name for entry in fields(SamplingParams)}
    | UNSUPPORTED
    | {
        "top_logprobs",
        "max_completion_tokens",
        "user",
        "metadata",
        "stream_options",
        "model",
        "url",
        "body",
        "id",
    }
    | {
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
        "priority",
        "deadline_s",
        "queue_timeout_s",
        "x" * 200,
    }
)


def _value(chance: random.Random, name: str) -> Any:
    """Likely values for a name, and unlikely ones for any."""
    likely: dict[str, list[Any]] = {
        "temperature": [0, 0.7, 1, 1.5],
        "top_k": [0, 1, 5, -1],
        "top_p": [0.5, 1],
        "min_p": [0, 0.1],
        "seed": [0, 1, -5, 2**63],
        "max_tokens": [1, 2, 3],
        "stop": ["x", ["a", "b"], "\n", ["x"] * 100_000, [""], ["é", "\ufffd"], ["a" * 50_000]],
        "stop_token_ids": [[], [1], [1, 2, 3], list(range(9)), [10**6], ["1"], [True]],
        "logprobs": [0, 1, 5, 20, 21, True, False, -1],
        "top_logprobs": [0, 2, 20, 21],
        "prompt_logprobs": [0, 2, 21],
        "n": [1, 2, 3, 0, 10**9],
        "best_of": [1, 2, 10**9],
        "logit_bias": [
            {},
            {"5": 3},
            {"5": -100, "6": 100},
            {"x": 1},
            {"5": "x"},
            {str(i): 1 for i in range(5000)},
        ],
        "allowed_token_ids": [[1, 2, 3], [], [10**6], list(range(5000))],
        "bad_words": [["x"], [""], ["a"] * 5000, [1]],
        "min_tokens": [0, 1, 2, 100],
        "presence_penalty": [0, 1, -2, 2.1],
        "frequency_penalty": [0, 1, -2, 2.1],
        "repetition_penalty": [1, 1.2, 0, -1],
        "response_format": [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
            {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
            {"type": "json_schema", "json_schema": {"schema": {"type": "what"}}},
            {"type": "x"},
        ],
        "structured_outputs": [
            {"regex": "[ab]{1,3}"},
            {"choice": ["x", "y"]},
            {"regex": "(.{0,10000}){1000}"},
            {"json": {}},
            {},
        ],
        "custom_id": ["a", "b", "line-1", "", "i" * 600, "\u2028"],
        "priority": [0, 1, -1, 10**9],
        "deadline_s": [0, 10, 0.001, -1, 10**9],
        "queue_timeout_s": [0, 10, 0.001, -1],
    }
    if name in likely and chance.random() < 0.9:
        return chance.choice(likely[name])
    return _any(chance, 3)


def _any(chance: random.Random, depth: int) -> Any:
    kinds = ["null", "bool", "number", "word", "random"] + ["list", "object"] * (depth > 0)
    match chance.choice(kinds):
        case "null":
            return None
        case "bool":
            return chance.random() < 0.5
        case "number":
            return chance.choice(_NUMBERS)
        case "word":
            return chance.choice(_WORDS)
        case "random":
            return "".join(chr(chance.randrange(0x20, 0x250)) for _ in range(chance.randrange(12)))
        case "list":
            return [_any(chance, depth - 1) for _ in range(chance.randrange(4))]
    return {chance.choice(_WORDS + _NAMES): _any(chance, depth - 1) for _ in range(chance.randrange(4))}


def _mutated(chance: random.Random, raw: bytes) -> bytes:
    """The line cut, grown, or with a piece replaced."""
    at, to = sorted((chance.randrange(len(raw) + 1), chance.randrange(len(raw) + 1)))
    match chance.randrange(7):
        case 0:
            return raw[:at]
        case 1:
            return raw[:at] + raw[to:]
        case 2:
            return raw[:at] + chance.randbytes(chance.randrange(1, 9)) + raw[at:]
        case 3:
            colon = raw.find(b": ", at)
            return raw if colon < 0 else raw[: colon + 2] + chance.choice(_RAW) + raw[colon + 3 :]
        case 4:
            return raw[:at] + raw[at:to] * 2 + raw[to:]
        case 5:
            return raw.replace(b"{", b'{"prompt": "twice", ', 1)
    return chance.choice([b"", b"\xef\xbb\xbf", b" \t", b"\x00", b"\xff\xfe"]) + raw


@dataclass(slots=True)
class FuzzReport:
    """What came of it. problems: what must be empty."""

    lines: int = 0
    results: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    sentinels: int = 0
    longest_turn: float = 0.0  # seconds of processor time
    problems: list[str] = field(default_factory=list)


def fuzz(
    engine: XlaBatchEngine, count: int, *, seed: int = 0, beat: Callable[[int], None] | None = None
) -> FuzzReport:
    """Run `count` hostile lines through the engine, a good one among each `SENTINEL_EVERY`, and check every output.

    beat: called with the lines done after every engine step, for a watchdog.
    """
    template = "{% for message in messages %}{{ message.content + '\\n' }}{% endfor %}"
    engine.chat_template = ChatTemplate(sources={"default": template}, special_tokens={})
    report, hostile = FuzzReport(), cases(seed)
    pending: set[int] = set()

    def raw_lines() -> Iterator[bytes]:
        for number in range(count):
            yield json.dumps(SENTINEL).encode() if number % SENTINEL_EVERY == 0 else next(hostile)

    def lines() -> Iterator[Line]:
        for number, raw in enumerate(raw_lines(), 1):
            found = list(read_lines(io.BytesIO(raw), MAX_LINE_BYTES))
            if found and number > 1:  # a byte order mark may only start a file
                found = [Line(1, len(raw), raw if len(raw) <= MAX_LINE_BYTES else None)]
            for line in found:
                pending.add(number)
                yield Line(number, line.size, line.raw)

    sentinel: list[Any] = []

    def check(data: bytes) -> None:
        record = json.loads(data)
        number, _ = parse_record_id(record["id"]) or (0, 0)
        if number not in pending:
            report.problems.append(f"line {number} has a second output, or never was")
        pending.discard(number)
        report.lines += 1
        if record["error"] is None:
            report.results += 1
        else:
            report.codes[record["error"]["code"]] += 1
            if record["error"]["code"] in ("engine_error", "engine_closed"):
                report.problems.append(f"line {number}: {record['error']['message']}")
        if (number - 1) % SENTINEL_EVERY == 0:
            choices = record["error"] or record["response"]["body"]["choices"]
            sentinel[:] = sentinel or [choices]
            report.sentinels += 1
            if [choices] != sentinel:
                report.problems.append(f"line {number}: a good request got {choices}, before {sentinel[0]}")

    class Sink:
        def write(self, data: bytes) -> None:
            check(data)

    last = time.process_time()

    def on_turn() -> None:
        nonlocal last
        now = time.process_time()
        report.longest_turn, last = max(report.longest_turn, now - last), now
        if beat is not None:
            beat(report.lines)

    header = ResultHeader(created=0, model="m", tokenizer=engine.tokenizer)
    totals = BatchRun(engine, lines(), Sink(), header=header, on_turn=on_turn).run()
    if totals.failure is not None:
        report.problems.append(f"the run stopped: {totals.failure!r}")
    report.problems += [f"line {number} has no output" for number in itertools.islice(sorted(pending), 10)]
    return report
