"""The cores that this process may use."""

import os


def cores() -> int:
    """The cores of this process, among as many threads XLA divides work."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
