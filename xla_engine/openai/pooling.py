"""Requests for embeddings, classes, scores or ranks: OpenAI's embeddings, and vLLM's classify, score and rerank.

{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"model": "any", "input": ["one", "two"]}}
{"custom_id": "b", "method": "POST", "url": "/v1/rerank",
 "body": {"query": "a question", "documents": ["one", "two"], "top_n": 1}}
{"custom_id": "c", "method": "POST", "url": "/v1/score", "body": {"queries": "a question", "documents": ["one"]}}
{"custom_id": "d", "method": "POST", "url": "/classify", "body": {"input": ["one", "two"]}}
{"custom_id": "e", "method": "POST", "url": "/pooling", "body": {"input": "one", "task": "embed"}}
"""

import base64
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xla_engine.errors import InvalidRequestError
from xla_engine.outputs import RequestOutput
from xla_engine.pooling_outputs import ranked
from xla_engine.pooling_params import PoolingParams
from xla_engine.prompts import TextPair
from xla_engine.utils.did_you_mean import did_you_mean
from xla_engine.utils.json_line import kind
from xla_engine.utils.plain import integer_of
from xla_engine.utils.shown import shown

EMBEDDINGS_URL = "/v1/embeddings"
SCORE_URL = "/v1/score"
RERANK_URL = "/v1/rerank"
CLASSIFY_URL = "/classify"
POOLING_URL = "/pooling"
POOLING_URLS = (EMBEDDINGS_URL, SCORE_URL, RERANK_URL, CLASSIFY_URL, POOLING_URL)
MAX_INPUTS = 2048  # texts in one body, OpenAI's limit

_NAMES = {
    EMBEDDINGS_URL: ("input", "dimensions", "encoding_format"),
    SCORE_URL: ("queries", "documents", "text_1", "text_2"),
    CLASSIFY_URL: ("input",),
    POOLING_URL: ("input", "task", "dimensions", "encoding_format"),
    RERANK_URL: ("query", "documents", "top_n", "return_documents"),
}
_OF_PARAMS = ("use_activation", "truncate_prompt_tokens")
_SHARED = ("priority", "deadline_s", "queue_timeout_s", "cache_salt")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequest:
    """The form of the answer to a pooling request.

    url: one of POOLING_URLS. encoding_format: of vectors, "float" or "base64" (of little-endian float32).
    documents: of a rerank, as given. top_n: how many of them to return; None returns all.
    """

    url: str
    encoding_format: str = "float"
    documents: tuple[str, ...] = ()
    top_n: int | None = None

    @property
    def prefix(self) -> str:
        """The prefix of the answer's id."""
        return "embd-" if self.url == EMBEDDINGS_URL else f"{self.url.rpartition('/')[2]}-"


# form of the answer, what is computed, prompts (pairs for score and rerank), and options of `submit`
_Parts = tuple[PoolingRequest, PoolingParams, tuple[str | tuple[int, ...] | TextPair, ...], dict[str, Any]]


def take_pooling(url: str, body: Mapping[str, Any]) -> _Parts:
    """Parse the body of one of POOLING_URLS, without `model`. Raises InvalidRequestError."""
    given = {name: value for name, value in body.items() if value is not None and name != "user"}
    known = (*_NAMES[url], *_OF_PARAMS, *_SHARED)
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known) or f"; {url} has {', '.join(known)}"
            raise InvalidRequestError(f"unknown field {shown(name)}{hint}")
    of_params = {name: given.pop(name) for name in _OF_PARAMS if name in given}
    options = {name: given.pop(name) for name in _SHARED if name in given}
    if url in (EMBEDDINGS_URL, POOLING_URL):
        form = given.get("encoding_format", "float")
        if form not in ("float", "base64"):
            raise InvalidRequestError(f'encoding_format must be "float" or "base64", not {shown(form)}')
        params = PoolingParams(
            task=given.get("task", "embed"), dimensions=given.get("dimensions"), **of_params
        )
        request = PoolingRequest(url=url, encoding_format=form)
        return request, params, _inputs(given.get("input")), options
    if url == CLASSIFY_URL:
        params = PoolingParams(task="classify", **of_params)
        return PoolingRequest(url=url), params, _inputs(given.get("input")), options
    params = PoolingParams(task="score", **of_params)
    if url == RERANK_URL:
        query, documents = _texts("query", given.get("query")), _texts("documents", given.get("documents"))
        if not isinstance(given["query"], str):
            raise InvalidRequestError(f"query must be text, not {kind(given['query'])}")
        if not isinstance(given.get("return_documents", True), bool):
            raise InvalidRequestError("return_documents must be true or false")
        ranked(documents, [0.0] * len(documents), top := given.get("top_n"))  # checks top_n
        request = PoolingRequest(url=url, documents=documents, top_n=top)
    else:
        names = [name for name in ("text_1", "text_2") if name in given]
        first, second = ("text_1", "text_2") if names else ("queries", "documents")
        query, documents = _texts(first, given.get(first)), _texts(second, given.get(second))
        if len(query) not in (1, len(documents)):
            raise InvalidRequestError(
                f"{len(query)} {first} for {len(documents)} {second}; give one or {len(documents)}"
            )
        request = PoolingRequest(url=url)
    queries = query * len(documents) if len(query) == 1 else query
    pairs = tuple(TextPair(*each) for each in zip(queries, documents, strict=True))
    return request, params, pairs, options


def pooling_body(
    request: PoolingRequest,
    outputs: Sequence[RequestOutput],
    name: str,
    model: str,
    created: int,
    labels: Sequence[str | None] = (),
) -> dict[str, Any]:
    """The answer as JSON values.

    outputs: one for each text or pair, in order. name: the answer's id. labels: names of classes.
    """
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    found = [output.pooled or () for output in outputs]
    body: dict[str, Any] = {"id": name, "object": "list", "created": created, "model": model}
    if request.url in (EMBEDDINGS_URL, POOLING_URL):
        what, key = ("embedding", "embedding") if request.url == EMBEDDINGS_URL else ("pooling", "data")
        body["data"] = [
            {"object": what, "index": index, key: _encoded(vector, request.encoding_format)}
            for index, vector in enumerate(found)
        ]
    elif request.url == CLASSIFY_URL:
        body["data"] = [
            {
                "index": index,
                "label": dict(enumerate(labels)).get(
                    max(range(len(probs)), key=probs.__getitem__, default=0)
                ),
                "probs": list(probs),
                "num_classes": len(probs),
            }
            for index, probs in enumerate(found)
        ]
    elif request.url == SCORE_URL:
        body["data"] = [
            {"object": "score", "index": index, "score": score} for index, (score, *_) in enumerate(found)
        ]
    else:
        scores = [score for score, *_ in found]
        body = {"id": name, "model": model}
        body["results"] = [
            {
                "index": each.index,
                "document": {"text": each.document},
                "relevance_score": each.relevance_score,
            }
            for each in ranked(request.documents, scores, request.top_n)
        ]
    body["usage"] = {"prompt_tokens": tokens, "total_tokens": tokens}
    return body


def _encoded(vector: Sequence[float], form: str) -> list[float] | str:
    if form == "float":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _inputs(value: object) -> tuple[str | tuple[int, ...], ...]:
    """OpenAI's `input`: a text, token ids, or a list of either."""
    if value is None:
        raise InvalidRequestError('no "input"; it must be text, token ids, or a list of either')
    several = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    many: Any = value if several else [value]
    if len(many) > MAX_INPUTS:
        raise InvalidRequestError(f"{len(many)} inputs; at most {MAX_INPUTS}: use more requests")
    for index, each in enumerate(many):
        ids = isinstance(each, list) and all(integer_of(token) is not None for token in each)
        if not each or not (isinstance(each, str) or ids):
            raise InvalidRequestError(
                f"input[{index}] must be text or token ids, at least one; not {shown(each)}"
            )
    return tuple(each if isinstance(each, str) else tuple(map(int, each)) for each in many)


def _texts(name: str, value: object) -> tuple[str, ...]:
    many = [value] if isinstance(value, str) else value
    if not isinstance(many, list) or not many or not all(isinstance(each, str) for each in many):
        raise InvalidRequestError(f"{name} must be text or a list of texts, not {shown(value)}")
    if len(many) > MAX_INPUTS:
        raise InvalidRequestError(f"{len(many)} {name}; at most {MAX_INPUTS}: use more requests")
    return tuple(many)
