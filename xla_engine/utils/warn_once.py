"""Warnings about what clients send, of which a client cannot fill the log."""

import logging

MAX_WARNED = 256  # different warnings
MAX_NAME = 64  # characters of a client's name for something
_warned: set[tuple[str, str]] = set()
logger = logging.getLogger("xla_engine.requests")


def warn_once(message: str, name: str) -> None:
    """Log a warning with a name in it, once for each name."""
    name = name[:MAX_NAME]
    if (message, name) not in _warned and len(_warned) < MAX_WARNED:
        _warned.add((message, name))
        logger.warning(message, name)
