"""`/metrics`: the engine's metrics (`xla_engine.observability.metrics`) and those of the server."""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Protocol

from xla_engine import __version__
from xla_engine.engine.client import EngineClient
from xla_engine.observability.metrics import counter, gauge
from xla_engine.observability.prometheus import Family, text_of
from xla_engine.outputs import RequestOutput
from xla_engine.server.settings import ServerSettings
from xla_engine.utils.resident import resident_bytes

_RECENT = 0.1  # weight of the last request in `recent_seconds`
_Values = list[tuple[float, dict[str, str]]]


class RequestTimes:
    """Counts of requests that only the server has.

    recent_seconds: moving average of request times. refused: requests rejected because the queue was full.
    responses: counts by path and status.
    """

    def __init__(self) -> None:
        self.recent_seconds = 1.0
        self.refused = 0
        self.responses: Counter[tuple[str, str]] = Counter()

    def count(self, output: RequestOutput) -> None:
        if (metrics := output.metrics) is not None and metrics.finished_time is not None:
            seconds = metrics.finished_time - metrics.arrival_time
            self.recent_seconds += _RECENT * (seconds - self.recent_seconds)


class Serving(Protocol):
    """The part of `Service` that metrics read; see there."""

    engine: EngineClient
    settings: ServerSettings
    times: RequestTimes
    fingerprint: str
    draining: bool

    @property
    def live(self) -> int: ...


class ServerMetric(NamedTuple):
    """A metric of the server. make: `gauge` or `counter`. read: returns its values with their labels."""

    name: str
    make: Callable[[str, str, _Values], Family]
    about: str
    read: Callable[[Serving], _Values]


SERVER_METRICS = (
    ServerMetric(
        "xla_engine_interactive_live",
        gauge,
        "Sequences of accepted HTTP requests.",
        lambda service: [(service.live, _model(service))],
    ),
    ServerMetric(
        "xla_engine_draining",
        gauge,
        "1 while the server drains.",
        lambda service: [(float(service.draining), _model(service))],
    ),
    ServerMetric(
        "xla_engine_refused_total",
        counter,
        "Requests refused because the queue was full.",
        lambda service: [(service.times.refused, _model(service))],
    ),
    ServerMetric(
        "xla_engine_http_responses_total",
        counter,
        "Answers by path and status.",
        lambda service: [
            (count, {"path": path, "status": status})
            for (path, status), count in service.times.responses.items()
        ],
    ),
    ServerMetric(
        "process_resident_memory_bytes",
        gauge,
        "Memory of the server's process, weights included.",
        lambda _: [(size, {}) for size in (resident_bytes(),) if size is not None],
    ),
    ServerMetric(
        "xla_engine_info",
        gauge,
        "Version and fingerprint of this server.",
        lambda service: [(1, {"version": __version__, "fingerprint": service.fingerprint})],
    ),
)


def metrics_text(service: Serving) -> str:
    """All metrics. Those of the engine have the model's name as a label, as in vLLM."""
    engine = service.engine.metrics(service.settings.model_names[0])
    own = (metric.make(metric.name, metric.about, metric.read(service)) for metric in SERVER_METRICS)
    return text_of((*engine, *own))


def _model(service: Serving) -> dict[str, str]:
    return {"model_name": service.settings.model_names[0]}
