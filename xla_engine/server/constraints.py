"""Compile constraints off the event loop, in fair order between keys, and with a limit on their number."""

from collections.abc import Callable

from xla_engine.sampling_params import SamplingParams
from xla_engine.server.fair_worker import FairWorker
from xla_engine.server.shares import Shares

# constraints waiting or being compiled, up to a second each; half of them per key
MAX_WAITING = 256


class Constraints:
    """Compiles the constraints of requests before these are queued."""

    def __init__(
        self, compile_: Callable[[SamplingParams], object], knows: Callable[[SamplingParams], bool]
    ) -> None:
        """compile_: may take a second, in any thread. knows: whether the constraint is compiled already.

        Both raise InvalidRequestError.
        """
        self._compile = compile_
        self._knows = knows
        self._worker = FairWorker("constraints")
        self.shares = Shares(MAX_WAITING, "too many constraints wait to be compiled; retry later")

    async def compile(self, params: SamplingParams, key: str) -> None:
        """Compile the constraint of a request when it is its key's turn, or return at once if it is compiled already.

        key: of the caller. Raises InvalidRequestError, and ApiError if too many are waiting.
        """
        if params.structured_outputs is None or self._knows(params):
            return
        with self.shares.hold(1, key):
            await self._worker.run(lambda: self._compile(params), key)

    def close(self) -> None:
        """Stop compiling."""
        self._worker.close()
