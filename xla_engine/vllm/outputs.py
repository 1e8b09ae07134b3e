"""Outputs in vLLM's shapes: lists, and a dict of log-probabilities for each token."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from xla_engine import outputs
from xla_engine.model_loader.peft.request import LoRARequest
from xla_engine.outputs import RequestMetrics
from xla_engine.text.tokenizer import Tokenizer
from xla_engine.vllm.sampling_params import RequestOutputKind


class Logprob(NamedTuple):
    """A token's log-probability, its rank (None if only its own logprob was requested), and its text."""

    logprob: float
    rank: int | None
    decoded_token: str | None


class PoolingOutput(NamedTuple):
    """The pooled output of a text, float32."""

    data: np.ndarray[Any, Any]


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One generated sequence.

    logprobs: for each token, the sampled one and the n likeliest by id if `SamplingParams.logprobs` is n; else None.
    token_logprobs: log-probabilities of the sampled tokens only.
    The other fields are those of `xla_engine.CompletionOutput`.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    token_logprobs: list[float] | None
    finish_reason: str | None
    stop_reason: int | str | None
    lora_request: None = None

    def finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.finish_reason is not None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A request and its sequences; fields are those of `xla_engine.RequestOutput`, tuples as lists.

    images_sha256: empty without pictures.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None
    num_cached_tokens: int
    error: str | None = None
    lora_request: LoRARequest | None = None
    images_sha256: list[str] = field(default_factory=list)


def vllm_output(
    output: outputs.RequestOutput,
    tokenizer: Tokenizer | None,
    lora: LoRARequest | None = None,
    since: outputs.RequestOutput | None = None,
) -> RequestOutput:
    """`output` in vLLM's shape.

    lora: the request's adapter. since: an earlier output; sequences then have only the part after it.
    """
    before = {} if since is None else {each.index: each for each in since.outputs}
    return RequestOutput(
        request_id=output.request_id,
        prompt=output.prompt,
        prompt_token_ids=list(output.prompt_token_ids),
        prompt_logprobs=None
        if output.prompt_logprobs is None
        else [None if each is None else _ranked(each) for each in output.prompt_logprobs],
        outputs=[_completion(each, before.get(each.index), tokenizer) for each in output.outputs],
        finished=output.finished,
        metrics=output.metrics,
        num_cached_tokens=output.num_cached_tokens,
        error=output.error,
        lora_request=lora,
        images_sha256=list(output.images_sha256),
    )


class OutputStream:
    """Converts the cumulative outputs of one request to an output kind."""

    def __init__(
        self, kind: RequestOutputKind, tokenizer: Tokenizer | None, lora: LoRARequest | None = None
    ) -> None:
        self._kind, self._tokenizer, self._lora = kind, tokenizer, lora
        self._before: outputs.RequestOutput | None = None

    def next(self, output: outputs.RequestOutput) -> RequestOutput | None:
        """What to show of the next cumulative output; None for nothing."""
        if self._kind is RequestOutputKind.FINAL_ONLY and not output.finished:
            return None
        before, self._before = self._before, output
        since = before if self._kind is RequestOutputKind.DELTA else None
        return vllm_output(output, self._tokenizer, self._lora, since)


def _completion(
    output: outputs.CompletionOutput, before: outputs.CompletionOutput | None, tokenizer: Tokenizer | None
) -> CompletionOutput:
    text, tokens = ("", 0) if before is None else (before.text, len(before.token_ids))
    ids, numbers = output.token_ids[tokens:], output.logprobs
    logprobs: list[dict[int, Logprob]] | None = None
    if output.top_logprobs is not None:
        logprobs = [_ranked(each) for each in output.top_logprobs[tokens:]]
    elif numbers is not None:
        words = [None if tokenizer is None else tokenizer.decode([token]) for token in ids]
        found = zip(ids, numbers[tokens:], words, strict=True)
        logprobs = [{token: Logprob(value, None, word)} for token, value, word in found]
    return CompletionOutput(
        index=output.index,
        text=output.text[len(text) :],
        token_ids=list(ids),
        cumulative_logprob=output.cumulative_logprob,
        logprobs=logprobs,
        token_logprobs=None if numbers is None else list(numbers[tokens:]),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
    )


def _ranked(tokens: dict[int, outputs.Logprob]) -> dict[int, Logprob]:
    return {token: Logprob(*found) for token, found in tokens.items()}
