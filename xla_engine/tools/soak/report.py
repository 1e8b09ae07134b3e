"""What a soak did and found."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

ALLOWED_GROWTH = 1024  # bytes a request
LEAST_ENGINES = 8  # whose memory tells growth from their different sizes
ALLOWED_RATIO = 1.2  # of the server's memory after a round of clients, to that after the warm-up
LEAST_ROUNDS = 4  # of clients after the warm-up, without which nothing is said of it
_MIB = 1 << 20
_COUNTS = (
    *("engines", "rounds", "requests", "refused", "tokens", "steps", "preempted"),
    *("tokens found in the cache", "drafts checked"),
    *("steps that failed", "steps interrupted", "steps that took long", "steps that hung"),
    "compared with alone",
)


@dataclass(slots=True)
class SoakReport:
    """seed, first_life: repeat the soak. seconds: wall time.

    counts: by what happened. ends: sequences by reason. problems: what broke, in words; empty where all held.
    resident: (requests so far, bytes of memory) after each engine's end, the warm-up left out: engines differ in size.
    no_speculation: why no engine speculated; None if engines did.
    hostile: what a server's hostile clients were answered, by status; None where nothing.
    slowest_health_s: of an answer of /health. server: bytes of memory of the idle server after each round of clients,
    the warm-up left out.
    """

    seed: int
    first_life: int
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    resident: list[tuple[int, int]] = field(default_factory=list)
    no_speculation: str | None = None
    hostile: Counter[int | None] = field(default_factory=Counter)
    slowest_health_s: float = 0.0
    server: list[int] = field(default_factory=list)

    @property
    def growth(self) -> tuple[float, float]:
        """Bytes that each request left behind, by least squares, and their standard error."""
        if len(self.resident) < 3:
            return 0.0, math.inf
        requests, sizes = np.asarray(self.resident, np.float64).T
        (found, _), errors = np.polyfit(requests, sizes, 1, cov=True)
        return float(found), float(np.sqrt(errors[0, 0]))

    @property
    def grows(self) -> bool:
        """Whether the growth per request surely exceeds the limit: by four standard errors."""
        found, error = self.growth
        return len(self.resident) >= LEAST_ENGINES and found - 4 * error > ALLOWED_GROWTH

    @property
    def server_grows(self) -> bool:
        return len(self.server) >= LEAST_ROUNDS and max(self.server) > ALLOWED_RATIO * self.server[0]

    @property
    def unmeasured(self) -> list[str]:
        """The memory of which too little was seen to tell whether it grows."""
        found, error = self.growth
        engines = [] if self.grows or found + 2 * error <= ALLOWED_GROWTH else ["memory"]
        server = ["memory of the server"] if self.hostile and len(self.server) < LEAST_ROUNDS else []
        return engines + server

    @property
    def ok(self) -> bool:
        return not (self.problems or self.grows or self.server_grows)

    def short(self) -> str:
        """The report so far in one line."""
        some = ("engines", "requests", "compared with alone")
        told = ", ".join(f"{self.counts[name]} {name}" for name in some)
        return f"{self.seconds:.0f} s, {told}, {len(self.problems)} problems; {self._memory()}"

    def lines(self) -> list[str]:
        """The report as text."""
        about: dict[str, object] = {"seed": self.seed, "first life": self.first_life}
        about |= {"time": f"{self.seconds:.0f} s"} | {name: self.counts[name] for name in _COUNTS}
        about |= {"sequences": _listed(self.ends), "memory": self._memory()}
        if self.no_speculation is not None:
            about["no speculation"] = self.no_speculation
        if self.hostile:
            about["HTTP answers compared"] = self.counts["HTTP answers compared"]
            about["HTTP clients answered"] = _listed(self.hostile)
            about["slowest /health"] = f"{1e3 * self.slowest_health_s:.0f} ms"
            about["memory of the server"] = ", ".join(f"{size / _MIB:.0f}" for size in self.server) + " MiB"
        return [f"{name:<27}{value}" for name, value in about.items()] + list(self._verdict())

    def _memory(self) -> str:
        if not self.resident:
            return "not measured"
        ends = [f"{size / _MIB:.0f} MiB" for _, size in (self.resident[:1] + self.resident[-1:])]
        found, error = self.growth
        return (
            f"{' to '.join(ends)}; {found:+.0f} +- {2 * error:.0f} bytes a request, allowed {ALLOWED_GROWTH}"
        )

    def _verdict(self) -> Iterator[str]:
        yield from (f"  {problem}" for problem in self.problems[:20])
        if self.problems:
            life = self.problems[0].split(",")[0].partition("/")[2]
            again = f"--seed {self.seed} --first-life {life} --lives 1"
            yield f"to see it again, with the same options: xla-engine soak {again}"
        if self.grows:
            yield "  the memory grows"
        if self.server_grows:
            yield f"  the memory of the server grows to more than {ALLOWED_RATIO} times what it was"
        if not self.ok:
            yield "NOT all held"
        elif self.unmeasured:
            yield f"no problem found, but not measured: {', '.join(self.unmeasured)}; run for longer"
        else:
            yield "all held"


def _listed(counts: Counter[str] | Counter[int | None]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=str))
