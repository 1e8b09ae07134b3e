"""Lives of an engine, one after another, until the time is over; and the report."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from xla_engine.config import EngineConfig
from xla_engine.errors import ConfigError
from xla_engine.model_loader.checkpoint import Checkpoint
from xla_engine.scheduler.policy import POLICIES
from xla_engine.soak import memory
from xla_engine.soak.async_life import AsyncLife
from xla_engine.soak.faults import STEP_TIMEOUT_S, FaultyTokenizer
from xla_engine.soak.life import ENDS, Life, Tally

ROUNDS = 40  # of a life
EVERY = 3  # so many lives, one goes through `AsyncLLM`
WARM_LIVES = 4  # whose memory is not looked at: one of each kind
ALLOWED_GROWTH = 48 << 20  # bytes, by the slope, from the end of the warm-up to the end of the soak
_BLOCK = 32
_PATIENCE_S = 30.0  # for threads to end
_KINDS: dict[str, dict[str, Any]] = {
    "slots": {},
    "blocks": {"block_size": _BLOCK},
    "slots, speculation": {"speculative_config": {"method": "suffix", "num_speculative_tokens": 3}},
    "blocks, speculation": {
        "block_size": _BLOCK,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
    },
}


@dataclass(slots=True)
class SoakReport:
    """What a soak did and found.

    seed, first_life: repeat it. seconds: wall time. tally: what happened.
    resident: (requests so far, bytes of memory) after each engine's end, the warm-up left out: engines differ in size.
    """

    seed: int
    first_life: int
    seconds: float = 0.0
    tally: Tally = field(default_factory=Tally)
    resident: list[tuple[int, int]] = field(default_factory=list)
    without_speculation: str | None = None

    @property
    def bytes_per_request(self) -> float:
        """Slope of the memory over requests, by least squares."""
        return memory.slope(self.resident)

    @property
    def growth(self) -> int:
        """What the slope makes of the whole soak, in bytes."""
        if len(self.resident) < 3:
            return 0
        return round(self.bytes_per_request * (self.resident[-1][0] - self.resident[0][0]))

    @property
    def ok(self) -> bool:
        return not self.tally.problems and self.growth <= ALLOWED_GROWTH

    def lines(self) -> list[str]:
        """The report as text."""
        tally, mib = self.tally, 1 << 20
        ends = ", ".join(f"{name} {count}" for name, count in sorted(tally.ends.items()))
        first, last = (self.resident[0][1], self.resident[-1][1]) if self.resident else (0, 0)
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
            f"memory                     {first / mib:.0f} MiB after the warm-up, {last / mib:.0f} MiB at the end; "
            f"{self.bytes_per_request:+.0f} bytes a request, {self.growth / mib:+.1f} MiB in all, "
            f"allowed {ALLOWED_GROWTH / mib:.0f}",
        ]
        if self.without_speculation is not None:
            lines.append(f"no speculation             {self.without_speculation}")
        lines += [f"  {problem}" for problem in tally.problems[:20]]
        if tally.problems:
            life = tally.problems[0].split(",")[0].partition("/")[2]
            again = f"--seed {self.seed} --first-life {life} --lives 1"
            lines.append(f"to see it again, with the same options: xla-engine soak {again}")
        if self.growth > ALLOWED_GROWTH:
            lines.append("  the memory grows")
        lines.append("all held" if self.ok else "NOT all held")
        return lines


def soak(
    checkpoint: Checkpoint,
    tokenizer: FaultyTokenizer | None,
    config: EngineConfig,
    *,
    minutes: float | None = None,
    lives: int | None = None,
    seed: int = 0,
    first_life: int = 0,
    rounds: int = ROUNDS,
    progress: Callable[[str], None] | None = None,
) -> SoakReport:
    """Run engines under requests, faults and ends of all kinds, until the time or the lives are over.

    config: what the lives do not choose themselves.
    minutes: no round begins later. lives: engines at most. The first problem ends the soak after its round.
    rounds: of each life. progress: called after each round with "round".

    Raises ConfigError where no engine can be.
    """
    report = SoakReport(seed, first_life)
    others, threads = memory.survivors(), len(memory.threads())
    began = time.monotonic()

    def is_over() -> bool:
        return minutes is not None and time.monotonic() - began >= 60 * minutes

    numbers = itertools.count(first_life) if lives is None else range(first_life, first_life + lives)
    for number in numbers:
        try:
            life = _begin(checkpoint, tokenizer, config, f"{seed}/{number}", number, report)
        except ConfigError as error:
            if number % len(_KINDS) < 2:
                raise
            report.without_speculation = str(error)
            continue
        for step in range(rounds):
            life.run_round(step, last=step == rounds - 1)
            if progress is not None:
                progress("round")
            if report.tally.problems or life.engine.closed_because is not None or is_over():
                break
        life.finish()
        del life
        report.tally.problems += [
            f"{seed}/{number}, after its end: {what}" for what in _remains(others, threads)
        ]
        if number >= first_life + WARM_LIVES:
            report.resident.append((report.tally.requests, memory.resident_bytes()))
        if report.tally.problems or is_over():
            break
    report.seconds = time.monotonic() - began
    return report


def _begin(
    checkpoint: Checkpoint,
    tokenizer: FaultyTokenizer | None,
    config: EngineConfig,
    seed: str,
    number: int,
    report: SoakReport,
) -> Life:
    kind = list(_KINDS)[number % len(_KINDS)]
    end = ENDS[(number + number // len(_KINDS)) % len(ENDS)]
    draw = random.Random(f"{seed}/config")
    fields: dict[str, Any] = {
        "scheduling_policy": draw.choice(list(POLICIES)),
        "quantum": draw.choice((1, 8)),
        "priority_aging": draw.choice((1, 64)),
        "swap_space": draw.choice((4.0, 4.0, 0.001, 0.0)),
        "max_waiting": draw.choice((None, None, 8)),
        "step_timeout_s": STEP_TIMEOUT_S if end == "hang" or draw.random() < 0.5 else None,
        **_KINDS[kind],
    }
    if "block_size" in fields:
        longest = -(-config.context_length(checkpoint.config.max_position_embeddings) // _BLOCK) + 1
        fields["num_blocks"] = max(longest + 1, config.num_slots * longest * 2 // 5)
    kind_of_life = AsyncLife if number % EVERY == EVERY - 1 else Life
    return kind_of_life(checkpoint, tokenizer, replace(config, **fields), seed, report.tally, end=end)


def _remains(others: Counter[str], threads: int) -> Iterator[str]:
    """What is left of an engine that is no more, beside `others` and `threads`, which were there before the soak."""
    until = time.monotonic() + _PATIENCE_S
    while len(memory.threads()) > threads and time.monotonic() < until:
        time.sleep(0.01)  # a step that hung was let go, and still has to end
    if found := memory.survivors() - others:
        yield f"these live on: {dict(found)}"
    if (waiting := len(memory.threads()) - threads) > 0:
        yield f"{waiting} threads wait for steps"
