"""A life whose requests go through `AsyncLLM`: each is a task that reads its stream or disconnects."""

import asyncio
from typing import Any

from xla_engine.async_llm import AsyncLLM
from xla_engine.errors import EngineClosedError
from xla_engine.scheduler import QueueFullError
from xla_engine.tools.soak.faults import STEP_TIMEOUT_S
from xla_engine.tools.soak.life import Life
from xla_engine.tools.soak.requests import SoakRequest

_TURN_S = 0.001  # between two looks at who is due
_PATIENCE = 100_000  # turns, for all readers of a round to get what they wait for; more where these are many
_PATIENCE_EACH = 1_500


class AsyncLife(Life):
    """A `Life` in an event loop, a new one for each round.

    A thread waits for the device, so a seed repeats the requests, and not the moments at which they end. Steps are not
    interrupted: an interrupt ends the event loop itself.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._llm = AsyncLLM.from_engine(self.engine)
        self.device.interrupts = False

    def finish(self) -> None:
        """Close the engine and count what it did."""
        super().finish()
        asyncio.run(self._llm.close())

    def _run(self, requests: list[SoakRequest], *, last: bool) -> None:
        asyncio.run(self._conduct(requests, last=last))

    async def _conduct(self, requests: list[SoakRequest], *, last: bool) -> None:
        engine, waiting = self.engine, list(reversed(requests))
        end_turn = self._draw.randrange(2, 10) if last else None
        live: dict[str, SoakRequest] = {}
        readers: dict[str, asyncio.Task[None]] = {}
        turn, turns = 0, 0
        while waiting or engine.has_work or not all(reader.done() for reader in readers.values()):
            if waiting and not engine.has_unfinished:
                turn = max(turn, waiting[-1].turn)
            while waiting and waiting[-1].turn <= turn:
                request = waiting.pop()
                readers[request.name] = asyncio.create_task(self._follow(request, live), name=request.name)
            self._disturb(live, readers, turn)
            if turn == end_turn:
                await self._end_engine(requests)
            if engine.closed_because is not None:
                waiting.clear()
                if not engine.has_unfinished and all(reader.done() for reader in readers.values()):
                    break
            if self.device.hangs and engine.closed_because is None:
                self._clock.now += STEP_TIMEOUT_S
                self._llm.keep_running()
            turns += 1  # and not the time, which passes while the process is stopped
            if turns > max(_PATIENCE, _PATIENCE_EACH * len(requests)):
                left = [name for name, reader in readers.items() if not reader.done()]
                raise TimeoutError(f"these still wait: {', '.join(left)}")
            turn += 1
            await asyncio.sleep(_TURN_S)
        for reader in readers.values():
            if not reader.cancelled():
                reader.result()
        requests[:] = live.values()  # the others were never taken

    async def _follow(self, request: SoakRequest, live: dict[str, SoakRequest]) -> None:
        """Send a request and read its outputs. If it is accepted, it is added to `live`."""
        live[request.name] = request
        if request.params.structured_outputs is not None:
            request.text_fails = None  # the text begins when the constraint was tried, in another turn
        outputs = self._llm.generate(
            request.prompt, request.params, request_id=request.name, **request.options
        )
        try:
            self._prepare(request)
            async for output in outputs:
                self._read(request, output)
                if request.reader == "slow":
                    await asyncio.sleep(16 * _TURN_S)
        except (QueueFullError, EngineClosedError):
            if request.tokens or any(name in self._ended for name in request.sequences):
                raise
            self._tally.refused += 1
            del live[request.name]
        else:
            self._tally.requests += 1

    def _disturb(
        self, live: dict[str, SoakRequest], readers: dict[str, asyncio.Task[None]], turn: int
    ) -> None:
        """Cancel readers, abort and preempt requests, as drawn for this turn."""
        for request in live.values():
            if request.abort_turn == turn and (request.reader == "gone" or self._draw.random() < 0.5):
                if readers[request.name].cancel():
                    request.left = True
                    self._tally.requests += 1
            elif request.abort_turn == turn:
                request.aborted |= self._llm.abort(request.name)
            self._preempt(request, turn)

    async def _end_engine(self, requests: list[SoakRequest]) -> None:
        """Begin the end of the engine; drained or closed, it is over."""
        if self._fail_for_good():
            return
        for request in requests:  # also those whose readers have not begun
            request.aborted = True  # unless it has ended before
        if self.end == "drain":
            await self._llm.drain(0.05)
        await self._llm.close()
