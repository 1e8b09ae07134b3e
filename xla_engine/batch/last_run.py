"""Throughput of a model's last run on this machine, from which the next run's time is estimated."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from xla_engine.environment import compile_cache_directory
from xla_engine.runner.native_library.cache import private_directory, read_own, write_own

_ENOUGH = 16  # answers; a shorter run is too short to estimate from


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRun:
    """A model's last run: answers, all their tokens, and seconds from the first line read to the last one written."""

    answers: int
    generated_tokens: int
    seconds: float
    day: str = ""

    @property
    def tokens_per_s(self) -> float:
        return self.generated_tokens / self.seconds

    @property
    def mean_tokens(self) -> float:
        return self.generated_tokens / self.answers

    def time_of(self, tokens: float) -> str:
        """The estimated time for a number of tokens, in words."""
        seconds = tokens / self.tokens_per_s
        about = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
        return f"about {about} at {self.tokens_per_s:.0f} tok/s, as in the run of {self.day}"

    def keep(self, model: Path | str) -> None:
        """Store the run if it was long enough and the cache directory is writable."""
        if self.answers >= _ENOUGH and self.generated_tokens and self.seconds > 0:
            text = json.dumps({**asdict(self), "day": time.strftime("%Y-%m-%d")})
            with contextlib.suppress(OSError):
                write_own(_place(model), text.encode())

    @classmethod
    def of(cls, model: Path | str) -> LastRun | None:
        """The last run of a model; None if there is none."""
        try:
            return cls(**json.loads(read_own(_place(model))))
        except (OSError, ValueError, TypeError):
            return None


def _place(model: Path | str) -> Path:
    name = str(Path(model).resolve()) if Path(model).exists() else str(model)
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return private_directory(compile_cache_directory() / "last_runs") / f"{digest}.json"
