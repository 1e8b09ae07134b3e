"""The state of a live request in a simulation."""

from dataclasses import dataclass

from xla_engine.tools.simulator.trace import Arrival


@dataclass(slots=True)
class LiveRequest:
    """A live request.

    came: when it arrived. had_token: whether it has one.
    last_token: when its latest token came; kept only for requests that do not get one in every step.
    away: whether it lost its slot and had no token since.
    back: the step from which it has a slot again, None while it waits.
    """

    arrival: Arrival
    came: float
    had_token: bool = False
    last_token: float = 0.0
    away: bool = False
    back: int | None = None
