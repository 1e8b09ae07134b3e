"""Record the run of a schedule on an engine."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.environment import embedded_model_directory
from xla_engine.equivalence.record import Record, Step, trace
from xla_engine.equivalence.schedule import Action, Schedule, run_schedule
from xla_engine.errors import InvalidRequestError
from xla_engine.observability.observer import Observer
from xla_engine.observability.step_log import parts_of
from xla_engine.outputs import CompletionOutput
from xla_engine.scheduler import Chunk, Events, Plan, Row, Slot, TokenEvent, VerifyRow
from xla_engine.utils.comparison import TokenSample, logprob_bits, logprob_of


class Credit(NamedTuple):
    """One token credited by a step. `end` is set on a request's last one."""

    request_id: str
    token_id: int
    bits: int | None
    end: str | None

    @property
    def sample(self) -> TokenSample:
        return TokenSample(self.token_id, None if self.bits is None else logprob_of(self.bits))


def _ignore(*_: object) -> None:
    """A callback that does nothing."""


class Recorder:
    """Runs one schedule on an idle engine and records its steps.

    on_planned: called with number and step when a step is started.
    on_restarted: called with the id of a preempted request whose tokens will be generated again.
    on_read: called with number, step and credited tokens when a step is read.
    """

    def __init__(
        self,
        engine: XlaBatchEngine,
        schedule: Schedule,
        *,
        on_planned: Callable[[int, Step], object] = _ignore,
        on_restarted: Callable[[str], object] = _ignore,
        on_read: Callable[[int, Step, tuple[Credit, ...]], object] = _ignore,
    ) -> None:
        snapshot = engine.snapshot()
        self._engine = engine
        self._schedule = schedule
        self._on_planned, self._on_restarted, self._on_read = on_planned, on_restarted, on_read
        self._first_step = snapshot.counters.steps_planned
        self._epochs = [view.slot.epoch for view in snapshot.slots]
        self._wants_bits = {case.request_id: case.params.logprobs is not None for case in schedule.requests}
        if any(case.params.n > 1 for case in schedule.requests):
            raise InvalidRequestError("a record holds requests of one sequence; use n 1")
        if engine.config.prefix_cache_dir is not None:
            raise InvalidRequestError("a record does not hold what files held: leave prefix_cache_dir out")
        self.turn = 0
        self.steps: list[Step] = []

    def run(
        self,
        *,
        on_action: Callable[[Action, bool], None] | None = None,
        on_turn: Callable[[], None] | None = None,
    ) -> dict[str, CompletionOutput]:
        """Run the schedule to its end, or until `on_turn` raises, after which the engine may have live requests."""

        def next_turn(turn: int) -> None:
            self.turn = turn + 1
            if on_turn is not None:
                on_turn()

        with self._engine.observers.having(Observer(started=self._started, read=self._read)):
            return run_schedule(self._engine, self._schedule, on_action=on_action, on_turn=next_turn)

    def _started(self, plan: Plan) -> None:
        number = plan.step - self._first_step
        self.steps.append(self._step(plan))
        self._on_planned(number, self.steps[number])
        for request_id in plan.moves.replays:
            self._on_restarted(request_id)

    def _read(self, plan: Plan, events: Events) -> None:
        number = plan.step - self._first_step
        credits = tuple(self._credit(event) for event in events)
        self.steps[number] = replace(
            self.steps[number], read=self.turn, hash=_hash(credits), verified=tuple(events.verified)
        )
        self._on_read(number, self.steps[number], credits)

    def _step(self, plan: Plan) -> Step:
        holders: dict[str, Slot] = {}
        parts: tuple[Chunk | Row | VerifyRow, ...] = (*plan.chunks, *plan.decode, *plan.verify)
        for part in parts:
            holders[part.request_id] = part.slot
        # without token budget, the first chunk comes in a later step
        if not holders.keys() >= set(plan.admitted):
            for view in self._engine.snapshot().slots:
                if view.request is not None:
                    holders[view.request.request_id] = view.slot
        slots = [(name, holders[name]) for name in plan.admitted]
        rows = parts_of(plan, str)
        return Step(
            turn=self.turn,
            admitted=tuple((name, slot.index, slot.epoch - self._epochs[slot.index]) for name, slot in slots),
            chunks=tuple((name, slot, start, length) for name, slot, start, length, _ in rows["chunks"]),
            decode=tuple(row.slot.index for row in plan.decode),
            width=plan.width,
            verify=tuple((name, slot, width) for name, slot, width in rows["verify"]),
            held=tuple(sorted(plan.blocked)),
            is_late=plan.is_late,
        )

    def _credit(self, event: TokenEvent) -> Credit:
        logprob = event.sample.logprob
        wants_bits = self._wants_bits[event.request_id]
        return Credit(
            request_id=event.request_id,
            token_id=event.sample.token_id,
            bits=logprob_bits(logprob) if logprob is not None and wants_bits else None,
            end=None if event.finish_reason is None else str(event.finish_reason),
        )


def record_schedule(
    engine: XlaBatchEngine,
    schedule: Schedule,
    *,
    alone: Mapping[str, CompletionOutput] | None = None,
    blank: bool = False,
    on_action: Callable[[Action, bool], None] | None = None,
) -> tuple[dict[str, CompletionOutput], Record]:
    """Run a schedule and record it. blank: clear cache and row state first.

    The prefix cache is always cleared, so that plans are reproducible.
    """
    engine.reset_prefix_cache()
    if blank:
        engine.blank()
    recorder = Recorder(engine, schedule)
    results = recorder.run(on_action=on_action)
    directory = engine.checkpoint.path
    record = Record(
        identity=engine.identity(),
        model_path=None if directory == embedded_model_directory() else str(directory),
        fresh=blank,
        schedule=schedule,
        steps=tuple(recorder.steps),
        batched={name: trace(output) for name, output in results.items()},
        alone={name: trace(output) for name, output in (alone or {}).items() if name in results},
        speculative_config=None if engine.config.speculation is None else engine.config.speculation.given(),
    )
    return results, record


def _hash(credits: Sequence[Credit]) -> str:
    return hashlib.sha256(json.dumps(credits).encode()).hexdigest()[:12]
