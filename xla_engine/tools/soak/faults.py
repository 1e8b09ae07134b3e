"""The faults of a soak: steps that fail, hang or take long, an interrupt, a lost device, text that cannot be decoded.
Its clock is moved by steps only, so that a seed determines when a deadline passes."""

import random
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from xla_engine.runner.in_flight import InFlight
from xla_engine.runner.runner import Runner
from xla_engine.scheduler import Chunk, Plan, Row, StepResult, Swap, VerifyRow
from xla_engine.text.detokenizer import IncrementalDetokenizer
from xla_engine.text.tokenizer import Tokenizer

PLANTED = "planted by the soak"
STEP_S = 0.01  # of the soak's clock, for each step
STEP_TIMEOUT_S = 30.0  # on the soak's clock
_LONG_STEP_S = 0.3
_FAIL = 0.02  # share of the steps
_INTERRUPT = 0.002
_TAKE_LONG = 0.03


class PlantedInterrupt(KeyboardInterrupt):
    """An interrupt in the middle of a turn, as Ctrl-C makes one."""


class Clock:
    """Seconds since the beginning of a life."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class FaultyDevice:
    """A runner whose steps fail now and then while `active`.

    poison: sequences with which every step fails, or every step in which they decode; by whether it is the latter.
    hits: by sequence, planted failures of steps that computed or moved it; the engine may blame it when it is alone in
        a second.
    interrupts: whether steps are interrupted too.
    counts: the faults are added to these, by what happened.
    """

    def __init__(self, runner: Runner, clock: Clock, draw: random.Random, counts: Counter[str]) -> None:
        self.active = False
        self.interrupts = True
        self.poison: dict[str, bool] = {}
        self.hits: Counter[str] = Counter()
        self._counts = counts
        self._runner = runner
        self._clock = clock
        self._draw = draw
        self._steps_to_hang: int | None = None
        self._lost = False
        self._hung, self._released = threading.Event(), threading.Event()
        self._last_failed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def hang_after(self, steps: int) -> None:
        """After this many steps, let the start or the read of a step hang until `release`."""
        self._steps_to_hang = steps

    @property
    def hangs(self) -> bool:
        """Whether a step hangs, and was not released."""
        return self._hung.is_set() and not self._released.is_set()

    def lose(self) -> None:
        """Fail every step from now on, and the attempt to make the state of the device anew."""
        self._lost = True

    def release(self) -> None:
        """Let a hanging step return."""
        self._released.set()

    def start(self, plan: Plan, *rest: Any) -> InFlight:
        """Start a step; a failing start has run, so that the state of the device has moved on unnoticed."""
        self._clock.now += STEP_S
        self._perhaps_hang()
        step = self._runner.start(plan, *rest)
        if self._fails(0.5):
            self._fail(plan)
        return step

    def wait(self, step: InFlight) -> StepResult:
        """Read a step, unless it fails: then its result is lost."""
        self._perhaps_hang()
        result = self._runner.wait(step)
        may_interrupt = self.active and self.interrupts and not self._last_failed
        if may_interrupt and self._draw.random() < _INTERRUPT:
            self._counts["steps interrupted"] += 1
            self._last_failed = True
            raise PlantedInterrupt(PLANTED)
        if self._fails(0.5) or self._is_poisoned(step.plan):
            self._fail(step.plan)
        self._last_failed = False
        return result

    def rebuild(self) -> None:
        """Make the state anew, unless the device is lost."""
        if self._lost:
            raise RuntimeError(f"no device any more, {PLANTED}")
        self._runner.rebuild()

    def sleep(self, done: threading.Event, seconds: float) -> bool:
        """Wait for a step, in place of `Waiter.sleep`: the time of one that hangs or takes long passes at once."""
        if self._steps_to_hang is not None:
            while not self._hung.is_set():
                if done.wait(0.001):
                    return True
            self._clock.now += seconds
            return False
        if self.active and self._draw.random() < _TAKE_LONG:
            self._counts["steps that took long"] += 1
            self._clock.now += min(seconds, _LONG_STEP_S)
            return False
        return done.wait()

    def _perhaps_hang(self) -> None:
        if self._steps_to_hang is None:
            return
        self._steps_to_hang -= 1
        if self._steps_to_hang < 0:
            self._hung.set()
            self._released.wait()

    def _is_poisoned(self, plan: Plan) -> bool:
        if not self.poison:
            return False
        decoding = _names((*plan.decode, *plan.verify))
        in_step = _names(_parts(plan))
        return any(name in (decoding if late else in_step) for name, late in self.poison.items())

    def _fails(self, share: float) -> bool:
        if self._lost:
            return True
        return self.active and not self._last_failed and self._draw.random() < share * _FAIL

    def _fail(self, plan: Plan) -> None:
        self._counts["steps that failed"] += 1
        self._last_failed = True
        self.hits.update(_names(_parts(plan)) | _names((*plan.moves.parks, *plan.moves.resumes)))
        raise self._draw.choice((RuntimeError, MemoryError, ValueError))(f"a step failed, {PLANTED}")


def _parts(plan: Plan) -> tuple[Chunk | Row | VerifyRow, ...]:
    return (*plan.chunks, *plan.decode, *plan.verify)


def _names(parts: Iterable[Chunk | Row | VerifyRow | Swap]) -> set[str]:
    return {part.request_id for part in parts}


class FaultyTokenizer(Tokenizer):
    """A tokenizer that fails on demand.

    tokens_left: the next sequence that is opened cannot show its text after so many tokens; None: it can.
    """

    tokens_left: int | None = None

    def incremental(self, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """A detokenizer for one stream of tokens, good or not."""
        good = super().incremental(skip_special_tokens)
        if self.tokens_left is None:
            return good
        left, self.tokens_left = self.tokens_left, None
        return _FailingDetokenizer(good, left)


class _FailingDetokenizer(IncrementalDetokenizer):
    def __init__(self, good: IncrementalDetokenizer, tokens_left: int) -> None:
        self._good = good
        self._left = tokens_left

    def push(self, token_id: int) -> str:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"no text can be made of this, {PLANTED}")
        return self._good.push(token_id)

    def push_all(self, token_ids: Sequence[int]) -> Iterable[str]:
        return [self.push(token_id) for token_id in token_ids]

    def peek(self) -> str:
        return self._good.peek()

    def flush(self) -> str:
        return self._good.flush()
