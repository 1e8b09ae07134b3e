"""Encode answers as JSON in small pieces that do not block the event loop. Data that choices share is encoded once."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from xla_engine.openai.call import HttpCall
from xla_engine.openai.logprobs import (
    ENTRIES,
    ChatLogprobs,
    TextLogprobs,
    few_tokens,
    logprob_blocks,
    prompt_logprobs,
    token_parts,
)
from xla_engine.openai.results import (
    PAUSE,
    ReasoningTokens,
    ResultHeader,
    completion_usage,
    result_choices,
    result_head,
    shows_prompt_logprobs,
    spelled,
)
from xla_engine.outputs import CompletionOutput, RequestOutput
from xla_engine.sampling_params import SamplingParams
from xla_engine.text.parsers.chats import begins_thinking

if TYPE_CHECKING:
    from xla_engine.text.tokenizer import Tokenizer

Pauses = Generator[bytes, None, "Columns"]
_encode = msgspec.json.Encoder().encode


class Columns:
    """A JSON object of growing lists.

    before: its lists come first. They are shared, not copied, so data that choices share is encoded and stored once.
    """

    def __init__(self, before: Columns | None = None) -> None:
        shared = {} if before is None else before._lists
        self._lists: dict[str, list[bytes]] = {name: list(parts) for name, parts in shared.items()}
        self._others: dict[str, bytes] = {}

    def add(self, block: Mapping[str, Any]) -> None:
        """Append the lists of a block. Other values replace earlier ones."""
        for name, value in block.items():
            if not isinstance(value, list):
                self._others[name] = _encode(value)
            elif value:
                self._lists.setdefault(name, []).append(_encode(value)[1:-1])
            else:
                self._lists.setdefault(name, [])

    def pieces(self) -> Iterator[bytes]:
        """The JSON in pieces of bounded size."""
        between = b"{"
        for name, parts in self._lists.items():
            yield between + _encode(name) + b":["
            for number, part in enumerate(parts):
                if number:
                    yield b","
                yield part
            yield b"]"
            between = b","
        for name, value in self._others.items():
            yield between + _encode(name) + b":" + value
            between = b","
        yield b"}"


def list_pieces(parts: Iterable[list[Any]]) -> Iterator[bytes]:
    """A JSON list in pieces. parts: of the list."""
    yield b"["
    for number, part in enumerate(parts):
        yield (b"," if number else b"") + _encode(part)[1:-1]
    yield b"]"


def counted(counter: ReasoningTokens, token_ids: Sequence[int]) -> Iterator[bytes]:
    """Feed tokens to a counter, a few at a time, with `PAUSE` in between."""
    for begin in range(0, len(token_ids), ENTRIES):
        counter.add(token_ids[begin : begin + ENTRIES])
        yield PAUSE


def completion_columns(
    completion: CompletionOutput, blocks: TextLogprobs | ChatLogprobs, before: Columns | None
) -> Pauses:
    """The logprobs block of a completion. before: of the echoed prompt."""
    columns = Columns(before)
    for few in few_tokens(completion, blocks.params):
        columns.add(blocks.completion(few) or {})
        yield PAUSE
    return columns


def prompt_columns(output: RequestOutput, params: SamplingParams, tokenizer: Tokenizer | None) -> Pauses:
    columns, blocks = Columns(), TextLogprobs(params, tokenizer)
    for part in token_parts(len(output.prompt_token_ids), params.logprobs):
        columns.add(blocks.prompt(output, part))
        yield PAUSE
    return columns


def prompt_logprobs_pieces(output: RequestOutput, params: SamplingParams) -> Iterator[bytes]:
    """`prompt_logprobs` in vLLM's format."""
    parts = token_parts(len(output.prompt_token_ids), params.prompt_logprobs)
    return list_pieces(prompt_logprobs(output, part) for part in parts)


def answer_pieces(
    call: HttpCall, outputs: Sequence[RequestOutput], name: str, header: ResultHeader
) -> Iterator[bytes]:
    """Yield the JSON of `result_body`, with the usage and, if requested, the token ids.

    outputs: one for each prompt, all ended with "stop" or "length".
    """
    request, params, tokenizer = call.request, call.request.params, header.tokenizer
    head = result_head(request, outputs, name, header)
    reasoning = 0
    thinking = request.is_chat and begins_thinking(outputs[0], tokenizer)
    for completion in (each for output in outputs for each in output.outputs):
        counter = ReasoningTokens(request, tokenizer, thinking=thinking)
        yield from counted(counter, completion.token_ids)
        reasoning += counter.count
    new = head["usage"]["completion_tokens"]
    head["usage"] = completion_usage(outputs, new=new, reasoning=reasoning)
    if call.return_token_ids and request.is_chat:
        head["prompt_token_ids"] = outputs[0].prompt_token_ids
    del head["choices"]
    yield _encode(head)[:-1]
    if request.is_chat and shows_prompt_logprobs(request, outputs[0]):
        yield b',"prompt_logprobs":'
        yield from prompt_logprobs_pieces(outputs[0], params)
    between = b',"choices":['
    texts = []
    for output in outputs:
        text = (yield from spelled(output, tokenizer)) if request.echo else output.prompt
        texts.append(_without_logprobs(output, text))
    choices = result_choices(request, texts, name, header)
    for output, plain in zip(outputs, texts, strict=True):
        before = None
        if request.echo and params.logprobs is not None:
            before = yield from prompt_columns(output, params, tokenizer)
        for completion in output.outputs:
            choice = next(choices)
            del choice["logprobs"]
            if call.return_token_ids:
                choice["token_ids"] = completion.token_ids
            # the first choice also has the prompt's token ids and logprobs
            is_first = completion is output.outputs[0] and not request.is_chat
            if is_first and call.return_token_ids:
                choice["prompt_token_ids"] = output.prompt_token_ids
            yield between + _encode(choice)[:-1] + b',"logprobs":'
            between = b","
            if completion.logprobs is None:
                yield b"null"
            else:
                begin = len(plain.prompt or "") if request.echo else 0
                blocks = logprob_blocks(request, tokenizer, begin=begin)
                columns = yield from completion_columns(completion, blocks, before)
                yield from columns.pieces()
            if is_first and shows_prompt_logprobs(request, output):
                yield b',"prompt_logprobs":'
                yield from prompt_logprobs_pieces(output, params)
            yield b"}"
            yield PAUSE
    yield b"]}"


def _without_logprobs(output: RequestOutput, prompt: str | None) -> RequestOutput:
    outputs = tuple(replace(each, logprobs=None, top_logprobs=None) for each in output.outputs)
    return replace(output, prompt=prompt, outputs=outputs, prompt_logprobs=None)
