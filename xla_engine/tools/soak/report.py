"""The results of a soak, and the rates of each kind of engine."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from xla_engine.tools.soak import memory
from xla_engine.tools.soak.http_rounds import HttpTally
from xla_engine.tools.soak.life import Tally

ALLOWED_GROWTH = 1024  # bytes a request
PARTS = ("start", "rounds", "alone", "end")  # of an engine's wall time
LEAST_ENGINES = 8  # whose memory tells growth from their different sizes


@dataclass(slots=True)
class KindTimes:
    """The wall time of all engines of one kind, and what they did in it.

    seconds: by what for. "start": making engines. "rounds": the requests of rounds together, and looking at their
    results. "alone": running requests alone. "end": closing engines, and looking for what is left of them.
    """

    lives: int = 0
    requests: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def line(self) -> str:
        """As text: requests a second of all the time, and where the time went."""
        total = sum(self.seconds.values())
        least = max(total, 1e-9)
        return (
            f"{self.lives} engines, {self.requests} requests, {self.requests / least:.1f} a second; "
            f"of {total:.0f} s: "
            + ", ".join(f"{name} {100 * spent / least:.0f} %" for name, spent in self.seconds.items())
        )


@dataclass(slots=True)
class SoakReport:
    """What a soak did and found.

    seed, first_life: repeat it. seconds: wall time. tally: what happened. kinds: by kind of engine, its times.
    resident: (requests so far, bytes of memory) after each engine's end, the warm-up left out: engines differ in size.
    http: what happened over HTTP; None for a soak without a server.
    """

    seed: int
    first_life: int
    seconds: float = 0.0
    tally: Tally = field(default_factory=Tally)
    kinds: dict[str, KindTimes] = field(default_factory=dict)
    resident: list[tuple[int, int]] = field(default_factory=list)
    without_speculation: str | None = None
    http: HttpTally | None = None

    @property
    def growth(self) -> tuple[float, float]:
        """Bytes that each request left behind, and what that may be wrong by: twice the standard error."""
        found, error = memory.slope(self.resident)
        return found, 2 * error

    @property
    def grows(self) -> bool:
        """Whether the growth per request surely exceeds the limit: by four standard errors."""
        found, error = self.growth
        return len(self.resident) >= LEAST_ENGINES and found - 2 * error > ALLOWED_GROWTH

    @property
    def is_measured(self) -> bool:
        """Whether engines enough have ended after the warm-up to tell growth from their different sizes."""
        found, error = self.growth
        return self.grows or found + error <= ALLOWED_GROWTH

    @property
    def ok(self) -> bool:
        grows = self.http is not None and self.http.grows
        return not self.tally.problems and not self.grows and not grows

    def lines(self) -> list[str]:
        """The report as text."""
        tally = self.tally
        ends = ", ".join(f"{name} {count}" for name, count in sorted(tally.ends.items()))
        lines = [
            f"seed                       {self.seed}",
            f"time                       {self.seconds:.0f} s",
            f"engines                    {tally.lives}  (from life {self.first_life} on)",
            f"rounds                     {tally.rounds}",
            f"requests                   {tally.requests}  (sequences: {ends})",
            f"requests refused           {tally.refused}",
            f"tokens                     {tally.tokens}  (in {tally.steps} steps)",
            f"preempted                  {tally.preemptions}",
            f"tokens found in the cache  {tally.cached_tokens}",
            f"drafts checked             {tally.drafted_tokens}",
            f"steps failed, interrupted  {tally.failed_steps}, {tally.interrupts}",
            f"steps long, hung           {tally.slow_steps}, {tally.hangs}",
            f"compared with alone        {tally.compared}",
            f"memory                     {self.memory_line()}",
        ]
        if self.without_speculation is not None:
            lines.append(f"no speculation             {self.without_speculation}")
        if self.http is not None:
            lines += self.http.lines()
        lines += [f"{name:<26} {times.line()}" for name, times in self.kinds.items()]
        return lines + list(self._verdict())

    def memory_line(self) -> str:
        """Memory and its slope as text."""
        if len(self.resident) < 3:
            return (
                f"not measured: {len(self.resident)} engines after the warm-up, and 3 are needed; run for longer, or "
                "with fewer --rounds"
            )
        mib = 1 << 20
        (_, first), *_, (_, last) = self.resident
        found, error = self.growth
        return (
            f"{first / mib:.0f} MiB after the warm-up, {last / mib:.0f} MiB at the end; {found:+.0f} +- {error:.0f} "
            f"bytes a request, allowed {ALLOWED_GROWTH}"
            + ("" if self.is_measured else ": not measured, run for longer")
        )

    def _verdict(self) -> Iterator[str]:
        problems = self.tally.problems
        yield from (f"  {problem}" for problem in problems[:20])
        if problems:
            life = problems[0].split(",")[0].partition("/")[2]
            again = f"--seed {self.seed} --first-life {life} --lives 1"
            yield f"to see it again, with the same options: xla-engine soak {again}"
        if self.grows:
            yield "  the memory grows"
        if self.http is not None and self.http.grows:
            yield "  the memory of the server grows"
        unmeasured = [] if self.is_measured else ["memory"]
        if self.http is not None and self.http.ratio is None:
            unmeasured.append("memory of the server")
        if not self.ok:
            yield "NOT all held"
        elif unmeasured:
            yield f"no problem found, but not measured: {', '.join(unmeasured)}"
        else:
            yield "all held"
