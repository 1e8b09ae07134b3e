"""Steps in flight, and how their results are fetched."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from xla_engine.graphs.sampling.logits import unpack_samples
from xla_engine.graphs.sampling.logprobs import TopLogprobs, unpack_top_logprobs
from xla_engine.runner.inputs import kept
from xla_engine.runner.row_settings import RowSettings
from xla_engine.scheduler import NO_TOKEN, Chunk, Decoded, Plan, Sample, StepResult

Asked = tuple[tuple[int, Chunk, RowSettings], ...]
"""Lanes of a prefill call for which something is computed, with their chunks and settings."""


class ScoredPrompts(NamedTuple):
    """Log-probabilities of the tokens of a prefill call's chunks, packed, with lane, chunk and settings of those that
    requested them. target: i32 `[lanes * chunk size]`, the tokens; -1: none."""

    packed: jax.Array
    asked: Asked
    target: jax.Array


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSamples:
    """Device results of one prefill call.

    samples: packed. lanes: those that completed a prompt. wanted: how many top log-probabilities each of these needs.
    top: the most likely tokens; None if no lane needs any.
    prompt: log-probabilities of the chunks' tokens; None if none were requested.
    hidden: f32 `[lanes * chunk size, D]`, the residual stream after the last layer.
    pooled: the pooled vectors, with lane, chunk and settings of each pooled lane. These lanes sample no token.
    """

    samples: jax.Array
    lanes: tuple[int, ...]
    wanted: tuple[int, ...]
    top: jax.Array | None
    prompt: ScoredPrompts | None
    hidden: jax.Array
    pooled: tuple[jax.Array, Asked] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSamples:
    """Device results of one decode or verify step, of `width` samples a lane. Fields as in `FirstSamples`, by row."""

    samples: jax.Array
    wanted: tuple[int, ...]
    top: jax.Array | None
    width: int = 1


class EncodedText(NamedTuple):
    """A text of an encoder's call: its first row, the chunk that is all of it, and its settings."""

    row: int
    chunk: Chunk
    settings: RowSettings


class EncodedTexts(NamedTuple):
    """Device results of one call of an encoder. hidden: f32 `[rows, D]`."""

    hidden: jax.Array
    texts: tuple[EncodedText, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """A started step: its plan and its device results, which were not fetched yet; one `first` per prefill call.

    encoded: one for each call of an encoder, which has no others.
    """

    plan: Plan
    first: tuple[FirstSamples, ...]
    decode: DecodeSamples | None
    encoded: tuple[EncodedTexts, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """Log-probabilities of prompt tokens from position `start` on: of the token, and of the most likely ones.

    settings: the object that `Runner.start` was given, which tells this request from a later one with the same id.
    """

    request_id: str
    settings: RowSettings
    start: int
    scores: tuple[tuple[float, TopLogprobs], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledChunk:
    """The result of `pool_chunk` for a chunk: `vectors` f32 `[G, D]`. Other fields as in `PromptScores`."""

    request_id: str
    settings: RowSettings
    start: int
    vectors: np.ndarray


def fetch_samples(step: InFlight) -> StepResult:
    first: list[Sample] = []
    for call in step.first:
        found = unpack_samples(np.asarray(call.samples))
        token, logprob = found["token"], found["logprob"]
        top = _top_logprobs(call.top, call.lanes, call.wanted)
        if call.pooled is not None:
            token = np.where(token == NO_TOKEN, 0, token)  # pooled lanes sample no token
        first.extend(
            Sample(int(token[lane]), float(logprob[lane]), most_likely)
            for lane, most_likely in zip(call.lanes, top, strict=True)
        )
    decode = Decoded()
    verify: Sequence[Sequence[Sample]] = ()
    drafted: Sequence[int] = ()
    if step.decode is not None and step.plan.width > 1:
        verify, drafted = _verified(step.decode, step.plan)
    elif step.decode is not None:
        columns = unpack_samples(np.asarray(step.decode.samples))
        extra = _top_by_slot(step.decode, step.plan)
        # Every token is read, but few log-probabilities are: these stay in a buffer until they are accessed.
        decode = Decoded(tokens=columns["token"].tolist(), logprobs=columns["logprob"].data, extra=extra)
        if step.plan.verify:  # in a step of width 1, which decodes one token for each row
            singles = [decode.sample(row.slot.index) for row in step.plan.verify]
            verify = [() if sample.token_id == NO_TOKEN else (sample,) for sample in singles]
            drafted = [0] * len(singles)
    return StepResult(first=first, decode=decode, verify=verify, drafted=drafted)


def _verified(samples: DecodeSamples, plan: Plan) -> tuple[list[list[Sample]], list[int]]:
    """The samples of each row of a plan's `verify`, and how many drafts it had."""
    columns = unpack_samples(np.asarray(samples.samples))
    tokens, logprobs = columns["token"], columns["logprob"]
    top = None if samples.top is None else np.asarray(samples.top)
    found, drafted = list[list[Sample]](), list[int]()
    for lane, (row, wanted) in enumerate(zip(plan.verify, samples.wanted, strict=True)):
        begin = lane * samples.width
        count, drafts = kept(tokens[begin : begin + samples.width].tolist(), row)
        found.append(
            [
                Sample(
                    int(tokens[at]),
                    float(logprobs[at]),
                    unpack_top_logprobs(top[:, at], wanted) if top is not None and wanted else None,
                )
                for at in range(begin, begin + count)
            ]
        )
        drafted.append(drafts)
    return found, drafted


def _top_by_slot(samples: DecodeSamples, plan: Plan) -> dict[int, TopLogprobs]:
    """The most likely tokens of the rows that need any, by slot."""
    if samples.top is None:
        return {}
    slots = [row.slot.index for row in plan.decode_rows]
    top = _top_logprobs(samples.top, slots, samples.wanted)
    return {slot: likely for slot, likely in zip(slots, top, strict=True) if likely is not None}


def _top_logprobs(
    top: jax.Array | None, columns: Sequence[int], wanted: Sequence[int]
) -> Sequence[TopLogprobs | None]:
    """The most likely tokens of each of `columns`, as many as it needs; None if it needs none."""
    if top is None:
        return [None] * len(columns)
    packed = np.asarray(top)
    return [
        unpack_top_logprobs(packed[:, column], count) if count else None
        for column, count in zip(columns, wanted, strict=True)
    ]
