"""How fast this machine reads its memory."""

import math
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np


def read_bandwidth(threads: int, megabytes: int = 512, rounds: int = 7) -> float:
    """GB/s at which `threads` cores together read memory that is in no cache; the best round."""
    parts = np.ones((threads, megabytes * 2**18 // threads), np.float32)
    best = math.inf
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds):
            began = time.perf_counter()
            list(pool.map(np.max, parts))
            best = min(best, time.perf_counter() - began)
    return float(parts.nbytes / best / 1e9)
