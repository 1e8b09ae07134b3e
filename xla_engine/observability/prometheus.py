"""Metrics as text, in Prometheus' text format, version 0.0.4.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/. Written here so that metrics need no dependency;
tests read the result with prometheus-client.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from xla_engine.observability.histogram import Distribution

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Sample(NamedTuple):
    """One value of a metric with its labels."""

    value: float | Distribution
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A metric with its values.

    name: a counter's ends in _total. kind: "counter", "gauge" or "histogram". about: a description of one line.
    """

    name: str
    kind: str
    about: str
    samples: tuple[Sample, ...]


def text_of(families: Iterable[Family]) -> str:
    """The metrics as text."""
    return "".join(f"{line}\n" for family in families for line in _lines(family))


def _lines(family: Family) -> Iterator[str]:
    about = family.about.replace("\\", "\\\\").replace("\n", "\\n")
    yield f"# HELP {family.name} {about}"
    yield f"# TYPE {family.name} {family.kind}"
    for value, labels in family.samples:
        if isinstance(value, Distribution):
            for bound, count in value.cumulative():
                yield _sample(f"{family.name}_bucket", {**labels, "le": str(bound)}, count)
            yield _sample(f"{family.name}_bucket", {**labels, "le": "+Inf"}, value.count)
            yield _sample(f"{family.name}_sum", labels, value.total)
            yield _sample(f"{family.name}_count", labels, value.count)
        else:
            yield _sample(family.name, labels, value)


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{inside}}} {value}" if inside else f"{name} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
