"""The engine's log under `xla_engine.engine`.

It is hidden unless the program configures logging, for example with `logging.basicConfig(level=logging.INFO)`.
`xla-engine run -v` shows it.
"""

import logging

from xla_engine.observability.stats import EngineStats

LOG_STEPS = 1000  # steps between lines of progress

engine_log = logging.getLogger("xla_engine.engine")
engine_log.addHandler(logging.NullHandler())  # else Python itself would print warnings


class ProgressLog:
    """Progress since the last line."""

    def __init__(self, now: float) -> None:
        """now: seconds on the same clock as in `line`."""
        self._before, self._at = EngineStats(), now

    def line(self, stats: EngineStats, now: float) -> str:
        """The engine's state, and its rates since the last line or the start."""
        before, seconds = self._before, max(now - self._at, 1e-9)
        self._before, self._at = stats, now
        text = (
            f"step {stats.steps}: {stats.slots_used} of {stats.slots} slots, {stats.waiting} sequences wait, "
            f"KV cache {stats.kv_usage:.0%}; since the last line "
            f"{(stats.generation_tokens - before.generation_tokens) / seconds:.1f} tokens/s, "
            f"{(stats.prompt_tokens - before.prompt_tokens) / seconds:.1f} of prompts, "
            f"{sum(stats.finished.values()) - sum(before.finished.values())} sequences ended"
        )
        for name in ("preemptions", "recoveries"):
            if more := getattr(stats, name) - getattr(before, name):
                text += f", {more} {name}"
        return text
