"""Proposes tokens from earlier text: what followed the last occurrences of the sequence's ending.

After suffix decoding (Oliaro et al. 2024, arXiv 2411.04975), with a table of short runs of tokens instead of a suffix
tree. The last RUN tokens are looked up, the longest match among the latest places wins, and a longer match gives a
longer draft.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from xla_engine.engine.speculation.proposer import Proposal

RUN = 3  # length of the runs of tokens by which places are found
PLACES = 6  # how many of the latest places of a run are tried
LONGEST = 32  # the longest match that is measured
MAX_TOKENS = 1 << 20  # tokens kept of finished sequences, for all groups; some hundred bytes each

Run = tuple[int, ...]


class _Text:
    """The tokens of one sequence, with an index of where each run ends.

    Each place links to the previous place of the same run, so a token costs one entry of a dict and one of a list. The
    index is built at the first lookup.

    latest: the end of a run's latest place. older: once finished, the previous text of the group that has the run.
    """

    def __init__(self, group: str) -> None:
        self.group = group
        self.tokens: list[int] = []
        self.latest: dict[Run, int] = {}
        self.older: dict[Run, _Text] = {}
        self._earlier: list[int] = []  # by end - RUN: the previous end of the same run, 0 for none

    def index(self) -> None:
        """Index the new tokens."""
        known, latest, earlier = self.tokens, self.latest, self._earlier
        # A place is useful only if a token follows it, so a run is entered once the next token is known.
        begin = len(earlier)
        columns = [known[begin + at : max(len(known) - RUN + at, 0)] for at in range(RUN)]
        for end, run in enumerate(zip(*columns, strict=True), begin + RUN):
            before = latest.setdefault(run, end)
            if before == end:
                earlier.append(0)
            else:
                earlier.append(before)
                latest[run] = end

    def ends(self, run: Run) -> Iterator[int]:
        """The ends of the latest places of a run, latest first."""
        end = self.latest.get(run, 0)
        for _ in range(PLACES):
            if not end:
                return
            yield end
            end = self._earlier[end - RUN]

    def clear(self) -> None:
        """Forget everything, so that texts that link here find nothing."""
        for part in (self.tokens, self.latest, self.older, self._earlier):
            part.clear()


@dataclass(slots=True)
class _Group:
    """Finished sequences that may be proposed to each other. latest: by run, the latest text that has it."""

    latest: dict[Run, _Text] = field(default_factory=dict)

    def add(self, text: _Text) -> None:
        latest = self.latest
        text.older = {run: latest[run] for run in latest.keys() & text.latest.keys()}
        latest.update(dict.fromkeys(text.latest, text))

    def texts(self, run: Run) -> Iterator[_Text]:
        """The latest texts that have a run, latest first."""
        text = self.latest.get(run)
        for _ in range(PLACES):
            if text is None:
                return
            yield text
            text = text.older.get(run)

    def remove_oldest(self, text: _Text) -> None:
        for run in text.latest:
            if self.latest[run] is text:
                del self.latest[run]
        text.clear()


class SuffixProposer:
    """Looks up the end of a sequence in itself and, if `shares`, in the finished sequences of its group.

    max_tokens: tokens of finished sequences that are kept; the oldest sequences are evicted first.
    """

    def __init__(self, *, shares: bool = True, max_tokens: int = MAX_TOKENS) -> None:
        self._shares = shares
        self._max_tokens = max_tokens
        self._live: dict[str, _Text] = {}
        self._groups: dict[str, _Group] = {}
        self._finished: deque[_Text] = deque()
        self._held = 0

    @property
    def num_tokens(self) -> int:
        """Tokens kept of finished sequences."""
        return self._held

    def begin(self, name: str, tokens: Sequence[int], group: str) -> None:
        text = self._live[name] = _Text(group)
        text.tokens.extend(tokens)

    def extend(self, name: str, tokens: Sequence[int]) -> None:
        self._live[name].tokens.extend(tokens)

    def propose(self, name: str, most: int) -> Proposal:
        own = self._live[name]
        if most < 1 or len(own.tokens) < RUN:
            return Proposal()
        own.index()
        run = tuple(own.tokens[-RUN:])
        found, place, longest = own, 0, 0
        for text, end in self._places(own, run):
            match = _match(text.tokens, end, own.tokens)
            if match > longest:
                found, place, longest = text, end, match
            if match == LONGEST:
                break
        if not longest:
            return Proposal()
        count = min(most, 2 * longest)
        tokens = found.tokens[place : place + count]
        if found is own:  # a sequence that repeats itself: extend the period
            while len(tokens) < count:
                tokens = tokens + tokens[: count - len(tokens)]
        return Proposal(tokens, longest)

    def end(self, name: str) -> None:
        text = self._live.pop(name, None)
        if text is None or not self._shares or not RUN < len(text.tokens) <= self._max_tokens:
            return
        text.index()
        self._groups.setdefault(text.group, _Group()).add(text)
        self._finished.append(text)
        self._held += len(text.tokens)
        while self._held > self._max_tokens:
            oldest = self._finished.popleft()
            self._held -= len(oldest.tokens)
            group = self._groups[oldest.group]
            group.remove_oldest(oldest)
            if not group.latest:
                del self._groups[oldest.group]

    def _places(self, own: _Text, run: Run) -> Iterator[tuple[_Text, int]]:
        """Where a run ends: in the sequence's own text first, then in the latest texts of its group."""
        for end in own.ends(run):
            yield own, end
        if (group := self._groups.get(own.group)) is not None:
            for text in group.texts(run):
                for end in text.ends(run):
                    yield text, end


def _match(tokens: Sequence[int], end: int, own: Sequence[int]) -> int:
    """How many tokens before `end` equal those at the end of `own`, at most LONGEST; at least RUN match already."""
    least = min(end, len(own), LONGEST)
    if (
        tokens[end - least : end] == own[-least:]
    ):  # the usual case in repetitive text, and faster than the loop
        return least
    match = RUN
    while match < least and tokens[end - match - 1] == own[-match - 1]:
        match += 1
    return match
