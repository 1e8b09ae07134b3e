"""`/metrics`: the engine's metrics (`xla_engine.observability.metrics`) and those of the server."""

from collections.abc import Callable
from typing import NamedTuple

from xla_engine import __version__
from xla_engine.observability.metrics import Family, counter, gauge, text_of
from xla_engine.server.service import Service
from xla_engine.utils.resident import resident_bytes

_Values = list[tuple[float, dict[str, str]]]


class ServerMetric(NamedTuple):
    """A metric of the server. make: `gauge` or `counter`. read: returns its values with their labels."""

    name: str
    make: Callable[[str, str, _Values], Family]
    about: str
    read: Callable[[Service], _Values]


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


def metrics_text(service: Service) -> str:
    """All metrics. Those of the engine have the model's name as a label, as in vLLM."""
    engine = service.engine.metrics(service.settings.model_names[0])
    own = (metric.make(metric.name, metric.about, metric.read(service)) for metric in SERVER_METRICS)
    return text_of((*engine, *own))


def _model(service: Service) -> dict[str, str]:
    return {"model_name": service.settings.model_names[0]}
