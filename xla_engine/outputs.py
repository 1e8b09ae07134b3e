"""What comes back for a request. Names follow vLLM's `RequestOutput`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from xla_engine.utils.html import table


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
    top_logprobs: tuple[dict[int, Logprob], ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One request and what was generated for it so far; `finished` is true exactly once per request.

    prompt_logprobs: when `SamplingParams.prompt_logprobs` is given, per prompt token the token itself and the n most
        likely ones by id; None for the first token, which nothing predicts, and for those before `logprobs_start`.
        Shorter while the prompt is read.
    num_cached_tokens: prompt tokens that were not computed, as an earlier prompt began with them.
    num_drafted_tokens: guesses that were checked for it by steps that may sample several tokens.
    num_accepted_tokens: those of them that were right.
    pooled: of a request that pools, its numbers once it has ended; see `xla_engine.pooling`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics | None = None
    error: str | None = None
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    num_cached_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    pooled: tuple[float, ...] | None = None

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
