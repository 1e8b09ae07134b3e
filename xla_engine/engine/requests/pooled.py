"""The host's side of a request that pools: its vector, in place of text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xla_engine.engine.requests.sequence import LiveSequence
from xla_engine.errors import InvalidRequestError
from xla_engine.outputs import RequestOutput
from xla_engine.pooling.params import PoolingParams
from xla_engine.pooling.pooler import Pooler
from xla_engine.runner.pooling.pooled import PooledChunk
from xla_engine.scheduler import FinishReason


class PooledSequence(LiveSequence):
    """Collects what the device pools of a prompt. The one token that ends such a request is not shown."""

    def __init__(self, *arguments: Any, pooler: Pooler, pooling: PoolingParams, **others: Any) -> None:
        """pooling: the request's parameters. arguments, others: those of `LiveSequence`."""
        super().__init__(*arguments, **others)
        self._pooler, self._pooling = pooler, pooling
        self._chunks: dict[int, PooledChunk] = {}  # by their start; after a preemption some come again
        self._pooled: tuple[float, ...] | None = None

    def add_chunk(self, chunk: PooledChunk) -> None:
        """Take what was pooled of a chunk."""
        self._chunks[chunk.start] = chunk

    def finish(self, reason: FinishReason, now: float, error: str | None = None) -> FinishReason:
        """As in `LiveSequence`; ERROR where no vector could be made."""
        if reason is FinishReason.LENGTH:
            parts = [self._chunks[start].vectors for start in sorted(self._chunks)]
            try:
                vector = self._pooler.pooled(parts, len(self.prompt_token_ids))
                self._pooled = self._pooler.finish(vector, self._pooling)
            except InvalidRequestError as failure:
                reason, error = FinishReason.ERROR, str(failure)
        self._chunks.clear()
        return super().finish(reason, now, error)

    def output(self) -> RequestOutput:
        """The request as it stands."""
        output = super().output()
        shown = tuple(replace(each, token_ids=()) for each in output.outputs)
        return replace(output, outputs=shown, pooled=self._pooled)
