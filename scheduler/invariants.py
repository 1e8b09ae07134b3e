"""What always holds for a scheduler's state, between any two calls."""

from collections.abc import Iterable, Mapping

from xla_engine.scheduler.config import SchedulerConfig
from xla_engine.scheduler.kv.allocator import KVAllocator
from xla_engine.scheduler.queue import WaitingQueue
from xla_engine.scheduler.request import Status
from xla_engine.scheduler.request_state import RequestState
from xla_engine.scheduler.snapshot import Counters
from xla_engine.scheduler.steps.running import Running


def check(
    config: SchedulerConfig,
    states: Mapping[str, RequestState],
    waiting: WaitingQueue,
    running: Running,
    kv: KVAllocator,
    counters: Counters,
    parked_tokens: int,
) -> None:
    """Raise AssertionError if an invariant of a part or between parts is broken, and say which.

    states: every live request. parked_tokens: how many the scheduler counts as parked.
    """
    next_step = counters.steps_planned
    for part in (waiting, running.constrained, running.speculating):
        part.check()
    running.decoding.check(next_step)
    _require(counters.steps_committed <= next_step, "commits ran ahead of plans", counters)
    ended = sum(counters.finished.values())
    _require(counters.submitted == len(states) + ended, "a request is lost", counters)
    for request_id, state in states.items():
        _require(state.request_id == request_id, f"filed as {request_id!r}", state)
        _check_progress(state, next_step, config)
    parked = sum(state.parked for state in states.values())
    _require(parked == parked_tokens, f"{parked_tokens} tokens are counted as parked, not {parked}", states)

    def same(part: Iterable[RequestState], *statuses: Status) -> bool:
        return set(map(id, part)) == {id(state) for state in states.values() if state.status in statuses}

    waits = same(waiting, Status.WAITING, Status.PARKED)
    _require(waits, "the queue is not the requests that wait", states)
    prefills = same(running.prefilling, Status.PREFILLING)
    _require(prefills, "the prompts are not the requests that prefill", states)

    slots, holders = kv.slots, [state for state in states.values() if state.holds_slot]
    decoding = [state for state in holders if state.status is Status.RUNNING]
    rows, gated, drafting = len(running.decoding), len(running.constrained), len(running.speculating)
    counts = f"{rows} rows, {gated} and {drafting} decode"
    _require(len(decoding) == rows + gated + drafting, counts, decoding)
    _require(all(slots.holds(state.slot) for state in holders), "an occupancy is over", holders)
    _require(len({state.slot.index for state in holders}) == len(holders), "a slot is shared", holders)
    free = f"{slots.num_free} slots free, others occupied"
    _require(len(holders) + slots.num_free == len(slots), free, holders)
    kv.check(states.values(), next_step)


def _check_progress(state: RequestState, next_step: int, config: SchedulerConfig) -> None:
    """Raise AssertionError unless the counts of a request agree with each other and with its status."""
    planned, cap = state.planned(next_step), state.request.max_tokens
    whole_prompt = state.prefilled == state.context_tokens
    parked = state.status is Status.PARKED
    _require(parked == (state.parked > 0), "parked, or has state on the host, but not both", state)
    _require(0 <= state.credited <= planned <= cap, "credited, planned and cap are out of order", state)
    _require(state.credited < cap, "at its cap, but live", state)
    match state.status:
        case Status.WAITING:
            _require(not state.holds_slot, "waits with a slot", state)
            _require(state.last_step is None, "waits, but is in the calendar", state)
        case Status.PARKED:
            _require(not state.holds_slot and whole_prompt, "parked with a slot, or before its time", state)
        case Status.PREFILLING:
            _require(state.holds_slot and planned == state.base, "a prompt without a slot", state)
            _require(not whole_prompt, "wholly planned, but still a prompt", state)
            size, groups, cut = config.chunk_size, config.groups(state.request), state.prefilled
            starts = (0, state.request.max_cached_tokens or 0, *(start for start, _ in groups))
            _require(cut % size in {start % size for start in starts}, "cut off the chunk grid", state)
            split = any(start < cut < start + length for start, length in groups)
            _require(not split, "cut inside a picture", state)
        case Status.RUNNING:
            _require(whole_prompt and planned > 0, "runs without its prompt", state)
            _require(state.holds_slot == (planned < cap), "a slot is kept or given up too early", state)
        case Status.FINISHED:
            _require(False, "finished, but live", state)


def _require(holds: bool, broken: str, about: object) -> None:
    # Not `assert`, so that it also runs under `python -O`.
    if not holds:
        raise AssertionError(f"{broken}: {about}")
