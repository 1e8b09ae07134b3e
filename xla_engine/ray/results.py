"""The result columns of a row, as `ray.data.llm` names them."""

from collections.abc import Mapping, Sequence
from typing import Any

from xla_engine.outputs import CompletionOutput, Logprob, RequestOutput

ERROR = "__inference_error__"  # column; "" if there is a result


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


_NOTHING = RequestOutput(
    request_id="",
    prompt=None,
    prompt_token_ids=(),
    outputs=(CompletionOutput(index=0, text="", token_ids=()),),
    finished=True,
)


def error_of(message: str) -> dict[str, Any]:
    """The columns of a failed row: empty results, and the error."""
    return result_of(_NOTHING) | {ERROR: message}


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
