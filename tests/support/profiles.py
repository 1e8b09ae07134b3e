"""How hypothesis draws examples: the same ones in each run, so that continuous integration does not fail by chance.

By default few; many with `--hypothesis-profile many` (`.ci/run`), other ones in each run with `--hypothesis-profile
random` (`.ci/release`). No example fails because it took long, which on a busy machine any may.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

_SAME = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile("few", _SAME)
settings.register_profile("many", _SAME)
settings.register_profile("random", _SAME, derandomize=False)
settings.load_profile("few")


def examples(few: int, many: int) -> int:
    """What `max_examples` should be in this run."""
    return few if settings.get_current_profile_name() == "few" else many
