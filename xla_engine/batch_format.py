"""Batch lines in, batch lines out: pure functions between bytes and requests, results and bytes.

Two kinds of input line may be mixed in one file. A plain line holds the prompt and `SamplingParams` fields:

    {"prompt": "def main(", "max_tokens": 32, "temperature": 0, "custom_id": "a"}

and an OpenAI Batch line (https://platform.openai.com/docs/api-reference/batch) holds a completions request:

    {"custom_id": "a", "method": "POST", "url": "/v1/completions",
     "body": {"model": "any", "prompt": "def main(", "max_tokens": 32, "temperature": 0}}

Both give OpenAI Batch output lines. A line must be an I-JSON object (RFC 7493: UTF-8, no duplicate names, no
NaN or Infinity, no lone surrogates; integers within 64 bits) nested at most `MAX_NESTING` deep: what other
readers would see differently is refused here rather than guessed at.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from xla_engine.errors import InvalidRequestError
from xla_engine.fingerprint import result_fingerprint
from xla_engine.outputs import CompletionOutput, RequestOutput
from xla_engine.sampling_params import UNSUPPORTED, SamplingParams

MAX_NESTING = 64  # containers inside one another in one line
MAX_CUSTOM_ID = 512  # characters
MAX_MESSAGE = 500  # characters of an error message; the rest of a hostile value is not echoed

COMPLETIONS_URL = "/v1/completions"

# OpenAI bodies spell out defaults: an unsupported field may be there with the value that asks for nothing.
NEUTRAL: Mapping[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "stream": False,
    "stop": [],
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LineRequest:
    """One input line that asks for something the engine may be able to do.

    line: number in the file, from 1.
    custom_id: the line's own, or `line-<n>`.
    prompt: text, or token ids.
    model: the name the line asked for, to be echoed; None where it named none.
    """

    line: int
    custom_id: str
    prompt: str | tuple[int, ...]
    params: SamplingParams
    model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineError:
    """One input line that has no result, and why. `code` is for machines, `message` for people."""

    line: int
    custom_id: str
    code: str
    message: str


def line_error(line: int, code: str, message: str, custom_id: str | None = None) -> LineError:
    """A `LineError` whose message has a bounded length, whatever the line held."""
    if len(message) > MAX_MESSAGE:
        message = message[: MAX_MESSAGE - 4] + " ..."
    return LineError(line=line, custom_id=custom_id or f"line-{line}", code=code, message=message)


def parse_line(raw: bytes, line: int, defaults: Mapping[str, Any] | None = None) -> LineRequest | LineError:
    """Read one non-blank input line.

    line: its number from 1. defaults: sampling fields that apply where the line does not say otherwise.

    Never raises for anything in `raw`: what is wrong comes back as a `LineError` with code
    `invalid_json_line` or `invalid_request`. Prompt length and token ids against the model are the engine's
    to check.
    """
    try:
        record = _load_object(raw)
    except (ValueError, RecursionError) as error:
        return line_error(line, "invalid_json_line", _json_message(error))
    custom_id = None
    try:
        custom_id = _custom_id(record)
        is_batch_line = not record.keys().isdisjoint(("body", "url", "method"))
        body = _batch_body(record) if is_batch_line else record
        prompt = _prompt(body)
        sampling = {name: value for name, value in body.items() if name not in ("prompt", "custom_id", "id")}
        model = sampling.pop("model", None) if is_batch_line else None
        if model is not None and not isinstance(model, str):
            raise InvalidRequestError(f"model must be a string, not {model!r}")
        if is_batch_line:
            sampling = _without_neutral(sampling)
        params = SamplingParams.from_mapping({**(defaults or {}), **sampling})
    except InvalidRequestError as error:
        return line_error(line, error.code, str(error), custom_id)
    name = custom_id or f"line-{line}"
    return LineRequest(line=line, custom_id=name, prompt=prompt, params=params, model=model)


def output_error(request: LineRequest, output: RequestOutput) -> LineError | None:
    """Why a finished request has no result; None when it has one, having ended by "stop" or "length"."""
    reason = output.outputs[0].finish_reason if output.outputs else "error"
    if reason in ("stop", "length"):
        return None
    code = "aborted" if reason == "abort" else "engine_error"
    message = output.error or f"the request ended with finish_reason {reason!r}"
    return line_error(request.line, code, message, request.custom_id)


def result_line(
    request: LineRequest, output: RequestOutput, *, created: int, model: str, fingerprint: str | None = None
) -> bytes:
    """The output line of a request that ended by "stop" or "length".

    created: Unix seconds, one value for the whole run, so that it is the only field two runs can differ in.
    model: the name of the loaded model, for lines that named none.
    fingerprint: of the engine; given, the body says it in `xla_engine`, with hashes of tokens and logprob bits.

    Ids are made of the line number. `logprobs` follows the completions API with one number per token and
    `token_ids` beside them; a number that is not finite becomes null.
    """
    completion = output.outputs[0]
    prompt_tokens, completion_tokens = len(output.prompt_token_ids), len(completion.token_ids)
    choice = {
        "index": completion.index,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "logprobs": _logprobs(completion),
    }
    body: dict[str, Any] = {
        "id": f"cmpl-{request.line}",
        "object": "text_completion",
        "created": created,
        "model": request.model or model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }
    if fingerprint is not None:
        body["xla_engine"] = result_fingerprint(fingerprint, completion.token_ids, completion.logprobs)
    response = {"status_code": 200, "request_id": f"req_{request.line}", "body": body}
    return _output_line(request.line, request.custom_id, response=response, error=None)


def error_line(error: LineError) -> bytes:
    """The output line of an input line without a result; `error.line` is ours, the rest OpenAI's."""
    detail = {"code": error.code, "message": error.message, "line": error.line}
    return _output_line(error.line, error.custom_id, response=None, error=detail)


def _load_object(raw: bytes) -> dict[str, Any]:
    value = json.loads(raw.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_unique_names)
    if not isinstance(value, dict):
        raise ValueError(f"a line must be a JSON object, not {_kind(value)}")
    _check_values(value)
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the name {name!r} stands twice in one object")
            seen.add(name)
    return record


def _check_values(value: object) -> None:
    """Walk level by level, so that depth costs no stack."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below += item.keys()
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str):
                try:
                    item.encode("utf-8")
                except UnicodeEncodeError as error:
                    raise ValueError(
                        "a string holds half of a surrogate pair; write the whole character"
                    ) from error
            elif isinstance(item, float):
                if not math.isfinite(item):
                    raise ValueError("a number is too large for a 64-bit float")
            elif isinstance(item, int) and not -(2**63) <= item < 2**64:
                raise ValueError("an integer does not fit into 64 bits")
        if not below:
            return
        level = below
    raise ValueError(f"nested more than {MAX_NESTING} deep")


def _json_message(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at character {error.pos + 1}"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: {error.reason} at byte {error.start + 1}"
    if isinstance(error, RecursionError):
        return f"nested more than {MAX_NESTING} deep"
    return str(error)


def _custom_id(record: Mapping[str, Any]) -> str | None:
    if "custom_id" in record and "id" in record:
        raise InvalidRequestError('both "custom_id" and "id" given; keep one')
    value = record.get("custom_id", record.get("id"))
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"custom_id must be a non-empty string, not {value!r}")
    if len(value) > MAX_CUSTOM_ID:
        raise InvalidRequestError(f"custom_id has {len(value)} characters; at most {MAX_CUSTOM_ID}")
    return value


def _batch_body(record: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in record:
        if name not in ("custom_id", "id", "method", "url", "body"):
            raise InvalidRequestError(
                f"unknown field {name!r} beside the body; sampling fields belong into the body"
            )
    method, url, body = record.get("method", "POST"), record.get("url"), record.get("body")
    if method != "POST":
        raise InvalidRequestError(f'method must be "POST", not {method!r}')
    if url != COMPLETIONS_URL:
        if url is None:
            raise InvalidRequestError(f'no "url"; write "url": "{COMPLETIONS_URL}"')
        raise InvalidRequestError(f"url {url!r} is not supported by this version; only {COMPLETIONS_URL} is")
    if not isinstance(body, dict):
        raise InvalidRequestError(f'"body" must be an object, not {_kind(body)}')
    for name in ("custom_id", "id"):
        if name in body:
            raise InvalidRequestError(f"field {name!r} belongs beside the body, not into it")
    return body


def _prompt(body: Mapping[str, Any]) -> str | tuple[int, ...]:
    if "prompt" not in body:
        raise InvalidRequestError('no "prompt"; it must be a string or a list of token ids')
    prompt = body["prompt"]
    if not isinstance(prompt, (str, list)):
        raise InvalidRequestError(f"prompt must be a string or a list of token ids, not {_kind(prompt)}")
    if not prompt:
        raise InvalidRequestError("the prompt is empty; give at least one token")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt[0], (str, list)):
        raise InvalidRequestError(
            "prompt is a list of prompts, not supported by this version; give each its own line"
        )
    for position, token_id in enumerate(prompt):
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < 2**31:
            raise InvalidRequestError(f"prompt[{position}] must be a token id, not {token_id!r}")
    return tuple(prompt)


def _without_neutral(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's null means "as if absent"; a default spelled out for an unsupported field asks for nothing."""
    known = {field.name for field in fields(SamplingParams)} | UNSUPPORTED

    def asks_for_nothing(name: str, value: object) -> bool:
        if value is None:
            return name in known
        neutral = NEUTRAL.get(name)
        return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)

    return {name: value for name, value in sampling.items() if not asks_for_nothing(name, value)}


def _logprobs(choice: CompletionOutput) -> dict[str, Any] | None:
    if choice.logprobs is None:
        return None
    finite = [value if math.isfinite(value) else None for value in choice.logprobs]
    return {"token_logprobs": finite, "token_ids": list(choice.token_ids)}


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")


def _output_line(line: int, custom_id: str, *, response: object, error: object) -> bytes:
    record = {"id": f"batch_req_{line}", "custom_id": custom_id, "response": response, "error": error}
    # ASCII only: U+2028 and the like in generated text would end a line for some readers.
    return json.dumps(record, ensure_ascii=True, allow_nan=False).encode("ascii") + b"\n"
