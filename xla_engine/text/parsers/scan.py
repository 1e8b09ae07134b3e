"""Events of parsers, and the search for marks in text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial, wraps
from typing import Concatenate, ParamSpec

BLANKS = re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolStart:
    """The beginning of a tool call. name: of the function."""

    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """More of the arguments of the latest call, as the model wrote them."""

    text: str


Event = Content | Reasoning | ToolStart | ToolArguments


@dataclass(frozen=True, slots=True)
class Marks:
    """Strings that a scanner searches for; of two at the same place it takes the longer.

    beginnings: what may become one of them with more text. longest: the length of the longest beginning.
    """

    pattern: re.Pattern[str]
    beginnings: frozenset[str]
    longest: int

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, *marks: str) -> Marks:
        by_length = sorted(set(marks), key=len, reverse=True)
        beginnings = frozenset(mark[:size] for mark in by_length for size in range(1, len(mark)))
        longest = max(map(len, by_length)) - 1
        return cls(re.compile("|".join(map(re.escape, by_length))), beginnings, longest)

    def unfinished(self, text: str, place: int) -> int:
        """Where the longest end of a text, from a place on, begins that may become a mark."""
        first = max(len(text) - self.longest, place)
        return next((at for at in range(first, len(text)) if text[at:] in self.beginnings), len(text))


class Scanner:
    """Splits text at marks; the text comes in pieces, which may split a mark. ended: no more text comes."""

    def __init__(self) -> None:
        self.ended = False
        self._text = ""
        self._place = 0  # what is before it was taken

    def push(self, text: str) -> None:
        """Add text at the end."""
        self._text, self._place = self._text[self._place :] + text, 0

    def put_back(self, text: str) -> None:
        """Undo the taking of this text, the latest that was taken."""
        if len(text) <= self._place:
            self._place -= len(text)
        else:  # it came in several pieces
            self._text, self._place = text + self.rest(), 0

    def until(self, marks: Marks) -> tuple[str, str | None]:
        """The text before the first of these marks, and the mark. Without one: the text that cannot be part of it."""
        begin = self._place
        found = marks.pattern.search(self._text, begin)
        unfinished = len(self._text) if self.ended else marks.unfinished(self._text, begin)
        if found is None or unfinished <= found.start():
            self._place = unfinished
            return self._text[begin:unfinished], None
        self._place = found.end()
        return self._text[begin : found.start()], found[0]

    def mark(self, marks: Marks) -> str | None:
        """Take the mark that comes next: an empty string if there is none, None if more text is needed to tell."""
        if not self.ended and marks.unfinished(self._text, self._place) == self._place:
            return None
        found = marks.pattern.match(self._text, self._place)
        return "" if found is None else self.take(len(found[0]))

    def peek(self, size: int = 1) -> str:
        """The next characters, as far as they have come, without taking them."""
        return self._text[self._place : self._place + size]

    def take(self, size: int) -> str:
        begin, self._place = self._place, self._place + size
        return self._text[begin : self._place]

    def run(self, pattern: re.Pattern[str]) -> str:
        """Take what a pattern of characters matches here, as far as it has come."""
        found = pattern.match(self._text, self._place)
        return "" if found is None else self.take(len(found[0]))

    def rest(self) -> str:
        """All text that was not taken yet."""
        return self.take(len(self._text) - self._place)


def next_mark(scan: Scanner, marks: Marks, held: list[str]) -> Generator[None, None, str]:
    """Take blanks and the mark that follows them; empty if none does. held: gets what was taken."""
    while True:
        held.append(scan.run(BLANKS))
        if (mark := scan.mark(marks)) is not None:
            held.append(mark)
            return mark
        yield None


class Parser:
    """Parses one answer. However its text is split, the events join to the same message.

    `feed` never raises for anything in a text; an invalid tool call is content.
    """

    def __init__(self, scanner: Scanner, steps: Iterator[Event | None]) -> None:
        """steps: the events of the text in a scanner, and None where more text is needed."""
        self._scanner, self._steps = scanner, steps

    def feed(self, text: str) -> list[Event]:
        self._scanner.push(text)
        return list(iter(partial(next, self._steps, None), None))

    def finish(self) -> list[Event]:
        self._scanner.ended = True
        return self.feed("")

    def changed(self, change: Callable[[Iterator[Event | None]], Iterator[Event | None]]) -> Parser:
        """This parser with other events; it takes this one's place. change: what makes its steps of these."""
        return Parser(self._scanner, change(self._steps))


P = ParamSpec("P")


def incremental(steps: Callable[Concatenate[Scanner, P], Iterator[Event | None]]) -> Callable[P, Parser]:
    """Makes parsers of a generator of `Parser`'s steps."""

    @wraps(steps)
    def make(*arguments: P.args, **options: P.kwargs) -> Parser:
        scanner = Scanner()
        return Parser(scanner, steps(scanner, *arguments, **options))

    return make


@dataclass(slots=True)
class Message:
    """The sum of events. calls: name and arguments of each."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case ToolStart(name):
                    self.calls.append([name, ""])
                case ToolArguments(text):
                    self.calls[-1][1] += text


def message_of(parser: Parser, text: str) -> Message:
    message = Message()
    message.add(parser.feed(text))
    message.add(parser.finish())
    return message
