"""How many examples hypothesis draws: few by default, many with `--hypothesis-profile many` (`.ci/run`)."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("many")


def examples(few: int, many: int) -> int:
    """What `max_examples` should be in this run."""
    return many if settings.get_current_profile_name() == "many" else few
