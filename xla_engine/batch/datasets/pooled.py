"""Rows of a table for a model that pools: their requests, and the columns that their results become."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from xla_engine.openai.pooling import CLASSIFY_URL, EMBEDDINGS_URL, SCORE_URL

# What a row becomes -> the URL of its request, and the columns of its result.
TASKS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "embed": (EMBEDDINGS_URL, ("embedding",)),
    "classify": (CLASSIFY_URL, ("label", "probs")),
    "score": (SCORE_URL, ("score",)),
}


def pooled_record(
    record: dict[str, Any], task: str, query: Any, defaults: Mapping[str, Any]
) -> tuple[dict[str, Any], str | None]:
    """The request line of a row, and what is wrong with the row, if anything.

    record: the row's custom_id, its text or token ids as `prompt`, and further fields. query: the first text of a
    pair. defaults: further fields of rows that do not have them.
    """
    body = {**defaults, **record}
    line = {name: body.pop(name) for name in ("custom_id",) if name in body}
    text = body.pop("prompt", None)
    if text is None:
        return line, "a row for a model that pools has a text or token ids, not a chat"
    if task == "score":
        body |= {"queries": query, "documents": text}
    else:
        body["input"] = text
    if task == "embed":
        body["encoding_format"] = "base64"  # shorter, and to the bit
    return {**line, "method": "POST", "url": TASKS[task][0], "body": body}, None


def pooled_values(body: Mapping[str, Any]) -> dict[str, Any]:
    """What the body of an answer has for the columns of `TASKS`."""
    (found,) = body["data"]
    if isinstance(vector := found.get("embedding"), str):
        return {"embedding": np.frombuffer(base64.b64decode(vector), "<f4")}
    return {name: found[name] for name in ("embedding", "label", "probs", "score") if name in found}
