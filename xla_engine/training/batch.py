"""What a trainer learns from: sequences that were sampled, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from xla_engine.engine.requests.validation import RequestValidator
from xla_engine.errors import InvalidRequestError
from xla_engine.graphs.row_state.rows import Tables
from xla_engine.graphs.row_state.sampling_fields import SamplingRows
from xla_engine.outputs import RequestOutput
from xla_engine.runner.row_settings import HostTables, RowSettings, sampling_rows
from xla_engine.sampling_params import SamplingParams
from xla_engine.text.token_mask import TokenMask

_MULTIPLE = 32  # of the width of a batch, so that few shapes compile


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Processing:
    """How the sampler made the distribution of each of B sequences from the model's logits.

    sampling, tables: as the engine has them for its rows; `draft_masks` holds masks that the host made, if any.
    stop_ids: i32 `[B, E]`, as in `Rows`.
    prompt_length: i32 `[B]`. min_tokens: i32 `[B]`, response tokens before stop ids may be sampled.
    """

    sampling: SamplingRows
    tables: Tables
    stop_ids: Any
    prompt_length: Any
    min_tokens: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """B sequences of at most T tokens.

    tokens: i32 `[B, T]`, prompt and response, padded with 0.
    length: i32 `[B]`, tokens that are not padding.
    response_mask: bool `[B, T]`, the tokens that were sampled. Never the first of a sequence.
    sampled: f32 `[B, T]`, their log-probabilities as they were sampled; 0 elsewhere.
    processing: what processed log-probabilities refer to; None: log-probabilities are raw.
    """

    tokens: Any
    length: Any
    response_mask: Any
    sampled: Any
    processing: Processing | None


def make_processing(
    params: SamplingParams,
    prompt_lengths: Sequence[int],
    validator: RequestValidator,
    answers: Sequence[Sequence[int]] | None = None,
    width: int = 1,
) -> Processing:
    """The processing of sequences with these parameters and prompts. Raises InvalidRequestError.

    answers: the tokens of each, from which the masks that the host made while sampling are made again; None refuses
    parameters that need such masks. width: T of the batch.
    """
    stop_ids = validator.stop_token_ids(params)
    mask = validator.token_mask(params, stop_ids)
    masks = [] if mask is None or not mask.constrained else _masks_of(mask, params, answers)
    count = len(prompt_lengths)
    settings = RowSettings(
        max_tokens=1,
        stop_token_ids=stop_ids,
        params=params,
        seed=0,
        mask=mask,
        dry_breakers=validator.dry_breakers(params),
    )
    # Behind t tokens of the response is the mask that the sampler has behind t drafts.
    tables = HostTables(count, validator.vocab_size, drafts=width - 1 if masks else 0)
    for row, behind in enumerate(masks):
        tables.set_draft_masks(row, behind)
    for row in range(count):
        tables.set_bias(row, params.logit_bias or {})
        if mask is not None:
            tables.set_mask(row, mask.words)
    arrays: dict[str, Any] = tables.take_stale()
    return Processing(
        sampling=sampling_rows(count, dict.fromkeys(range(count), settings), dry=validator.has_dry),
        tables=Tables(**arrays),
        stop_ids=np.tile(np.asarray(stop_ids, np.int32), (count, 1)),
        prompt_length=np.asarray(prompt_lengths, np.int32),
        min_tokens=np.full(count, settings.min_tokens, np.int32),
    )


def _masks_of(
    mask: TokenMask, params: SamplingParams, answers: Sequence[Sequence[int]] | None
) -> list[list[np.ndarray]]:
    """For each answer, the mask after each token but the last. Raises InvalidRequestError."""
    name = "bad_words of more than one token" if params.structured_outputs is None else "structured_outputs"
    if answers is None:
        raise InvalidRequestError(
            f"tunix's trainer does not support {name} with processed log-probabilities: which tokens are allowed "
            "is decided on the host, token by token. Sample without, or start the engine with logprobs_mode "
            "'raw_logprobs'"
        )
    found = [mask.ahead(answer[:-1]) for answer in answers]
    for row, (answer, masks) in enumerate(zip(answers, found, strict=True)):
        if len(masks) < len(answer) - 1:
            raise InvalidRequestError(
                f"answer {row} of the batch was sampled with other {name}: its token {len(masks)} is not allowed. "
                "Give the parameters that it was sampled with"
            )
    return found


def make_batch(
    outputs: Sequence[RequestOutput],
    params: SamplingParams,
    validator: RequestValidator | None,
    width: int | None = None,
) -> Batch:
    """The answers of `outputs` in order, all of them if a request has several.

    params: that all were sampled with. validator: the engine's, if log-probabilities are processed. width: T; None
    takes the longest sequence, rounded up to a multiple of 32. Raises InvalidRequestError.
    """
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
    processing = None
    if validator is not None:
        lengths = [len(output.prompt_token_ids) for output, _ in rows]
        answers = [answer.token_ids for _, answer in rows]
        processing = make_processing(params, lengths, validator, answers, width)
    return Batch(tokens=tokens, length=length, response_mask=mask, sampled=sampled, processing=processing)
