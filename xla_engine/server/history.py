"""Recent history of a server for the page at /: rates by the second, and which request held which slot."""

import asyncio
import time
from collections import deque
from typing import Any, NamedTuple

from xla_engine.observability.observer import Observer
from xla_engine.open_engine import EngineClient
from xla_engine.scheduler import Plan, Row, VerifyRow

SECONDS = 300  # length of the history
RESOLUTION_S = 0.02  # minimum time between recorded plans
LOOK_S = 0.1  # time between snapshots of the slots
GAP_S = 0.25  # a slot that was idle for longer counts as free
MOST_SEGMENTS = 20_000


class HistorySecond(NamedTuple):
    """One second. time: Unix seconds. generated, prefilled: tokens a second. kv: fraction of the cache in use."""

    time: float
    generated: float
    prefilled: float
    running: int
    waiting: int
    kv: float


class SlotPeriod(NamedTuple):
    """A period in which a slot prefilled or decoded for one request. kind: "prefill" or "decode". Times in Unix
    seconds."""

    slot: int
    kind: str
    request_id: str
    begin: float
    end: float


class History:
    """Records the engine's plans, at most every `RESOLUTION_S`, and its counters once a second.

    With data parallelism there are no plans to observe, so a snapshot of the slots is taken every `LOOK_S` instead.
    """

    def __init__(self, engine: EngineClient) -> None:
        self.samples: deque[HistorySecond] = deque(maxlen=SECONDS)
        self._engine = engine
        self._segments: deque[SlotPeriod] = deque(maxlen=MOST_SEGMENTS)
        self._open: dict[int, SlotPeriod] = {}
        self._looked = 0.0
        self._hears_plans = False

    def watch(self) -> None:
        """Begin to observe plans."""
        self._engine.observers.add(Observer(started=self._see_plan))

    def _see_plan(self, plan: Plan) -> None:
        now = time.time()
        if now - self._looked < RESOLUTION_S:
            return
        self._looked, self._hears_plans = now, True
        for chunk in plan.chunks:
            self._see(chunk.slot.index, "prefill", chunk.request_id, now)
        rows: tuple[Row | VerifyRow, ...] = (*plan.decode, *plan.verify)
        for row in rows:
            self._see(row.slot.index, "decode", row.request_id, now)

    def _see_slots(self) -> None:
        now = time.time()
        for view in self._engine.snapshot().slots:
            if (held := view.request) is not None:
                kind = "prefill" if held.prefilled < held.prompt_tokens else "decode"
                self._see(view.slot.index, kind, held.request_id, now)

    def _see(self, slot: int, kind: str, request_id: str, now: float) -> None:
        last = self._open.get(slot)
        if last is not None and last[1:3] == (kind, request_id) and now - last.end < GAP_S:
            self._open[slot] = last._replace(end=now)
            return
        if last is not None:
            self._segments.append(last._replace(end=min(now, last.end + RESOLUTION_S)))
        self._open[slot] = SlotPeriod(slot, kind, request_id, now, now)

    async def sample(self) -> None:
        """Take a sample every second, until cancelled."""
        engine = self._engine
        before, at = engine.stats(), time.monotonic()
        while True:
            for _ in range(round(1 / LOOK_S)):
                await asyncio.sleep(LOOK_S)
                if not self._hears_plans:
                    self._see_slots()
            stats, now = engine.stats(), time.monotonic()
            seconds = max(now - at, 1e-9)
            self.samples.append(
                HistorySecond(
                    time=time.time(),
                    generated=(stats.generation_tokens - before.generation_tokens) / seconds,
                    prefilled=(stats.prompt_tokens - before.prompt_tokens) / seconds,
                    running=stats.running,
                    waiting=stats.waiting,
                    kv=stats.kv_usage,
                )
            )
            before, at = stats, now

    def since(self, moment: float) -> dict[str, Any]:
        """The history after a moment (Unix seconds), as JSON values. Latencies are since the server's start."""
        spread = self._engine.stats().distributions
        segments = [segment for segment in (*self._segments, *self._open.values()) if segment.end > moment]
        histograms = {
            "first_token": spread.first_token_seconds,
            "inter_token": spread.inter_token_seconds,
            "whole": spread.request_seconds,
        }
        return {
            "now": time.time(),
            "samples": [sample for sample in self.samples if sample.time > moment],
            "segments": segments,
            "latencies": {
                name: {"p50": each.quantile(0.5), "p99": each.quantile(0.99), "count": each.count}
                for name, each in histograms.items()
            },
        }
