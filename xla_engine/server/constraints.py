"""Constraints are compiled off the event loop, in an order that is fair to keys, and only so many at a time."""

from __future__ import annotations

from collections.abc import Callable

from xla_engine.sampling_params import SamplingParams
from xla_engine.server.fair_worker import FairWorker
from xla_engine.server.shares import Shares

# constraints that wait or are compiled, a second each at most; each key may have half of them
MAX_WAITING = 256


class Constraints:
    """Compiles what texts must match, before their requests are queued."""

    def __init__(
        self, compile_: Callable[[SamplingParams], object], knows: Callable[[SamplingParams], bool]
    ) -> None:
        """compile_: may take a second, in any thread. knows: whether it has nothing to do. Both raise
        InvalidRequestError."""
        self._compile = compile_
        self._knows = knows
        self._worker = FairWorker("constraints")
        self.shares = Shares(MAX_WAITING, "too many constraints wait to be compiled; ask again later")

    async def compile(self, params: SamplingParams, key: str) -> None:
        """Compile the constraint of a request when its turn has come; one that is known does not wait.

        key: whose it is. Raises InvalidRequestError, and ApiError where too many wait.
        """
        if params.structured_outputs is None or self._knows(params):
            return
        with self.shares.hold(1, key):
            await self._worker.run(lambda: self._compile(params), key)

    def close(self) -> None:
        """Compile no more."""
        self._worker.close()
