"""Convert rows of a Ray dataset to requests, and outputs to the columns of `ray.data.llm`."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xla_engine.batch.datasets.rows import without_nulls
from xla_engine.batch.requests import LineError, LineRequest, line_error, parse_record
from xla_engine.outputs import Logprob, RequestOutput

ERROR = "__inference_error__"  # column; "" if there is a result


PROMPTS = (("messages", "messages"), ("tokenized_prompt", "prompt"), ("prompt", "prompt"))  # column, field
SAMPLING = "sampling_params"


def columns_read(id_column: str | None) -> set[str]:
    """The columns that form a request."""
    return {*(column for column, _ in PROMPTS), SAMPLING} | ({id_column} if id_column is not None else set())


def request_of(
    row: Mapping[str, Any], defaults: Mapping[str, Any], id_column: str | None, seed_of: Callable[[str], int]
) -> LineRequest | LineError:
    """The request of a row, or its error.

    row: has `messages`, `prompt` or `tokenized_prompt`, and optionally `sampling_params`.
    id_column: the column of row ids. Without one the request itself is the id, so that equal rows get equal texts.
    seed_of: returns the seed for an id, for rows without a seed.
    """
    given = row.get(SAMPLING)
    record: dict[str, Any] = dict(without_nulls(given)) if isinstance(given, Mapping) else {}
    for column, field in PROMPTS:
        if row.get(column) is not None:
            record[field] = without_nulls(_plain(row[column]))
            break
    else:
        return line_error(1, "invalid_request", "the row has no messages, prompt or tokenized_prompt")
    if record.get("seed", defaults.get("seed")) is None:
        record["seed"] = seed_of(_name(record) if id_column is None else str(row.get(id_column)))
    request = parse_record(record, 1, defaults)
    if isinstance(request, LineRequest) and (len(request.prompts) > 1 or request.params.n > 1):
        return line_error(1, "invalid_request", "a row has one text: n must be 1")
    return request


def _name(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _plain(value: Any) -> Any:
    """Arrays as lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def result_of(output: RequestOutput) -> dict[str, Any]:
    completion = output.outputs[0]
    tops: Sequence[Mapping[int, Logprob]] | None = completion.top_logprobs
    if tops is None and completion.logprobs is not None:
        pairs = zip(completion.token_ids, completion.logprobs, strict=True)
        tops = [{token: Logprob(value, 0)} for token, value in pairs]
    return {
        "generated_text": completion.text,
        "generated_tokens": list(completion.token_ids),
        "num_input_tokens": len(output.prompt_token_ids),
        "num_generated_tokens": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "logprobs": None if tops is None else [_logprobs(top) for top in tops],
        "prompt_logprobs": None
        if output.prompt_logprobs is None
        else [None if top is None else _logprobs(top) for top in output.prompt_logprobs],
        "images_sha256": list(output.images_sha256),
        ERROR: "",
    }


def error_of(message: str) -> dict[str, Any]:
    """The columns of a failed row: empty results, and the error."""
    return {
        "generated_text": "",
        "generated_tokens": [],
        "num_input_tokens": 0,
        "num_generated_tokens": 0,
        "finish_reason": None,
        "logprobs": None,
        "prompt_logprobs": None,
        "images_sha256": [],
        ERROR: message,
    }


def _logprobs(top: Mapping[int, Logprob]) -> list[dict[str, Any]]:
    """The token and the likeliest others. rank: null if only the token's own logprob was requested."""
    return [
        {
            "token_id": token,
            "logprob": each.logprob,
            "rank": each.rank or None,
            "decoded_token": each.decoded_token,
        }
        for token, each in top.items()
    ]


def columns_of(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Arrow arrays from the values of `result_of` and `error_of`, with the same types in every batch."""
    import pyarrow as pa

    logprob = pa.struct(
        [
            ("token_id", pa.int32()),
            ("logprob", pa.float64()),
            ("rank", pa.int32()),
            ("decoded_token", pa.string()),
        ]
    )
    types = {
        "generated_text": pa.string(),
        "generated_tokens": pa.list_(pa.int32()),
        "num_input_tokens": pa.int64(),
        "num_generated_tokens": pa.int64(),
        "finish_reason": pa.string(),
        "logprobs": pa.list_(pa.list_(logprob)),
        "prompt_logprobs": pa.list_(pa.list_(logprob)),
        "images_sha256": pa.list_(pa.string()),
        ERROR: pa.string(),
    }
    return {name: pa.array([each[name] for each in results], kind) for name, kind in types.items()}
