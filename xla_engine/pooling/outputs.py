"""What comes back for a request that pools. Names follow vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


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
    """One request and what was made of it.

    prompt_token_ids: as the model saw them; of a score by two vectors, those of the query and then the document's.
    num_cached_tokens: those that were not computed.
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
    """One of the documents that were ranked: its place among those given, its text and its score."""

    index: int
    document: str
    relevance_score: float
