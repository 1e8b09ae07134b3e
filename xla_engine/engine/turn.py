"""A turn of an engine, as its driver sees it: a generator that yields what it waits for and is sent the result.

A turn yields once, or not at all if there is nothing to wait for. The driver chooses how to wait: in its own thread,
in another thread with a time limit, or in an event loop.
"""

from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, NamedTuple


class Wait(NamedTuple):
    """What a turn waits for.

    call: blocks until the result is ready; may run in any thread. Send its result to the turn, or throw its exception.
    time_left: seconds until the next deadline or the step's timeout; 0 if the step has timed out, so that the device
        counts as lost; infinity for no limit.
    expire: ends the requests whose deadline has passed; call it when `time_left` has elapsed.
    """

    call: Callable[[], Any]
    time_left: Callable[[], float]
    expire: Callable[[], object]


Turn = Generator[Wait, Any, None]


def answer_turn(turn: Turn, answer: Any) -> None:
    """Send a turn the result of its wait, or throw it if it is an exception; the turn ends.

    Raises an interrupt (a BaseException that is no Exception) again.
    """
    with suppress(StopIteration):
        if isinstance(answer, BaseException):
            turn.throw(answer)
        else:
            turn.send(answer)


def drive(turn: Turn) -> None:
    """Run a turn to its end in this thread, with no time limit."""
    try:
        if (wait := next(turn, None)) is None:
            return
        try:
            answer = wait.call()
        except BaseException as error:
            answer = error
        answer_turn(turn, answer)
    finally:
        turn.close()  # in case an interrupt came between wait and answer
