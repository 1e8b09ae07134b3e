"""Find stop strings in text that comes in pieces; the result does not depend on how the text is split.

A request ends at the first character that completes one of its stop strings; if it completes several, the longest
counts. The search uses the Aho-Corasick automaton (Communications of the ACM 18, 1975), which reads each character
once, however many strings there are. Text that may still become part of a stop string is held back.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from xla_engine.text.detokenizer import IncrementalDetokenizer


class Match(NamedTuple):
    """A stop string that ends after `end` characters of the searched text."""

    end: int
    string: str


class StopStrings:
    """The automaton of a set of nonempty stop strings. The state summarises the text so far; it begins as 0."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]  # by state, then by character
        self._fail = [0]  # the state of the longest proper suffix that is a prefix of a stop string
        self._depth = [0]  # length of a state's prefix
        self._match: list[str | None] = [None]  # the longest stop string that is a suffix
        for string in strings:
            self._add(string)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                self._fail[child] = self._step(self._fail[state], character)
                self._match[child] = self._match[child] or self._match[self._fail[child]]
                queue.append(child)
        self._first = frozenset(self._next[0])

    def _add(self, string: str) -> None:
        state = 0
        for character in string:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
            state = self._next[state][character]
        self._match[state] = string

    def _step(self, state: int, character: str) -> int:
        while (found := self._next[state].get(character)) is None and state:
            state = self._fail[state]
        return found or 0

    def search(self, state: int, text: str) -> tuple[int, Match | None]:
        """Read `text` up to the first match. Returns the new state, and the match."""
        if not state and self._first.isdisjoint(text):
            return 0, None
        for end, character in enumerate(text, 1):
            state = self._step(state, character)
            if (string := self._match[state]) is not None:
                return state, Match(end, string)
        return state, None

    def skip(self, state: int, text: str) -> int:
        """Read all of `text`, ignoring matches. Returns the new state."""
        for character in text:
            state = self._step(state, character)
        return state

    def undecided(self, state: int) -> int:
        """How many of the last characters may still become part of a stop string."""
        return self._depth[state]


stop_strings = lru_cache(maxsize=16)(StopStrings)  # requests with the same stop strings share an automaton


class GeneratedText:
    """The text of one request, cut at the first stop string.

    stop: strings that end it. include_stop: keep the stop string in the text.
    """

    def __init__(
        self, detokenizer: IncrementalDetokenizer, stop: tuple[str, ...] = (), *, include_stop: bool = False
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stop_strings(stop) if stop else None
        self._include_stop = include_stop
        self._pieces: list[str] = []
        self._state = 0
        self._held = 0  # characters at the end that are held back

    def push(self, token_id: int, *, may_stop: bool = True) -> str | None:
        """Take one token; returns the stop string that it completes, if any. No token may follow then.

        may_stop: whether a stop string may end with this token.
        """
        piece = self._detokenizer.push(token_id)
        self._pieces.append(piece)
        if self._stops is None:
            return None
        if not may_stop:
            self._state = self._stops.skip(self._state, piece)
        else:
            state, match = self._stops.search(self._state, piece)
            if match is None and (tail := self._detokenizer.peek()):
                # Also search the text that only a later token could change, because there may be no later token.
                _, match = self._stops.search(state, tail)
                if match is not None:
                    self._pieces.append(tail)
                    piece = tail
            self._state = state
            if match is not None:
                self._cut(len(piece) - match.end, match.string)
                return match.string
        self._held = 0 if self._include_stop else self._stops.undecided(self._state)
        return None

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take many tokens, without a search for stop strings."""
        assert self._stops is None, "text with stop strings takes one token at a time"
        self._pieces.extend(self._detokenizer.push_all(token_ids))

    def end(self) -> None:
        """Release the held-back text, when no more tokens follow and no stop string matched."""
        self._pieces.append(self._detokenizer.flush())
        self._held = 0

    @property
    def text(self) -> str:
        """The final text so far. It only grows."""
        self._pieces = ["".join(self._pieces)]
        (text,) = self._pieces
        return text[: len(text) - self._held]

    def _cut(self, beyond: int, string: str) -> None:
        self._held = 0
        text = self.text
        self._pieces = [text[: len(text) - beyond - (0 if self._include_stop else len(string))]]
