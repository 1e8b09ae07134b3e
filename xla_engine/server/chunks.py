"""Pieces of an answer that is streamed: what is new in each output, in OpenAI's form, as server-sent events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from xla_engine.batch.results import (
    ResultHeader,
    asked_for,
    chat_logprobs,
    prompt_text,
    text_logprobs,
    with_prompt,
)
from xla_engine.outputs import CompletionOutput, RequestOutput
from xla_engine.server.wire import Call
from xla_engine.text.parsers.scan import Content, Event, Parser, Reasoning, ToolArguments, ToolStart
from xla_engine.text.parsers.tools import new_call_id

if TYPE_CHECKING:
    from xla_engine.text.tokenizer import IncrementalDetokenizer

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(value) + b"\n\n"


@dataclass(slots=True)
class _Choice:
    """What was sent of one choice."""

    tokens: int = 0
    characters: int = 0
    ended: bool = False
    echoed: bool = False
    spelled: IncrementalDetokenizer | None = None  # for the offsets of its tokens
    offset: int = 0
    parser: Parser | None = None
    calls: int = 0


class ChunkWriter:
    """Turns the outputs of one call into chunks. The texts of a choice's chunks add up to its text."""

    def __init__(self, call: Call, name: str, header: ResultHeader, *, thinking: bool = False) -> None:
        self._call = call
        self._thinking = thinking
        self._header = header
        self._is_chat = call.request.is_chat
        self._choices: dict[int, _Choice] = {}
        self._usage: dict[
            int, tuple[int, int, int]
        ] = {}  # by prompt: its tokens, the cached ones, the new ones
        self._common: dict[str, Any] = {
            "id": name,
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "created": header.created,
            "model": call.request.model or header.model,
            "system_fingerprint": header.system_fingerprint,
        }

    def events(self, index: int, output: RequestOutput) -> Iterator[bytes]:
        """What is new in the output of the prompt of this index."""
        if not self._call.request.generates:
            if not output.finished:
                return
            output = asked_for(self._call.request, output)
        per_prompt = self._call.request.params.n
        new = sum(len(completion.token_ids) for completion in output.outputs)
        prompt = (len(output.prompt_token_ids), output.num_cached_tokens)
        begun = self._usage.setdefault(index, (*prompt, 0))
        for completion in output.outputs:
            number = index * per_prompt + completion.index
            state = self._choices.get(number)
            if state is None:
                state = self._choices[number] = _Choice(parser=self._call.parser(thinking=self._thinking))
                if self._is_chat:  # before its first token
                    self._usage[index] = begun
                    role = {"role": "assistant", "content": ""}
                    beginning = {"index": number, "delta": role, "logprobs": None, "finish_reason": None}
                    yield self._event(beginning, output)
            self._usage[index] = (*prompt, new)
            for choice in self._news(number, state, output, completion):
                yield self._event(choice, output)

    def last_events(self) -> Iterator[bytes]:
        """The usage, where the call wants it, and the end."""
        if self._call.include_usage:
            yield event({**self._common, "choices": [], "usage": self.usage()})
        yield DONE

    def usage(self) -> dict[str, Any]:
        """Tokens of all prompts and choices so far."""
        prompt, cached, new = (sum(column) for column in zip(*self._usage.values(), strict=True))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _event(self, choice: dict[str, Any], output: RequestOutput) -> bytes:
        chunk = {**self._common, "choices": [choice]}
        if self._call.return_token_ids and choice.get("token_ids") is None:
            chunk["prompt_token_ids"] = output.prompt_token_ids
        if self._call.continuous_usage:
            chunk["usage"] = self.usage()
        elif self._call.include_usage:
            chunk["usage"] = None
        return event(chunk)

    def _news(
        self, number: int, state: _Choice, output: RequestOutput, completion: CompletionOutput
    ) -> list[dict[str, Any]]:
        """The part of a choice that was not sent yet, in one piece or, of a parsed chat, one for each kind of text."""
        if state.ended:
            return []
        text, ids = completion.text[state.characters :], completion.token_ids[state.tokens :]
        ended = completion.finish_reason is not None
        echo = output if self._call.request.echo and not state.echoed else None
        prompt = "" if echo is None else prompt_text(echo, self._header.tokenizer)
        pieces = self._pieces(state, prompt + text, ended=ended)
        wants_tokens = completion.logprobs is not None or self._call.return_token_ids
        if not pieces and (ended or (ids and wants_tokens)):
            pieces = [{"delta": {}} if self._is_chat else {"text": ""}]
        choices: list[dict[str, Any]] = [
            {"index": number, **piece, "logprobs": None, "finish_reason": None} for piece in pieces
        ]
        if not choices and not text:
            return []
        if choices:
            if ids or echo is not None:
                choices[0]["logprobs"] = self._logprobs(state, echo, completion)
            if self._call.return_token_ids:
                choices[0]["token_ids"] = ids
            state.tokens, state.echoed = len(completion.token_ids), True
        if ended:
            state.ended = True
            reason = completion.finish_reason
            choices[-1]["finish_reason"] = "tool_calls" if reason == "stop" and state.calls else reason
            choices[-1]["stop_reason"] = completion.stop_reason
        state.characters = len(completion.text)
        return choices

    def _pieces(self, state: _Choice, text: str, *, ended: bool) -> list[dict[str, Any]]:
        """Text as a completion or a chat has it."""
        if not self._is_chat:
            return [{"text": text}] if text else []
        if state.parser is None:
            return [{"delta": {"content": text}}] if text else []
        events = [*state.parser.feed(text), *(state.parser.finish() if ended else [])]
        return [{"delta": self._part(state, each)} for each in events]

    @staticmethod
    def _part(state: _Choice, part: Event) -> dict[str, Any]:
        """The delta of one event of a parser."""
        match part:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text, "reasoning": text}
            case ToolStart(name):
                state.calls += 1
                function = {"name": name, "arguments": ""}
                call = {
                    "index": state.calls - 1,
                    "id": new_call_id(),
                    "type": "function",
                    "function": function,
                }
                return {"tool_calls": [call]}
            case ToolArguments(text):
                return {"tool_calls": [{"index": state.calls - 1, "function": {"arguments": text}}]}

    def _logprobs(
        self, state: _Choice, echo: RequestOutput | None, completion: CompletionOutput
    ) -> dict[str, Any] | None:
        """The block of the tokens that were not sent yet, as the unstreamed answer has it.

        echo: where the tokens of the prompt come first.
        """
        if completion.logprobs is None:
            return None
        new = slice(state.tokens, None)
        tops = completion.top_logprobs
        part = replace(
            completion,
            token_ids=completion.token_ids[new],
            logprobs=completion.logprobs[new],
            top_logprobs=None if tops is None else tops[new],
        )
        params, tokenizer = self._call.request.params, self._header.tokenizer
        if self._is_chat:
            return chat_logprobs(part, params, tokenizer)
        block = text_logprobs(part, params, tokenizer)
        if block is not None and tokenizer is not None:
            state.spelled = state.spelled or tokenizer.incremental(params.skip_special_tokens)
            block["text_offset"] = self._offsets(state, state.spelled, part.token_ids)
        if block is not None and echo is not None:
            state.offset += len(prompt_text(echo, tokenizer))
            block = with_prompt(block, echo, params, tokenizer)
        return block

    @staticmethod
    def _offsets(state: _Choice, spelled: IncrementalDetokenizer, token_ids: Sequence[int]) -> list[int]:
        offsets = []
        for token_id in token_ids:
            offsets.append(state.offset)
            state.offset += len(spelled.push(token_id))
        return offsets
