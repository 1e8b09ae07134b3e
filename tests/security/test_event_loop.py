"""No request holds the event loop: whatever is sent, its longest step stays below 50 ms of processor time.

The loop serves all clients, so a step is what others wait. Steps are measured in processor time of the loop's thread
(`support/loop_watch.py`), so a busy machine lengthens none. A collection of garbage may fall into any step; so what
seems to take long is sent twice more, and the shortest counts.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.security.test_hostile_schemas import everyone, itself, ladder, nested
from tests.server.bodies import TEMPLATE
from tests.server.conftest import ENGINE, Running
from tests.server.test_parsers import PARSERS, PIECES
from tests.support.loop_watch import LoopWatch
from tests.support.operations import calls_of
from tests.support.tiers import default
from xla_engine.async_llm import AsyncLLM
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.server import launch
from xla_engine.server.batches.store import FileRecord
from xla_engine.server.service import Service
from xla_engine.server.settings import ServerSettings
from xla_engine.text.parsers.scan import Message, message_of

STEP_S = 0.05
TEXTS, CHATS = "/v1/completions", "/v1/chat/completions"
MB = 1 << 20


class Watched:
    """A server whose loop is watched, and a client."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.watch = LoopWatch(running.loop)
        self.http = httpx.Client(base_url=running.url, timeout=1800)

    def step(self, send: Callable[[], httpx.Response]) -> float:
        """The longest step of the loop while a request is answered, in seconds."""
        found = []
        for _ in range(3):
            self.watch.longest()
            answer = send()
            found.append(self.watch.longest())
            assert answer.status_code < 500 or answer.status_code == 501, answer.text
            if found[-1] < STEP_S:
                break
        return min(found)

    def post(self, path: str, body: Any) -> Callable[[], httpx.Response]:
        raw = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
        headers = {"content-type": "application/json"}
        return lambda: self.http.post(path, content=raw, headers=headers)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    settings = ServerSettings(
        model_names=("embedded",),
        sampling_defaults={"chat_template": TEMPLATE},
        tool_parser="qwen3_coder",
        reasoning_parser="think",
        batch_dir=tmp_path_factory.mktemp("batches"),
    )
    before = sys.getswitchinterval()
    sys.setswitchinterval(launch.SWITCH_S)
    service = Service(AsyncLLM.from_engine(XlaBatchEngine.from_pretrained(None, ENGINE)), settings)
    found = Watched(Running(service))
    gc.collect()
    gc.freeze()
    yield found
    gc.unfreeze()
    found.watch.stop()
    found.http.close()
    found.running.stop()
    sys.setswitchinterval(before)


def test_a_step_of_the_loop_is_measured(watched: Watched) -> None:
    def work() -> None:
        end = time.thread_time() + 0.08
        while time.thread_time() < end:
            pass

    def send() -> httpx.Response:
        watched.running.loop.call_soon_threadsafe(work)
        return watched.http.get("/health")

    assert watched.step(send) > STEP_S
    assert watched.step(lambda: watched.http.get("/health")) < STEP_S


# -- large requests, one field of which is too large -----------------------------------------------------------------

MANY = [1] * 3_900_000
USER = {"role": "user", "content": "x"}
RULES = "root ::= " + " | ".join(f'"a{number}" "b" [a-z]+' for number in range(2800))  # 57 KB


def constrained(**given: Any) -> tuple[str, dict[str, Any]]:
    return TEXTS, {"prompt": "x", "max_tokens": 1, "structured_outputs": given}


def text(**given: Any) -> tuple[str, dict[str, Any]]:
    return TEXTS, {"prompt": "x", "max_tokens": 1, **given}


def talk(**given: Any) -> tuple[str, dict[str, Any]]:
    return CHATS, {"messages": [USER], "max_tokens": 1, **given}


def called(schema: Any, choice: Any = "auto", **more: Any) -> tuple[str, dict[str, Any]]:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, **more}}
    return talk(tools=[tool], tool_choice=choice)


LARGE: dict[str, tuple[str, dict[str, Any]]] = {
    "GBNF": constrained(grammar=RULES),
    "an enum": constrained(json={"enum": list(range(1_000_000))}),
    "parts of a message": talk(messages=[{"role": "user", "content": MANY}]),
    "allowed ids": text(allowed_token_ids=list(range(1_000_000))),
    "an expression": constrained(regex="a" * (8 * MB - 200)),
    "choices": constrained(choice=["a" * 8000 + str(number) for number in range(1000)]),
    "an enum that just fits": constrained(json={"enum": list(range(37_000))}),
    "an enum that just does not fit": constrained(json={"enum": list(range(40_000))}),
    "ids that fit": text(allowed_token_ids=[1, 2, 3, 4095] * 130_000),
    "ids that are floats": text(allowed_token_ids=[1.0] * 500_000),
    "stop ids": text(stop_token_ids=[1] * 500_000),
    "a required tool": called({"properties": {"a": {"items": MANY}}}, "required"),
    "a named tool": called({"items": MANY}, {"type": "function", "function": {"name": "f"}}),
    "a strict tool": called({"properties": {"a": {"enum": MANY}}}, strict=True),
    "a tool": called({"properties": {"a": {"enum": MANY}}}),
    "a schema": talk(
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": MANY}}}
    ),
    "variables of the template": talk(chat_template_kwargs={"x": MANY}),
    "messages": talk(messages=[USER] * 21_000),
    "a prompt": text(prompt=MANY),
    "prompts": text(prompt=["x"] * 60_000),
    **{
        f"numbers for {name}": text(**{name: MANY})
        for name in (
            "stop",
            "logit_bias",
            "temperature",
            "model",
            "user",
            "bad_words",
            "dry_sequence_breakers",
            "n",
        )
    },
    "items": ("/v1/responses", {"input": MANY}),
    "messages of a response": ("/v1/responses", {"input": [USER] * 20_000}),
    "reasoning": (
        "/v1/responses",
        {"input": [{"type": "reasoning", "summary": MANY}, USER], "max_output_tokens": 16},
    ),
    "Anthropic's content": (
        "/v1/messages",
        {"max_tokens": 1, "messages": [{"role": "user", "content": MANY}]},
    ),
    "ids for a text": ("/detokenize", {"tokens": MANY}),
    "a text": ("/tokenize", {"prompt": "x " * (4 * MB - 100)}),
}


@pytest.mark.parametrize("name", default(LARGE, 2))
def test_a_large_field_is_measured_before_it_is_converted(watched: Watched, name: str) -> None:
    """An enum of a million numbers held the loop for 284 ms, 57 KB of GBNF for 638 ms, 3.9 million parts for 1.5 s."""
    path, body = LARGE[name]
    raw = json.dumps(body, separators=(",", ":")).encode()
    assert len(raw) < 8 * MB, "the server would refuse it by its size alone"
    assert watched.step(watched.post(path, raw)) < STEP_S


# -- what is stored --------------------------------------------------------------------------------------------------


def test_a_small_request_that_follows_a_large_one_is_parsed_in_a_thread(watched: Watched) -> None:
    """Items of any size may be stored; reasoning does not count towards the limits of a chat."""
    item = {"type": "reasoning", "summary": [], "content": [[1] * 1_900_000]}
    first = watched.http.post(
        "/v1/responses",
        content=json.dumps(
            {"input": [item, USER], "store": True, "max_output_tokens": 16}, separators=(",", ":")
        ),
    )
    assert first.status_code == 200, first.text
    for name in ("previous_response_id", "previous_response\\u005fid"):
        body = b'{"%s":"%s","input":"y","max_output_tokens":16}' % (
            name.encode(),
            first.json()["id"].encode(),
        )
        send = watched.post("/v1/responses", body)
        assert send().status_code == 200
        assert watched.step(send) < STEP_S
    items = watched.http.get(f"/v1/responses/{first.json()['id']}/input_items")
    assert [each["type"] for each in items.json()["data"]] == ["message", "reasoning"]
    assert items.json()["data"][1]["content"] == item["content"]


@pytest.mark.parametrize(
    "query", ["limit=1", "limit=1&order=asc", "limit=3&after=file-00005000", "purpose=batch"]
)
def test_one_of_ten_thousand_files_is_listed(watched: Watched, query: str) -> None:
    store = watched.running.batches.store
    records = {
        name: FileRecord(id=name, filename="a", purpose="batch", tenant="")
        for name in (f"file-{number:08}" for number in range(10_000))
    }
    store.files.update(records)
    try:
        assert watched.step(lambda: watched.http.get(f"/v1/files?{query}")) < (
            STEP_S if "limit" not in query else 0.01
        )
        data = watched.http.get(f"/v1/files?{query}").json()["data"]
        expected = {"limit=1": ["file-00009999"], "limit=1&order=asc": ["file-00000000"]}
        expected["limit=3&after=file-00005000"] = ["file-00004999", "file-00004998", "file-00004997"]
        assert [each["id"] for each in data] == expected.get(query, [*records][::-1])
    finally:
        for name in records:
            del store.files[name]


@pytest.mark.parametrize("limit", ["0", "10001", "1" + "0" * 5000, "0" * 30 + "9" * 30, "-1", "1.0", "²", ""])
def test_a_limit_is_the_number_of_all_its_digits(watched: Watched, limit: str) -> None:
    assert watched.http.get("/v1/files", params={"limit": limit}).status_code == 400
    assert watched.http.get("/v1/files", params={"limit": "0" * 30 + "7"}).status_code == 200


# -- small hostile requests ------------------------------------------------------------------------------------------

SCHEMAS: list[Any] = [
    itself(20),
    itself(40),
    ladder(20),
    everyone(6),
    nested(12),
    {"$ref": "#"},
    {"$ref": "#/properties/a"},
    {"properties": {"a": {"pattern": "(a*)*$"}}},
    {"pattern": "(" * 40 + "a" + ")*" * 40},
    {"type": 5, "enum": {}},
    {"properties": {str(n): {"type": "integer"} for n in range(80)}, "required": [str(n) for n in range(80)]},
    {"allOf": [{"anyOf": [{"type": "string"}, {"type": "integer"}]}] * 30},
    {"minItems": 10**9, "type": "array"},
    {"not": {"not": {"not": {}}}},
    {"type": "string", "minLength": 10**6, "maxLength": 10**7},
    True,
    False,
    [],
    None,
    1,
]
WORDS: list[Any] = [
    "",
    "x",
    " " * 3000,
    "\n" * 1000,
    "a" * 3000,
    "\u0301" * 500,
    "\U0001f469\u200d" * 200,
    "\x00",
    "<tool_call>" * 200,
    "<function=f><parameter=a>" * 60,
    "{" * 60,
    '"' * 1000,
    "\\" * 1000,
    "{{ x }}" * 100,
    "{% for x in y %}" * 50,
    "data:image/png;base64," + "A" * 500,
    "http://127.0.0.1/",
    "file:///etc/passwd",
    "<think>" * 300,
    "</think>" * 300,
]
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**63,
    -(2**63),
    1.5,
    1e308,
    -0.0,
    [],
    {},
    [[]] * 300,
    [{}] * 300,
    [1] * 1000,
    {str(n): n for n in range(300)},
    ["x"] * 300,
    [None] * 300,
    [[[[[[[[[[[[]]]]]]]]]]]],
    {"a": {"a": {"a": {"a": {}}}}},
    *WORDS,
    *SCHEMAS,
]
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SEEDS: dict[str, list[dict[str, Any]]] = {
    TEXTS: [
        {
            "prompt": "x",
            "max_tokens": 1,
            "stop": ["a"],
            "logit_bias": {"1": 1},
            "bad_words": ["b"],
            "logprobs": 1,
        },
        {"prompt": [1, 2], "max_tokens": 1, "structured_outputs": {"regex": "a+"}, "allowed_token_ids": [1]},
        {"prompt": "x", "max_tokens": 1, "structured_outputs": {"grammar": 'start: "a"'}, "suffix": "y"},
    ],
    CHATS: [
        {
            "messages": [USER],
            "max_tokens": 1,
            "tools": [FUNCTION],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
        },
        {
            "messages": [USER, {"role": "assistant", "content": "y", "tool_calls": []}, USER],
            "max_tokens": 1,
            "stop": "a",
        },
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
            "max_tokens": 1,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "object"}},
            },
        },
        {"messages": [USER], "max_tokens": 1, "chat_template_kwargs": {"a": 1}, "reasoning_effort": "low"},
    ],
    "/v1/responses": [
        {
            "input": [USER],
            "max_output_tokens": 16,
            "tools": [{"type": "function", "name": "f", "parameters": {}}],
        },
        {
            "input": "x",
            "instructions": "y",
            "previous_response_id": "z",
            "store": True,
            "max_output_tokens": 16,
        },
        {
            "input": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]}, USER],
            "reasoning": {},
        },
    ],
    "/v1/messages": [
        {"max_tokens": 1, "messages": [USER], "system": "x", "tools": [{"name": "f", "input_schema": {}}]},
        {
            "max_tokens": 1,
            "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}],
        },
    ],
    "/tokenize": [{"prompt": "x"}, {"messages": [USER], "tools": [FUNCTION], "return_token_strs": True}],
    "/detokenize": [{"tokens": [1, 2]}],
    "/v1/batches": [
        {"input_file_id": "file-1", "endpoint": TEXTS, "completion_window": "24h", "metadata": {"a": "b"}}
    ],
}


MOST_BYTES = 16 << 10  # a body of so many is parsed in the loop


def mutated(draw: random.Random, value: Any, depth: int = 0) -> Any:
    """A value some part of which is replaced by a hostile one."""
    if depth and draw.random() < 0.25:
        return draw.choice(VALUES)
    if isinstance(value, dict) and value:
        changed = dict(value)
        name = draw.choice(list(value))
        changed[name] = mutated(draw, value[name], depth + 1)
        if draw.random() < 0.1:
            changed[draw.choice(["x", "n", "seed", "a" * 2000, "", "min_tokens", "top_p"])] = draw.choice(
                VALUES
            )
        return changed
    if isinstance(value, list) and value:
        place = draw.randrange(len(value))
        changed_items = [*value[:place], mutated(draw, value[place], depth + 1), *value[place + 1 :]]
        return changed_items * draw.choice([1, 1, 1, 30])
    return draw.choice(VALUES)


def hostile(draw: random.Random, path: str) -> bytes:
    """A small body, valid but for some parts; some of them are no JSON."""
    body = draw.choice(SEEDS[path])
    for _ in range(draw.choice([1, 1, 2, 3])):
        body = mutated(draw, body)
    raw = beginning(body)
    if draw.random() < 0.05:
        place = draw.randrange(len(raw))
        raw = (
            raw[:place]
            + draw.choice([b"", b"[" * 500, b'"', b"\xff", b"9" * 5000, b'{"a":' * 300])
            + raw[place + 1 :]
        )
    return raw[:MOST_BYTES]


def beginning(body: Any) -> bytes:
    """A value as JSON, cut off. Written whole, lists repeated in lists repeated in lists would take gigabytes."""
    pieces, size = [], 0
    for piece in json.JSONEncoder().iterencode(body):
        pieces.append(piece)
        size += len(piece)
        if size > MOST_BYTES:
            break
    return "".join(pieces).encode()[:MOST_BYTES]


COUNTS = [
    20,
    pytest.param(200, marks=pytest.mark.full),
    pytest.param(10_000, marks=pytest.mark.release),
]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("path", SEEDS)
def test_small_hostile_bodies_hold_nobody_up(watched: Watched, path: str, count: int) -> None:
    draw = random.Random(f"{path}{count}")
    with ThreadPoolExecutor(4) as threads:
        for begin in range(0, count, 20):
            sends = [watched.post(path, hostile(draw, path)) for _ in range(min(20, count - begin))]
            watched.watch.longest()
            answers = list(threads.map(lambda send: send(), sends))
            assert all(answer.status_code < 500 for answer in answers), [
                a.text for a in answers if a.status_code >= 500
            ]
            if watched.watch.longest() >= STEP_S:
                assert max(map(watched.step, sends)) < STEP_S
    assert watched.http.get("/health").status_code == 200


def form(draw: random.Random) -> tuple[bytes, bytes]:
    """A boundary and a damaged form."""
    boundary = draw.choice([b"B", b"B" * 70, b"-" * 70, b"a-a-a-a"])
    lines = [
        b"--" + boundary,
        b'content-disposition: form-data; name="file"; filename="a"',
        b"",
        b"{}",
        b"--" + boundary + b"--",
        b'content-disposition: form-data; name="purpose"',
        b"batch",
        b"\r\n",
        b"-" * 3000,
        (b"\r\n--" + boundary)[:-1] * 200,
        b'content-disposition: form-data; name="' + b'\\"' * 1000,
        b"x: y",
        b"content-type: " + b";a=b" * 500,
        b"\xff" * 100,
    ]
    parts = [draw.choice(lines) for _ in range(draw.randrange(40))]
    begin = [lines[0], draw.choice([lines[1], lines[5]]), b"", b"x"]
    return boundary, b"\r\n".join([*begin, *parts] if draw.random() < 0.8 else parts)


# Starlette leaves the file of a form that is damaged behind it to Python, which closes it with a warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("count", COUNTS)
def test_small_hostile_forms_hold_nobody_up(watched: Watched, count: int) -> None:
    draw = random.Random(count)
    for _ in range(count):
        boundary, body = form(draw)
        headers = {"content-type": f"multipart/form-data; boundary={boundary.decode()}"}
        assert watched.step(lambda: watched.http.post("/v1/files", content=body, headers=headers)) < STEP_S  # noqa: B023


# -- parsers of what a model wrote -----------------------------------------------------------------------------------

UNITS = [
    *PIECES,
    *filter(None, WORDS),
    "<tool_call><function=f>",
    "<parameter=a>",
    "</parameter>",
    "</function></tool_call>",
    '{"name": "f", "arguments": {',
    '{"name":',
    ",",
    "; ",
    "[ARGS]",
    "f[ARGS]{}",
    "<|channel|>commentary to=functions.f",
]


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(
    "count", [100, pytest.param(500, marks=pytest.mark.full), pytest.param(10_000, marks=pytest.mark.release)]
)
def test_small_hostile_answers_are_parsed_in_few_operations(name: str, count: int) -> None:
    """Also token by token. The number of calls is linear in the text."""
    draw = random.Random(f"{name}{count}")
    message_of(PARSERS[name](), "".join(UNITS)[:4000])  # the patterns of a set of tools are compiled once
    for number in range(count):
        answer = "".join(draw.choice(UNITS) for _ in range(draw.randrange(1, 12)))[:4000]
        parser, message = PARSERS[name](), Message()
        size = draw.choice([1, 3, 50]) if number % 10 == 0 else 4096

        def feed(
            parser: Any = parser, message: Any = message, size: int = size, answer: str = answer
        ) -> None:
            for begin in range(0, len(answer), size):
                message.add(parser.feed(answer[begin : begin + size]))
            message.add(parser.finish())

        most = 2000 + 100 * len(answer)
        assert calls_of(feed, most) <= most


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(
    "unit",
    [
        pytest.param(unit, marks=pytest.mark.full if at % 4 == 0 else pytest.mark.release)
        for at, unit in enumerate(UNITS)
    ],
)
def test_a_long_answer_takes_linear_time(name: str, unit: str) -> None:
    """60,000 characters of one piece. What takes linear time takes a second at most, quadratic time tens of them."""
    answer = unit * (60_000 // len(unit))
    before = time.thread_time()
    message_of(PARSERS[name](), answer)
    assert time.thread_time() - before < 3
