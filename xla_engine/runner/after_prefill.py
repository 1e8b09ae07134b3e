"""What follows a prefill call, on its hidden states: scores of prompts, pooled vectors, and draft models that read.

The programs are those of `graphs/steps/after_prefill.py` and of the device proposer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xla_engine.graphs.config import MEAN
from xla_engine.graphs.inventory import Inventory, program_name
from xla_engine.graphs.steps.after_prefill import unpack_prompt_logprobs
from xla_engine.pooling_params import PoolingParams
from xla_engine.runner.drafting.device_proposer import DeviceProposer
from xla_engine.runner.in_flight import Asked, InFlight, PooledChunk, PromptScores, ScoredPrompts
from xla_engine.runner.inputs import prompt_targets
from xla_engine.runner.programs import POOL, PROMPT_LOGPROBS, READ_PROMPTS
from xla_engine.runner.row_settings import RowSettings
from xla_engine.scheduler import Chunk


class AfterPrefill:
    """Starts the programs that follow a prefill call.

    reads_all: whether they need the last layer's output at all positions of every prompt.
    """

    def __init__(
        self,
        inventory: Inventory,
        weights: list[jax.Array],
        rope: jax.Array,
        put: Callable[..., Any],
        chunk_size: int,
        *,
        device_proposer: DeviceProposer | None,
        pooling: str | None,
    ) -> None:
        """As in `Dispatch`."""
        self._inventory, self._weights, self._rope, self._put = inventory, weights, rope, put
        self._chunk_size, self._pooling = chunk_size, pooling
        reads = device_proposer is not None and device_proposer.reads_prompts
        self._reader = device_proposer if reads else None
        self.reads_all = pooling is not None or reads

    @property
    def reads_prompts(self) -> bool:
        """Whether the device proposer reads prompts, so that the input of each call is needed again."""
        return self._reader is not None

    def warm_up(self, lanes: int, hidden: jax.Array, seen: jax.Array, work: jax.Array) -> None:
        """Run each program once without work."""
        self.read(lanes, seen, work)
        self._score(lanes, hidden, self._put(np.full(lanes * self._chunk_size, -1, np.int32)))
        if self._pooling is not None:
            self._pool(lanes, hidden, np.zeros(lanes, np.int32))

    def read(self, lanes: int, seen: jax.Array, work: jax.Array) -> None:
        """Pass the hidden states of a prefill call to the device proposer, if it reads prompts."""
        if self._reader is not None:
            name = program_name(READ_PROMPTS, lanes=lanes)
            self._reader.keep(
                self._inventory(name, self._weights, self._rope, seen, work, *self._reader.takes)
            )

    def scores(
        self, chunks: Sequence[Chunk], settings: Mapping[str, RowSettings], lanes: int, hidden: jax.Array
    ) -> ScoredPrompts | None:
        """The log-probabilities of the chunks' tokens; None if none were requested."""
        asked = []
        target = np.full((lanes, self._chunk_size), -1, np.int32)
        for lane, chunk in enumerate(chunks):
            if ahead := scored_targets(chunk, settings):
                asked.append((lane, chunk, settings[chunk.request_id]))
                target[lane, : len(ahead)] = ahead
        if not asked:
            return None
        placed = self._put(target.reshape(-1))
        return ScoredPrompts(self._score(lanes, hidden, placed), tuple(asked), placed)

    def pooled(
        self, chunks: Sequence[Chunk], settings: Mapping[str, RowSettings], lanes: int, hidden: jax.Array
    ) -> tuple[jax.Array, Asked] | None:
        """Pool the chunks of pooling requests; returns `FirstSamples.pooled`, None if there are none."""
        if self._pooling is None:
            return None
        asked = tuple(
            (lane, chunk, settings[chunk.request_id])
            for lane, chunk in enumerate(chunks)
            if isinstance(settings[chunk.request_id].params, PoolingParams)
            and (chunk.is_last or self._pooling == MEAN)
        )
        if not asked:
            return None
        count = np.zeros(lanes, np.int32)
        for lane, chunk, _ in asked:
            count[lane] = len(chunk.tokens)
        return self._pool(lanes, hidden, count), asked

    def _score(self, lanes: int, hidden: jax.Array, target: jax.Array) -> jax.Array:
        """The log-probabilities of `target`, i32 `[lanes * chunk_size]` (-1: none)."""
        return self._inventory(program_name(PROMPT_LOGPROBS, lanes=lanes), self._weights, hidden, target)

    def _pool(self, lanes: int, hidden: jax.Array, count: np.ndarray) -> jax.Array:
        """Run `graphs.steps.after_prefill.pool_chunk`. count: tokens of each lane."""
        return self._inventory(program_name(POOL, lanes=lanes), self._weights, hidden, self._put(count))


def scored_targets(chunk: Chunk, settings: Mapping[str, RowSettings]) -> tuple[int, ...]:
    """The tokens that a chunk's positions predict, if their log-probabilities are needed; otherwise none."""
    row = settings[chunk.request_id]
    return () if row.params.prompt_logprobs is None else prompt_targets(chunk, row)


def fetch_prompt_scores(step: InFlight, chunk_size: int) -> list[PromptScores]:
    """Fetch the log-probabilities of prompt tokens that a started step computed."""
    found = []
    for call in step.first:
        if call.prompt is None:
            continue
        packed = np.asarray(call.prompt.packed).reshape(-1, chunk_size, call.prompt.packed.shape[1])
        for lane, chunk, row in call.prompt.asked:
            wanted = row.params.prompt_logprobs or 0
            count = len(prompt_targets(chunk, row))
            scores = tuple(unpack_prompt_logprobs(packed[lane, at], wanted) for at in range(count))
            found.append(
                PromptScores(request_id=chunk.request_id, settings=row, start=chunk.start + 1, scores=scores)
            )
    return found


def fetch_pooled(step: InFlight) -> list[PooledChunk]:
    """Fetch the vectors that a started step pooled."""
    found = []
    for call in step.first:
        if call.pooled is None:
            continue
        vectors = np.asarray(call.pooled[0])
        for lane, chunk, row in call.pooled[1]:
            found.append(
                PooledChunk(
                    request_id=chunk.request_id, settings=row, start=chunk.start, vectors=vectors[lane]
                )
            )
    return found
