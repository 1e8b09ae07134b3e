"""One client's large request among those of others: its answer, chat and text take turns with theirs.

Each law is stated over generated requests; tests/server/test_long_answers.py does the same over HTTP.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.test_delivery import Spelling
from tests.support.turns import assert_turns
from xla_engine.openai import answers
from xla_engine.openai.answers import answer_pieces
from xla_engine.openai.call import HttpCall
from xla_engine.openai.requests import LineError, parse_record
from xla_engine.openai.results import ResultHeader, result_body
from xla_engine.outputs import CompletionOutput, Logprob, RequestOutput
from xla_engine.server import preparation, turns
from xla_engine.server.errors import ApiError
from xla_engine.server.preparation import Rendering, chat_size
from xla_engine.server.service import answer_values
from xla_engine.server.turns import Turns
from xla_engine.text.parsers.chats import Chat
from xla_engine.text.tokenizer import Tokenizer

CHAT_URL, TEXT_URL = "/v1/chat/completions", "/v1/completions"
MESSAGE = {"role": "user", "content": "x"}


class Letters(Spelling):
    """A tokenizer of 26 letters that counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def incremental(self, skip: bool = True) -> Spelling:
        return self

    def token_bytes(self, token_id: int) -> bytes:
        self.asked += 1
        return bytes([ord("a") + token_id])


def scores(token_id: int, width: int) -> dict[int, Logprob]:
    others = [(token_id + step) % 25 for step in range(width)]
    return {each: Logprob(-0.5 - rank, rank) for rank, each in enumerate(others, 1)}


def tops(ids: list[int], width: int | None) -> tuple[dict[int, Logprob], ...] | None:
    return tuple(scores(each, width) for each in ids) if width else None


@st.composite
def answered(draw: st.DrawFn) -> tuple[HttpCall, list[RequestOutput]]:
    """A request, and a result that an engine may have returned for it."""
    is_chat, width = draw(st.booleans()), draw(st.sampled_from([None, 0, 1, 20]))
    n, most = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    prompts = [
        draw(st.lists(st.integers(0, 24), min_size=1, max_size=40)) for _ in range(draw(st.integers(1, 3)))
    ]
    body: dict[str, Any] = {"n": n, "max_tokens": most, "temperature": 1}
    if is_chat:
        body |= {
            "messages": [MESSAGE],
            **({} if width is None else {"logprobs": True, "top_logprobs": width}),
        }
        prompts = prompts[:1]
    else:
        body |= {"prompt": prompts, "echo": draw(st.booleans()), "logprobs": width}
    if not body.get("echo") and draw(st.booleans()):
        body["prompt_logprobs"] = 2
    record = {"method": "POST", "url": CHAT_URL if is_chat else TEXT_URL, "body": body}
    request = parse_record(record, 1)
    assert not isinstance(request, LineError), request
    params, outputs = request.params, []
    for number, ids in enumerate(prompts):
        made = [draw(st.lists(st.integers(0, 24), min_size=0, max_size=most)) for _ in range(n)]
        told = params.prompt_logprobs
        outputs.append(
            RequestOutput(
                request_id=str(number),
                prompt=draw(st.sampled_from([None, "x" * len(ids)])),
                prompt_token_ids=tuple(ids),
                outputs=tuple(
                    CompletionOutput(
                        index=index,
                        text="".join(chr(ord("a") + each) for each in found),
                        token_ids=tuple(found),
                        logprobs=None if params.logprobs is None else (-0.5,) * len(found),
                        top_logprobs=tuple(scores(each, params.logprobs) for each in found)
                        if params.logprobs
                        else None,
                        finish_reason="length",
                    )
                    for index, found in enumerate(made)
                ),
                finished=True,
                prompt_logprobs=None
                if told is None
                else (None, *(scores(each, max(told, 1)) for each in ids[1:])),
            )
        )
    return HttpCall(request=request, return_token_ids=draw(st.booleans())), outputs


def values_in(answer: dict[str, Any]) -> int:
    """The tokens whose log-probabilities the answer contains, with their values."""
    count = 0
    for choice in [answer, *answer["choices"]]:
        block = choice.get("logprobs") or {}
        count += len(block.get("tokens") or ())
        count += sum(len(each or ()) for each in block.get("top_logprobs") or ())
        count += sum(1 + len(each["top_logprobs"]) for each in block.get("content") or ())
        count += sum(1 + len(each or ()) for each in choice.get("prompt_logprobs") or ())
    return count


@settings(max_examples=150, deadline=None)
@given(case=answered())
def test_an_answer_in_pieces_is_the_answer(case: tuple[HttpCall, list[RequestOutput]]) -> None:
    """For any n, prompts, echo and log-probabilities: the same JSON, in small pieces within the limit."""
    call, outputs = case
    header = ResultHeader(created=0, model="m", tokenizer=Letters())
    pieces = list(answer_pieces(call, outputs, "name", header))
    whole = json.loads(b"".join(pieces))
    expected = json.loads(json.dumps(result_body(call.request, outputs, "name", header)))
    for name in ("prompt_tokens_details", "completion_tokens_details"):
        del whole["usage"][name]
    for choice in [whole, *whole["choices"]]:
        for name in ("token_ids", "prompt_token_ids"):
            assert (choice.pop(name, None) is None) or call.return_token_ids
    assert whole == expected
    assert max(map(len, pieces)) < 64 * answers.ENTRIES
    lengths = [len(output.prompt_token_ids) for output in outputs]
    assert values_in(whole) <= answer_values(call.request, lengths, 100)


@pytest.mark.parametrize("n", [1, 16, 128])
def test_a_prompt_that_is_repeated_is_encoded_once(n: int) -> None:
    """The texts of its tokens are looked up once for all choices."""
    ids = [7] * 480
    body = {"prompt": [ids], "n": n, "max_tokens": 1, "echo": True, "logprobs": 20, "temperature": 1}
    request = parse_record({"method": "POST", "url": TEXT_URL, "body": body}, 1)
    assert not isinstance(request, LineError)
    output = RequestOutput(
        request_id="a",
        prompt=None,
        prompt_token_ids=tuple(ids),
        outputs=tuple(
            CompletionOutput(
                index=index,
                text="b",
                token_ids=(1,),
                logprobs=(-1.0,),
                top_logprobs=(scores(1, 20),),
                finish_reason="length",
            )
            for index in range(n)
        ),
        finished=True,
        prompt_logprobs=(None, *(scores(7, 20) for _ in ids[1:])),
    )
    letters = Letters()
    header = ResultHeader(created=0, model="m", tokenizer=letters)
    pieces = list(answer_pieces(HttpCall(request=request), [output], "name", header))
    assert letters.asked <= 480 * 22 + n * 22
    assert len(json.loads(b"".join(pieces))["choices"][-1]["logprobs"]["tokens"]) == 481
    kept = {id(piece) for piece in pieces if len(piece) > 1000}
    assert sum(map(len, pieces)) > n * 100_000 and len(kept) <= 80, "each choice has copies of its own"


def test_long_answers_work_one_at_a_time_between_turns_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PIECE_S", 0)  # each piece is a turn's work
    made: list[int] = []

    def pieces(number: int) -> Iterator[bytes]:
        for _ in range(50):
            made.append(number)
            yield b"x" * 100

    async def main() -> None:
        circle, most, ticks = Turns(), 0, 0

        async def read(number: int) -> int:
            return sum([len(part) async for part in circle.parts(pieces(number))])

        tasks = [asyncio.create_task(read(number)) for number in range(6)]
        await asyncio.sleep(0)  # each has had the first piece, for which nobody waits
        while not all(task.done() for task in tasks):
            before = len(made)
            await asyncio.sleep(0)
            most, ticks = max(most, len(made) - before), ticks + 1
        assert [task.result() for task in tasks] == [5000] * 6
        assert most <= 1 and ticks >= 6 * 49
        later = made[6:60]
        assert all(abs(later.count(number) - 9) <= 1 for number in range(6)), (
            "one of them waits for the others"
        )

    asyncio.run(main())


@pytest.mark.parametrize(
    "chat",
    [
        Chat(messages=(MESSAGE,) * 250_000),
        Chat(messages=({"role": "user", "content": [{"type": "text", "text": "x"}] * 250_000},)),
        Chat(messages=({"role": "assistant", "tool_calls": [{"a": [[]] * 250_000}]},)),
        Chat(messages=(MESSAGE,), options={"tools": [{"type": "function"}] * 250_000}),
        Chat(messages=(MESSAGE,), options={"chat_template_kwargs": {str(n): n for n in range(250_000)}}),
        Chat(messages=({"role": "user", "content": "x" * (preparation.MAX_CHARACTERS + 1)},)),
        Chat(messages=({"role": "user", "x" * (preparation.MAX_CHARACTERS + 1): ""},)),
    ],
)
def test_a_chat_beyond_the_bounds_is_refused_before_it_is_rendered(chat: Chat) -> None:
    calls: list[Any] = []
    beside = Rendering(lambda *a, **k: calls.append(a) or "x")
    with pytest.raises(ApiError, match="send") as refused:
        asyncio.run(beside.render(chat, "a"))
    assert refused.value.status == 400 and refused.value.param == "messages"
    assert not calls and not beside.shares.held


@settings(max_examples=50, deadline=None)
@given(
    texts=st.lists(st.text(max_size=50), min_size=1, max_size=20),
    tools=st.lists(st.dictionaries(st.text(max_size=5), st.integers()), max_size=5),
)
def test_the_size_of_a_chat_counts_all_its_text(texts: list[str], tools: list[dict[str, int]]) -> None:
    messages = tuple({"role": "user", "content": text} for text in texts)
    size = chat_size(Chat(messages=messages, options={"tools": tools}))
    names = sum(len(name) for tool in tools for name in tool)
    assert size.characters == sum(map(len, texts)) + len(texts) * len("roleusercontent") + names
    assert size.values >= 3 * len(texts) + len(tools)


class Renderer:
    """Renders when it is allowed to, and records whose chat it was."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.seen: list[str] = []

    def __call__(self, messages: Any, process: object, **_: Any) -> str:
        text = messages[0]["content"]
        if len(text) > 2:
            assert self.may.wait(600)
        self.seen.append(text[:2])
        return str(text)


LARGE = "!" * (preparation.SMALL_CHARACTERS + 1)


def chat(text: str) -> Chat:
    return Chat(messages=({"role": "user", "content": text},))


@settings(max_examples=20, deadline=None)
@given(counts=st.lists(st.integers(1, 6), min_size=2, max_size=4))
def test_keys_take_turns_and_small_chats_wait_for_no_large_one(counts: list[int]) -> None:
    """The k-th chat of any key comes before the (k + 2)-th of another, however many chats each key sends."""

    async def main() -> list[str]:
        renderer = Renderer()
        beside = Rendering(renderer)
        large = [
            asyncio.create_task(beside.render(chat(f"{key}{number}" + LARGE), str(key)))
            for key, count in enumerate(counts)
            for number in range(count)
        ]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(beside.render(chat("hi"), "0"), 300) == "hi", "it waits for a large one"
        assert not any(task.done() for task in large)
        renderer.may.set()
        await asyncio.gather(*large)
        assert not beside.shares.held
        beside.close()
        return renderer.seen[1:]

    assert_turns(asyncio.run(main()), counts)


def test_the_queue_for_the_template_is_bounded_and_no_key_fills_it() -> None:
    async def main() -> None:
        renderer = Renderer()
        beside = Rendering(renderer)
        huge = chat("!" * (preparation.MAX_CHARACTERS // 2))
        tasks = [asyncio.create_task(beside.render(huge, "a")) for _ in range(50)]
        await asyncio.sleep(0)
        other = asyncio.create_task(beside.render(huge, "b"))
        await asyncio.sleep(0)
        assert beside.shares.held <= preparation.QUEUED_CHARACTERS
        renderer.may.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [each for each in found if isinstance(each, ApiError)]
        assert refused and len(refused) < 50 and {each.status for each in refused} == {429}
        assert len(await other) == preparation.MAX_CHARACTERS // 2
        beside.close()

    asyncio.run(main())


def test_a_chat_whose_client_has_gone_gives_its_turn_away() -> None:
    async def main() -> None:
        renderer = Renderer()
        beside = Rendering(renderer)
        tasks = [asyncio.create_task(beside.render(chat(f"a{n}" + LARGE), "a")) for n in range(4)]
        await asyncio.sleep(0.01)
        for gone in (tasks[0], tasks[2]):
            gone.cancel()
        renderer.may.set()
        assert len(await asyncio.wait_for(tasks[3], 300)) > 2
        assert (await tasks[1])[:2] == "a1" and not beside.shares.held
        assert "a2" not in renderer.seen
        beside.close()

    asyncio.run(main())


def test_a_long_text_is_tokenised_while_other_threads_go_on(tokenizer: Tokenizer) -> None:
    """The library's `encode` holds the interpreter for all of a text."""
    text = "def f(x): return x + 1\n" * 45_000
    done = threading.Event()
    found: list[int] = []

    def encode() -> None:
        found.extend(tokenizer.encode(text))
        done.set()

    threading.Thread(target=encode).start()
    turns_taken = 0
    while not done.wait(0.001):
        turns_taken += 1
    assert turns_taken > 20
    assert found[:200] == tokenizer.encode(text[:4000])[:200] and tokenizer.decode(found) == text


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    from xla_engine.environment import embedded_model_directory

    return Tokenizer.from_pretrained(embedded_model_directory())
