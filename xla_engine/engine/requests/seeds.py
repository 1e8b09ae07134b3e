"""The seeds that key a request's noise, and the ids of its sequences."""

from __future__ import annotations

import hashlib


def sequence_ids(request_id: str, n: int) -> list[str]:
    """The ids under which the scheduler knows the sequences of a request."""
    return [request_id] if n == 1 else [f"{request_id}[{index}]" for index in range(n)]


def request_seed(seed: int, request_id: str) -> int:
    """The noise key of a request without a seed of its own, 64-bit unsigned, from the engine's seed and its id."""
    digest = hashlib.sha256(f"{seed}\0{request_id}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")


def sequence_seed(seed: int, index: int) -> int:
    """The noise key of a request's sequence, 64-bit unsigned; the first one's is the request's own."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}\0{index}".encode()).digest()[:8], "big")
