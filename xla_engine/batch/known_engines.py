"""Identities of the engines that ran on this machine, by digest: the `system_fingerprint` of results."""

import contextlib
import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path

from xla_engine.config import AUTO, ISAS
from xla_engine.engine.identity import EngineIdentity
from xla_engine.environment import compile_cache_directory
from xla_engine.runner.native_library.cache import private_directory, read_own, write_own

# Of attention and linear layers.
_BACKENDS = (("native", "native"), ("native", "xla"), ("xla", "xla"), ("gpu", "gpu"), ("gpu", "xla"))


def remember(identity: EngineIdentity) -> None:
    """Store an identity in the cache directory. Does nothing if the directory is not writable."""
    path = _place(identity.digest())
    if not path.exists():
        with contextlib.suppress(OSError):
            write_own(path, json.dumps(asdict(identity), sort_keys=True).encode())


def recall(digest: str | None) -> EngineIdentity | None:
    """The identity of an engine by its digest; None if it is unknown on this machine."""
    if digest is None or not (digest.isascii() and digest.isalnum()):
        return None
    try:
        found = EngineIdentity(**json.loads(read_own(_place(digest))))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.digest() == digest else None


def elsewhere(digest: str | None, here: EngineIdentity) -> EngineIdentity | None:
    """The identity of an engine that ran on another kind of machine, found by its digest: `here` with other C++
    kernels, and maybe another default length. None if it differs in something else."""
    isas = (
        None,
        *(isa for isa in ISAS if isa not in (AUTO, "none", "amx")),
    )  # AMX and pure JAX are not named
    lengths = (here.config.get("max_model_len"), *(1 << power for power in range(8, 19)), None)
    plain = {name: word for name, word in here.platform.items() if name != "isa"}
    for isa, (attention, linear), length in itertools.product(isas, _BACKENDS, lengths):
        named = {} if isa is None or attention == "xla" else {"isa": isa}
        platform = plain | {"attention": attention, "linear": linear} | named
        found = replace(here, platform=platform, config={**here.config, "max_model_len": length})
        if found.digest() == digest:
            return found
    return None


def _place(digest: str) -> Path:
    return private_directory(compile_cache_directory() / "engines") / f"{digest}.json"
