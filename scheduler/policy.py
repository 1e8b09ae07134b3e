"""The scheduler's arithmetic: the order of the queue, how a prompt is cut, and how many chunks run in a step.

Where a prompt is cut depends on the prompt alone; only *when* a chunk runs depends on the load. Therefore the KV of a
request, and so its tokens, have the same bits under any load.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

# (start, length) of positions whose chunks run in one call, in ascending order
Groups = Sequence[tuple[int, int]]
Place = tuple[float, int]  # a request's place in the queue; the lowest goes first
WAYS_TO_PREEMPT = ("park", "recompute", "replay")  # see `way_to_preempt`


class Facts(NamedTuple):
    """The input of a policy.

    turn: number of requests that arrived, or were sent to the back, before this one.
    aging: `priority_aging` of `SchedulerConfig`. prompt_tokens: length of the prompt.
    priority, deadline, max_tokens, cache_salt: as in `Request`.
    """

    turn: int
    priority: int
    prompt_tokens: int
    deadline: float | None
    aging: int
    max_tokens: int = 1
    cache_salt: str = ""


def fcfs(facts: Facts) -> Place:
    """First come, first served; ignores priorities."""
    return facts.turn, facts.turn


def by_priority(facts: Facts) -> Place:
    """By priority with aging, see `place`; first come, first served among equal priorities."""
    return place(facts.turn, facts.priority, facts.aging)


def shortest_prompt(facts: Facts) -> Place:
    """The shortest prompt first; of equal ones the earlier."""
    return facts.prompt_tokens, facts.turn


def earliest_deadline(facts: Facts) -> Place:
    """The earliest deadline first; requests without one come after all that have one, in order of arrival."""
    return math.inf if facts.deadline is None else facts.deadline, facts.turn


POLICIES: dict[str, Callable[[Facts], Place]] = {
    "fcfs": fcfs,
    "priority": by_priority,
    "shortest_prompt": shortest_prompt,
    "deadline": earliest_deadline,
    "longest_prefix": fcfs,  # then the one of the first in line with the longest cached prefix
    "round_robin": fcfs,  # requests give up their slots after a quantum, see `Scheduler`
}
PREEMPTIVE = frozenset({"fcfs", "priority"})  # policies under which each arrival preempts at most one request
# Policies whose order does not bound waiting times. Under them, the request that waits longest goes next after
# `priority_aging` others have passed it.
UNBOUNDED = frozenset({"shortest_prompt", "deadline", "longest_prefix"})


def place(arrival: int, priority: int, aging: int) -> tuple[int, int]:
    """A request's place in the queue; the lowest goes first.

    arrival: how many requests were submitted before. priority: lower goes first.
    aging: how many arrivals one level of priority is worth. Since all requests age equally with each arrival, their
        order never changes.

    Starvation bound: of the requests that arrive after one of priority p, at most `(p - q) * aging - 1` of priority q
    or above go before it. Equal priorities go in order of arrival.

    >>> sorted([place(0, 1, 3), place(1, 0, 3), place(2, 0, 3), place(3, 0, 3)])  # the third comes too late
    [(1, 1), (2, 2), (3, 0), (3, 3)]
    """
    return arrival + priority * aging, arrival


def num_chunks(prompt_tokens: int, chunk_size: int, start: int = 0, groups: Groups = ()) -> int:
    """The number of chunks of a prompt from position `start` on.

    >>> num_chunks(9, 4), num_chunks(8, 4, start=4), num_chunks(14, 4, groups=((6, 5),))
    (3, 1, 4)
    """
    if not groups:
        return -(-(prompt_tokens - start) // chunk_size)
    return sum(1 for _ in _cuts(start, prompt_tokens, chunk_size, groups))


def next_cuts(
    start: int, prompt_tokens: int, chunk_size: int, count: int, groups: Groups = ()
) -> list[tuple[int, int]]:
    """The next `count` chunks from position `start` on, as (start, stop). Each group begins a chunk.

    >>> next_cuts(4, 14, 4, count=2)
    [(4, 8), (8, 12)]
    >>> next_cuts(8, 14, 4, count=2)
    [(8, 12), (12, 14)]
    >>> next_cuts(4, 14, 4, count=3, groups=((6, 5),))
    [(4, 6), (6, 10), (10, 14)]
    """
    return list(islice(_cuts(start, prompt_tokens, chunk_size, groups), count))


def _cuts(start: int, prompt_tokens: int, chunk_size: int, groups: Groups) -> Iterator[tuple[int, int]]:
    for bound in (*(at for at, _ in groups if at > start), prompt_tokens):
        for at in range(start, bound, chunk_size):
            yield at, min(at + chunk_size, bound)
        start = bound


def unsplit(count: int, stops: Sequence[int], groups: Groups, *, first: bool) -> int:
    """How many of a prompt's next chunks, which end at `stops`, run: `count` or fewer, so that no group is split.

    first: one must run, as in `grant`; then so many as the first group needs, if it is at the front.

    >>> unsplit(2, (4, 6, 10, 14), ((6, 5),), first=True), unsplit(3, (4, 6, 10, 14), ((6, 5),), first=True)
    (2, 2)
    >>> unsplit(1, (10, 14), ((6, 5),), first=True), unsplit(1, (10, 14), ((6, 5),), first=False)
    (2, 0)
    """

    def whole(chunks: int) -> bool:
        return not chunks or not any(start < stops[chunks - 1] < start + length for start, length in groups)

    fewer = next(size for size in range(count, -1, -1) if whole(size))
    if fewer or not first:
        return fewer
    return next(size for size in range(1, len(stops) + 1) if whole(size))


def last_cut(position: int, chunk_size: int, groups: Groups = ()) -> int:
    """The last place up to `position` at which a prompt is cut outside of groups.

    >>> last_cut(9, 4), [last_cut(each, 4, ((6, 5),)) for each in (5, 6, 10, 13, 14)]
    (8, [4, 6, 6, 6, 14])
    """
    begin, end = 0, 0  # of the last group that has begun
    for start, length in groups:
        if start <= position:
            begin, end = start, start + length
    cut = begin + (position - begin) // chunk_size * chunk_size
    return begin if cut < end else cut


def chunk_cost(chunks: int, chunk_size: int, *, joins_decode: bool) -> int:
    """The budget that chunks use: each its padded width, plus one if a row joins the decode of this step."""
    return chunks * chunk_size + joins_decode


def grant(chunks_left: int, budget: int, chunk_size: int, *, joins_decode: bool, first: bool) -> int:
    """How many of a prompt's remaining chunks run in this step.

    budget: tokens that prompts may still use.
    joins_decode: the row decodes in the step of its last chunk, because it samples more than one token.
    first: no chunk was granted in this step yet. Then one runs whatever the budget. So the oldest prompt advances in
        every step, and if A chunks of older prompts are left when a prompt of C chunks gets its slot, its last chunk
        is planned within A + C steps.

    >>> grant(3, 8, 4, joins_decode=True, first=True)
    2
    >>> grant(2, 8, 4, joins_decode=True, first=True)  # the row's decode would be the ninth token
    1
    >>> grant(2, -5, 4, joins_decode=True, first=True), grant(2, -5, 4, joins_decode=True, first=False)
    (1, 0)
    """
    if chunk_cost(chunks_left, chunk_size, joins_decode=joins_decode) <= budget:
        return chunks_left
    return max(min(budget // chunk_size, chunks_left - 1), int(first))


def usable_prefix(
    cached: int,
    context_tokens: int,
    chunk_size: int,
    *,
    cut_invariant: bool,
    most: int | None = None,
    groups: Groups = (),
) -> int:
    """How many of `cached` tokens can be reused: whole chunks, so that the rest is cut as it is without a cache.

    The last token always runs, because its logits are needed. If the bits do not depend on the cut (`cut_invariant`),
    it runs alone when all else is cached. With `most`, all tokens after the first `most` run. No group is split.

    >>> usable_prefix(9, 14, 4, cut_invariant=True), usable_prefix(14, 14, 4, cut_invariant=False)
    (8, 12)
    >>> usable_prefix(12, 12, 4, cut_invariant=False), usable_prefix(12, 12, 4, cut_invariant=True)
    (8, 11)
    >>> usable_prefix(12, 12, 4, cut_invariant=False, most=6), usable_prefix(12, 12, 4, cut_invariant=True, most=6)
    (4, 6)
    """
    last = context_tokens - 1 if most is None else min(most, context_tokens - 1)
    split = any(start < last < start + length for start, length in groups)
    if cut_invariant and not split and cached >= (context_tokens if most is None else last):
        return last
    return last_cut(min(cached, last), chunk_size, groups)


def way_to_preempt(
    tokens: int, parked: int, *, swap_tokens: int, recompute_tokens: int, prefill_equals_decode: bool
) -> str:
    """How to preempt a request of `tokens` KV entries: the cheapest exact way.

    "recompute" prefills prompt and generated tokens again. This is exact if prefill gives the bits of decode, and
    cheaper up to `recompute_tokens`. "park" moves the state to host memory, which has room for `swap_tokens`; `parked`
    of them are used. "replay" runs the request again from its beginning; it is always possible, and samples the same
    tokens.

    >>> limits = {"swap_tokens": 100, "recompute_tokens": 16}
    >>> way_to_preempt(16, 0, prefill_equals_decode=True, **limits)
    'recompute'
    >>> way_to_preempt(60, 0, prefill_equals_decode=True, **limits)
    'park'
    >>> way_to_preempt(60, 80, prefill_equals_decode=True, **limits)
    'recompute'
    >>> way_to_preempt(60, 80, prefill_equals_decode=False, **limits)
    'replay'
    """
    fits = parked + tokens <= swap_tokens
    if prefill_equals_decode and (tokens <= recompute_tokens or not fits):
        return "recompute"
    return "park" if fits else "replay"
