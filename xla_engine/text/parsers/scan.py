"""Events of parsers, and the search for tags in text that comes in pieces."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Concatenate, ParamSpec

_PIECE = 4096  # characters


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


class Scanner:
    """Splits text at tags; the text comes in pieces, which may split a tag. ended: no more text comes."""

    def __init__(self) -> None:
        self.ended = False
        self._held = ""

    def push(self, text: str) -> None:
        self._held += text

    def until(self, tags: Sequence[str]) -> tuple[str, str | None]:
        """The text before the first of these tags, and the tag. Without a tag: the text that cannot be part of one."""
        found = [(place, tag) for tag in tags if (place := self._held.find(tag)) >= 0]
        if found:
            place, tag = min(found)
            before, self._held = self._held[:place], self._held[place + len(tag) :]
            return before, tag
        keep = 0 if self.ended else max(_overlap(self._held, tag) for tag in tags)
        before, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return before, None

    def rest(self) -> str:
        """All text that was not taken yet."""
        rest, self._held = self._held, ""
        return rest


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


P = ParamSpec("P")


def incremental(steps: Callable[Concatenate[Scanner, P], Iterator[Event | None]]) -> Callable[P, Parser]:
    """Makes parsers of a generator of `Parser`'s steps."""

    @wraps(steps)
    def make(*arguments: P.args, **options: P.kwargs) -> Parser:
        scanner = Scanner()
        return Parser(scanner, steps(scanner, *arguments, **options))

    return make


def _overlap(text: str, tag: str) -> int:
    """Length of the longest suffix of the text that is a prefix of the tag."""
    return next(
        (size for size in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-size:])), 0
    )


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
    # in pieces, because a parser copies the rest of its piece at every tag
    for begin in range(0, len(text), _PIECE):
        message.add(parser.feed(text[begin : begin + _PIECE]))
    message.add(parser.finish())
    return message
