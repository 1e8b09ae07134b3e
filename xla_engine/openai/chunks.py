"""Chunks of streamed answers: the new part of each output in OpenAI's format, as server-sent events."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from xla_engine.openai.answers import Columns, completion_columns, counted, prompt_columns
from xla_engine.openai.call import HttpCall
from xla_engine.openai.chat_message import ChatMessage
from xla_engine.openai.logprobs import ChatLogprobs, TextLogprobs, logprob_blocks
from xla_engine.openai.results import ReasoningTokens, ResultHeader, asked_for, completion_usage, spelled
from xla_engine.outputs import CompletionOutput, RequestOutput
from xla_engine.text.parsers.scan import Parser

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(value) + b"\n\n"


@dataclass(slots=True)
class _Choice:
    """State of one streamed choice."""

    parser: Parser
    chat: ChatMessage
    ended: bool = False
    echoed: bool = False
    blocks: TextLogprobs | ChatLogprobs | None = None
    reasoning: ReasoningTokens | None = None


@dataclass(frozen=True, slots=True)
class _Head:
    """An echoed prompt: its text and, if requested, its block of logprobs."""

    text: str
    columns: Columns | None


class ChunkWriter:
    """Turns the outputs of one call into chunks. The texts of a choice's chunks join to its text."""

    def __init__(self, call: HttpCall, name: str, header: ResultHeader, *, thinking: bool = False) -> None:
        self._call = call
        self._thinking = thinking
        self._header = header
        self._is_chat = call.request.is_chat
        self._choices: dict[int, _Choice] = {}
        self._heads: dict[int, _Head] = {}  # by prompt
        self._prompt_ids: dict[int, msgspec.Raw] = {}  # by prompt
        self._outputs: dict[int, RequestOutput] = {}  # by prompt: the latest output
        self._new = 0  # generated tokens
        self._common: dict[str, Any] = {
            "id": name,
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "created": header.created,
            "model": call.request.model or header.model,
            "system_fingerprint": header.system_fingerprint,
        }

    def events(self, index: int, output: RequestOutput) -> Iterator[bytes]:
        """The chunks of a delta output of prompt `index`. Yields `PAUSE` in between."""
        generates = self._call.request.generates
        if not generates:
            ended = tuple(each for each in output.outputs if each.finish_reason is not None)
            output = asked_for(self._call.request, replace(output, outputs=ended))
        per_prompt, reading = self._call.request.params.n, self._call.request.reading
        self._outputs[index] = output
        for completion in output.outputs:
            number = index * per_prompt + completion.index
            state = self._choices.get(number)
            if state is None:
                chat = ChatMessage(reading, f"{self._common['id']}/{number}")
                state = self._choices[number] = _Choice(reading.parser(thinking=self._thinking), chat)
                if self._is_chat:  # the role comes before the first token
                    role = {"role": "assistant", "content": ""}
                    beginning = {"index": number, "delta": role, "logprobs": None, "finish_reason": None}
                    yield from self._event(beginning, index, output)
            self._new += len(completion.token_ids)
            if self._call.include_usage:
                if state.reasoning is None:
                    tokenizer = self._header.tokenizer
                    state.reasoning = ReasoningTokens(self._call.request, tokenizer, thinking=self._thinking)
                yield from counted(state.reasoning, completion.token_ids)
            for choice in (yield from self._news(number, index, state, output, completion)):
                yield from self._event(choice, index, output)

    def last_events(self) -> Iterator[bytes]:
        """The usage, if requested, and the end marker."""
        if self._call.include_usage:
            yield event({**self._common, "choices": [], "usage": self.usage()})
        yield DONE

    def usage(self) -> dict[str, Any]:
        """Tokens of all prompts and choices so far."""
        reasoning = sum(each.reasoning.count for each in self._choices.values() if each.reasoning is not None)
        return completion_usage(self._outputs.values(), new=self._new, reasoning=reasoning)

    def _event(self, choice: dict[str, Any], index: int, output: RequestOutput) -> Iterator[bytes]:
        """The chunk of one choice. Its `logprobs` are `Columns` or None."""
        chunk = {**self._common, "choices": [choice]}
        if self._call.return_token_ids and choice.get("token_ids") is None:
            if index not in self._prompt_ids:
                self._prompt_ids[index] = msgspec.Raw(_encode(output.prompt_token_ids))
            chunk["prompt_token_ids"] = self._prompt_ids[index]
        if choice["finish_reason"] is not None and (hashes := self._hashes()):
            chunk["images_sha256"] = hashes
        if self._call.continuous_usage:
            chunk["usage"] = self.usage()
        elif self._call.include_usage:
            chunk["usage"] = None
        block = choice.get("logprobs")
        if block is None:
            yield event(chunk)
            return
        del chunk["choices"], choice["logprobs"]
        yield b"data: " + _encode(chunk)[:-1] + b',"choices":[' + _encode(choice)[:-1] + b',"logprobs":'
        yield from block.pieces()
        yield b"}]}\n\n"

    def _hashes(self) -> list[str]:
        """`images_sha256` of all prompts, once their last choice has ended."""
        request = self._call.request
        if sum(each.ended for each in self._choices.values()) < len(request.prompts) * request.params.n:
            return []
        return [each for _, output in sorted(self._outputs.items()) for each in output.images_sha256]

    def _news(
        self, number: int, index: int, state: _Choice, output: RequestOutput, completion: CompletionOutput
    ) -> Generator[bytes, None, list[dict[str, Any]]]:
        """The new part of a choice: one piece or, for a parsed chat, one for each kind of text."""
        if state.ended:
            return []
        ids, ended = completion.token_ids, completion.finish_reason is not None
        head = None
        if self._call.request.echo and not state.echoed:
            head = yield from self._head(index, output)
            state.echoed = True
        pieces = self._pieces(state, ("" if head is None else head.text) + completion.text, ended=ended)
        wants_tokens = completion.logprobs is not None or self._call.return_token_ids
        if not pieces and (ended or (ids and wants_tokens)):
            pieces = [{"delta": {}} if self._is_chat else {"text": ""}]
        choices: list[dict[str, Any]] = [
            {"index": number, **piece, "logprobs": None, "finish_reason": None} for piece in pieces
        ]
        if choices:
            if completion.logprobs is not None and (ids or head is not None):
                choices[0]["logprobs"] = yield from self._logprobs(state, head, completion)
            if self._call.return_token_ids:
                choices[0]["token_ids"] = ids
        if ended:
            state.ended = True
            choices[-1]["finish_reason"] = state.chat.finish_reason(completion.finish_reason)
            choices[-1]["stop_reason"] = completion.stop_reason
        return choices

    def _head(self, index: int, output: RequestOutput) -> Generator[bytes, None, _Head]:
        """The echoed prompt; built once and shared by all choices of the prompt."""
        if (head := self._heads.get(index)) is None:
            params, tokenizer = self._call.request.params, self._header.tokenizer
            text = yield from spelled(output, tokenizer)
            columns = None
            if params.logprobs is not None:
                columns = yield from prompt_columns(output, params, tokenizer)
            head = self._heads[index] = _Head(text, columns)
        return head

    def _pieces(self, state: _Choice, text: str, *, ended: bool) -> list[dict[str, Any]]:
        """Text in the format of a completion or a chat."""
        if not self._is_chat:
            return [{"text": text}] if text else []
        events = [*state.parser.feed(text), *(state.parser.finish() if ended else [])]
        return [{"delta": each} for each in state.chat.add(events)]

    def _logprobs(
        self, state: _Choice, head: _Head | None, completion: CompletionOutput
    ) -> Generator[bytes, None, Columns]:
        """The logprobs block of the new tokens, as in an unstreamed answer. head: the echoed prompt, which comes
        first."""
        if state.blocks is None:
            begin = 0 if head is None else len(head.text)
            state.blocks = logprob_blocks(self._call.request, self._header.tokenizer, begin=begin)
        return completion_columns(completion, state.blocks, None if head is None else head.columns)
