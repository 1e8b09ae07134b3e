"""What comes back for a request: text, a score or a vector. Names follow vLLM's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

from xla_engine.errors import ConfigError, InvalidRequestError
from xla_engine.utils.html import table
from xla_engine.utils.shown import shown

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Host times of one request in seconds on the engine's monotonic clock; None where it never got there.

    token_times: of all tokens in order, those of all sequences where there are several.
    sequence_token_times: the same sequence by sequence, where there are several; else empty.
    """

    arrival_time: float
    admitted_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    token_times: tuple[float, ...] = ()
    sequence_token_times: tuple[tuple[float, ...], ...] = ()

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def inter_token_latencies(self) -> tuple[float, ...]:
        """Seconds between consecutive tokens of a sequence; one sequence after the other."""
        sequences = self.sequence_token_times or (self.token_times,)
        return tuple(b - a for times in sequences for a, b in pairwise(times))


class Logprob(NamedTuple):
    """A token's log-probability; its rank among all tokens, 1 the most likely; and its text.

    decoded_token: None where the engine has no tokenizer or the request is not detokenized.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """The generated side of a request.

    text: decoded text up to the stop; while the request runs, without what may still become a stop string.
    token_ids: every generated token, those of the stop included.
    logprobs: one log-probability per token when `SamplingParams.logprobs` is given, else None.
    top_logprobs: per token what vLLM calls `logprobs`: the token and the n most likely ones by id, when
        `SamplingParams.logprobs` is above 0, else None.
    finish_reason: "stop", "length", "abort", "error", or None while running.
    stop_reason: the stop string or stop token id that ended the request; None when it was an eos id.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: tuple[float, ...] | None = None
    top_logprobs: Sequence[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RequestOutput:
    """One request and what was generated for it so far; `finished` is true exactly once per request.

    prompt_logprobs: when `SamplingParams.prompt_logprobs` is given, per prompt token the token itself and the n most
        likely ones by id; None for the first token, which nothing predicts, and for those before `logprobs_start`.
        Shorter while the prompt is read.
    num_cached_tokens: prompt tokens that were not computed, as an earlier prompt began with them.
    num_drafted_tokens: guesses that were checked for it by steps that may sample several tokens.
    num_accepted_tokens: those of them that were right.
    pooled: of a request that pools, its numbers once it has ended; see `LLM.embed`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics | None = None
    error: str | None = None
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    pooled: tuple[float, ...] | None = None

    @property
    def text(self) -> str:
        """The text of a request with one answer. Raises InvalidRequestError where `n` gave it several."""
        if len(self.outputs) != 1:
            raise InvalidRequestError(
                f"request {self.request_id} has {len(self.outputs)} answers; read .outputs[i].text"
            )
        return self.outputs[0].text

    def to_records(self) -> list[dict[str, Any]]:
        """One flat record for each answer: those of `RequestOutputs.to_records`."""
        return [
            {
                "request_id": self.request_id,
                "index": each.index,
                "prompt": self.prompt,
                "generated_text": each.text,
                "finish_reason": each.finish_reason,
                "num_input_tokens": len(self.prompt_token_ids),
                "num_generated_tokens": len(each.token_ids),
                "cumulative_logprob": each.cumulative_logprob,
                "error": self.error,
            }
            for each in self.outputs
        ]

    def __repr__(self) -> str:
        """What a person reads: the texts and how they end; token ids and times are counted, not listed."""
        answers = ", ".join(
            f"{each.text!r} ({len(each.token_ids)} tokens, {each.finish_reason or 'running'})"
            for each in self.outputs
        )
        prompt = f"{len(self.prompt_token_ids)} tokens" if self.prompt is None else shown(self.prompt)
        error = "" if self.error is None else f", error={self.error!r}"
        return f"RequestOutput({self.request_id!r}, prompt={prompt}, outputs=[{answers}]{error})"

    def _repr_html_(self) -> str:
        """Prompt and text of each sequence, as a table for notebooks."""
        rows = [
            (
                output.index,
                f"{self.prompt or ''}{output.text}",
                len(output.token_ids),
                output.finish_reason or "running",
            )
            for output in self.outputs
        ]
        caption = f"request {self.request_id}, {len(self.prompt_token_ids)} prompt tokens"
        if self.error is not None:
            caption += f": {self.error}"
        return table(("", "prompt and text", "tokens", "ends"), rows, caption=caption)


class RequestOutputs(list[RequestOutput]):
    """The list that `LLM.generate` and `chat` return, which also makes a table of itself."""

    __slots__ = ()

    def to_records(self) -> list[dict[str, Any]]:
        """One dict for each answer, in order, with the names that a run's tables have: `generated_text`,
        `finish_reason`, `num_input_tokens`, `num_generated_tokens`, `error`; and `request_id`, `index` (of the answer
        among the request's), `prompt` and `cumulative_logprob`."""
        return [record for output in self for record in output.to_records()]

    def to_pandas(self) -> Any:
        """`to_records` as a pandas DataFrame. Raises ConfigError where pandas is not installed."""
        try:
            import pandas
        except ImportError as error:
            raise ConfigError("to_pandas needs pandas: pip install pandas; or use to_records()") from error
        return pandas.DataFrame(self.to_records())


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The log-likelihood of one continuation after its context.

    logprob: sum of `token_logprobs`, natural logarithm.
    is_greedy: whether greedy decoding would have written it.
    token_ids: of the continuation.
    token_logprobs: one per token.
    num_cached_tokens: tokens of the context that were not computed.
    """

    logprob: float
    is_greedy: bool
    token_ids: tuple[int, ...]
    token_logprobs: tuple[float, ...]
    num_cached_tokens: int


def score_of(output: RequestOutput, begin: int) -> Score:
    """The score of a request that `score_request` made, whose continuation begins at position `begin`."""
    ids = output.prompt_token_ids[begin:]
    found = [each for each in (output.prompt_logprobs or ())[begin:] if each is not None]
    if output.error is not None or len(found) != len(ids):
        raise InvalidRequestError(
            f"request {output.request_id} was not scored: {output.error or 'it was aborted'}"
        )
    tokens = [each[token] for each, token in zip(found, ids, strict=True)]
    return Score(
        logprob=sum(each.logprob for each in tokens),
        is_greedy=all(len(each) == 1 for each in found),  # the likeliest token is the token itself
        token_ids=tuple(ids),
        token_logprobs=tuple(each.logprob for each in tokens),
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


def pooled_of(output: RequestOutput) -> list[float]:
    """The numbers of a request. Raises InvalidRequestError where it ended without."""
    if output.pooled is None:
        ended = output.error or f"it ended with reason {output.outputs[0].finish_reason!r}"
        raise InvalidRequestError(f"request {output.request_id} was not pooled: {ended}")
    return list(output.pooled)


def embedding_of(output: RequestOutput) -> EmbeddingRequestOutput:
    """The vector of a request that has ended. Raises InvalidRequestError where it has none; so do the next two."""
    return EmbeddingRequestOutput(**_shared(output), outputs=EmbeddingOutput(embedding=pooled_of(output)))


def classification_of(output: RequestOutput) -> ClassificationRequestOutput:
    """The classes of a request that has ended."""
    return ClassificationRequestOutput(
        **_shared(output), outputs=ClassificationOutput(probs=pooled_of(output))
    )


def document_score_of(output: RequestOutput) -> ScoringRequestOutput:
    """The score of a request that has ended, for a classifier of one class."""
    return ScoringRequestOutput(**_shared(output), outputs=ScoringOutput(score=pooled_of(output)[0]))


def _shared(output: RequestOutput) -> dict[str, Any]:
    return {
        "request_id": output.request_id,
        "prompt_token_ids": list(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
    }


def ranked(documents: Sequence[str], scores: Sequence[float], top_n: int | None) -> list[RerankResult]:
    """Documents by score, highest first. Raises InvalidRequestError for a `top_n` that is no count."""
    if top_n is not None and (isinstance(top_n, bool) or not isinstance(top_n, int) or top_n < 1):
        raise InvalidRequestError(f"top_n must be an integer of at least 1, not {top_n!r}")
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return [
        RerankResult(index=index, document=documents[index], relevance_score=scores[index])
        for index in order[:top_n]
    ]


def cosine_score(query: RequestOutput, document: RequestOutput) -> ScoringRequestOutput:
    """How alike the vectors of a query and a document are: their cosine."""
    one, other = pooled_of(query), pooled_of(document)
    lengths = math.hypot(*one) * math.hypot(*other)
    score = math.fsum(a * b for a, b in zip(one, other, strict=True)) / max(lengths, 1e-12)
    return ScoringRequestOutput(
        request_id=document.request_id,
        outputs=ScoringOutput(score=score),
        prompt_token_ids=[*query.prompt_token_ids, *document.prompt_token_ids],
        num_cached_tokens=query.num_cached_tokens + document.num_cached_tokens,
    )
