"""Constraints that take long to compile delay only the clients who sent them."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.conftest import Running
from tests.support.turns import assert_turns
from xla_engine.errors import InvalidRequestError
from xla_engine.openai.requests import LineError
from xla_engine.sampling_params import SamplingParams
from xla_engine.server.errors import ApiError, ended
from xla_engine.server.preparation import MAX_WAITING, Constraints


class Compiler:
    """Compiles when it is allowed to, and records the order."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.seen: list[str] = []

    def __call__(self, params: SamplingParams) -> None:
        assert self.may.wait(600)
        self.seen.append(regex_of(params))


def regex_of(params: SamplingParams) -> str:
    assert params.structured_outputs is not None and params.structured_outputs.regex is not None
    return params.structured_outputs.regex


def constrained(regex: str) -> SamplingParams:
    return SamplingParams(structured_outputs={"regex": regex})  # type: ignore[arg-type]


@settings(max_examples=20, deadline=None)
@given(counts=st.lists(st.integers(1, 6), min_size=2, max_size=4))
def test_keys_take_turns_and_what_is_known_waits_for_nothing(counts: list[int]) -> None:
    """The k-th constraint of any key comes before the (k + 2)-th of another, however many each key sends."""

    async def main() -> list[str]:
        compiler = Compiler()
        constraints = Constraints(compiler, lambda params: regex_of(params) == "known")
        tasks = [
            asyncio.create_task(constraints.compile(constrained(f"{key}{number}"), str(key)))
            for key, count in enumerate(counts)
            for number in range(count)
        ]
        await asyncio.sleep(0)
        await asyncio.wait_for(constraints.compile(constrained("known"), "0"), 300)
        await asyncio.wait_for(constraints.compile(SamplingParams(), "0"), 300)
        assert not any(task.done() for task in tasks)
        compiler.may.set()
        await asyncio.gather(*tasks)
        constraints.close()
        return compiler.seen

    assert_turns(asyncio.run(main()), counts)


def test_the_queue_is_bounded_and_no_key_fills_it() -> None:
    async def main() -> None:
        compiler = Compiler()
        constraints = Constraints(compiler, lambda _: False)
        tasks = [
            asyncio.create_task(constraints.compile(constrained(f"a{number}"), "a"))
            for number in range(MAX_WAITING)
        ]
        await asyncio.sleep(0)
        other = asyncio.create_task(constraints.compile(constrained("b"), "b"))
        await asyncio.sleep(0)
        compiler.may.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [each for each in found if isinstance(each, ApiError)]
        assert len(refused) == MAX_WAITING // 2 and {each.status for each in refused} == {429}
        await other
        assert compiler.seen.index("b") <= 2
        constraints.close()

    asyncio.run(main())


def test_a_constraint_that_is_none_is_told_to_who_sent_it_alone() -> None:
    def compile_(params: SamplingParams) -> None:
        if regex_of(params) == "bad":
            raise InvalidRequestError("structured_outputs: bad")

    async def main() -> None:
        constraints = Constraints(compile_, lambda _: False)
        bad, good = await asyncio.gather(
            constraints.compile(constrained("bad"), "a"),
            constraints.compile(constrained("x"), "a"),
            return_exceptions=True,
        )
        assert isinstance(bad, InvalidRequestError) and good is None
        constraints.close()

    asyncio.run(main())


def test_other_requests_are_answered_while_constraints_are_compiled(
    server: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are more slow constraints than threads in the event loop's pool; chats and completions are
    answered meanwhile."""
    compiler = Compiler()
    monkeypatch.setattr(server.service.constraints, "_compile", compiler)

    def ask(number: int) -> int:
        body: dict[str, Any] = {
            "prompt": "x",
            "max_tokens": 2,
            "structured_outputs": {"regex": f"z{{{number + 41}}}"},
        }
        return http.post("/v1/completions", json=body).status_code

    with ThreadPoolExecutor(48) as pool:
        slow = [pool.submit(ask, number) for number in range(48)]
        server.wait_until(lambda: server.service.constraints.shares.held == 48)
        for _ in range(3):
            chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            assert http.post("/v1/chat/completions", json=chat).status_code == 200
            assert http.post("/v1/completions", json={"prompt": "y", "max_tokens": 2}).status_code == 200
        assert not any(each.done() for each in slow)
        compiler.may.set()
        assert {each.result() for each in slow} == {200}


def test_a_row_that_its_constraint_ends_is_the_clients_fault() -> None:
    """It is a 4xx, because clients retry after a 500."""
    message = (
        "structured_outputs: regex 'a': its masks take more than 1 s and 0.02 s a token of processor time"
    )
    found = ended(LineError(line=1, custom_id="x", code="engine_fault", message=message))
    assert (found.status, found.param) == (400, "structured_outputs")
    assert ended(LineError(line=1, custom_id="x", code="engine_fault", message="else")).status == 500


SCHEMA: Any = {
    "type": "array",
    "items": {"type": "boolean"},
    "uniqueItems": True,
    "maxItems": 3,
    "not": {"const": []},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_an_answer_names_what_its_schema_leaves_to_the_client(
    http: httpx.Client, path: str, stream: bool
) -> None:
    ask: dict[str, Any] = {"temperature": 0, "stream": stream}
    if path == "/v1/responses":
        ask |= {"input": "x", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}
    else:
        ask |= {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}
        ask |= (
            {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
        )
    for _ in range(2):
        answer = http.post(path, json=ask)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-left-to-client"] == "uniqueItems, not"
    plain = {name: value for name, value in ask.items() if name not in ("response_format", "text")}
    assert "x-left-to-client" not in http.post(path, json=plain).headers
