"""A turn of an engine as those who run it see it: a generator that yields what it waits for, and is sent the answer.

A turn yields once, or not at all when there is nothing to wait for. Whoever runs it chooses how to wait: in its own
thread, in another one within a time limit, or in an event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, NamedTuple


class Wait(NamedTuple):
    """What a turn waits for.

    call: blocks until the answer is there, in any thread. The turn is sent what it returns, or thrown what it raises.
    time_left: seconds until something has had its time: 0 when that is the device, which is then given up, and
        infinity for no limit.
    expire: ends the requests whose time is up; to be called when `time_left` has passed.
    """

    call: Callable[[], Any]
    time_left: Callable[[], float]
    expire: Callable[[], object]


Turn = Generator[Wait, Any, None]


def answer_turn(turn: Turn, answer: Any) -> None:
    """Send a turn what its wait has brought, or throw what was raised in its place; the turn ends.

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
        turn.close()  # where an interrupt came between the two
