"""The engine's loop around the real scheduler, with a cost model in place of a device.

A turn is the engine's: `plan -> start -> read the step before -> commit`. Nothing is sampled; each request gets the
number of tokens its trace says. Memory is bounded by the requests that are live at one time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from xla_engine.scheduler import Plan, Request
from xla_engine.scheduler.fast_forward import (
    Steady,
    next_deadline,
    skip_commits,
    skip_plans,
    steady_plans,
)
from xla_engine.simulator.cost import HostWork
from xla_engine.simulator.live_request import LiveRequest
from xla_engine.simulator.report import REFUSED, Report
from xla_engine.simulator.steady import decode_seconds, prefill_seconds
from xla_engine.simulator.stops import STOPS
from xla_engine.simulator.trace import Arrival, distinct
from xla_engine.simulator.turns import Turns


class Simulation(Turns):
    """Runs a trace through a scheduler of its own.

    machine: the programs that steps are made of.
    lag: as in `EngineConfig`.
    log: takes every step; none is skipped then.
    speculated: the steps of a recorded run whose rows sampled several tokens; these plans are made again, and their
        rows get as many tokens as they got there.
    recorded: a run whose rows sit out steps as they did, where their masks were not there.
    """

    def run(self, arrivals: Iterable[Arrival]) -> Report:
        """Run until every request has ended. Raises ValueError for a request that cannot be."""
        for arrival in arrivals:
            self.take(arrival)
        return self.finish()

    @property
    def live(self) -> int:
        """Requests that came and have not ended."""
        return len(self._live)

    def take(self, arrival: Arrival) -> None:
        """Run until a request is due, and take it. Raises ValueError for one that cannot be."""
        while not self._is_due(arrival, not self._is_busy):
            self._pass(arrival)
        self._submit(arrival)

    def run_until(self, ahead: Arrival | None) -> None:
        """Run until a request would be due, which another may take; None: until every request has ended."""
        while self._is_busy and (ahead is None or not self._is_due(ahead, False)):
            self._pass(ahead)

    def finish(self) -> Report:
        """Run until every request has ended."""
        self.run_until(None)
        self.report.wall = self._last_read
        self.report.steps = self._next_step
        counters = self._scheduler.snapshot().counters
        self.report.new_tokens, self.report.preemptions = counters.tokens_credited, counters.preemptions
        return self.report

    @property
    def _is_busy(self) -> bool:
        return self._scheduler.has_unfinished or bool(self._in_flight)

    def _pass(self, ahead: Arrival | None) -> None:
        if not self._skip(ahead):
            self._turn()

    def _is_due(self, arrival: Arrival, idle: bool) -> bool:
        clock = self._clock
        if idle:
            if clock.wait(arrival.time):
                self._tokens = self._ended = 0  # that is done by now
                self._woken = 1
            return True
        if arrival.moment is None:
            return arrival.time <= clock.now
        return self._is_over(arrival.moment)

    def _submit(self, arrival: Arrival) -> None:
        self.report.requests += 1
        if self._scheduler.never_fits(arrival.prompt_tokens, arrival.max_tokens) is not None:
            self.report.finished[REFUSED] = self.report.finished.get(REFUSED, 0) + 1
            return
        self._clock.submit()
        # Recorded arrivals come when the loop gets to them; timed ones have waited since their time.
        came = self._clock.now if arrival.moment is not None else arrival.time
        prompt = arrival.prompt
        if prompt is None:
            prompt = distinct(self.report.requests, arrival.prompt_tokens)
        request = Request(
            request_id=arrival.name,
            prompt_token_ids=prompt,
            max_tokens=arrival.max_tokens,
            stop_token_ids=STOPS,
            host_gated=arrival.host_gated,
            max_cached_tokens=arrival.max_cached_tokens,
            priority=arrival.priority,
            deadline=None if arrival.deadline is None else came + arrival.deadline,
        )
        self._scheduler.submit(request)
        self._live[arrival.name] = LiveRequest(arrival, came)
        self._stops.submit(self.report.requests, arrival)
        self._irregular += arrival.host_gated
        if arrival.gives_up is not None:
            heapq.heappush(self._gives_up, (arrival.gives_up[0], arrival.name, arrival.gives_up[1]))
        if self._log is not None:
            self._log.submitted(request, self._clock.now, arrival.custom_id)

    def _skip(self, ahead: Arrival | None) -> bool:
        """Take turns whose plans are known without making them: all decode the same rows, alone or beside the same
        number of chunks of one prompt. Steps in flight that are unlike these are read one by one, the others in bulk.

        Returns whether there were any.
        """
        if self._log is not None or self.plans is not None or len(self._in_flight) != self._lag:
            return False
        steady, clock = steady_plans(self._scheduler), self._clock
        if steady is None or not steady.rows:
            return False
        self._decode(steady.rows)
        steps, until = self._limits(steady, ahead)
        calls = self._machine.calls(steady.chunks)
        device, taken = self._seconds(steady, calls), 0
        unlike = [
            plan.decode is not steady.rows or plan.resumes or plan.first_rows for plan in self._in_flight
        ]
        while any(unlike[taken:]) and taken < steps and clock.now < until:
            clock.run(self._take_host_work(len(calls)), next(device))
            skip_plans(self._scheduler, 1, steady.chunks)
            self._in_flight.append(
                Plan(step=self._next_step, admitted=(), chunks=(), decode=steady.rows, decisions=())
            )
            self._next_step += 1
            taken += 1
            self._read()
        if taken < steps and clock.now < until:
            taken += self._read_alike(steady, steps - taken, until, len(calls), device)
        report = self.report
        report.most_waiting = max(report.most_waiting, self._scheduler.num_waiting)
        report.skipped += taken
        report.decode_steps += taken
        report.row_steps += taken * len(steady.rows)
        report.prompt_tokens += taken * steady.chunks * self._scheduler.config.chunk_size
        return taken > 0

    def _limits(self, steady: Steady, ahead: Arrival | None) -> tuple[int, float]:
        """How many turns can be taken at most, and the time at which none begins any more."""
        step, steps = self._next_step, steady.steps
        until = next_deadline(self._scheduler)
        if not self._lag:
            steps -= 1  # what is read at once may end a request
        if (stop := self._stops.next_step) is not None:
            steps = min(steps, stop - (step - self._lag))
        if self._gives_up:
            moment = self._gives_up[0][0]
            steps = min(steps, moment.started - step, moment.read - (step - self._lag))
        if ahead is not None and ahead.moment is not None:
            steps = min(steps, ahead.moment.started - step)
        elif ahead is not None:
            until = min(until, ahead.time)
        if not steady.chunks:
            steps = min(steps, self._machine.steps_alike(self._longest_base + step))
        return steps, until

    def _seconds(self, steady: Steady, calls: tuple[int, ...]) -> Iterator[float]:
        """What the device takes for each of the steps."""
        cost, step = self._clock.cost, self._next_step

        def keys(later: int) -> int:
            return self._keys(step + later)

        if not steady.chunks:
            return decode_seconds(cost, len(steady.rows), keys)
        return prefill_seconds(cost, self._machine, steady, self._scheduler.config.chunk_size, calls, keys)

    def _read_alike(
        self, steady: Steady, steps: int, until: float, calls: int, device: Iterator[float]
    ) -> int:
        """Take up to `steps` turns that read steps of the same rows, in bulk. Returns how many there were."""
        cost, rows = self._clock.cost, len(steady.rows)
        reads = self._clock.steady(
            steps,
            until,
            first_host=cost.host(self._take_host_work(calls)),
            host=cost.host(HostWork(tokens=rows, calls=calls)),
            device=device,
        )
        for now in reads:
            self.report.inter_token.add(now - self._last_read, rows)
            self._last_read = now
        taken = len(reads)
        skip_plans(self._scheduler, taken, steady.chunks)
        skip_commits(self._scheduler, taken, rows)
        self._next_step += taken
        for plan in self._in_flight:  # nobody else has them; copies would cost as much as a turn
            object.__setattr__(plan, "step", plan.step + taken)
        self._tokens = rows
        return taken
