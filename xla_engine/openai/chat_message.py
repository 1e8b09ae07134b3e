"""The message of a chat, built from a parser's events: a stream sends its increments, a whole answer is their sum.

`ResponseBuilder` and `MessageBuilder` build the answers of the Responses API and of Anthropic from the same events.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from xla_engine.text.parsers.chats import Reading
from xla_engine.text.parsers.scan import Content, Event, Reasoning, ToolArguments, ToolStart


class ChatMessage:
    """Builds one message. Streamed and unstreamed answers take the same steps."""

    def __init__(self, reading: Reading, name: str) -> None:
        """name: of the answer and choice; the ids of calls are derived from it."""
        self._offered, self._name = reading.offered, name
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []  # names of tools, and their arguments

    def add(self, events: Iterable[Event]) -> Iterator[dict[str, Any]]:
        """The increments for more text: one for each event."""
        for event in events:
            match event:
                case Content(text):
                    self._content.append(text)
                    yield {"content": text}
                case Reasoning(text):
                    self._reasoning.append(text)
                    yield {"reasoning_content": text, "reasoning": text}
                case ToolStart(name):
                    self._calls.append((name, []))
                    yield self._increment(self._call(len(self._calls) - 1))
                case ToolArguments(text):
                    name, arguments = self._calls[-1]
                    arguments.append(text)
                    is_custom = name in self._offered.custom
                    yield self._increment(
                        {"custom": {"input": text}} if is_custom else {"function": {"arguments": text}}
                    )

    @property
    def message(self) -> dict[str, Any]:
        """All increments so far."""
        calls = [self._call(number) for number in range(len(self._calls))]
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or (None if calls else ""),
            "refusal": None,
        }
        if reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls and self._offered.old:
            message["function_call"] = calls[0]["function"]
        elif calls:
            message["tool_calls"] = calls
        return message

    def finish_reason(self, reason: str | None) -> str | None:
        """The reason that a client sees, which tells of calls."""
        if reason != "stop" or not self._calls:
            return reason
        return "function_call" if self._offered.old else "tool_calls"

    def _call(self, number: int) -> dict[str, Any]:
        name, arguments = self._calls[number][0], "".join(self._calls[number][1])
        if name in self._offered.custom:
            call: dict[str, Any] = {"type": "custom", "custom": {"name": name, "input": arguments}}
        else:
            call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return {"id": call_id(self._name, number), **call}

    def _increment(self, part: dict[str, Any]) -> dict[str, Any]:
        if self._offered.old:
            return {"function_call": part["function"]}
        return {"tool_calls": [{"index": len(self._calls) - 1, **part}]}


def call_id(name: str, number: int) -> str:
    """The id of a choice's call `number`, from 0. name: of the answer and choice."""
    return "call_" + hashlib.blake2b(f"{name}/{number}".encode(), digest_size=12).hexdigest()


def read_message(reading: Reading, text: str, name: str, *, thinking: bool) -> ChatMessage:
    """The message of a whole text. thinking: whether the prompt ended with the opening tag of reasoning."""
    message, parser = ChatMessage(reading, name), reading.parser(thinking=thinking)
    deque(message.add([*parser.feed(text), *parser.finish()]), maxlen=0)
    return message
