"""Write batch output lines: pure functions from results to bytes, in the OpenAI Batch format.

The `id` of an output line contains the input line's number and a hash of its bytes, so an output file alone tells
which lines of which input are done (`xla_engine.batch.resume` reads it).
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from xla_engine.batch.lines import Line
from xla_engine.batch.pooling import pooling_body
from xla_engine.batch.requests import LineError, LineRequest, line_error
from xla_engine.batch.responses import MessageLogprobs, ResponseBuilder
from xla_engine.engine.identity import result_fingerprint
from xla_engine.outputs import CompletionOutput, Logprob, RequestOutput
from xla_engine.sampling_params import SamplingParams
from xla_engine.text.parsers.chats import begins_thinking, part_message
from xla_engine.text.parsers.scan import Reasoning
from xla_engine.utils.json_line import dump_line

if TYPE_CHECKING:
    from xla_engine.text.tokenizer import Tokenizer

ENTRIES = 512  # log-probabilities between two pauses, about half a millisecond of work
_CODES = {"abort": "aborted", "error": "engine_error"}  # finish reasons whose error code differs
_ID = re.compile(r"batch_req_([1-9][0-9]{0,17})_([0-9a-f]{16})")


def line_digest(raw: bytes | None, size: int, salt: bytes = b"") -> int:
    """A 64-bit hash of an input line, or of its size if the line was too long to keep.

    salt: at most 16 bytes; a hash of everything else that the results depend on.
    """
    data = b"%d" % size if raw is None else raw
    return int.from_bytes(blake2b(data, digest_size=8, salt=salt).digest(), "big")


def salt_of(defaults: Mapping[str, Any] | None) -> bytes:
    """The salt of `line_digest` for the given sampling defaults."""
    return blake2b(dump_line(dict(defaults or {})), digest_size=16).digest()


class DigestedLines:
    """Passes input lines through, and keeps a digest of them and of the sampling defaults. size: of it, in bytes."""

    def __init__(self, lines: Iterable[Line], defaults: Mapping[str, Any] | None, *, size: int = 16) -> None:
        self._lines = lines
        self._salt = salt_of(defaults)
        self._digest = blake2b(digest_size=size)

    def __iter__(self) -> Iterator[Line]:
        for line in self._lines:
            self._digest.update(line_digest(line.raw, line.size, self._salt).to_bytes(8, "big"))
            yield line

    @property
    def digest(self) -> str:
        """Of all lines so far."""
        return self._digest.hexdigest()


def record_id(line: int, digest: int) -> str:
    return f"batch_req_{line}_{digest:016x}"


def parse_record_id(value: object) -> tuple[int, int] | None:
    """Line number and digest of a `record_id`; None for anything else."""
    match = _ID.fullmatch(value) if isinstance(value, str) else None
    return None if match is None else (int(match[1]), int(match[2], 16))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultHeader:
    """The fields that all results of a run share.

    created: Unix seconds, one value for the whole run; the only field in which two runs can differ.
    model: name of the loaded model, for lines that name none.
    system_fingerprint: digest of the engine's identity.
    hashes: add an `xla_engine` object with the fingerprint and with hashes of tokens and logprob bits.
    tokenizer: gives the text of tokens with logprobs; None writes `token_id:<id>`.
    labels: the names of a classifier's classes.
    """

    created: int
    model: str
    system_fingerprint: str | None = None
    hashes: bool = False
    tokenizer: Tokenizer | None = None
    labels: Sequence[str | None] = ()


def output_error(request: LineRequest, output: RequestOutput) -> LineError | None:
    """Why a finished request has no result; None if it ended with "stop" or "length", and so has one."""
    reasons = [completion.finish_reason for completion in output.outputs] or ["error"]
    reason = next((reason for reason in reasons if reason not in ("stop", "length")), None)
    if reason is None:
        return None
    code = _CODES.get(reason or "error", reason or "error")
    message = output.error or f"the request ended with finish_reason {reason!r}"
    texts = tuple(completion.text for completion in output.outputs if completion.text)
    return replace(line_error(request.line, code, message, request.custom_id), partial=texts)


def asked_for(request: LineRequest, output: RequestOutput) -> RequestOutput:
    """Remove the token of a request that generates none: the engine always generates at least one."""
    if request.generates:
        return output
    completions = [
        replace(
            completion,
            text="",
            token_ids=(),
            cumulative_logprob=None if completion.logprobs is None else 0.0,
            logprobs=None if completion.logprobs is None else (),
            top_logprobs=None if completion.top_logprobs is None else (),
            finish_reason="length",
            stop_reason=None,
        )
        for completion in output.outputs
    ]
    return replace(output, outputs=tuple(completions))


def result_line(
    request: LineRequest, outputs: Sequence[RequestOutput], name: str, header: ResultHeader
) -> bytes:
    """The output line of a request whose prompts all ended with "stop" or "length".

    outputs: one for each prompt; choices are numbered consecutively. name: the line's `record_id`. Logprobs that
    are not finite become null.
    """
    body = result_body(request, outputs, f"{answer_prefix(request)}{request.line}", header)
    response = {"status_code": 200, "request_id": f"req_{request.line}", "body": body}
    return dump_line({"id": name, "custom_id": request.custom_id, "response": response, "error": None})


def answer_prefix(request: LineRequest) -> str:
    """The prefix of the id of a completion, chat completion or pooling answer."""
    if request.pooling is not None:
        return request.pooling.prefix
    if request.response is not None:
        return "resp_"
    return "chatcmpl-" if request.is_chat else "cmpl-"


def result_body(
    request: LineRequest, outputs: Sequence[RequestOutput], name: str, header: ResultHeader
) -> dict[str, Any]:
    """The completion or chat completion as JSON values. name: its id. See `result_line`."""
    if request.pooling is not None:
        model = request.model or header.model
        return pooling_body(request.pooling, outputs, name, model, header.created, header.labels)
    if request.response is not None:
        thinking = begins_thinking(outputs[0], header.tokenizer)
        writer = ResponseWriter(request, name, header, thinking=thinking)
        deque(writer.events(outputs[0], header.created), maxlen=0)
        body = writer.builder.response
    else:
        body = result_head(request, outputs, name, header)
        body["choices"] = list(result_choices(request, outputs, name, header))
    per_prompt = len(outputs[0].outputs)
    for number, output in enumerate(outputs):
        if shows_prompt_logprobs(request, output):
            place = body if request.is_chat else body["choices"][number * per_prompt]  # where vLLM puts them
            place["prompt_logprobs"] = prompt_logprobs(output, slice(None))
    if header.hashes and header.system_fingerprint is not None:
        completions = [completion for output in outputs for completion in output.outputs]
        body["xla_engine"] = _hashes(header.system_fingerprint, completions)
    return body


class ResponseWriter:
    """Turns the outputs of a Responses request into the events of its response. ended: whether it has a result."""

    def __init__(
        self,
        request: LineRequest,
        name: str,
        header: ResultHeader,
        *,
        thinking: bool,
        pack: Callable[[dict[str, Any]], Any] = dict,
    ) -> None:
        """name: its id. thinking: whether the prompt ended with the opening tag of reasoning. pack: turns the record
        of a token with its log-probabilities into what the response holds."""
        assert request.response is not None
        self.ended = False
        self._blocks, self._pack = ChatLogprobs(request.params, header.tokenizer), pack
        self._parser = request.reading.parser(thinking=thinking)
        self._reasoning = ReasoningTokens(request, header.tokenizer, thinking=thinking)
        self._logprobs = None
        if request.params.logprobs is not None and header.tokenizer is not None:
            text = header.tokenizer.incremental(request.params.skip_special_tokens)
            self._logprobs = MessageLogprobs(request.reading.parser(thinking=thinking), text)
        self._new = 0  # generated tokens
        self.builder = ResponseBuilder(
            name,
            body=request.response,
            model=request.model or header.model,
            created=header.created,
            logprobs=self._logprobs,
        )

    def events(self, output: RequestOutput, now: int) -> Iterator[dict[str, Any] | None]:
        """The events of new output. None where the caller may give way to other work. now: Unix seconds."""
        completion = output.outputs[0]
        self._new += len(completion.token_ids)
        events = self._parser.feed(completion.text)
        for few in few_tokens(completion, self._blocks.params):
            self._reasoning.add(few.token_ids)
            if self._logprobs is not None:
                self._logprobs.add(few.token_ids, map(self._pack, self._blocks.records(few)))
            yield None
        if self._logprobs is not None and output.finished:
            self._logprobs.finish()
        yield from self.builder.add([*events, *(self._parser.finish() if output.finished else ())])
        if output.finished:
            usage = response_usage(output, new=self._new, reasoning=self._reasoning.count)
            yield from self.builder.end(reason=completion.finish_reason, usage=usage, now=now)
            self.ended = True


def result_head(
    request: LineRequest, outputs: Sequence[RequestOutput], name: str, header: ResultHeader
) -> dict[str, Any]:
    """A completion or chat completion with an empty list of choices."""
    new = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    usage = completion_usage(outputs, new=new, reasoning=0)
    hashes = [each for output in outputs for each in output.images_sha256]
    return {
        "id": name,
        "object": "chat.completion" if request.is_chat else "text_completion",
        "created": header.created,
        "model": request.model or header.model,
        "system_fingerprint": header.system_fingerprint,
        "choices": [],
        "usage": {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
        **({"images_sha256": hashes} if hashes else {}),
    }


def result_choices(
    request: LineRequest, outputs: Sequence[RequestOutput], name: str, header: ResultHeader
) -> Iterator[dict[str, Any]]:
    """Yield the choices of all prompts in order, each made lazily."""
    tokenizer = header.tokenizer
    thinking = request.is_chat and begins_thinking(outputs[0], tokenizer)
    for number, output in enumerate(outputs):
        head = None
        if request.echo:
            output = replace(output, prompt=prompt_text(output, tokenizer))
            if output.outputs[0].logprobs is not None:
                head = TextLogprobs(request.params, tokenizer).prompt(output)
        for completion in output.outputs:
            index = number * len(output.outputs) + completion.index
            choice = {"index": index} | _choice(request, output, completion, head, tokenizer)
            if request.is_chat:
                part_message(choice, request.reading.parser(thinking=thinking), f"{name}/{index}")
            yield choice


def shows_prompt_logprobs(request: LineRequest, output: RequestOutput) -> bool:
    """Whether the answer has vLLM's `prompt_logprobs`; with `echo` they are in the choice's logprobs instead."""
    return output.prompt_logprobs is not None and not (request.echo and request.params.logprobs is not None)


def error_line(error: LineError, name: str) -> bytes:
    """The output line of a failed input line. `line` and `partial` extend OpenAI's format."""
    detail = {"code": error.code, "message": error.message, "line": error.line}
    if error.partial:
        detail["partial"] = list(error.partial)
    return dump_line({"id": name, "custom_id": error.custom_id, "response": None, "error": detail})


def _choice(
    request: LineRequest,
    output: RequestOutput,
    completion: CompletionOutput,
    head: dict[str, Any] | None,
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    """One choice without its index; `stop_reason` is vLLM's. head: logprobs block of the echoed prompt, if any."""
    prompt = (output.prompt or "") if request.echo else ""
    content: dict[str, Any] = {"text": prompt + completion.text}
    if request.is_chat:
        content = {"message": {"role": "assistant", "content": completion.text, "refusal": None}}
    block = logprob_blocks(request, tokenizer, begin=len(prompt)).completion(completion)
    if block is not None and head is not None:
        block = {key: None if new is None else head[key] + new for key, new in block.items()}
    end = {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
    return {**content, **end, "logprobs": block}


class TextLogprobs:
    """Makes the completions API's logprobs blocks of parallel lists, with `token_ids` added, for tokens in order.

    `text_offset` is the number of characters before each token; a token that only begins a character has the offset
    of that character. `top_logprobs` has the most likely tokens and the chosen one. If two tokens have the same text,
    the likelier is kept.
    """

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None, *, begin: int = 0) -> None:
        """begin: offset of the first token."""
        self.params, self._tokenizer, self._length = params, tokenizer, begin
        self._text = None if tokenizer is None else tokenizer.incremental(params.skip_special_tokens)

    def completion(self, completion: CompletionOutput) -> dict[str, Any] | None:
        """The block of a completion's tokens; None without log-probabilities."""
        if completion.logprobs is None:
            return None
        return self._block(completion.token_ids, completion.logprobs, completion.top_logprobs)

    def prompt(self, output: RequestOutput, part: slice = slice(None)) -> dict[str, Any]:
        """The block of a prompt's tokens; null for the first token, which nothing predicts. part: the positions."""
        ids = output.prompt_token_ids[part]
        scores = (output.prompt_logprobs or (None,) * len(output.prompt_token_ids))[part]
        values = [
            None if found is None else found[token_id].logprob
            for token_id, found in zip(ids, scores, strict=True)
        ]
        return self._block(ids, values, scores if self.params.logprobs else None)

    def _block(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float | None],
        tops: Sequence[Mapping[int, Logprob] | None] | None,
    ) -> dict[str, Any]:
        return {
            "tokens": [_token_text(token_id, self._tokenizer) for token_id in token_ids],
            "token_logprobs": [None if value is None else _finite(value) for value in logprobs],
            "top_logprobs": None
            if tops is None
            else [None if found is None else _top_texts(found, self._tokenizer) for found in tops],
            "text_offset": None if self._text is None else list(map(self._offset, token_ids)),
            "token_ids": list(token_ids),
        }

    def _offset(self, token_id: int) -> int:
        assert self._text is not None
        offset = self._length
        self._length += len(self._text.push(token_id))
        return offset


class ChatLogprobs:
    """Makes the chat API's logprobs blocks with one record for each token, and `token_ids` added."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.params, self._tokenizer = params, tokenizer

    def completion(self, completion: CompletionOutput) -> dict[str, Any] | None:
        """The block of a completion's tokens; None without log-probabilities."""
        if completion.logprobs is None:
            return None
        content = self.records(completion)
        return {"content": content, "refusal": None, "token_ids": list(completion.token_ids)}

    def records(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        """The record of each token, as chats and responses have it."""
        tops: Sequence[Mapping[int, Logprob]] = completion.top_logprobs or [{}] * len(completion.token_ids)
        most, logprobs = self.params.logprobs or 0, completion.logprobs or ()
        return [
            {
                **_token(token_id, _finite(value), self._tokenizer),
                "top_logprobs": [_token(*other, self._tokenizer) for other in _likeliest(top, most)],
            }
            for token_id, value, top in zip(completion.token_ids, logprobs, tops, strict=True)
        ]


def logprob_blocks(
    request: LineRequest, tokenizer: Tokenizer | None, *, begin: int = 0
) -> TextLogprobs | ChatLogprobs:
    """What makes the logprobs blocks of one choice. begin: as in `TextLogprobs`."""
    if request.is_chat:
        return ChatLogprobs(request.params, tokenizer)
    return TextLogprobs(request.params, tokenizer, begin=begin)


def prompt_text(output: RequestOutput, tokenizer: Tokenizer | None) -> str:
    """The prompt's text as given, or decoded from its token ids."""
    if output.prompt is not None or tokenizer is None:
        return output.prompt or ""
    text = tokenizer.incremental()
    return "".join(map(text.push, output.prompt_token_ids)) + text.flush()


def _top_texts(found: Mapping[int, Logprob], tokenizer: Tokenizer | None) -> dict[str, float]:
    return {_token_text(token_id, tokenizer): value for token_id, value in reversed(_likeliest(found))}


def few_tokens(completion: CompletionOutput, params: SamplingParams) -> Iterator[CompletionOutput]:
    """A completion a few tokens at a time."""
    for part in token_parts(len(completion.token_ids), params.logprobs):
        tops = completion.top_logprobs
        yield replace(
            completion,
            token_ids=completion.token_ids[part],
            logprobs=None if completion.logprobs is None else completion.logprobs[part],
            top_logprobs=None if tops is None else tops[part],
        )


def token_parts(tokens: int, logprobs: int | None) -> Iterator[slice]:
    """Slices of tokens with about `ENTRIES` log-probabilities each; at least one slice."""
    size = max(ENTRIES // (1 + (logprobs or 0)), 1)
    return (slice(begin, begin + size) for begin in range(0, max(tokens, 1), size))


def prompt_logprobs(output: RequestOutput, part: slice) -> list[dict[str, Any] | None]:
    """Prompt logprobs of some positions in vLLM's format: by token id, and null for the first token."""
    return [
        None if found is None else dict(map(_named, found.items()))
        for found in (output.prompt_logprobs or ())[part]
    ]


def _named(item: tuple[int, Logprob]) -> tuple[str, dict[str, Any]]:
    token_id, entry = item
    return str(token_id), {**entry._asdict(), "logprob": _finite(entry.logprob)}


def _likeliest(found: Mapping[int, Logprob], lowest_rank: float = math.inf) -> list[tuple[int, float]]:
    """Token ids and logprobs, most likely first, without impossible tokens."""
    ranked = sorted(found.items(), key=lambda item: item[1].rank)
    return [
        (token_id, entry.logprob)
        for token_id, entry in ranked
        if entry.rank <= lowest_rank and math.isfinite(entry.logprob)
    ]


def _token(token_id: int, logprob: float | None, tokenizer: Tokenizer | None) -> dict[str, Any]:
    raw = None if tokenizer is None else list(tokenizer.token_bytes(token_id))
    return {"token": _token_text(token_id, tokenizer), "logprob": logprob, "bytes": raw}


def _token_text(token_id: int, tokenizer: Tokenizer | None) -> str:
    """A token's text, or its bytes in OpenAI's notation if they are part of a character."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _hashes(fingerprint: str, completions: Sequence[CompletionOutput]) -> Mapping[str, str | None]:
    """The fingerprint, and hashes over all choices in order."""
    token_ids = [token_id for completion in completions for token_id in completion.token_ids]
    logprobs = [value for completion in completions for value in completion.logprobs or ()]
    wanted = completions[0].logprobs is not None
    return result_fingerprint(fingerprint, token_ids, logprobs if wanted else None)


def completion_usage(outputs: Iterable[RequestOutput], *, new: int, reasoning: int) -> dict[str, Any]:
    """The usage object of completions and chats: prompt, cached, new and reasoning tokens, and drafts.

    outputs: one for each prompt.
    """
    found = list(outputs)
    prompt = sum(len(each.prompt_token_ids) for each in found)
    drafted = sum(each.num_drafted_tokens for each in found)
    accepted = sum(each.num_accepted_tokens for each in found)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(each.num_cached_tokens for each in found)},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def response_usage(output: RequestOutput, *, new: int, reasoning: int) -> dict[str, Any]:
    """`completion_usage` with the names that responses have."""
    usage = completion_usage([output], new=new, reasoning=reasoning)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": new,
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }


class ReasoningTokens:
    """Counts the reasoning tokens of one choice, including the opening tag."""

    def __init__(self, request: LineRequest, tokenizer: Tokenizer | None, *, thinking: bool) -> None:
        """thinking: whether the prompt ended with the opening tag."""
        parser = request.reading.reasoning_parser(thinking=thinking)
        self._reader = None
        if parser is not None and tokenizer is not None:
            self._reader = parser, tokenizer.incremental(request.params.skip_special_tokens)
        self._silent = 0  # tokens since the last one that produced an event
        self.count = 0

    def add(self, token_ids: Sequence[int]) -> int:
        """Read more tokens, and return the count so far."""
        if self._reader is None:
            return 0
        parser, text = self._reader
        for token_id in token_ids:
            self._silent += 1
            for event in parser.feed(text.push(token_id)):
                self.count += self._silent if isinstance(event, Reasoning) else 0
                self._silent = 0
        return self.count
