"""Between the loop and those who guess: which width a step gets, what is proposed for its rows, and what was right."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from xla_engine.config import AUTO, EngineConfig
from xla_engine.drafting.drafter import Drafter, Proposal
from xla_engine.drafting.suffix import SuffixDrafter
from xla_engine.drafting.width import WidthChooser
from xla_engine.engine.requests.request_table import RequestTable
from xla_engine.engine.requests.sequence import LiveSequence
from xla_engine.errors import ConfigError
from xla_engine.runner.runner import Runner
from xla_engine.runner.self_check.check import SelfCheck
from xla_engine.runner.verify_inputs import HELD, Guess
from xla_engine.scheduler import Plan, Request, Speculation, StepResult

CERTAIN = 1 << 20  # tokens of a match that can hardly be wrong


def make_speculator(
    config: EngineConfig, runner: Runner, found: SelfCheck | None, table: RequestTable
) -> Speculator | None:
    """What the options ask for; None where they ask for nothing.

    found: what the self-check saw, None where there was none. Raises ConfigError where the bits of a step would depend
    on how many tokens it checks.
    """
    options = config.speculation
    if options is None:
        return None
    if (why := _inexact(runner, found)) is not None:
        raise ConfigError(
            f"speculative_config: {why}, so speculation would change results here; leave it out"
        )
    lanes: dict[int, int] = {}
    for rows, width in config.verify_shapes:
        lanes[width] = max(lanes.get(width, 0), rows)
    chooser = WidthChooser(runner.step_costs()) if options.num_speculative_tokens == AUTO else None
    return Speculator(SuffixDrafter(shares=options.method == "suffix"), table, lanes, chooser)


def _inexact(runner: Runner, found: SelfCheck | None) -> str | None:
    """Why checking several tokens at once may give other bits than one by one; None where it cannot."""
    if not runner.keeps_no_state:
        return "this model has recurrent layers, whose state is not rolled back yet"
    if found is None:
        return "no self-check ran (self_check, or blocks enough for it)"
    if not runner.has_one_row_code:
        return "prefill and decode are not the same code (they are with the C++ operations, for bfloat16 and int8)"
    if not (found.ok and found.prefill_equals_decode and found.cut_invariant):
        return f"the self-check found {found.differences[0]}"
    return None


class Speculator:
    """Tells drafters what sequences have so far, and the device what they guess.

    drafter: may be another while the engine is idle.
    drafted, accepted: drafts that steps have checked, and those that were right.
    """

    def __init__(
        self,
        drafter: Drafter,
        table: RequestTable,
        lanes: Mapping[int, int],
        chooser: WidthChooser | None,
    ) -> None:
        """lanes: rows at most of a verify step, by width. chooser: None for the one width there is."""
        self.drafted = 0
        self.accepted = 0
        self.drafter = drafter
        self._table = table
        self._lanes = lanes
        self._chooser = chooser
        self._told: dict[str, int] = {}  # tokens that the drafter knows of a sequence's output
        self._started: deque[dict[str, int]] = (
            deque()
        )  # of verify steps in flight: the match of each proposal

    def begin(self, request: Request) -> None:
        """A sequence was queued."""
        self.drafter.begin(request.request_id, request.prompt_token_ids, request.cache_salt)
        self._told[request.request_id] = 0

    def end(self, name: str) -> None:
        """A sequence is over."""
        if self._told.pop(name, None) is not None:
            self.drafter.end(name)

    def restart(self) -> None:
        """Nothing is in flight any more."""
        self._started.clear()

    def wanted(self, running: list[str]) -> Speculation | None:
        """What the next plan may do. running: the sequences that may have a row in it."""
        if self._chooser is None:
            ((width, lanes),) = self._lanes.items()
            return Speculation(width, lanes)
        if not self._chooser.looks:
            return None
        widest = max(self._lanes)
        proposals = [self._propose(name, widest - 1) for name in running]
        found = [(len(tokens), match) for tokens, match in proposals if tokens]
        width = self._chooser.choose(len(running), found)
        return None if width == 0 else Speculation(width, self._lanes.get(width, len(running)))

    def guesses(self, plan: Plan) -> dict[str, Guess]:
        """What may come next for the rows of a verify step."""
        if plan.width < 2:
            return {}
        found, matches = {}, {}
        for row in plan.verify:
            sequence = self._table[row.request_id]
            gated = sequence.host_gated
            proposal = self._propose(row.request_id, row.width - 1 if gated else HELD * plan.width)
            if gated:
                masks = sequence.masks_behind(proposal.tokens)
                guess = Guess(sequence.next_position, proposal.tokens[: len(masks)], masks=masks)
            else:
                guess = Guess(sequence.next_position, proposal.tokens, lookup=True)
            found[row.request_id] = guess
            matches[row.request_id] = proposal.match
        self._started.append(matches)
        return found

    def read(self, plan: Plan, result: StepResult) -> None:
        """Count what a step has shown."""
        if plan.width < 2:
            return
        matches = self._started.popleft()
        for row, samples, drafted in zip(plan.verify, result.verify, result.drafted, strict=True):
            accepted = min(max(len(samples) - 1, 0), drafted)
            self.drafted += drafted
            self.accepted += accepted
            sequence = self._table.get(row.request_id)
            if sequence is not None:
                sequence.count_drafts(drafted, accepted)
            if self._chooser is not None and drafted:
                self._chooser.acceptance.observe(matches.get(row.request_id, 0), drafted, accepted)

    def _propose(self, name: str, most: int) -> Proposal:
        """Tokens behind those that were read of a sequence; of one that runs again, what it had before."""
        sequence = self._table[name]
        if sequence.is_repeating:
            return Proposal(sequence.known_tokens(most), CERTAIN)
        if forced := sequence.forced_tokens():
            return Proposal(forced[:most], CERTAIN)
        self._tell(sequence)
        return self.drafter.propose(name, most)

    def _tell(self, sequence: LiveSequence) -> None:
        name = sequence.request_id
        told = self._told[name]
        if tokens := sequence.tokens_from(told):
            self.drafter.extend(name, tokens)
            self._told[name] = told + len(tokens)
