"""Pooling the prompts of prefill calls."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from xla_engine.graphs.config import MEAN
from xla_engine.graphs.inventory import Inventory
from xla_engine.pooling_params import PoolingParams
from xla_engine.runner.in_flight import InFlight
from xla_engine.runner.programs import pool_name
from xla_engine.runner.row_settings import RowSettings
from xla_engine.scheduler import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledChunk:
    """The result of `graphs.steps.pooling` for a chunk of `tokens` tokens: `vectors` f32 `[G, D]`.

    Other fields as in `xla_engine.runner.in_flight.PromptScores`.
    """

    request_id: str
    settings: RowSettings
    start: int
    tokens: int
    vectors: np.ndarray


class Pooling:
    """Starts the pooling program after prefill calls."""

    def __init__(
        self, kind: str, inventory: Inventory, weights: list[jax.Array], put: Callable[..., Any]
    ) -> None:
        """kind: one of `graphs.config.POOLING_TYPES`."""
        self.kind = kind
        self._inventory = inventory
        self._weights = weights
        self._put = put

    @staticmethod
    def without(last: Mapping[int, RowSettings]) -> dict[int, RowSettings]:
        """The lanes that complete a prompt, without pooled ones, which sample nothing and activate no row."""
        return {lane: row for lane, row in last.items() if not isinstance(row.params, PoolingParams)}

    def start(
        self, chunks: Sequence[Chunk], settings: Mapping[str, RowSettings], lanes: int, hidden: jax.Array
    ) -> tuple[jax.Array, tuple[tuple[int, Chunk, RowSettings], ...]] | None:
        """Pool the chunks of pooling requests; returns `FirstSamples.pooled`, None if there are none."""
        asked = tuple(
            (lane, chunk, settings[chunk.request_id])
            for lane, chunk in enumerate(chunks)
            if isinstance(settings[chunk.request_id].params, PoolingParams)
            and (chunk.is_last or self.kind == MEAN)
        )
        if not asked:
            return None
        count = np.zeros(lanes, np.int32)
        for lane, chunk, _ in asked:
            count[lane] = len(chunk.tokens)
        return self.run(lanes, hidden, count), asked

    def run(self, lanes: int, hidden: jax.Array, count: np.ndarray) -> jax.Array:
        """Run `graphs.steps.pooling.pool_chunk` on a prefill call."""
        return self._inventory(pool_name(lanes), self._weights, hidden, self._put(count))


def fetch_pooled(step: InFlight) -> list[PooledChunk]:
    found = []
    for call in step.first:
        if call.pooled is None:
            continue
        vectors = np.asarray(call.pooled[0])
        for lane, chunk, row in call.pooled[1]:
            found.append(
                PooledChunk(
                    request_id=chunk.request_id,
                    settings=row,
                    start=chunk.start,
                    tokens=len(chunk.tokens),
                    vectors=vectors[lane],
                )
            )
    return found
