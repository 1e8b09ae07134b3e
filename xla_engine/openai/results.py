"""Write batch output lines: pure functions from results to bytes, in the OpenAI Batch format."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from xla_engine.engine.identity import result_fingerprint
from xla_engine.openai.chat_message import read_message
from xla_engine.openai.logprobs import (
    ChatLogprobs,
    TextLogprobs,
    few_tokens,
    logprob_blocks,
    prompt_logprobs,
    token_parts,
)
from xla_engine.openai.pooling import pooling_body
from xla_engine.openai.requests import LineError, LineRequest, line_error
from xla_engine.openai.responses import MessageLogprobs, ResponseBuilder
from xla_engine.outputs import CompletionOutput, RequestOutput
from xla_engine.text.parsers.chats import begins_thinking
from xla_engine.text.parsers.scan import Event, Reasoning
from xla_engine.utils.json_line import dump_line

if TYPE_CHECKING:
    from xla_engine.text.tokenizer import Tokenizer

PAUSE = b""  # a generator yields this when its caller may give way to other work
_CODES = {"abort": "aborted", "error": "engine_error"}  # finish reasons whose error code differs


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
            completion.part(slice(0)),
            text="",
            cumulative_logprob=None if completion.logprobs is None else 0.0,
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
        writer = response_writer(request, name, header, thinking=thinking)
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


class Builder(Protocol):
    """Builds an answer that consists of events, of a parser's events."""

    def add(self, events: Iterable[Event]) -> Iterator[dict[str, Any]]:
        """The events for more text."""

    def end(self, *, reason: str | None, usage: dict[str, Any], now: int) -> Iterator[dict[str, Any]]:
        """The last events. reason: "stop" or "length". usage: as `completion_usage` makes it."""


B = TypeVar("B", bound=Builder)


class AnswerWriter(Generic[B]):
    """Turns the outputs of a chat into the events of an answer, streamed or not. ended: whether it has a result.

    logprobs: of the messages' tokens, if requested. stop_reason: of the completion, once it has ended.
    """

    def __init__(
        self,
        request: LineRequest,
        header: ResultHeader,
        build: Callable[[AnswerWriter[B]], B],
        *,
        thinking: bool,
        pack: Callable[[dict[str, Any]], Any] = dict,
    ) -> None:
        """build: the builder of this writer. thinking: whether the prompt ended with the opening tag of reasoning.
        pack: turns the record of a token with its log-probabilities into what the answer holds."""
        self.ended = False
        self.stop_reason: int | str | None = None
        self._blocks, self._pack = ChatLogprobs(request.params, header.tokenizer), pack
        self._parser = request.reading.parser(thinking=thinking)
        self._reasoning = ReasoningTokens(request, header.tokenizer, thinking=thinking)
        self.logprobs = None
        if request.params.logprobs is not None and header.tokenizer is not None:
            text = header.tokenizer.incremental(request.params.skip_special_tokens)
            self.logprobs = MessageLogprobs(request.reading.parser(thinking=thinking), text)
        self._new = 0  # generated tokens
        self._latest: RequestOutput | None = None
        self.builder = build(self)

    def usage(self) -> dict[str, Any]:
        """Tokens of the prompt and of the answer so far."""
        outputs = () if self._latest is None else (self._latest,)
        return completion_usage(outputs, new=self._new, reasoning=self._reasoning.count)

    def events(self, output: RequestOutput, now: int) -> Iterator[dict[str, Any] | None]:
        """The events of new output. None where the caller may give way to other work. now: Unix seconds."""
        completion, self._latest = output.outputs[0], output
        self._new += len(completion.token_ids)
        events = self._parser.feed(completion.text)
        for few in few_tokens(completion, self._blocks.params):
            self._reasoning.add(few.token_ids)
            if self.logprobs is not None:
                self.logprobs.add(few.token_ids, map(self._pack, self._blocks.records(few)))
            yield None
        if self.logprobs is not None and output.finished:
            self.logprobs.finish()
        yield from self.builder.add([*events, *(self._parser.finish() if output.finished else ())])
        if output.finished:
            self.stop_reason = completion.stop_reason
            yield from self.builder.end(reason=completion.finish_reason, usage=self.usage(), now=now)
            self.ended = True


def response_writer(
    request: LineRequest,
    name: str,
    header: ResultHeader,
    *,
    thinking: bool,
    pack: Callable[[dict[str, Any]], Any] = dict,
) -> AnswerWriter[ResponseBuilder]:
    """The writer of a Responses request. name: its id. The others as in `AnswerWriter`."""
    body = request.response
    assert body is not None

    def build(writer: AnswerWriter[ResponseBuilder]) -> ResponseBuilder:
        return ResponseBuilder(
            name,
            body=body,
            model=request.model or header.model,
            created=header.created,
            logprobs=writer.logprobs,
            custom=request.reading.offered.custom,
        )

    return AnswerWriter(request, header, build, thinking=thinking, pack=pack)


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
            output = replace(output, prompt=_whole(spelled(output, tokenizer)))
            if output.outputs[0].logprobs is not None:
                head = TextLogprobs(request.params, tokenizer).prompt(output)
        for completion in output.outputs:
            index = number * len(output.outputs) + completion.index
            prompt = (output.prompt or "") if request.echo else ""
            content: dict[str, Any] = {"text": prompt + completion.text}
            reason = completion.finish_reason
            if request.is_chat:
                chat = read_message(request.reading, completion.text, f"{name}/{index}", thinking=thinking)
                content, reason = {"message": chat.message}, chat.finish_reason(reason)
            block = logprob_blocks(request, tokenizer, begin=len(prompt)).completion(completion)
            if block is not None and head is not None:
                block = {key: None if new is None else head[key] + new for key, new in block.items()}
            end = {"finish_reason": reason, "stop_reason": completion.stop_reason}
            yield {"index": index, **content, **end, "logprobs": block}


def _whole(pieces: Generator[bytes, None, str]) -> str:
    """What a generator returns when nothing interrupts it."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return str(end.value)


def shows_prompt_logprobs(request: LineRequest, output: RequestOutput) -> bool:
    """Whether the answer has vLLM's `prompt_logprobs`; with `echo` they are in the choice's logprobs instead."""
    return output.prompt_logprobs is not None and not (request.echo and request.params.logprobs is not None)


def error_line(error: LineError, name: str) -> bytes:
    """The output line of a failed input line. `line` and `partial` extend OpenAI's format."""
    detail = {"code": error.code, "message": error.message, "line": error.line}
    if error.partial:
        detail["partial"] = list(error.partial)
    return dump_line({"id": name, "custom_id": error.custom_id, "response": None, "error": detail})


def spelled(output: RequestOutput, tokenizer: Tokenizer | None) -> Generator[bytes, None, str]:
    """The prompt's text as given, or decoded from its token ids."""
    if output.prompt is not None or tokenizer is None:
        return output.prompt or ""
    text = tokenizer.incremental()
    pieces: list[str] = []
    for part in token_parts(len(output.prompt_token_ids), None):
        pieces += text.push_all(output.prompt_token_ids[part])
        yield PAUSE
    return "".join(pieces) + text.flush()


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
