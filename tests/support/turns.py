"""The law of clients who take turns."""

from __future__ import annotations

from collections.abc import Sequence


def assert_turns(order: Sequence[str], counts: Sequence[int]) -> None:
    """No client is served twice while another waits, in an order in which all asked at once.

    order: of what was served, each the number of a client, one digit, and of the request among the client's own.
    counts: requests of each client.
    """
    assert sorted(order) == sorted(
        f"{key}{number}" for key, count in enumerate(counts) for number in range(count)
    )
    for place, (key, number) in enumerate(order):
        for other, later in order[:place]:
            assert other == key or int(later) <= int(number) + 1, order
