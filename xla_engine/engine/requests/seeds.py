"""The noise keys of requests and sequences, and the ids of sequences."""

import hashlib

from xla_engine.sampling_params import SamplingParams


def sequence_ids(request_id: str, n: int) -> list[str]:
    """The ids under which the scheduler knows the sequences of a request."""
    return [request_id] if n == 1 else [f"{request_id}[{index}]" for index in range(n)]


def noise_key(engine_seed: int, request_id: str, params: SamplingParams) -> int:
    """A request's noise key, 64-bit unsigned: its own seed, or one derived from the engine's seed and its id."""
    if params.seed is not None:
        return params.seed % 2**64
    digest = hashlib.sha256(f"{engine_seed}\0{request_id}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")


def sequence_seed(seed: int, index: int) -> int:
    """The noise key of a request's sequence, 64-bit unsigned; the first sequence has the request's key."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}\0{index}".encode()).digest()[:8], "big")
