"""Parse batch input lines: pure functions from bytes to requests.

Three kinds of input line may be mixed in one file. A plain line holds a prompt, or the messages of a chat, and
`SamplingParams` fields:

    {"prompt": "def main(", "max_tokens": 32, "temperature": 0, "custom_id": "a"}
    {"prompt": "User:<image>What is this?", "images": ["data:image/png;base64,..."]}

and an OpenAI Batch line (https://platform.openai.com/docs/api-reference/batch) holds a completions or a chat
completions request, with OpenAI's names for its fields:

    {"custom_id": "a", "method": "POST", "url": "/v1/completions",
     "body": {"model": "any", "prompt": "def main(", "max_tokens": 32, "temperature": 0}}
    {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions",
     "body": {"model": "any", "messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 32}}

Lines for pooling models have the urls of `xla_engine.openai.pooling`.

Without `max_tokens`, a completion has at most 16 tokens and a chat as many as fit, as with OpenAI and vLLM.

The answer to each is an OpenAI Batch output line (`xla_engine.openai.results`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from xla_engine.errors import InvalidRequestError, XlaEngineError
from xla_engine.openai.fields import (
    COMPLETIONS_URL,
    LINE_FIELDS,
    RESPONSES_URL,
    SUBMIT_FIELDS,
    check_labels,
    custom_id_in,
    envelope,
    rename_others,
    take_echo,
    take_model,
    without_gaps,
    without_neutral,
)
from xla_engine.openai.pooling import POOLING_URLS, PoolingRequest, take_pooling
from xla_engine.openai.responses import chat_body
from xla_engine.outputs import RequestOutput, RequestOutputs
from xla_engine.prompts import Picture, TextPair, TextPrompt, pair_messages
from xla_engine.sampling_params import SamplingParams
from xla_engine.text.fill_in import FillIn
from xla_engine.text.parsers.chats import Chat, Dialect, Reading, take_chat
from xla_engine.utils.did_you_mean import did_you_mean
from xla_engine.utils.json_line import dump_line, kind, load_object
from xla_engine.utils.plain import integer_of
from xla_engine.utils.shown import shown

MAX_MESSAGE = 500  # characters of an error message, so that a hostile value is not echoed in full
MAX_PROMPTS = 128  # in one line
MAX_SEQUENCES = 1024  # of one line: prompts times n


Prompt = str | tuple[int, ...] | Chat | TextPair | TextPrompt | FillIn


@dataclass(frozen=True, slots=True, kw_only=True)
class LineRequest:
    """One valid input line. The engine may still reject it.

    line: number in the file, from 1.
    custom_id: the line's own, or `line-<n>`.
    prompts: text, token ids, text with pictures or a chat; more than one only if a completions body lists several.
    model: the model name in the line, which the answer repeats; None if it has none.
    echo: whether the text begins with the prompt.
    generates: false if only the prompt is scored; the one token that is generated anyway is left out.
    options: the given ones of `priority`, `deadline_s`, `queue_timeout_s` and `cache_salt`; `submit` checks them.
    default_limit: whether `max_tokens` is `DEFAULT_MAX_TOKENS` because the line set none.
    default_sampling: whether the temperature is 1 because neither line nor model nor command set one.
    reading: how a chat's answer is split into content, reasoning and tool calls.
    pooling: the form of the answer to a pooling request; None for other requests.
    response: the body of a Responses request, because its answer repeats some fields; None for other requests.
    """

    line: int
    custom_id: str
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    model: str | None = None
    echo: bool = False
    generates: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    default_limit: bool = False
    default_sampling: bool = False
    reading: Reading = field(default_factory=Reading)
    pooling: PoolingRequest | None = None
    response: Mapping[str, Any] | None = None

    @property
    def is_chat(self) -> bool:
        """Whether the answer is a chat completion."""
        return isinstance(self.prompts[0], Chat) and self.pooling is None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineError:
    """Why an input line has no result. `code` is for programs, `message` for people.

    partial: the texts that a request had generated when it ran out of time.
    """

    line: int
    custom_id: str
    code: str
    message: str
    partial: tuple[str, ...] = ()


def line_error(line: int, code: str, message: str, custom_id: str | None = None) -> LineError:
    """A `LineError` whose message has a bounded length, whatever the line held."""
    if len(message) > MAX_MESSAGE:
        message = message[: MAX_MESSAGE - 4] + " ..."
    return LineError(line=line, custom_id=custom_id or f"line-{line}", code=code, message=message)


def explain(error: Exception) -> tuple[str, str]:
    """The code and message of a request's exception."""
    if isinstance(error, XlaEngineError):
        return error.code, str(error)
    return XlaEngineError.code, f"{type(error).__name__}: {error}"


def parse_line(
    raw: bytes, line: int, defaults: Mapping[str, Any] | None = None, images: tuple[object, ...] | None = None
) -> LineRequest | LineError:
    """Read one non-blank input line.

    line: its number from 1. images: replaces the line's own.
    defaults: sampling fields that apply if the line does not set them, and also
        `chat_template`: source of a template that replaces the checkpoint's;
        `tool_parser`, `reasoning_parser`: names of the formats in which the model writes tool calls and reasoning;
            without them both stay part of the text;
        `chat_system`: turns each plain line's prompt into a chat with this system message, which may be empty.

    Never raises for anything in `raw`: returns a `LineError` with code `invalid_json_line` or `invalid_request`
    instead. The engine later checks prompt length and token ids against the model.
    """
    record = parse_object(raw, line)
    if isinstance(record, LineError):
        return record
    if images is not None:
        record["images"] = list(images)
    return parse_record(record, line, defaults)


def parse_object(raw: bytes, line: int) -> dict[str, Any] | LineError:
    """The JSON object of a line, or its error."""
    try:
        return load_object(raw, nan_is_null=True)
    except ValueError as error:
        return line_error(line, "invalid_json_line", str(error))
    except Exception as error:  # even an unforeseen error must not end the run
        return line_error(line, *explain(error))


def custom_id_of(raw: bytes | None, line: int) -> str:
    """The custom_id that a line's output will have, without parsing the rest. raw: None if the line was too long."""
    record = line_error(line, "line_too_long", "") if raw is None else parse_object(raw, line)
    if isinstance(record, LineError):
        return record.custom_id
    try:
        return custom_id_in(record) or f"line-{line}"
    except InvalidRequestError:
        return f"line-{line}"


def line_of(custom_id: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> dict[str, Any]:
    """The plain line that asks for `params`, as JSON values. It gives every number, so that no default of a model or
    a run applies."""
    numbers = {each.name: getattr(params, each.name) for each in fields(params)}
    numbers = {name: value for name, value in numbers.items() if isinstance(value, int | float)}
    record = {"custom_id": custom_id, "prompt": prompt_token_ids, **numbers, **params.to_mapping()}
    return dict(load_object(dump_line(record)))


class Seeded(Protocol):
    """An engine, as far as requests depend on it."""

    def limits(self) -> dict[str, Any]: ...
    def seed_of(self, request_id: str, params: SamplingParams) -> int: ...


def with_requests(
    engine: Seeded, outputs: Sequence[RequestOutput], params: Sequence[SamplingParams]
) -> RequestOutputs:
    """Outputs of token ids and text, with their requests, which give the seed that was used and a limit of tokens.

    params: of each output.
    """
    longest = int(engine.limits()["max_model_len"])
    return RequestOutputs(
        replace(
            output,
            request=line_of(
                output.request_id,
                output.prompt_token_ids,
                wanted.clone(
                    seed=engine.seed_of(output.request_id, wanted),
                    max_tokens=wanted.max_tokens or longest - len(output.prompt_token_ids),
                    truncate_prompt_tokens=None,
                ),
            ),
        )
        for output, wanted in zip(outputs, params, strict=True)
    )


def parse_record(
    record: Mapping[str, Any], line: int, defaults: Mapping[str, Any] | None = None
) -> LineRequest | LineError:
    """`parse_line` for a line that is already parsed as JSON."""
    custom_id = None
    record = without_gaps(record)
    defaults = dict(defaults or {})
    template, dialect = defaults.pop("chat_template", None), Dialect.take(defaults)
    system = defaults.pop("chat_system", None)
    try:
        custom_id = custom_id_in(record)
        if record.get("url") in POOLING_URLS:
            return _pooling(record, line, custom_id or f"line-{line}", template)
        if record.keys().isdisjoint(("body", "url", "method")):
            body = {name: value for name, value in record.items() if name not in ("custom_id", "id")}
            if system is not None:
                _as_chat(body, system)
            prompts, model, sampling, reading = _plain(body, dialect, template)
        else:
            prompts, model, sampling, reading = _openai(record, dialect, template)
        echo, generates = (False, True) if isinstance(prompts[0], Chat) else take_echo(sampling)
        sampling = without_neutral(sampling)
        options = {name: sampling.pop(name) for name in SUBMIT_FIELDS if name in sampling}
        if isinstance(prompts[0], Chat):
            defaults = {"max_tokens": None, **defaults}
        if sampling.get("response_format") is not None or "tools" in record.get("body", record):
            defaults.pop("structured_outputs", None)  # the request has a format of its own
        wanted = {**defaults, **sampling}
        params = SamplingParams.from_mapping(wanted, also_known=LINE_FIELDS)
        params = reading.prepared(params)
        if (sequences := len(prompts) * params.n) > MAX_SEQUENCES:
            raise InvalidRequestError(
                f"{len(prompts)} prompts of n = {params.n} are {sequences} sequences in one line; at most "
                f"{MAX_SEQUENCES}: use more lines"
            )
    except InvalidRequestError as error:
        return line_error(line, error.code, str(error), custom_id)
    except Exception as error:  # even an unforeseen error must not end the run
        return line_error(line, *explain(error), custom_id)
    name = custom_id or f"line-{line}"
    return LineRequest(
        line=line,
        custom_id=name,
        prompts=prompts,
        params=params,
        model=model,
        echo=echo,
        generates=generates,
        options=options,
        default_limit="max_tokens" not in wanted,
        default_sampling=generates and "temperature" not in wanted,
        reading=reading,
        response=record["body"] if record.get("url") == RESPONSES_URL else None,
    )


def _pooling(record: Mapping[str, Any], line: int, custom_id: str, template: str | None) -> LineRequest:
    url, body = envelope(record)
    check_labels(body)
    model = take_model(body)
    pooling, params, given, options = take_pooling(url, body)
    prompts: tuple[Prompt, ...] = given
    if template is not None:
        prompts = tuple(
            Chat(messages=tuple(pair_messages(each.first, each.second)), options={"chat_template": template})
            if isinstance(each, TextPair)
            else each
            for each in prompts
        )
    return LineRequest(
        line=line,
        custom_id=custom_id,
        prompts=prompts,
        params=params,
        model=model,
        options=options,
        pooling=pooling,
    )


# Prompts, model, sampling fields, and how a chat's answer is parsed.
_Parts = tuple[tuple[Prompt, ...], str | None, dict[str, Any], Reading]


def _as_chat(body: dict[str, Any], system: str) -> None:
    """Turn a line's prompt into a chat, and prepend `system` to a chat without a system message."""
    if isinstance(prompt := body.get("prompt"), list):
        raise InvalidRequestError(
            "the prompt is a list of token ids, which --chat cannot turn into a message; give text"
        )
    if isinstance(prompt, str) and prompt and "messages" not in body:
        del body["prompt"]
        content: object = prompt
        if (images := body.pop("images", None)) is not None:
            parts = [{"type": "image", "image": each} for each in _listed(images)]
            content = [*parts, {"type": "text", "text": prompt}]
        body["messages"] = [{"role": "user", "content": content}]
    messages = body.get("messages")
    if system and isinstance(messages, list) and messages:
        first = messages[0]
        if not (isinstance(first, Mapping) and first.get("role") in ("system", "developer")):
            body["messages"] = [{"role": "system", "content": system}, *messages]


def _plain(body: dict[str, Any], dialect: Dialect | None, template: str | None) -> _Parts:
    rename_others(body)
    if "messages" not in body:
        _check_prompt_is_there(body)
        _check_is_no_row(body)
        images = body.pop("images", None)
        if images is not None:
            return (_with_images(_prompt(body.pop("prompt", ...)), images),), None, body, Reading()
        return _around(body, lambda value: (_prompt(value),)), None, body, Reading()
    if "prompt" in body:
        raise InvalidRequestError('both "prompt" and "messages" given; keep one')
    if (images := body.pop("images", None)) is not None:
        body["messages"] = _filled(body["messages"], images)
    chat, reading = take_chat(body, dialect, template)
    return (chat,), None, body, reading


def _openai(record: Mapping[str, Any], dialect: Dialect | None, template: str | None) -> _Parts:
    url, body = envelope(record)
    check_labels(body)
    model = take_model(body)
    if url == RESPONSES_URL:
        if body.get("previous_response_id") is not None:
            raise InvalidRequestError(
                "previous_response_id: lines cannot refer to other responses; send the items as input"
            )
        if body.get("truncation") == "auto":
            raise InvalidRequestError(
                "truncation: batch lines are not truncated; leave it out, or send fewer items"
            )
        body = chat_body(body)
    rename_others(body)
    if url == COMPLETIONS_URL:
        _check_prompt_is_there(body)
        return _around(body, _prompts), model, body, Reading()
    chat, reading = take_chat(body, dialect, template)
    return (chat,), model, _chat_sampling(body), reading


def _chat_sampling(body: dict[str, Any]) -> dict[str, Any]:
    """Translate the chat API's logprobs fields to those of `SamplingParams`."""
    wanted, top = body.pop("logprobs", None), body.pop("top_logprobs", None)
    if not isinstance(wanted, (bool, type(None))):
        raise InvalidRequestError(f"logprobs of a chat must be true or false, not {shown(wanted)}")
    if top not in (None, 0) and not wanted:
        raise InvalidRequestError("top_logprobs needs logprobs: true")
    if wanted:
        body["logprobs"] = 0 if top is None else top
    return body


def _with_images(prompt: str | tuple[int, ...], images: object) -> TextPrompt:
    """A plain line's prompt with its pictures."""
    listed = _listed(images)
    if not isinstance(prompt, str):
        raise InvalidRequestError("images need a prompt that is text, with one <image> for each")
    pictures = [Picture(each, f"images[{n}]") for n, each in enumerate(listed)]
    return {"prompt": prompt, "multi_modal_data": {"image": pictures}}


def _filled(messages: object, images: object) -> object:
    """The messages of a plain line with its pictures in their {"type": "image"} parts, in order."""
    listed = _listed(images)
    left, places = iter(listed), 0

    def with_picture(part: object) -> object:
        nonlocal places
        if not isinstance(part, Mapping) or part.get("type") != "image" or part.get("image") is not None:
            return part
        places += 1
        return {"type": "image", "image": next(left, None)}

    def with_pictures(message: object) -> object:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
            return message
        return {**message, "content": list(map(with_picture, message["content"]))}

    filled = list(map(with_pictures, messages)) if isinstance(messages, list) else messages
    if places != len(listed):
        raise InvalidRequestError(
            f'{len(listed)} images for {places} parts {{"type": "image"}} of the messages; give one for each part'
        )
    return filled


def _listed(images: object) -> list[object]:
    if not isinstance(images, list):
        raise InvalidRequestError(f"images must be a list of pictures, not {kind(images)}")
    return images


def _check_prompt_is_there(body: Mapping[str, Any]) -> None:
    """Raise if "prompt" is missing, with a different message if it seems misspelt."""
    wrong = next((name for name in body if did_you_mean(name, ("prompt", "messages"))), None)
    if "prompt" not in body and wrong is not None:
        raise InvalidRequestError(
            f'no "prompt", but {shown(wrong)}{did_you_mean(wrong, ("prompt", "messages"))}'
        )


def _check_is_no_row(body: Mapping[str, Any]) -> None:
    """Raise if the line looks like a table row, and say how rows are read."""
    other = next(
        (name for name in body if name not in LINE_FIELDS and isinstance(body[name], str | list)), None
    )
    if "prompt" not in body and other is not None and other not in SamplingParams.__dataclass_fields__:
        raise InvalidRequestError(
            f'no "prompt" (text or token ids) and no "messages"; if {shown(other)} is the prompt, `run` reads it with '
            f"--prompt-column {other}"
        )


def _around(body: dict[str, Any], read: Callable[[object], tuple[Prompt, ...]]) -> tuple[Prompt, ...]:
    """Remove `prompt` and `suffix` from a body; with a suffix, the prompts are what comes before a gap.

    read: the prompts of a value.
    """
    prompt, suffix = body.pop("prompt", ...), body.pop("suffix", None)
    if suffix is None or suffix == "":
        return read(prompt)
    if not isinstance(suffix, str):
        raise InvalidRequestError(f"suffix must be text, not {kind(suffix)}")
    if body.get("echo"):
        raise InvalidRequestError("echo and suffix exclude each other; keep one")
    prompts = ("",) if prompt == "" else read(prompt)
    texts = [each for each in prompts if isinstance(each, str)]
    if len(texts) < len(prompts):
        raise InvalidRequestError("suffix needs a prompt that is text, not token ids")
    return tuple(FillIn(text, suffix) for text in texts)


def _prompts(value: object) -> tuple[Prompt, ...]:
    """OpenAI's `prompt`: one prompt, or a list of prompts."""
    if not isinstance(value, list) or not value or not isinstance(value[0], (str, list)):
        return (_prompt(value),)
    if len(value) > MAX_PROMPTS:
        raise InvalidRequestError(f"{len(value)} prompts in one line; at most {MAX_PROMPTS}: use more lines")
    return tuple(_prompt(prompt) for prompt in value)


def _prompt(value: object) -> str | tuple[int, ...]:
    if value is ...:
        raise InvalidRequestError('no "prompt"; it must be a string or a list of token ids')
    if not isinstance(value, (str, list)):
        raise InvalidRequestError(f"prompt must be a string or a list of token ids, not {kind(value)}")
    if not value:
        raise InvalidRequestError("the prompt is empty; give at least one token")
    if isinstance(value, str):
        return value
    if isinstance(value[0], (str, list)):
        raise InvalidRequestError("prompt is a list of prompts; give each its own line")
    for position, token_id in enumerate(value):
        number = integer_of(token_id)
        if number is None or not 0 <= number < 2**31:
            raise InvalidRequestError(f"prompt[{position}] must be a token id, not {shown(token_id)}")
    return tuple(map(int, value))
