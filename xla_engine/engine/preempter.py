"""Preempts requests when a caller asks for it."""

from xla_engine.engine.recovery import Recovery
from xla_engine.engine.state import EngineState
from xla_engine.errors import InvalidRequestError


class Preempter:
    """Takes slots from requests, which continue later with the same tokens."""

    def __init__(self, state: EngineState, recovery: Recovery, *, parks: bool) -> None:
        """parks: preempted requests can be parked in host memory."""
        self._state = state
        self._recovery = recovery
        self._parks = parks

    @property
    def ways(self) -> tuple[str, ...]:
        """The values of `how` that `preempt` accepts."""
        recomputes = self._state.scheduler.config.keeps_tokens
        return (*(("park",) if self._parks else ()), *(("recompute",) if recomputes else ()), "replay")

    def preempt(self, request_id: str, *, how: str | None = None, to_back: bool = False) -> bool:
        """As `XlaBatchEngine.preempt`."""
        self._recovery.restart_if_incomplete()
        if how not in (None, *self.ways):
            raise InvalidRequestError(f"this engine preempts by {', '.join(self.ways)}, not {how!r}")
        names = self._state.table.sequences(request_id)
        return any([self._preempt(name, how=how, to_back=to_back) for name in names])

    def _preempt(self, name: str, *, how: str | None, to_back: bool) -> bool:
        if (action := self._state.scheduler.preempt(name, how=how, to_back=to_back)) is None:
            return False
        self._state.table[name].preemptions += 1
        # The step being read may hold a later token of the sequence, whose first token will be dropped.
        if action == "replay":
            self._state.table[name].rewind()
        return True
