"""Scores, vectors and classes, of requests that generate no text. Names follow vLLM's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from xla_engine.errors import InvalidRequestError
from xla_engine.outputs import RequestOutput
from xla_engine.utils.plain import integer_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The log-likelihood of one continuation after its context.

    logprob: sum of `token_logprobs`, natural logarithm.
    is_greedy: whether greedy decoding would generate it.
    token_ids: of the continuation.
    token_logprobs: one per token.
    num_cached_tokens: tokens of the context that came from the prefix cache.
    """

    logprob: float
    is_greedy: bool
    token_ids: tuple[int, ...]
    token_logprobs: tuple[float, ...]
    num_cached_tokens: int


def score_of(output: RequestOutput, begin: int) -> Score:
    """The score from the output of a `score_request` whose continuation begins at position `begin`."""
    ids = output.prompt_token_ids[begin:]
    found = [each for each in (output.prompt_logprobs or ())[begin:] if each is not None]
    if output.error is not None or len(found) != len(ids):
        raise InvalidRequestError(
            f"request {output.request_id} was not scored: {output.error or 'it was aborted'}"
        )
    logprobs = tuple(each[token].logprob for each, token in zip(found, ids, strict=True))
    return Score(
        logprob=sum(logprobs),
        is_greedy=all(len(each) == 1 for each in found),  # the most likely token is the token itself
        token_ids=tuple(ids),
        token_logprobs=logprobs,
        num_cached_tokens=output.num_cached_tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    """The vector of a text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationOutput:
    """One probability per class."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringOutput:
    """How well a document fits a query: higher is better."""

    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequestOutput(Generic[T]):
    """One pooling request and its output.

    prompt_token_ids: as the model saw them; for a cosine score, those of the query followed by the document's.
    num_cached_tokens: those that came from the prefix cache.
    """

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """A text and its vector."""

    __slots__ = ()


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """A text and its classes."""

    __slots__ = ()


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """A query with a document, and how well they fit."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankResult:
    """A ranked document: its index among the given ones, its text and its score."""

    index: int
    document: str
    relevance_score: float


def pooled_of(output: RequestOutput) -> list[float]:
    """The pooled numbers of a request. Raises InvalidRequestError if it ended without."""
    if output.pooled is None:
        ended = output.error or f"it ended with reason {output.outputs[0].finish_reason!r}"
        raise InvalidRequestError(f"request {output.request_id} was not pooled: {ended}")
    return list(output.pooled)


def embedding_of(output: RequestOutput) -> EmbeddingRequestOutput:
    """The vector of a finished request. Raises InvalidRequestError if it has none, as do the next two functions."""
    return EmbeddingRequestOutput(**_shared(output), outputs=EmbeddingOutput(embedding=pooled_of(output)))


def classification_of(output: RequestOutput) -> ClassificationRequestOutput:
    """The class probabilities of a finished request."""
    return ClassificationRequestOutput(
        **_shared(output), outputs=ClassificationOutput(probs=pooled_of(output))
    )


def document_score_of(output: RequestOutput) -> ScoringRequestOutput:
    """The score of a finished request, from a classifier with one class."""
    return ScoringRequestOutput(**_shared(output), outputs=ScoringOutput(score=pooled_of(output)[0]))


def _shared(output: RequestOutput) -> dict[str, Any]:
    return {
        "request_id": output.request_id,
        "prompt_token_ids": list(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
    }


def ranked(documents: Sequence[str], scores: Sequence[float], top_n: int | None) -> list[RerankResult]:
    """Documents by score, highest first. Raises InvalidRequestError if `top_n` is not a positive integer."""
    count = None if top_n is None else integer_of(top_n)
    if top_n is not None and (count is None or count < 1):
        raise InvalidRequestError(f"top_n must be an integer of at least 1, not {top_n!r}")
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return [
        RerankResult(index=index, document=documents[index], relevance_score=scores[index])
        for index in order[:count]
    ]


def cosine_score(query: RequestOutput, document: RequestOutput) -> ScoringRequestOutput:
    one, other = pooled_of(query), pooled_of(document)
    lengths = math.hypot(*one) * math.hypot(*other)
    score = math.fsum(a * b for a, b in zip(one, other, strict=True)) / max(lengths, 1e-12)
    return ScoringRequestOutput(
        request_id=document.request_id,
        outputs=ScoringOutput(score=score),
        prompt_token_ids=[*query.prompt_token_ids, *document.prompt_token_ids],
        num_cached_tokens=query.num_cached_tokens + document.num_cached_tokens,
    )
