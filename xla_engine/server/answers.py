"""Encode complete answers as JSON in small pieces. Data that choices share is encoded once."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from xla_engine.batch.results import Offsets, ResultHeader, result_choices, result_head, shows_prompt_logprobs
from xla_engine.batch.usage import ReasoningTokens, Usage
from xla_engine.outputs import RequestOutput
from xla_engine.server.columns import (
    PAUSE,
    completion_columns,
    counted,
    prompt_columns,
    prompt_logprobs_pieces,
    spelled,
)
from xla_engine.server.wire import Call
from xla_engine.text.parsers.chats import begins_thinking

_encode = msgspec.json.Encoder().encode


def answer_pieces(
    call: Call, outputs: Sequence[RequestOutput], name: str, header: ResultHeader
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
    head["usage"] = Usage.of(outputs, new=new, reasoning=reasoning).as_completion()
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
                offsets = None if request.is_chat else Offsets(params, tokenizer, begin=begin)
                columns = yield from completion_columns(
                    completion, params, tokenizer, offsets=offsets, before=before
                )
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
