"""Short hashes that make two runs comparable later: of the engine, of a request's tokens, of its logprob bits."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """Everything the bits of a result may depend on besides the request.

    model: the checkpoint's fingerprint. dtype: of the weights as loaded. config: all `EngineConfig` fields, tuples
    as lists. platform: jax, jaxlib, backend and device kind; with bits "portable" only the name of the arithmetic.
    made_on: with bits "portable" what `platform` has otherwise. It is no part of the identity.
    """

    model: str
    dtype: str
    config: Mapping[str, Any]
    platform: Mapping[str, str]
    made_on: Mapping[str, str] = field(default_factory=dict)

    def digest(self, *, with_devices: bool = False) -> str:
        """Sixteen hex digits; equal where `differences` finds nothing.

        with_devices: as files from before this rule have it, with `tensor_parallel_size` even where no bit depends
            on it.
        """
        known = asdict(self) if with_devices else {**asdict(self), "config": self._options()}
        del known["made_on"]
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]

    def _options(self) -> dict[str, Any]:
        """The options that bits depend on: with the C++ products they are those of one device on any number, and with
        bits "portable" those of any machine and configuration."""
        if "arithmetic" in self.platform:
            from xla_engine.config import PORTABLE_OPTIONS  # late, because it imports jax

            return {name: value for name, value in self.config.items() if name in PORTABLE_OPTIONS}
        native = self.platform.get("linear") == self.platform.get("attention") == "native"
        return {
            name: value for name, value in self.config.items() if name != "tensor_parallel_size" or not native
        }

    def differences(self, other: EngineIdentity) -> list[str]:
        """One line per field that differs, this identity's value first."""
        mine, theirs = self._flat(), other._flat()
        return [
            f"{name}: {mine.get(name, 'absent')} and {theirs.get(name, 'absent')}"
            for name in dict.fromkeys((*mine, *theirs))
            if mine.get(name, ...) != theirs.get(name, ...)
        ]

    def _flat(self) -> dict[str, Any]:
        options = {f"engine option {name}": value for name, value in self._options().items()}
        return {"model": self.model, "dtype": self.dtype, **self.platform, **options}


def tokens_sha256(token_ids: Sequence[int]) -> str:
    """sha256 over the ids as little-endian int32."""
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}i", *token_ids)).hexdigest()


def logprob_bits_sha256(logprobs: Sequence[float] | None) -> str | None:
    """sha256 over the logprobs as little-endian float32; None for None."""
    if logprobs is None:
        return None
    return hashlib.sha256(struct.pack(f"<{len(logprobs)}f", *logprobs)).hexdigest()


def result_fingerprint(
    engine_digest: str, token_ids: Sequence[int], logprobs: Sequence[float] | None
) -> dict[str, str | None]:
    """The `xla_engine` object of a result line."""
    return {
        "fingerprint": engine_digest,
        "tokens_sha256": tokens_sha256(token_ids),
        "logprob_bits_sha256": logprob_bits_sha256(logprobs),
    }
