"""What engines have in common, whether they run in this process or as several in processes of their own."""

import math
from typing import Protocol

from xla_engine.engine.protocol import Engine, drained
from xla_engine.engine.requests.output_collector import OutputCollector, Readable
from xla_engine.outputs import RequestOutput


class _Accepting(Protocol):
    draining: bool


def step_engine(engine: Engine, collector: OutputCollector, *, only_finished: bool) -> list[RequestOutput]:
    """Run one turn; returns the outputs of the requests in `collector`, which the engine fills."""
    _turn(engine, collector)
    with engine.lock:
        return [request.output() for request in collector.take() if request.finished or not only_finished]


def drain_engine(
    engine: Engine, collector: OutputCollector, accepting: _Accepting, timeout_s: float | None
) -> list[RequestOutput]:
    """As `XlaBatchEngine.drain`, for the requests in `collector`. accepting: the state that refuses new ones."""
    ended: list[Readable] = []
    until = math.inf if timeout_s is None else engine.clock() + timeout_s
    draining, accepting.draining = accepting.draining, True
    try:
        while engine.has_unfinished:
            if engine.has_work and engine.clock() >= until:
                engine.abort_all(drained(timeout_s))
            _turn(engine, collector)
            with engine.lock:
                ended += (request for request in collector.take() if request.finished)
    except BaseException:
        with engine.lock:
            for request in ended:  # not delivered yet: the next `step` or `drain` must return them
                collector.put(request)
        raise
    finally:
        accepting.draining = draining
    with engine.lock:
        return [request.output() for request in ended]


def _turn(engine: Engine, collector: OutputCollector) -> None:
    """Run a turn. A closed engine runs none while outputs can still be read."""
    if engine.closed_because is None or not collector:
        engine.advance()
