"""Rows for a model that pools, and their result columns, as `ray.data.llm` names them."""

from collections.abc import Mapping, Sequence
from typing import Any

from xla_engine.batch.datasets.pooled import pooled_record
from xla_engine.batch.datasets.rows import without_nulls
from xla_engine.outputs import RequestOutput
from xla_engine.ray.results import ERROR

POOLING, QUERY = "pooling_params", "query"  # columns
COLUMNS = {"embed": "embeddings", "classify": "probs", "score": "score"}  # of a task's result


def pooled_record_of(row: Mapping[str, Any], task: str) -> dict[str, Any]:
    """The request line of a row. Raises ValueError for what the row lacks.

    row: has `prompt` or `tokenized_prompt`, for scores also `query`, and optionally fields of the request in
    `pooling_params`.
    """
    given = row.get(POOLING)
    fields: dict[str, Any] = dict(without_nulls(given)) if isinstance(given, Mapping) else {}
    text = next((row[name] for name in ("tokenized_prompt", "prompt") if row.get(name) is not None), None)
    if text is None or (task == "score" and row.get(QUERY) is None):
        needed = "query and prompt" if task == "score" else "prompt or tokenized_prompt"
        raise ValueError(f"invalid_row: the row has no {needed}")
    text = text.tolist() if hasattr(text, "tolist") else text
    record, problem = pooled_record({**fields, "prompt": text}, task, row.get(QUERY), {})
    if problem is not None:
        raise ValueError(f"invalid_row: {problem}")
    return record


def pooled_of(output: RequestOutput, task: str) -> dict[str, Any]:
    """The columns of a row's result."""
    numbers = output.pooled or ()
    value = numbers[0] if task == "score" else list(numbers)
    return {COLUMNS[task]: value, "num_input_tokens": len(output.prompt_token_ids), ERROR: ""}


def pooled_error(message: str, task: str) -> dict[str, Any]:
    """The columns of a failed row."""
    return {COLUMNS[task]: None, "num_input_tokens": 0, ERROR: message}


def pooled_columns(results: Sequence[Mapping[str, Any]], task: str) -> dict[str, Any]:
    """Arrow arrays from the values of `pooled_of` and `pooled_error`, with the same types in every batch."""
    import pyarrow as pa

    kind = pa.float32() if task == "score" else pa.list_(pa.float32())
    types = {COLUMNS[task]: kind, "num_input_tokens": pa.int64(), ERROR: pa.string()}
    return {name: pa.array([each[name] for each in results], type) for name, type in types.items()}
