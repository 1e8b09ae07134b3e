"""How to get the packages of an extra."""

from __future__ import annotations


def install(extra: str) -> str:
    """The command that installs an extra; xla-engine is on no package index, so it names a checkout."""
    return f"pip install '.[{extra}]' in the checkout of xla-engine"
