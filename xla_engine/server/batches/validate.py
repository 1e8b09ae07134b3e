"""Validate a file of requests before it runs. As at OpenAI, a file with an invalid line does not run at all."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from xla_engine.batch.envelope import CHAT_URL, COMPLETIONS_URL, MAX_CUSTOM_ID, RESPONSES_URL
from xla_engine.batch.lines import Line, read_lines
from xla_engine.utils.json_line import load_object

SHOWN_PROBLEMS = 50
MAX_MESSAGE = 200  # characters; short, because lists show the problems of up to 100 batches
_ASKED = {COMPLETIONS_URL: "prompt", CHAT_URL: "messages", RESPONSES_URL: "input"}


def problems_of(
    path: Path, endpoint: str, model_names: Sequence[str], max_lines: int
) -> tuple[int, list[Any]]:
    """The number of lines in a file, and its problems: code, message, line and field of each.

    Only the envelope is checked here. A line's parameters are checked when it runs, and may fail it alone.
    """
    names: dict[str, int] = {}
    found: list[Any] = []
    total = 0
    with open(path, "rb") as file:
        for line in read_lines(file):
            total += 1
            if total > max_lines:
                message = f"the file has more than {max_lines} lines; send it in parts"
                return total, [_problem("too_many_tasks", message, None)]
            found += _problems_of_line(line, endpoint, model_names, names)
            if len(found) >= SHOWN_PROBLEMS:
                break
    if not total:
        found.append(_problem("empty_file", "the file contains no request", None))
    return total, found[:SHOWN_PROBLEMS]


def _problems_of_line(
    line: Line, endpoint: str, model_names: Sequence[str], names: dict[str, int]
) -> Iterator[Any]:
    number = line.number
    if line.raw is None:
        yield _problem("line_too_long", f"the line has {line.size} bytes", number)
        return
    try:
        record = load_object(line.raw)
    except ValueError as error:
        yield _problem("invalid_json_line", f"the line is not valid JSON: {error}", number)
        return
    name = record.get("custom_id")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_CUSTOM_ID:
        message = f"custom_id must be text of 1 to {MAX_CUSTOM_ID} characters"
        yield _problem("missing_required_parameter", message, number, "custom_id")
    elif (first := names.setdefault(name, number)) != number:
        yield _problem("duplicate_custom_id", f"{name!r} was used on line {first}", number, "custom_id")
    if record.get("method", "POST") != "POST":
        yield _problem("invalid_method", 'method must be "POST"', number, "method")
    if record.get("url") != endpoint:
        message = f"url is {record.get('url')!r}, and the batch's endpoint {endpoint}"
        yield _problem("mismatched_endpoint", message, number, "url")
    body, asked = record.get("body"), _ASKED.get(endpoint)
    if not isinstance(body, dict):
        yield _problem("missing_required_parameter", "body must be an object", number, "body")
        return
    if isinstance(model := body.get("model"), str) and model not in model_names:
        message = f"model {model!r} is not supported here; this server has {', '.join(model_names)}"
        yield _problem("model_not_found", message, number, "body.model")
    if body.get("stream"):
        yield _problem(
            "streaming_unsupported", "streaming is not supported in batches", number, "body.stream"
        )
    if asked is not None and asked not in body:
        yield _problem("missing_required_parameter", f"the body has no {asked}", number, f"body.{asked}")


def _problem(code: str, message: str, line: int | None, param: str | None = None) -> dict[str, Any]:
    return {"code": code, "message": message[:MAX_MESSAGE], "line": line, "param": param}
