"""Requests that lost their slot: whose state goes to the host, and who begins again."""

from __future__ import annotations

from xla_engine.scheduler import policy
from xla_engine.scheduler.config import SchedulerConfig
from xla_engine.scheduler.plan import Swap
from xla_engine.scheduler.request import Status
from xla_engine.scheduler.request_state import RequestState


class Swaps:
    """What the host holds of parked requests, and what the next plan has to say of those that lost their slot.

    tokens: KV entries on the host, or on their way.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._parks: list[tuple[RequestState, Swap]] = []  # since the last plan
        self._replays: list[RequestState] = []
        self.tokens = 0

    def __bool__(self) -> bool:
        return bool(self._parks)

    def has_room(self, length: int) -> bool:
        """Whether the host can take `length` entries more."""
        return self.tokens + length <= self._config.swap_tokens

    def way(self, state: RequestState, length: int, how: str | None) -> str:
        """How a request of `length` entries loses its slot, if it can be done as asked. Raises ValueError."""
        if state.status is Status.PREFILLING:
            return "recompute"
        if how == "recompute" and not self._config.keeps_tokens:
            raise ValueError(
                "no generated tokens are kept to recompute: set prefill_equals_decode and preemption, park or replay"
            )
        return how or policy.way_to_preempt(
            length,
            self.tokens,
            swap_tokens=self._config.swap_tokens,
            recompute_tokens=self._config.recompute_tokens,
            prefill_equals_decode=self._config.keeps_tokens,
        )

    def park(self, state: RequestState, swap: Swap) -> None:
        """The next plan takes a request's state to the host."""
        state.parked = swap.length
        self.tokens += swap.length
        self._parks.append((state, swap))

    def release(self, state: RequestState) -> None:
        """A request comes back, or ended."""
        self.tokens -= state.parked
        state.parked = 0

    def replay(self, state: RequestState) -> None:
        """A request forgets its tokens, and the next plan says so."""
        state.start_over()
        self._replays.append(state)

    def take(self) -> tuple[tuple[Swap, ...], tuple[str, ...]]:
        """What goes to the host in the plan being made, and who begins again; without those that ended since."""
        if not self._parks and not self._replays:
            return (), ()
        parks = tuple(swap for state, swap in self._parks if state.status is not Status.FINISHED)
        replays = tuple(state.request_id for state in self._replays if state.status is not Status.FINISHED)
        self._parks.clear()
        self._replays.clear()
        return parks, replays
