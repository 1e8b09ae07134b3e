"""Runs an engine's turns in the threads of its callers.

Several threads may share an engine: one runs a turn while the others wait for its end. If there is a step timeout or a
deadline, a background thread waits for the step, so that the caller can end requests at their deadline and return
before the step is done. The next caller continues to wait for that step.
"""

import math
from threading import get_ident
from typing import Any

from xla_engine.engine.loop import Loop
from xla_engine.engine.state import NO_THREAD, EngineState, UnderWay
from xla_engine.engine.turn import Turn, answer_turn
from xla_engine.engine.waiter import device_lost


class Driver:
    """Runs the turns of a loop."""

    def __init__(self, state: EngineState, loop: Loop) -> None:
        self._state = state
        self._loop = loop

    def turn(self) -> Turn:
        """The next turn, for callers that wait in their own way; first ends a turn that a driver has left."""
        with self._state.lock:
            if self._state.turn.is_left:
                self.finish_steps()
        yield from self._loop.turn()

    def advance(self) -> None:
        """As `XlaBatchEngine.advance`."""
        state, turns = self._state, self._state.turn
        with state.lock:
            number, expired = turns.ended, state.expired
            if turns.running and turns.thread not in (NO_THREAD, get_ident()):
                self._await_turn(number)
                return
            if (found := turns.under_way) is not None and turns.thread == NO_THREAD:
                turns.thread = get_ident()
            elif (found := self._begin(expired)) is None:
                return
        is_left = False
        try:
            answer = self._wait(found, expired)
            if answer is None:
                is_left = self._leave()
            else:
                answer_turn(found.turn, answer)
        finally:
            if not is_left:
                self._end(found, number)

    def _begin(self, expired: int) -> UnderWay | None:
        """Begin a turn; None if it is already over."""
        state, turn = self._state, self._loop.turn()
        if (wait := next(turn, None)) is None:
            return None
        has_deadline = state.next_deadline() < math.inf or state.expired != expired
        limited = has_deadline or state.watches or state.step_timeout_s is not None
        if not state.turn.running:  # it waits for background work, which ends by itself at a deadline
            return UnderWay(turn, wait, None)
        pending = state.waiter.ask_and_wake(wait.call) if limited else None
        state.turn.under_way = UnderWay(turn, wait, pending)
        return state.turn.under_way

    def _wait(self, found: UnderWay, expired: int) -> Any:
        """The result or exception for the turn; None if a request passes its deadline, so that `expired` grows."""

        def expire() -> bool:
            found.wait.expire()
            return self._state.expired != expired

        try:
            if found.pending is None:
                return found.wait.call()
            return self._state.waiter.watch(found.pending, found.wait.time_left, expire)
        except BaseException as error:
            return error

    def _leave(self) -> bool:
        """Leave the turn to the next caller: this one must return the end of a request before the step is read."""
        with self._state.lock:
            self._state.turn.thread = NO_THREAD
            self._state.lock.notify_all()
        return True

    def _end(self, found: UnderWay, number: int) -> None:
        """Close the turn if an interrupt came before its answer."""
        with self._state.lock:
            if self._state.turn.running and self._state.turn.ended == number:
                found.turn.close()

    def _await_turn(self, number: int) -> None:
        """Wait until another thread's turn has ended or was left, or until the next deadline."""
        state = self._state
        left = state.next_deadline() - state.clock()
        seconds = None if left == math.inf else max(left, 1e-3)
        if not state.lock.wait_for(
            lambda: state.turn.ended != number or state.turn.thread == NO_THREAD, seconds
        ):
            self._loop.expire()

    def finish_steps(self) -> None:
        """Read the steps in flight whose requests have all passed their deadlines."""
        state = self._state
        while state.turn.is_left and (found := state.turn.under_way) is not None:
            assert found.pending is not None
            answered = found.pending.done.wait(state.step_timeout_s)
            answer_turn(found.turn, found.pending.result() if answered else device_lost())
            self.finish_idle_steps()

    def finish_idle_steps(self) -> None:
        """Read the steps in flight if no request is left, such as those that began before a stop was seen."""
        state = self._state
        while state.pipeline.in_flight and not state.table and state.closed is None:
            self.advance()
