"""The shadow parity probe: reruns some requests alone, by plain decode, while the engine runs.

The probe draws finished requests at random. It prefills the prompt again in a row reserved for it and decodes the
tokens one by one, in steps between the engine's own: no neighbour, cached prefix, preemption or draft. By law 1 every
token and every bit of its log-probabilities must be the same. Differences are counted and logged. The original result
was delivered before, and the cost to other requests is only the time of the extra steps.
"""

import logging
import random
from collections import deque
from collections.abc import Iterator
from itertools import repeat
from typing import Any, NamedTuple

from xla_engine.config import EngineConfig
from xla_engine.engine.requests.sequence import LiveSequence
from xla_engine.runner.in_flight import InFlight
from xla_engine.runner.row_settings import RowSettings
from xla_engine.runner.runner import Runner
from xla_engine.scheduler import NO_TOKEN, BlockTable, Chunk, FinishReason, Moves, Plan, Row, Sample, Slot
from xla_engine.utils.comparison import TokenSample, first_difference

_log = logging.getLogger("xla_engine.shadow")
_NAME = "shadow"  # the request's id, in plans that no scheduler sees
MOST_WAITING = 16  # drawn requests that may wait for their rerun; while there are as many, none is drawn
_MOST_UNREAD = 2  # steps of the probe in flight at most


class _Case(NamedTuple):
    """A finished request and its expected results, with log-probabilities if it asked for any."""

    request_id: str
    prompt: tuple[int, ...]
    samples: tuple[TokenSample, ...]
    settings: RowSettings


class ShadowProbe:
    """Reruns requests with the runner's programs.

    requests: how many were rerun, to their end or their first difference. mismatches: how many differed.
    """

    def __init__(self, runner: Runner, config: EngineConfig) -> None:
        """config: has `shadow_rate` above 0, so the device has one row more than the scheduler has slots."""
        self.requests = 0
        self.mismatches = 0
        self._runner = runner
        self._config = config
        self._draw = random.Random(config.seed)
        self._slot = Slot(index=config.num_slots, epoch=0)
        self._waiting: deque[_Case] = deque()
        self._case: _Case | None = None
        self._plans: Iterator[Plan] = iter(())
        self._unread: deque[InFlight] = deque()
        self._seen = 0  # tokens of the case compared so far
        self._broken = False

    def ended(self, sequence: LiveSequence, reason: FinishReason) -> None:
        """Decide at random whether a sequence that has ended is rerun."""
        if self._broken or self._draw.random() >= self._config.shadow_rate:
            return
        settings = sequence.settings
        if reason not in (FinishReason.STOP, FinishReason.LENGTH) or sequence.constrained or settings.adapter:
            return  # an adapter may have been unloaded by then
        output = sequence.output()
        (found,) = output.outputs
        if found.token_ids and len(self._waiting) < MOST_WAITING:
            logprobs = repeat(None) if found.logprobs is None else found.logprobs
            samples = tuple(map(TokenSample, found.token_ids, logprobs))
            self._waiting.append(_Case(sequence.request_id, output.prompt_token_ids, samples, settings))

    def step(self) -> bool:
        """Read finished steps and start one, right after the engine has started its own; False if there is none to do.

        A failure turns the probe off and changes nothing else. If it has destroyed the device state, the engine's next
        step fails, and all requests run again as after any fault.
        """
        try:
            return not self._broken and self._advance()
        except Exception as error:
            self._broken = True
            self._forget()
            _log.warning("the shadow probe has failed and is now off: %s: %s", type(error).__name__, error)
            return False

    def finish(self) -> None:
        """Rerun all drawn requests. The engine must be idle."""
        while self.step():
            for step in self._unread:
                self._runner.wait(step)

    def restart(self) -> None:
        """Begin the current request again, because the device has lost its state."""
        case = self._case
        self._forget()
        if case is not None:
            self._waiting.appendleft(case)

    def forget_all(self) -> None:
        """Drop all drawn requests, because the weights have changed."""
        self._waiting.clear()
        self._forget()

    def _forget(self) -> None:
        self._case, self._plans = None, iter(())
        self._unread.clear()

    def _advance(self) -> bool:
        while self._unread and _is_ready(self._unread[0]):
            self._read(self._unread.popleft())
        if self._case is None:
            if not self._waiting:
                return False
            self._case, self._seen = self._waiting.popleft(), 0
            self._plans = self._plans_of(self._case)
        if len(self._unread) < _MOST_UNREAD and (plan := next(self._plans, None)) is not None:
            step = self._runner.start(plan, {_NAME: self._case.settings})
            self._runner.prefill_calls -= len(step.first)  # the counter is for users' requests only
            self._unread.append(step)
        return True

    def _plans_of(self, case: _Case) -> Iterator[Plan]:
        """Plans that prefill the prompt in the usual chunks, one prefill call each, and then decode token by token."""
        size, lanes = self._config.chunk_size, self._config.prefill_lanes[-1]
        length = len(case.prompt)
        chunks = [
            Chunk(
                slot=self._slot,
                request_id=_NAME,
                start=start,
                tokens=case.prompt[start : start + size],
                is_last=start + size >= length,
            )
            for start in range(0, length, size)
        ]
        for at in range(0, len(chunks), lanes):
            yield Plan(
                step=0,
                chunks=tuple(chunks[at : at + lanes]),
                moves=Moves(tables=self._tables() if at == 0 else ()),
            )
        rows = (Row(slot=self._slot, request_id=_NAME),)
        for _ in case.samples[1:]:
            yield Plan(step=0, decode=rows)

    def _tables(self) -> tuple[BlockTable, ...]:
        """The row's block table: the probe owns the blocks beyond the scheduler's."""
        first = self._config.num_blocks
        if first is None:
            return ()
        blocks = tuple(range(first, first + self._runner.blocks_of_a_slot))
        return (BlockTable(slot=self._slot, request_id=_NAME, blocks=blocks),)

    def _read(self, step: InFlight) -> None:
        result = self._runner.wait(step)
        samples = [*result.first]
        if step.plan.decode:
            samples.append(result.decode.sample(self._slot.index))
        for sample in samples:
            case = self._case
            assert case is not None
            if (why := _difference(case, self._seen, sample)) is not None:
                self.mismatches += 1
                _log.error(
                    "request %r differs from its repetition alone by plain decode: token %d of %d %s",
                    case.request_id,
                    self._seen,
                    len(case.samples),
                    why,
                )
            self._seen += 1
            if why is not None or self._seen == len(case.samples):
                self.requests += 1
                self._forget()
                return


def _difference(case: _Case, place: int, sample: Sample) -> str | None:
    """Describe how a sample differs from the request's result; None if it does not."""
    then = case.samples[place]
    now = TokenSample(sample.token_id, None if then.logprob is None else sample.logprob)
    if first_difference([then], [now], place) is None:
        return None
    if then.token_id != now.token_id:
        return f"was {then.token_id} and is {'nothing' if now.token_id == NO_TOKEN else now.token_id}"
    return f"had log-probability {then.logprob:.9g}, has {now.logprob:.9g}"


def _is_ready(step: InFlight) -> bool:
    """Whether a step can be read without waiting."""
    parts: tuple[Any, ...] = (*step.first, *([] if step.decode is None else [step.decode]))
    return all(part.samples.is_ready() for part in parts)
