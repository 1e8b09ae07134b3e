"""How fast the last run of a model went on this machine: what an estimate of the next one rests on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from xla_engine.environment import compile_cache_directory
from xla_engine.runner.native_library.cache import private_directory, read_own, write_own

_ENOUGH = 16  # answers: a shorter run says little of a rate


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRun:
    """Of one model: answers, all of their tokens, and seconds from the first line read to the last one written."""

    answers: int
    generated_tokens: int
    seconds: float
    day: str = ""

    @property
    def tokens_per_s(self) -> float:
        return self.generated_tokens / self.seconds

    @property
    def mean_tokens(self) -> float:
        """Of an answer."""
        return self.generated_tokens / self.answers

    def keep(self, model: Path | str) -> None:
        """Remember it, where it is long enough to say something and can be written."""
        if self.answers >= _ENOUGH and self.generated_tokens and self.seconds > 0:
            text = json.dumps({**asdict(self), "day": time.strftime("%Y-%m-%d")})
            with contextlib.suppress(OSError):
                write_own(_place(model), text)

    @classmethod
    def of(cls, model: Path | str) -> LastRun | None:
        """The last one of a model; None where there is none."""
        try:
            return cls(**json.loads(read_own(_place(model))))
        except (OSError, ValueError, TypeError):
            return None


def _place(model: Path | str) -> Path:
    name = str(Path(model).resolve()) if Path(model).exists() else str(model)
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return private_directory(compile_cache_directory() / "last_runs") / f"{digest}.json"
