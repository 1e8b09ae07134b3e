"""What a trainer learns from: sequences that were sampled, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from xla_engine.errors import InvalidRequestError
from xla_engine.outputs import RequestOutput
from xla_engine.sampling_params import SamplingParams

_MULTIPLE = 32  # of the width of a batch, so that few shapes compile
# What changes the distribution that processed log-probabilities refer to. Only temperatures can be followed.
_NEUTRAL = SamplingParams()
_REFUSED = (
    *("top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "structured_outputs", "dry_multiplier"),
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """B sequences of at most T tokens.

    tokens: i32 `[B, T]`, prompt and response, padded with 0.
    length: i32 `[B]`, tokens that are not padding.
    response_mask: bool `[B, T]`, the tokens that were sampled. Never the first of a sequence.
    sampled: f32 `[B, T]`, their log-probabilities as they were sampled; 0 elsewhere.
    temperature: f32 `[B]`, that they were sampled at; read only with processed log-probabilities.
    """

    tokens: Any
    length: Any
    response_mask: Any
    sampled: Any
    temperature: Any


def make_batch(
    outputs: Sequence[RequestOutput], params: SamplingParams, *, processed: bool, width: int | None = None
) -> Batch:
    """The answers of `outputs` in order, all of them if a request has several.

    params: that all were sampled with. processed: whether log-probabilities are processed. width: T; None takes the
    longest sequence, rounded up to a multiple of 32. Raises InvalidRequestError.
    """
    if processed and (changed := [name for name in _REFUSED if _changes(params, name)]):
        raise InvalidRequestError(
            f"{changed[0]} changes the processed log-probabilities in a way that a policy cannot follow. Sample "
            "without it, or start the engine with logprobs_mode 'raw_logprobs'"
        )
    rows = [(output, answer) for output in outputs for answer in output.outputs]
    longest = max(
        (len(output.prompt_token_ids) + len(answer.token_ids) for output, answer in rows), default=1
    )
    width = -(-longest // _MULTIPLE) * _MULTIPLE if width is None else width
    if longest > width:
        raise InvalidRequestError(
            f"a sequence of {longest} tokens does not fit into width {width}. Give a larger one"
        )
    tokens, length = np.zeros((len(rows), width), np.int32), np.zeros(len(rows), np.int32)
    mask, sampled = np.zeros((len(rows), width), np.bool_), np.zeros((len(rows), width), np.float32)
    for row, (output, answer) in enumerate(rows):
        if answer.logprobs is None:
            raise InvalidRequestError(
                f"request {output.request_id} has no log-probabilities. Sample with SamplingParams(logprobs=0)"
            )
        first, end = (
            len(output.prompt_token_ids),
            len(output.prompt_token_ids) + len(answer.token_ids),
        )
        tokens[row, :end] = (*output.prompt_token_ids, *answer.token_ids)
        length[row], mask[row, first:end], sampled[row, first:end] = end, True, answer.logprobs
    temperature = np.full(len(rows), params.temperature, np.float32)
    return Batch(tokens=tokens, length=length, response_mask=mask, sampled=sampled, temperature=temperature)


def _changes(params: SamplingParams, name: str) -> bool:
    value = getattr(params, name)
    return bool(value != getattr(_NEUTRAL, name)) and bool(value) and not (name == "top_k" and value < 0)
