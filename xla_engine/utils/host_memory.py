"""How much memory the host has, and how much of it is available, within the limits of control groups. In bytes."""

import os
from pathlib import Path

_GROUPS = (  # control groups, version 2 and 1: directory, limit, usage, the part of the usage that is clean file cache
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available() -> int | None:
    """Available (not merely free) memory; None if the system does not report it."""
    left = (limit - in_use for limit, in_use in groups())
    found = [amount for amount in (_available_to_all(), *left) if amount is not None]
    return min(found, default=None)


def total() -> int | None:
    """All memory, used or not; None if the system does not report it."""
    found = [amount for amount in (size(), *(limit for limit, _ in groups())) if amount is not None]
    return min(found, default=None)


def _available_to_all() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return size()


def size() -> int | None:
    """Of the machine, whatever the control groups."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def groups() -> list[tuple[int, int]]:
    """Limit and usage of each control group that has a limit."""
    found = []
    for name, limit, used, reclaimable in _GROUPS:
        group = Path(name)
        try:
            parts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            in_use = int((group / used).read_text()) - int(parts.get(reclaimable, 0))
            found.append((int((group / limit).read_text()), in_use))
        except (OSError, ValueError):
            continue  # not this version, or the limit is "max"
    return found
