"""Connects the loop with a proposer: chooses the width of each step, collects drafts, and counts accepted ones."""

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
from xla_engine.errors import ConfigError
from xla_engine.runner.inputs import HELD, Draft
from xla_engine.runner.runner import Runner
from xla_engine.runner.self_check.check import SelfCheck
from xla_engine.runner.step_costs import StepCosts
from xla_engine.scheduler import Plan, Request, Scheduler, Speculation, StepResult
from xla_engine.speculative_config import ON_DEVICE

SAMPLE = 4  # rows whose proposals decide whether all rows should speculate
GAIN = 1.05  # by this factor a wider step must promise more tokens a second
PATIENCE = 4  # consecutive steps without a gain after which speculation is switched off
PROBE = 16  # the most steps between two looks at proposals while speculation is off
_MEMORY = 0.9  # weight of the old value at each new observation
# Drafts from the device can only be judged by verifying them, and a draft model first reads what it has not seen.
TRIAL = 0.8  # the acceptance that is supposed when they are tried
PAUSE = 128  # steps until the next trial after one that gained nothing; each further one doubles it
SUCCESS = 32  # a trial of so many steps was none in vain
# (n, initial acceptance) for matches of fewer than n tokens.
_FIRST = ((1, 0.4), (5, 0.2), (9, 0.6), (CERTAIN, 0.8), (CERTAIN + 1, 0.99))


def make_speculator(
    config: EngineConfig, runner: Runner, found: SelfCheck | None, table: RequestTable
) -> Speculator | None:
    """The speculator that the options ask for; None without speculation.

    found: the result of the self-check; None if it did not run.

    Raises ConfigError if the bits of a step would depend on how many tokens it verifies.
    """
    options = config.speculation
    if options is None:
        return None
    if (why := _inexact(found)) is not None:
        raise ConfigError(
            f"speculative_config: {why}, so speculation would change results here; leave it out"
        )
    on_device = options.method in ON_DEVICE
    shapes, widest = config.verify_shapes, max(width for _, width in config.verify_shapes)
    # With drafts from the device, which cost time, a step may have fewer than its program has room for.
    widths = (
        range(2, widest + 1)
        if on_device and options.num_speculative_tokens == AUTO
        else dict(shapes).values()
    )
    lanes = {width: max(rows for rows, wide in shapes if wide >= width) for width in widths}
    chooser = None
    if options.num_speculative_tokens == AUTO:
        chooser = WidthChooser(runner.step_costs(), tries=on_device)
    if on_device:
        return Speculator(NoProposer(), table, lanes, chooser, on_device=True)
    return Speculator(SuffixProposer(shares=options.method == "suffix"), table, lanes, chooser)


def _inexact(found: SelfCheck | None) -> str | None:
    """Why verifying several tokens at once may give other bits than decoding them one by one; None if it cannot."""
    if found is None:
        return "no self-check ran (give it enough blocks)"
    if not (found.ok and found.prefill_equals_decode and found.cut_invariant):
        return f"the self-check found {found.differences[0]}"
    return None


class Acceptance:
    """The probability that a draft token is right if all before it are, by the length of the proposal's match."""

    def __init__(self, unmatched: float = _FIRST[0][1], memory: float = _MEMORY) -> None:
        """unmatched: that of drafts without a match, before any was seen. memory: the weight of the old value."""
        self._memory = memory
        self._by_match = [unmatched, *(chance for _, chance in _FIRST[1:])]

    def of(self, match: int) -> float:
        """The acceptance of proposals with a match of `match` tokens."""
        return self._by_match[self._place(match)]

    def observe(self, match: int, drafted: int, accepted: int) -> None:
        """Learn that of `drafted` draft tokens the first `accepted` were right."""
        tried = min(accepted + 1, drafted)
        if not tried:
            return
        place = self._place(match)
        for _ in range(tried):
            self._by_match[place] *= self._memory
        # `tried` observations at once weigh as much as one after the other.
        self._by_match[place] += accepted / tried * (1 - self._memory**tried)

    @staticmethod
    def _place(match: int) -> int:
        return next(place for place, (bound, _) in enumerate(_FIRST) if match < bound)


class WidthChooser:
    """Chooses the width of each step; 0 for plain decode.

    Since the width changes no bit of a result, the choice may depend on anything.
    """

    def __init__(self, costs: StepCosts, *, tries: bool = False) -> None:
        """tries: drafts come from the device, so that they are tried to learn their acceptance."""
        self._tries = tries
        self.acceptance = self._unknown()
        self._costs = costs
        self._tried = 0  # steps since speculation was switched on
        self._trial_pause = PAUSE  # the next value of `_wait` after a trial
        self._idle = 0  # consecutive steps without a gain while speculation is on
        self.is_on = False  # whether rows speculate
        self._wait = 0  # steps until the next look while speculation is off
        self._pause = 1  # the next value of `_wait`; each look without a gain doubles it

    @property
    def looks(self) -> bool:
        """Whether to look at proposals in this step; each call counts as a step.

        While speculation is off, looks are 2, 3, 5, 9 and then PROBE steps apart, until one promises a gain.
        """
        if not self.is_on and self._wait:
            self._wait -= 1
            return False
        return True

    def choose(self, rows: int, proposals: Sequence[tuple[int, int]]) -> int:
        """The width for `rows` rows. proposals: (tokens, match) of those rows that have one."""
        best, width = self._best(rows, proposals, self.acceptance)
        if best >= GAIN:
            self.is_on, self._idle, self._pause = True, 0, 1
            self._tried += 1
            return width
        if self.is_on:
            self._idle += 1
            self.is_on = self._idle < PATIENCE
        if self.is_on:
            return 1
        self._wait = self._pause
        self._pause = min(2 * self._pause, PROBE - 1)
        # Where even an unknown acceptance would gain nothing, there are too many rows: that says nothing about drafts.
        if self._tries and self._tried and self._best(rows, proposals, self._unknown())[0] >= GAIN:
            self._end_trial()
        return 0

    def _end_trial(self) -> None:
        """Begin with an unknown acceptance the next time, after a pause that failures make longer."""
        self._trial_pause = PAUSE if self._tried >= SUCCESS else self._trial_pause
        self._wait, self._trial_pause = self._trial_pause, 2 * self._trial_pause
        self._tried, self.acceptance = 0, self._unknown()

    def _unknown(self) -> Acceptance:
        return Acceptance(TRIAL, memory=(1 + _MEMORY) / 2) if self._tries else Acceptance()

    def _best(
        self, rows: int, proposals: Sequence[tuple[int, int]], acceptance: Acceptance
    ) -> tuple[float, int]:
        plain = rows / self._costs.decode_of(rows) if rows else 0.0
        best, width = 0.0, 1
        if not proposals or not rows:
            return best, width
        for (lanes, wide), seconds in self._costs.verify.items():
            if lanes < rows or any(
                fewer >= rows and fewer < lanes and other == wide for fewer, other in self._costs.verify
            ):
                continue
            tokens = (
                rows
                - len(proposals)
                + sum(_expected(wide, tokens, acceptance.of(match)) for tokens, match in proposals)
            )
            if tokens / seconds / plain > best:
                best, width = tokens / seconds / plain, wide
        return best, width


def _expected(width: int, tokens: int, acceptance: float) -> float:
    """The expected tokens of a row in a verify step."""
    chance, drafts = min(acceptance, 0.99), min(width - 1, tokens)
    return (1 - chance ** (drafts + 1)) / (1 - chance)


class ReplayControl(Protocol):
    """Prescribes drafts and widths for the replay of a recorded run."""

    def wanted(self) -> Speculation | None:
        """The width and lanes of the next plan."""
        ...

    def planned(self, plan: Plan) -> None:
        """Note that a plan was made."""
        ...

    def drafts(self, plan: Plan, request_id: str) -> tuple[int, Sequence[int]]:
        """The drafts that follow the last token of a row on the device, after the position of the first of them."""
        ...


class Speculator:
    """Feeds tokens to the proposer, and its drafts to verify steps.

    proposer: may be replaced while the engine is idle. replay: replaces proposer and choice of widths in replays.
    drafted, accepted: how many draft tokens were verified, and how many were accepted.
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
        """lanes: the most rows of a verify step, by width.
        chooser: None if there is only one width; may be replaced while the engine is idle, as the proposer is.
        on_device: verify steps draft on the device for rows without a proposal."""
        self.drafted = 0
        self.accepted = 0
        self.proposer = proposer
        self.replay: ReplayControl | None = None
        self._table = table
        self._lanes = lanes
        self.chooser = chooser
        self._on_device = on_device
        self._told: dict[str, int] = {}  # by sequence: output tokens that the proposer knows
        self._looked: dict[str, Proposal] = {}  # the latest proposals that were not verified
        # Of the turn under way, by sequence: proposals, and the positions of their first tokens.
        self._proposed: dict[str, tuple[int, Proposal]] = {}
        self._started: deque[dict[str, int]] = deque()  # by verify step in flight: the match of each proposal

    def begin(self, request: Request) -> None:
        """Begin a sequence that was queued."""
        self.proposer.begin(request.request_id, request.prompt_token_ids, request.group)
        self._told[request.request_id] = 0

    def end(self, name: str) -> None:
        """End a sequence; it must still be in the table."""
        if name in self._told:
            if (sequence := self._table.get(name)) is not None:
                self._tell(sequence)
            del self._told[name]
            self._looked.pop(name, None)
            self.proposer.end(name)

    def restart(self) -> None:
        """Forget the steps in flight."""
        self._started.clear()

    def wanted(self, scheduler: Scheduler) -> Speculation | None:
        """The width and lanes of the scheduler's next plan; None for plain decode."""
        self._proposed.clear()
        if self.replay is not None:
            return self.replay.wanted()
        if self.chooser is None:
            ((width, lanes),) = self._lanes.items()
            return Speculation(width, lanes)
        if not self.chooser.looks:
            return None
        running, widest = scheduler.decoding, max(self._lanes)
        # While rows do not speculate, the proposals of a sample of them stand for all.
        stands_for = 1 if self.chooser.is_on else -(-len(running) // SAMPLE) or 1
        proposed = {name: self._held(name).first(widest - 1) for name in running[::stands_for]}
        unseen = widest - 1 if self._on_device else 0
        proposals = [*proposed.values()] * stands_for
        found = [(len(tokens) or unseen, match) for tokens, match in proposals if tokens or unseen]
        width = self.chooser.choose(len(running), found[: len(running)])
        if not width:
            self._looked = {name: each for name, each in proposed.items() if each.match < CERTAIN}
        return None if width == 0 else Speculation(width, self._lanes.get(width, len(running)))

    def foreseen(self, scheduler: Scheduler) -> Speculation | None:
        """What `wanted` would return now, without counting a step."""
        chooser = self.chooser
        self.chooser = copy.copy(chooser)
        try:
            return self.wanted(scheduler)
        finally:
            self.chooser = chooser

    def drafts(self, plan: Plan) -> dict[str, Draft]:
        """The drafts for the rows of a verify step, by request id."""
        if self.replay is not None:
            self.replay.planned(plan)
        if plan.width < 2:
            return {}
        found, matches = {}, {}
        for row in plan.verify:
            sequence = self._table[row.request_id]
            gated, replay = sequence.constrained, self.replay
            if replay is not None:
                start, drafts = replay.drafts(plan, row.request_id)
                proposal = Proposal(drafts)
            else:
                start = sequence.next_position
                proposal = self._held(row.request_id).first(row.width - 1 if gated else HELD * plan.width)
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
        """Count the accepted drafts of a step that was read."""
        if plan.width < 2:
            return
        matches = self._started.popleft()
        for row, samples, drafted in zip(plan.verify, result.verify, result.drafted, strict=True):
            accepted = min(max(len(samples) - 1, 0), drafted)
            self.drafted += drafted
            self.accepted += accepted
            sequence = self._table.get(row.request_id)
            if drafted:
                self._table.histograms.accepted_drafts.add(accepted)
            if sequence is not None:
                sequence.count_drafts(drafted, accepted)
            if self.chooser is not None and drafted:
                self.chooser.acceptance.observe(matches.get(row.request_id, 0), drafted, accepted)

    def _held(self, name: str) -> Proposal:
        """The longest proposal that a step may use, made once in a turn."""
        start = self._table[name].next_position
        if name in self._proposed and self._proposed[name][0] == start:  # not so if the plan has rewound it
            return self._proposed[name][1]
        proposal = self._propose(name, HELD * max(self._lanes))
        self._proposed[name] = start, proposal
        return proposal

    def _propose(self, name: str, most: int) -> Proposal:
        """Propose tokens after those read so far; a sequence that runs again proposes its known tokens."""
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
        """Compare an unverified proposal with the tokens that came, to learn the acceptance without a verify step."""
        if proposal is not None and self.chooser is not None:
            pairs = list(zip(proposal.tokens, tokens, strict=False))
            right = next((at for at, (draft, token) in enumerate(pairs) if draft != token), len(pairs))
            self.chooser.acceptance.observe(proposal.match, len(pairs), right)
