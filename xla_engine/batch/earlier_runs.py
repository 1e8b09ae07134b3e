"""What this machine keeps of earlier runs: engines by their digest, and the throughput of each model's last run."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from xla_engine.config import AUTO, ISAS, KEPT
from xla_engine.engine.identity import EngineIdentity
from xla_engine.environment import compile_cache_directory
from xla_engine.runner.native_library.cache import private_directory, read_own, write_own

# Of attention and linear layers.
_BACKENDS = (("native", "native"), ("native", "xla"), ("xla", "xla"), ("gpu", "gpu"), ("gpu", "xla"))
ENOUGH = 16  # answers; a shorter run is too short to estimate from


def remember(identity: EngineIdentity) -> None:
    """Store an identity in the cache directory. Does nothing if the directory is not writable."""
    path = _place("engines", identity.digest())
    if not path.exists():
        with contextlib.suppress(OSError):
            write_own(path, json.dumps(asdict(identity), sort_keys=True).encode())


def recall(digest: str | None) -> EngineIdentity | None:
    """The identity of an engine by its digest; None if it is unknown on this machine."""
    if digest is None or not (digest.isascii() and digest.isalnum()):
        return None
    try:
        found = EngineIdentity(**json.loads(read_own(_place("engines", digest))))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.digest() == digest else None


def elsewhere(digest: str | None, here: EngineIdentity) -> EngineIdentity | None:
    """The identity of an engine that ran on another kind of machine, found by its digest: `here` with other C++
    kernels, and maybe another default length or form of the weights. None if it differs in something else."""
    isas = (None, *(isa for isa in ISAS if isa not in (AUTO, "none", "amx")))  # these are not named
    lengths = (here.config.get("max_model_len"), *(1 << power for power in range(8, 19)), None)
    names = (here.config["quantization"], None, *KEPT) if "quantization" in here.config else ()
    forms: list[dict[str, str | None]] = [{}, *({"quantization": form} for form in names)]
    plain = {name: word for name, word in here.platform.items() if name != "isa"}
    for form, isa, (attention, linear), length in itertools.product(forms, isas, _BACKENDS, lengths):
        named = {} if isa is None or attention == "xla" else {"isa": isa}
        platform = plain | {"attention": attention, "linear": linear} | named
        found = replace(here, platform=platform, config={**here.config, "max_model_len": length, **form})
        if found.digest() == digest:
            return found
    return None


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
        if self.answers >= ENOUGH and self.generated_tokens and self.seconds > 0:
            text = json.dumps({**asdict(self), "day": time.strftime("%Y-%m-%d")})
            with contextlib.suppress(OSError):
                write_own(_place("last_runs", _name_of(model)), text.encode())

    @classmethod
    def of(cls, model: Path | str) -> LastRun | None:
        """The last run of a model; None if there is none."""
        try:
            return cls(**json.loads(read_own(_place("last_runs", _name_of(model)))))
        except (OSError, ValueError, TypeError):
            return None


def _name_of(model: Path | str) -> str:
    name = str(Path(model).resolve()) if Path(model).exists() else str(model)
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def _place(folder: str, name: str) -> Path:
    return private_directory(compile_cache_directory() / folder) / f"{name}.json"
