"""Build a response from a parser's events: its items, and the events of its stream."""

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

from xla_engine.batch.responses.logprobs import MessageLogprobs
from xla_engine.outputs import CompletionOutput
from xla_engine.text.parsers.scan import Content, Event, Parser, Reasoning, ToolArguments, ToolStart

# defaults of a tool's fields in an answer
_TOOL = {"description": None, "parameters": None, "strict": None}
_ECHOED = ("instructions", "max_output_tokens", "temperature", "top_p", "user", "metadata")


class ResponseBuilder:
    """Builds one response. Streamed and unstreamed answers take the same steps."""

    def __init__(
        self,
        name: str,
        *,
        body: Mapping[str, Any],
        model: str,
        created: int,
        logprobs: MessageLogprobs | None = None,
    ) -> None:
        """logprobs: the log-probabilities of tokens, if requested; it has read those whose text is added."""
        self._logprobs = logprobs
        self.output: list[dict[str, Any]] = []
        self._name = name
        self._number = -1
        self._open: dict[str, Any] | None = None
        self._response: dict[str, Any] = {
            "id": name,
            "object": "response",
            "created_at": created,
            "completed_at": None,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "previous_response_id": body.get("previous_response_id"),
            "reasoning": {"effort": (body.get("reasoning") or {}).get("effort"), "summary": None},
            "store": body.get("store") is True,
            "service_tier": "default",
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": [_TOOL | tool for tool in body.get("tools") or []],
            "truncation": body.get("truncation") or "disabled",
            "usage": None,
            **{key: body.get(key) for key in _ECHOED},
            "metadata": body.get("metadata") or {},
            "temperature": body.get("temperature") if body.get("temperature") is not None else 1.0,
            "top_p": body.get("top_p") if body.get("top_p") is not None else 1.0,
            "presence_penalty": body.get("presence_penalty") or 0.0,
            "frequency_penalty": body.get("frequency_penalty") or 0.0,
            "top_logprobs": body.get("top_logprobs") or 0,
            "max_tool_calls": None,
            "safety_identifier": body.get("safety_identifier"),
            "prompt_cache_key": body.get("prompt_cache_key"),
        }

    def begin(self) -> Iterator[dict[str, Any]]:
        """The first events."""
        yield self._event("response.created", response=dict(self._response))
        yield self._event("response.in_progress", response=dict(self._response))

    def add(self, events: Iterable[Event]) -> Iterator[dict[str, Any]]:
        """The events for more text."""
        for event in events:
            match event:
                case Content(text):
                    yield from self._item("message")
                    yield from self._delta("response.output_text.delta", "text", text)
                case Reasoning(text):
                    yield from self._item("reasoning")
                    yield from self._delta("response.reasoning_text.delta", "text", text)
                case ToolStart(name):
                    yield from self._close()
                    yield from self._item("function_call", name=name)
                case ToolArguments(text):
                    assert self._open is not None
                    self._open["arguments"] += text
                    yield self._at("response.function_call_arguments.delta", delta=text)

    def end(self, *, reason: str | None, usage: dict[str, Any], now: int) -> Iterator[dict[str, Any]]:
        """The last events. reason: "stop" or "length"."""
        cut = reason == "length"
        if not self.output:
            yield from self._item("message")
        yield from self._close(cut=cut)
        self._response |= {
            "status": "incomplete" if cut else "completed",
            "completed_at": None if cut else now,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self.output,
            "usage": usage,
        }
        yield self._event("response.incomplete" if cut else "response.completed", response=self.response)

    def whole(
        self, parser: Parser, completion: CompletionOutput, *, usage: dict[str, Any], now: int
    ) -> dict[str, Any]:
        """The complete response, for a request that does not stream."""
        for _ in self.add([*parser.feed(completion.text), *parser.finish()]):
            pass
        for _ in self.end(reason=completion.finish_reason, usage=usage, now=now):
            pass
        return self.response

    def failed(self, code: str, message: str) -> dict[str, Any]:
        """The last event of a response that fails."""
        error = {"code": code, "message": message}
        self._response |= {"status": "failed", "error": error, "output": self.output}
        return self._event("response.failed", response=self.response)

    @property
    def response(self) -> dict[str, Any]:
        """The response so far."""
        return dict(self._response)

    def _item(self, kind: str, *, name: str = "") -> Iterator[dict[str, Any]]:
        """Open an item of this kind unless one is open."""
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self._close()
        token = blake2b(f"{self._name}/{len(self.output)}".encode(), digest_size=16).hexdigest()
        item: dict[str, Any] = {"type": kind, "status": "in_progress"}
        match kind:
            case "message":
                item |= {"id": f"msg_{token}", "role": "assistant", "content": []}
            case "reasoning":
                item |= {"id": f"rs_{token}", "summary": [], "content": []}
            case _:
                item |= {"id": f"fc_{token}", "call_id": f"call_{token[:24]}", "name": name, "arguments": ""}
        self._open = item
        self.output.append(item)
        yield self._event("response.output_item.added", output_index=len(self.output) - 1, item=_copied(item))
        if kind != "function_call":
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            if kind == "message":
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._parts.append(part)
            yield self._at("response.content_part.added", content_index=0, part=_copied(part))

    def _delta(self, event: str, key: str, text: str) -> Iterator[dict[str, Any]]:
        self._parts[0][key] += text
        extra = {}
        if event == "response.output_text.delta":
            extra["logprobs"] = self._new_logprobs()
        yield self._at(event, content_index=0, delta=text, **extra)

    def _new_logprobs(self) -> list[Any]:
        """Those of the open message that nothing has told yet."""
        if self._logprobs is None:
            return []
        found = self._logprobs.take(sum(item["type"] == "message" for item in self.output) - 1)
        self._parts[0]["logprobs"] += found
        return found

    def _close(self, *, cut: bool = False) -> Iterator[dict[str, Any]]:
        item = self._open
        if item is None:
            return
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._at("response.function_call_arguments.done", **done)
        else:
            part = self._parts[0]
            word = "output_text" if item["type"] == "message" else "reasoning_text"
            if item["type"] == "message" and (late := self._new_logprobs()):  # of tokens without text
                yield self._at("response.output_text.delta", content_index=0, delta="", logprobs=late)
            extra = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            yield self._at(f"response.{word}.done", content_index=0, text=part["text"], **extra)
            yield self._at("response.content_part.done", content_index=0, part=dict(part))
        item["status"] = "incomplete" if cut else "completed"
        self._open = None
        yield self._event("response.output_item.done", output_index=len(self.output) - 1, item=_copied(item))

    @property
    def _parts(self) -> list[dict[str, Any]]:
        assert self._open is not None
        parts: list[dict[str, Any]] = self._open["content"]
        return parts

    def _at(self, kind: str, **fields: Any) -> dict[str, Any]:
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], output_index=len(self.output) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}


def _copied(item: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of an item that later changes do not affect."""
    return {
        key: [dict(part) if isinstance(part, dict) else part for part in value]
        if isinstance(value, list)
        else value
        for key, value in item.items()
    }
