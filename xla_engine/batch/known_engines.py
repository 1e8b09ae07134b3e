"""Identities of the engines that ran on this machine, by digest: the `system_fingerprint` of results."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path

from xla_engine.engine.identity import EngineIdentity
from xla_engine.environment import compile_cache_directory
from xla_engine.runner.native_library.cache import private_directory, read_own, write_own


def remember(identity: EngineIdentity) -> None:
    """Store an identity in the cache directory. Does nothing if the directory is not writable."""
    path = _place(identity.digest())
    if not path.exists():
        with contextlib.suppress(OSError):
            write_own(path, json.dumps(asdict(identity), sort_keys=True))


def recall(digest: str | None) -> EngineIdentity | None:
    """The identity of an engine by its digest; None if it is unknown on this machine."""
    if digest is None or not (digest.isascii() and digest.isalnum()):
        return None
    try:
        found = EngineIdentity(**json.loads(read_own(_place(digest))))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.digest() == digest else None


def _place(digest: str) -> Path:
    return private_directory(compile_cache_directory() / "engines") / f"{digest}.json"
