"""Level B for speculation: whatever the drafts, requests get the same bits as without speculation.

Also replays speculation: drafts that are right and wrong in the same places as those of a record.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.speculation.proposer import NoProposer, Proposer
from xla_engine.engine.speculation.recorded import Recorded
from xla_engine.engine.speculation.suffix import SuffixProposer
from xla_engine.equivalence.across_configurations import LevelResult, compared, run_together
from xla_engine.equivalence.cases import draw_cases
from xla_engine.equivalence.record import Record
from xla_engine.scheduler import Plan, Speculation
from xla_engine.speculative_config import ON_DEVICE, SpeculativeConfig


def across_speculation(
    engine: XlaBatchEngine, *, requests: int, seed: int, progress: Callable[[str], None] | None = None
) -> list[LevelResult]:
    """Run the same requests without speculation, and with right, half right and wrong drafts, at all lags.

    Checks the engine's own `speculative_config`, or three widths if it has none. progress: called with the name of
    each finished comparison. Raises ConfigError if this machine cannot speculate.
    """
    cases = draw_cases(engine, requests, seed, every_field=True)
    with XlaBatchEngine(
        engine.checkpoint, engine.tokenizer, replace(engine.config, speculative_config=None)
    ) as plain:
        expected = run_together(plain, cases)
    outputs = {name: output.token_ids for name, output in expected.items()}
    results = []
    for options in _configurations(engine.config.speculation):
        config = replace(engine.config, speculative_config=options)
        with XlaBatchEngine(engine.checkpoint, engine.tokenizer, config) as other:
            for at, (who, proposer) in enumerate(_proposers(outputs, options.method in ON_DEVICE)):
                other.lag = at % 3
                other.draft_with(proposer)
                before = other.stats()
                found = run_together(other, cases)
                after = other.stats()
                drafted = after.drafted_tokens - before.drafted_tokens
                right = after.accepted_tokens - before.accepted_tokens
                name = f"{options.num_speculative_tokens} drafts, {who}, lag {other.lag}: {right} of {drafted} right"
                result, report = compared(name, cases, expected, found)
                result.notes = [f"{name}: {difference}" for difference in report.divergences[:5]]
                results.append(result)
                if progress is not None:
                    progress(name)
    return results


def _configurations(own: SpeculativeConfig | None) -> Sequence[SpeculativeConfig]:
    if own is not None:
        return [own]
    return [SpeculativeConfig(method="suffix", num_speculative_tokens=count) for count in (1, 3, 7)]


def _proposers(outputs: Mapping[str, Sequence[int]], on_device: bool) -> Iterator[tuple[str, Proposer]]:
    if on_device:
        yield "by the device", NoProposer()
    yield "looked up", SuffixProposer()
    yield "recorded", Recorded(outputs)
    yield "half right", Recorded(outputs, 0.5)
    yield "wrong", Recorded(outputs, 0.0)


@contextlib.contextmanager
def guessing_as_recorded(engine: XlaBatchEngine, record: Record) -> Iterator[None]:
    """Make an engine repeat the plans of a record, with drafts such that its rows sample as many tokens."""
    speculator = engine.speculator
    if speculator is None or record.speculative_config is None:
        yield
        return
    speculator.replay = _AsRecorded(record, engine.snapshot().counters.steps_planned)
    try:
        yield
    finally:
        speculator.replay = None


class _AsRecorded:
    """The `ReplayControl` of a record, which has each row's samples and its number of right drafts."""

    def __init__(self, record: Record, first_step: int) -> None:
        self._widths = [step.width for step in record.steps]
        self._first_step = first_step
        self._next = 0
        # for each step, the position of the drafts and the drafts, by request
        self._rows: list[dict[str, tuple[int, list[int]]]] = []
        cases = (*record.schedule.cases, *record.schedule.neighbours)
        prompts = {case.request_id: len(case.prompt_token_ids) for case in cases}
        sampled: dict[str, int] = {}
        holder: dict[int, str] = {}
        for step in record.steps:
            holder.update((slot, name) for name, slot, _ in step.admitted)
            # The last chunk of a prompt samples a token, after those that were prefilled again with it.
            sampled.update(
                (name, max(start + length - prompts[name] + 1, 0)) for name, _, start, length in step.chunks
            )
            for slot in step.decode:
                sampled[holder[slot]] += 1
            rows = {}
            for (name, *_), (tokens, drafts) in zip(step.verify, step.verified, strict=False):
                known = record.batched[name].token_ids if name in record.batched else ()
                rows[name] = (
                    prompts[name] + sampled[name],
                    _drafts(known[sampled[name] :], tokens - 1, drafts),
                )
                sampled[name] += tokens
            self._rows.append(rows)

    def wanted(self) -> Speculation | None:
        return Speculation.again(self._widths[self._next]) if self._next < len(self._widths) else None

    def drafts(self, plan: Plan, request_id: str) -> Sequence[int]:
        return self._row(plan, request_id)[1]

    def start(self, plan: Plan, request_id: str) -> int:
        return self._row(plan, request_id)[0]

    def planned(self, plan: Plan) -> None:
        """Called after a plan was made."""
        self._next = plan.step - self._first_step + 1

    def _row(self, plan: Plan, name: str) -> tuple[int, list[int]]:
        number = plan.step - self._first_step
        return self._rows[number].get(name, (0, [])) if number < len(self._rows) else (0, [])


def _drafts(ahead: Sequence[int], right: int, count: int) -> list[int]:
    """`count` drafts, of which the first `right` match the coming tokens, as far as these are known."""
    return [token if place < right else token ^ 1 for place, token in enumerate(ahead[:count])]
