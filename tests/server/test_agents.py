"""Agents of other projects run their tools over the server, in each format in which models write calls.

The model's answers are forced by a grammar, special tokens included; everything else is real: the template, the format
that the server detects, the tokens, the parser, the client's requests and its tools. LangChain and OpenAI's Agents SDK
are in the extra `agents`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import Running
from tests.support.call_forms import FORMS, HARMONY
from tests.support.format_models import FORMATS, format_model
from xla_engine.async_llm import AsyncLLM
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.sampling_params import SamplingParams
from xla_engine.server.service import Service
from xla_engine.server.settings import ServerSettings
from xla_engine.structured_outputs import StructuredOutputsParams
from xla_engine.text.parsers.chats import Reading

pytestmark = pytest.mark.full
SLIPS = {"bare": "hermes", "fence": "hermes", "qwen3_coder without a beginning": "qwen3_coder"}
MODELS = {**{name: name for name in FORMATS}, **SLIPS}  # by the form in which the model writes its calls
WRITE = {
    **FORMS,
    **HARMONY,
    "deepseek": FORMS["deepseek v3.1"],
    "kimi_k2": FORMS["kimi k2"],
    "gemma4": FORMS["gemma4"],
}
ASK, CITY, ANSWER = "How warm is it in two days?", 'New "York" </tool_call>', "It will be 21 degrees."


@dataclass
class Forced:
    """A server whose model answers with given texts, in order."""

    url: str
    form: str
    texts: list[str] = field(default_factory=list)
    ran: list[tuple[str, Any]] = field(default_factory=list)

    def begin(self) -> None:
        """A new session: a call of each tool, then an answer."""
        write = WRITE[self.form]
        text = "<|channel|>final<|message|>" + ANSWER if self.form == "harmony" else ANSWER
        self.texts[:] = [write("get_weather", {"city": CITY}), write("add", {"a": 20, "b": 1}), text]
        self.ran.clear()

    def ended(self, answer: object) -> None:
        assert answer == ANSWER and not self.texts
        assert self.ran == [("get_weather", CITY), ("add", (20, 1))]

    def get_weather(self, city: str) -> str:
        """The weather in a city."""
        self.ran.append(("get_weather", city))
        return f"20 degrees in {city}"

    def add(self, a: int, b: int) -> int:
        """Adds two numbers."""
        self.ran.append(("add", (a, b)))
        return a + b


def grammar_of(text: str, model: str) -> str:
    """A grammar of one text, with the special tokens of a format in it."""
    special, ends = FORMATS[model].special, FORMATS[model].ends  # the engine itself ends an answer
    parts = re.split("(" + "|".join(map(re.escape, special)) + ")", text)
    written = (
        json.dumps(part, ensure_ascii=False)
        if part not in special
        else part
        if part[0] == "<"
        else f"<{part}>"
        for part in parts
        if part and part not in ends
    )
    return '%llguidance {"no_forcing": true}\nstart: ' + " ".join(written)


@pytest.fixture(scope="module", params=MODELS)
def forced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forced]:
    form, model = request.param, MODELS[request.param]
    folder = format_model(model, tmp_path_factory.mktemp("formats") / model)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    engine = XlaBatchEngine.from_pretrained(str(folder), EngineConfig(max_num_seqs=2, max_model_len=2048))
    server = Running(Service(AsyncLLM.from_engine(engine), ServerSettings(model_names=("model",))))
    found = Forced(f"{server.url}/v1", form)
    prepared = Reading.prepared

    def force(reading: Reading, params: SamplingParams) -> SamplingParams:
        held = StructuredOutputsParams(grammar=grammar_of(found.texts.pop(0), model))
        return replace(prepared(reading, params), structured_outputs=held)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Reading, "prepared", force)
        yield found
    server.stop()


@pytest.fixture
def client(forced: Forced) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=forced.url, api_key="none", max_retries=0) as client:
        yield client


def function(name: str, **properties: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"name": name, "description": name, "parameters": schema, "strict": True}


FUNCTIONS = [function("get_weather", city="string"), function("add", a="integer", b="integer")]


@pytest.mark.parametrize("stream", [False, True])
def test_the_openai_client(forced: Forced, client: openai.OpenAI, stream: bool) -> None:
    forced.begin()
    tools: Any = [{"type": "function", "function": each} for each in FUNCTIONS]
    messages: list[Any] = [{"role": "user", "content": ASK}]
    while True:
        options: Any = {"model": "model", "messages": messages, "tools": tools}
        if stream:
            with client.chat.completions.stream(**options) as events:
                for _ in events:
                    pass
                choice = events.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(**options).choices[0]
        messages.append(choice.message.model_dump(exclude_none=True))
        if not choice.message.tool_calls:
            break
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        for call in choice.message.tool_calls:
            run: Callable[..., object] = getattr(forced, call.function.name)
            result = str(run(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    forced.ended(choice.message.content)


@pytest.mark.parametrize("stream", [False, True])
def test_the_openai_client_with_responses(forced: Forced, client: openai.OpenAI, stream: bool) -> None:
    forced.begin()
    tools: Any = [{"type": "function", **each} for each in FUNCTIONS]
    items: list[Any] = [{"role": "user", "content": ASK}]
    while True:
        options: Any = {"model": "model", "input": items, "tools": tools}
        if stream:
            with client.responses.stream(**options) as events:
                for _ in events:
                    pass
                answer = events.get_final_response()
        else:
            answer = client.responses.create(**options)
        items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            break
        for call in calls:
            run: Callable[..., object] = getattr(forced, call.name)
            result = str(run(**json.loads(call.arguments)))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    forced.ended(answer.output_text)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_agents_sdk(forced: Forced, api: str, stream: bool) -> None:
    agents = pytest.importorskip("agents", reason="pip install openai-agents (extra agents) runs this test")
    agents.set_tracing_disabled(True)
    forced.begin()

    async def main() -> object:
        model_class = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
        async with openai.AsyncOpenAI(base_url=forced.url, api_key="none", max_retries=0) as client:
            agent = agents.Agent(
                name="agent",
                model=model_class("model", openai_client=client),
                tools=[agents.function_tool(forced.get_weather), agents.function_tool(forced.add)],
            )
            if not stream:
                return (await agents.Runner.run(agent, ASK)).final_output
            result = agents.Runner.run_streamed(agent, ASK)
            async for _ in result.stream_events():
                pass
            return result.final_output

    forced.ended(asyncio.run(main()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stream", [False, True])
def test_langchain(forced: Forced, stream: bool) -> None:
    reason = "pip install langchain langchain-openai (extra agents) runs this test"
    langchain_openai = pytest.importorskip("langchain_openai", reason=reason)
    agents = pytest.importorskip("langchain.agents", reason=reason)
    forced.begin()

    def get_weather(city: str) -> str:
        """The weather in a city."""
        return forced.get_weather(city)

    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return forced.add(a, b)

    with httpx.Client(timeout=1800) as http:
        model = langchain_openai.ChatOpenAI(
            base_url=forced.url,
            api_key="none",
            model="model",
            max_retries=0,
            streaming=stream,
            http_client=http,
        )
        agent = agents.create_agent(model, tools=[get_weather, add])
        ask = {"messages": [{"role": "user", "content": ASK}]}
        if not stream:
            forced.ended(agent.invoke(ask)["messages"][-1].content)
            return
        texts = [
            piece.content
            for piece, _ in agent.stream(ask, stream_mode="messages")
            if type(piece).__name__ == "AIMessageChunk"
        ]
        forced.ended("".join(texts))
