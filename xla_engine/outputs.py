"""The outputs of requests. Names follow vLLM's; scores and vectors are in `pooling_outputs.py`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple, Self

from xla_engine.errors import ConfigError, InvalidRequestError
from xla_engine.utils.html import table
from xla_engine.utils.shown import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Times of one request in seconds on the engine's monotonic clock; None if it did not get that far.

    token_times: of all tokens in order; with n above 1, of all sequences.
    sequence_token_times: with n above 1, the same for each sequence; otherwise empty.
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
        """Seconds between consecutive tokens of a sequence, one sequence after the other."""
        sequences = self.sequence_token_times or (self.token_times,)
        return tuple(b - a for times in sequences for a, b in pairwise(times))


class Logprob(NamedTuple):
    """A token's log-probability; its rank among all tokens (1 is the most likely); and its text.

    decoded_token: None if the engine has no tokenizer or the request is not detokenized.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


_PER_TOKEN = {"per_token": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One generated sequence of a request.

    text: decoded text up to the stop; while the request runs, without what may become a stop string.
    token_ids: every generated token, including those of the stop.
    logprobs: one log-probability per token if `SamplingParams.logprobs` is given, otherwise None.
    top_logprobs: what vLLM calls `logprobs`: for each token, the token and the n most likely ones by id, if
        `SamplingParams.logprobs` is above 0, otherwise None.
    finish_reason: "stop", "length", "abort", "deadline", "queue_timeout", "error", or None while running.
    stop_reason: the stop string or stop token id that ended the request; None if it was an eos id.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = field(metadata=_PER_TOKEN)
    cumulative_logprob: float | None = None
    logprobs: tuple[float, ...] | None = field(default=None, metadata=_PER_TOKEN)
    top_logprobs: Sequence[dict[int, Logprob]] | None = field(default=None, metadata=_PER_TOKEN)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def columns(self) -> dict[str, Sequence[Any]]:
        """The fields with one value for each token, without those that the request did not ask for."""
        return {name: values for name in PER_TOKEN if (values := getattr(self, name)) is not None}

    def part(self, tokens: slice) -> Self:
        """The same with some of its tokens; what does not belong to tokens stays."""
        columns: dict[str, Any] = {name: values[tokens] for name, values in self.columns().items()}
        return replace(self, **columns)


PER_TOKEN = tuple(each.name for each in fields(CompletionOutput) if each.metadata.get("per_token"))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RequestOutput:
    """One request and its output so far; `finished` is true exactly once per request.

    prompt_logprobs: if `SamplingParams.prompt_logprobs` is given, for each prompt token, itself and the n most likely
        ones by id; None for the first token and those before `logprobs_start`. Shorter during prefill.
    num_cached_tokens: prompt tokens that came from the prefix cache.
    num_drafted_tokens, num_accepted_tokens: draft tokens that were verified for it, and those that were accepted.
    pooled: the result of a pooling request, once it has ended; see `LLM.embed`.
    images_sha256: of the tiles of each of the prompt's pictures; another hash means other pixels, not another model.
    request: the request as a line of a batch file, with the seed that it had; None unless receipts were asked for.
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
    images_sha256: tuple[str, ...] = ()
    request: Mapping[str, Any] | None = None

    @property
    def text(self) -> str:
        """The text of a request with one answer. Raises InvalidRequestError if `n` is above 1."""
        if len(self.outputs) != 1:
            raise InvalidRequestError(
                f"request {self.request_id} has {len(self.outputs)} answers; read .outputs[i].text"
            )
        return self.outputs[0].text

    def to_records(self) -> list[dict[str, Any]]:
        """One flat record for each answer, as in `RequestOutputs.to_records`."""
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
                "images_sha256": list(self.images_sha256),
            }
            for each in self.outputs
        ]

    def __repr__(self) -> str:
        """The texts and how they ended, with the numbers of tokens."""
        answers = ", ".join(
            f"{each.text!r} ({len(each.token_ids)} tokens, {each.finish_reason or 'running'})"
            for each in self.outputs
        )
        prompt = f"{len(self.prompt_token_ids)} tokens" if self.prompt is None else shown(self.prompt)
        error = "" if self.error is None else f", error={self.error!r}"
        return f"RequestOutput({self.request_id!r}, prompt={prompt}, outputs=[{answers}]{error})"

    def _repr_html_(self) -> str:
        """A table for notebooks: prompt and text of each sequence."""
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
    """The list that `LLM.generate` and `chat` return; can convert itself to a table."""

    __slots__ = ()

    def to_records(self) -> list[dict[str, Any]]:
        """One dict for each answer, in order.

        Its keys are those of a batch run's tables (`generated_text`, `finish_reason`, `num_input_tokens`,
        `num_generated_tokens`, `error`, `images_sha256`), and `request_id`, `index` (of the answer in its request),
        `prompt` and `cumulative_logprob`.
        """
        return [record for output in self for record in output.to_records()]

    def to_pandas(self) -> Any:
        """`to_records` as a pandas DataFrame. Raises ConfigError if pandas is not installed."""
        try:
            import pandas
        except ImportError as error:
            raise ConfigError("to_pandas needs pandas: pip install pandas; or use to_records()") from error
        return pandas.DataFrame(self.to_records())


def __getattr__(name: str) -> Any:
    """Scores, vectors and classes were defined here, and can be imported from here still."""
    pooling = import_module("xla_engine.pooling_outputs")
    if name.startswith("_") or getattr(getattr(pooling, name, None), "__module__", "") != pooling.__name__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(pooling, name)
