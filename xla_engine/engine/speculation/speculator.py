"""Between the loop and those who guess: which width a step gets, what is proposed for its rows, and what was right."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from xla_engine.config import AUTO, EngineConfig
from xla_engine.engine.requests.request_table import RequestTable
from xla_engine.engine.requests.sequence import LiveSequence
from xla_engine.engine.speculation.proposer import CERTAIN, NoProposer, Proposal, Proposer
from xla_engine.engine.speculation.suffix import SuffixProposer
from xla_engine.engine.speculation.width import WidthChooser
from xla_engine.errors import ConfigError
from xla_engine.runner.runner import Runner
from xla_engine.runner.self_check.check import SelfCheck
from xla_engine.runner.verify_inputs import HELD, Draft
from xla_engine.scheduler import Plan, Request, Speculation, StepResult
from xla_engine.speculative_config import ON_DEVICE

SAMPLE = 8  # rows that are looked at, to know whether rows had better speculate


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
    if options.method in ON_DEVICE:
        return Speculator(NoProposer(), table, lanes, chooser, on_device=True)
    return Speculator(SuffixProposer(shares=options.method == "suffix"), table, lanes, chooser)


def _inexact(runner: Runner, found: SelfCheck | None) -> str | None:
    """Why checking several tokens at once may give other bits than one by one; None where it cannot."""
    if found is None:
        return "no self-check ran (self_check, or blocks enough for it)"
    if not runner.has_one_row_code:
        return "prefill and decode are not the same code (they are with the C++ operations, for bfloat16 and int8)"
    if not (found.ok and found.prefill_equals_decode and found.cut_invariant):
        return f"the self-check found {found.differences[0]}"
    return None


class ReplayControl(Protocol):
    """Says what a run is to do, in place of proposers and of the choice of widths."""

    def wanted(self) -> Speculation | None:
        """What the next plan may do."""
        ...

    def planned(self, plan: Plan) -> None:
        """A plan was made."""
        ...

    def drafts(self, plan: Plan, request_id: str) -> Sequence[int]:
        """Tokens that stand right behind the last one of a row of a plan, on the device."""
        ...

    def start(self, plan: Plan, request_id: str) -> int:
        """Where these stand in the sequence."""
        ...


class Speculator:
    """Tells proposers what sequences have so far, and the device what they guess.

    proposer: may be another while the engine is idle. replay: what replaces it, and the choice of widths.
    drafted, accepted: drafts that steps have checked, and those that were right.
    """

    def __init__(
        self,
        proposer: Proposer,
        table: RequestTable,
        lanes: Mapping[int, int],
        chooser: WidthChooser | None,
        *,
        on_device: bool = False,
    ) -> None:
        """lanes: rows at most of a verify step, by width. chooser: None for the one width there is. on_device: verify
        steps guess as many tokens as they take for rows that `proposer` has nothing for."""
        self.drafted = 0
        self.accepted = 0
        self.proposer = proposer
        self.replay: ReplayControl | None = None
        self._table = table
        self._lanes = lanes
        self._chooser = chooser
        self._on_device = on_device
        self._told: dict[str, int] = {}  # tokens that the proposer knows of a sequence's output
        self._looked: dict[str, Proposal] = {}  # what comes next, by the last look that no step was spent on
        self._started: deque[dict[str, int]] = (
            deque()
        )  # of verify steps in flight: the match of each proposal

    def begin(self, request: Request) -> None:
        """A sequence was queued."""
        self.proposer.begin(request.request_id, request.prompt_token_ids, request.group)
        self._told[request.request_id] = 0

    def end(self, name: str) -> None:
        """A sequence is over; the table has it still."""
        if name in self._told:
            if (sequence := self._table.get(name)) is not None:
                self._tell(sequence)
            del self._told[name]
            self._looked.pop(name, None)
            self.proposer.end(name)

    def restart(self) -> None:
        """Nothing is in flight any more."""
        self._started.clear()

    def wanted(self, running: list[str]) -> Speculation | None:
        """What the next plan may do. running: the sequences that may have a row in it."""
        if self.replay is not None:
            return self.replay.wanted()
        if self._chooser is None:
            ((width, lanes),) = self._lanes.items()
            return Speculation(width, lanes)
        if not self._chooser.looks:
            return None
        widest = max(self._lanes)
        # Rows that do not speculate are judged by some of them, which are all that anything is looked up for.
        stands_for = 1 if self._chooser.is_on else -(-len(running) // SAMPLE) or 1
        proposed = {name: self._propose(name, widest - 1) for name in running[::stands_for]}
        unseen = widest - 1 if self._on_device else 0
        proposals = [*proposed.values()] * stands_for
        found = [(len(tokens) or unseen, match) for tokens, match in proposals if tokens or unseen]
        width = self._chooser.choose(len(running), found[: len(running)])
        if not width:
            self._looked = {name: each for name, each in proposed.items() if each.match < CERTAIN}
        return None if width == 0 else Speculation(width, self._lanes.get(width, len(running)))

    def foreseen(self, running: list[str]) -> Speculation | None:
        """What `wanted` would say now; it is not counted as a step."""
        chooser = self._chooser
        self._chooser = copy.copy(chooser)
        try:
            return self.wanted(running)
        finally:
            self._chooser = chooser

    def drafts(self, plan: Plan) -> dict[str, Draft]:
        """What may come next for the rows of a verify step."""
        if self.replay is not None:
            self.replay.planned(plan)
        if plan.width < 2:
            return {}
        found, matches = {}, {}
        for row in plan.verify:
            sequence = self._table[row.request_id]
            gated, replay = sequence.constrained, self.replay
            if replay is not None:
                start = replay.start(plan, row.request_id)
                proposal = Proposal(replay.drafts(plan, row.request_id))
            else:
                start = sequence.next_position
                proposal = self._propose(row.request_id, row.width - 1 if gated else HELD * plan.width)
            if gated:
                mask = sequence.mask
                slow = mask is None or (mask.may_be_slow and replay is None)
                masks = [] if mask is None or slow else mask.ahead(proposal.tokens)
                draft = Draft(start, proposal.tokens[: len(masks)], masks=masks)
            else:
                draft = Draft(start, proposal.tokens, lookup=replay is None)
            found[row.request_id] = draft
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
            if drafted:
                self._table.token_buffer.histograms.accepted_drafts.add(accepted)
            if sequence is not None:
                sequence.count_drafts(drafted, accepted)
            if self._chooser is not None and drafted:
                self._chooser.acceptance.observe(matches.get(row.request_id, 0), drafted, accepted)

    def _propose(self, name: str, most: int) -> Proposal:
        """Tokens behind those that were read of a sequence; of one that runs again, what it had before."""
        sequence = self._table[name]
        if sequence.is_repeating:
            return Proposal(sequence.known_tokens(most), CERTAIN)
        if sequence.mask is not None and (forced := sequence.mask.forced()):
            return Proposal(forced[:most], CERTAIN)
        self._tell(sequence)
        return self.proposer.propose(name, most)

    def _tell(self, sequence: LiveSequence) -> None:
        name = sequence.request_id
        told = self._told[name]
        if tokens := sequence.read_from(told):
            self._learn(self._looked.pop(name, None), tokens)
            self.proposer.extend(name, tokens)
            self._told[name] = told + len(tokens)

    def _learn(self, proposal: Proposal | None, tokens: Sequence[int]) -> None:
        """Hold what a look proposed against what came: acceptance is learned before a step is spent on it."""
        if proposal is not None and self._chooser is not None:
            pairs = list(zip(proposal.tokens, tokens, strict=False))
            right = next((at for at, (guess, token) in enumerate(pairs) if guess != token), len(pairs))
            self._chooser.acceptance.observe(proposal.match, len(pairs), right)
