"""Parsers of the formats in which models write reasoning and tool calls: small state machines over text."""

import json
import re
from collections.abc import Callable

from xla_engine.text.parsers.calls import call_events, list_events
from xla_engine.text.parsers.scan import Content, Event, Parser, Reasoning, Scanner, ToolArguments, ToolStart


class Plain:
    """All text is content."""

    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


class Think:
    """`<think>` reasoning `</think>`, followed by text for another parser.

    begun: the prompt ended with the opening tag. Otherwise the text has reasoning only if it begins with the tag.
    """

    def __init__(self, rest: Parser, *, begun: bool) -> None:
        self._rest = rest
        self._scanner = Scanner()
        self._state = "reasoning" if begun else "before"
        self._lead = ""  # blanks before anything else
        self._blank = True  # nothing but blanks since the last tag

    def feed(self, text: str) -> list[Event]:
        if self._state == "after":
            return self._after(text)
        self._scanner.push(text)
        events: list[Event] = []
        if self._state == "before":
            before, tag = self._scanner.until(["<think>"])
            self._lead += before
            if tag is None and not self._lead.strip():
                return []
            if self._lead.strip():
                self._state, self._blank = "after", False
                return self._rest.feed(self._lead + (tag or "") + self._scanner.rest())
            self._state = "reasoning"
        piece, tag = self._scanner.until(["</think>"])
        if self._blank:
            piece = piece.lstrip()
        if piece:
            self._blank = False
            events.append(Reasoning(piece))
        if tag is not None:
            self._state, self._blank = "after", True
            events += self._after(self._scanner.rest())
        return events

    def finish(self) -> list[Event]:
        if self._state == "before":
            return [*self._rest.feed(self._lead + self._scanner.rest()), *self._rest.finish()]
        if self._state == "reasoning" and (rest := self._scanner.rest()):
            return [Reasoning(rest), *self._rest.finish()]
        return self._rest.finish()

    def _after(self, text: str) -> list[Event]:
        if self._blank:
            text = text.lstrip()
        self._blank = self._blank and not text
        return self._rest.feed(text) if text else []


class Hermes:
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>`, any number, with text in between (Hermes, Qwen).

    Blanks around a call belong to it. A call is emitted when it is complete. read: parses the text between the tags.
    """

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, read: Callable[[str], list[Event] | None] = call_events) -> None:
        self._read = read
        self._scanner = Scanner()
        self._in_call = False
        self._call = ""
        self._blanks = ""  # blanks that may belong to a following call
        self._after_call = False  # nothing but blanks since a call

    def feed(self, text: str) -> list[Event]:
        self._scanner.push(text)
        events: list[Event] = []
        while True:
            if self._in_call:
                piece, tag = self._scanner.until([self.CLOSE])
                self._call += piece
                if tag is None:
                    return events
                events += self._end_call(self.CLOSE)
            else:
                piece, tag = self._scanner.until([self.OPEN])
                events += self._content(piece)
                if tag is None:
                    return events
                self._in_call = True

    def finish(self) -> list[Event]:
        self._call += self._scanner.rest()
        if self._in_call:
            return self._end_call("")
        rest, self._call = self._call, ""
        events = self._content(rest)
        if self._blanks and not self._after_call:
            events.append(Content(self._blanks))
        return events

    def _content(self, text: str) -> list[Event]:
        if self._after_call:
            text = text.lstrip()
        text = self._blanks + text
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        self._after_call = self._after_call and not shown
        return [Content(shown)] if shown else []

    def _end_call(self, close: str) -> list[Event]:
        call, self._call, self._in_call = self._call, "", False
        events = self._read(call)
        if events is None:
            held, self._blanks = self._blanks, ""
            return [Content(f"{held}{self.OPEN}{call}{close}")]
        self._blanks, self._after_call = "", True
        return events


class Whole:
    """A text that is tool calls from a mark on, or from its beginning; text before the mark is content.

    marks: those that begin calls. bare: a text that begins with `{` or `[` is calls, too. separator: between objects.
    """

    _NAMED = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*(?:\[CALL_ID\][A-Za-z0-9]*)?\[ARGS\]\s*(.*)", re.DOTALL)

    def __init__(self, marks: tuple[str, ...], *, bare: bool = False, separator: str | None = None) -> None:
        self._marks = marks
        self._separator = separator
        self._scanner = Scanner()
        self._state = "begin" if bare else "content"
        self._held = ""
        self._mark = ""
        self._blanks = ""

    def feed(self, text: str) -> list[Event]:
        if self._state == "calls":
            self._held += text
            return []
        self._scanner.push(text)
        piece, tag = self._scanner.until(self._marks)
        events: list[Event] = []
        if self._state == "begin":
            self._held += piece
            if tag is None and not self._held.strip():
                return []
            if self._held.lstrip().startswith(("{", "[")):
                self._held += (tag or "") + self._scanner.rest()
                self._state = "calls"
                return []
            piece, self._held, self._state = self._held, "", "content"
        text = self._blanks + piece
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        if shown:
            events.append(Content(shown))
        if tag is not None:
            self._state, self._mark, self._held = "calls", tag, self._scanner.rest()
        return events

    def finish(self) -> list[Event]:
        if self._state != "calls":
            rest = self._held + self._blanks + self._scanner.rest()
            return [Content(rest)] if rest else []
        events = self._calls()
        return [Content(self._blanks + self._mark + self._held)] if events is None else events

    def _calls(self) -> list[Event] | None:
        found: list[Event] = []
        pieces = (
            [piece for piece in self._held.split(self._mark) if piece.strip()] if self._mark else [self._held]
        )
        for piece in pieces:
            named = self._NAMED.fullmatch(piece)
            events: list[Event] | None
            if named is not None:
                events = [ToolStart(named[1]), ToolArguments(named[2].rstrip())]
            else:
                events = list_events(piece, separator=self._separator)
            if events is None:
                return None
            found += events
        return found or None


class Harmony:
    """gpt-oss: messages in channels. analysis is reasoning, final is content, `to=functions.NAME` is a tool call."""

    _TAGS = ("<|message|>", "<|end|>", "<|start|>", "<|channel|>", "<|call|>", "<|return|>")
    _TO = re.compile(r"to=functions\.([A-Za-z0-9_.-]+)")

    def __init__(self) -> None:
        self._scanner = Scanner()
        self._header = ""
        self._in_body = False
        self._kind = "content"

    def feed(self, text: str) -> list[Event]:
        self._scanner.push(text)
        events: list[Event] = []
        while True:
            piece, tag = self._scanner.until(self._TAGS)
            events += self._take(piece)
            if tag is None:
                return events
            if tag == "<|message|>":
                events += self._begin()
            elif tag in ("<|start|>", "<|channel|>") and not self._in_body:
                self._header += " "
            else:
                self._in_body, self._header = False, ""

    def finish(self) -> list[Event]:
        return self._take(self._scanner.rest())

    def _begin(self) -> list[Event]:
        header, self._header, self._in_body = self._header, "", True
        if (to := self._TO.search(header)) is not None:
            self._kind = "call"
            return [ToolStart(to[1])]
        self._kind = "reasoning" if "analysis" in header.split() else "content"
        return []

    def _take(self, piece: str) -> list[Event]:
        if not piece:
            return []
        if not self._in_body:
            self._header += piece
            return []
        match self._kind:
            case "call":
                return [ToolArguments(piece)]
            case "reasoning":
                return [Reasoning(piece)]
            case _:
                return [Content(piece)]


class FirstCall:
    """Drops all tool calls but the first from another parser's events: `parallel_tool_calls: false`."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._calls = 0

    def feed(self, text: str) -> list[Event]:
        return self._kept(self._parser.feed(text))

    def finish(self) -> list[Event]:
        return self._kept(self._parser.finish())

    def _kept(self, events: list[Event]) -> list[Event]:
        kept = []
        for event in events:
            self._calls += isinstance(event, ToolStart)
            if self._calls <= 1 or not isinstance(event, ToolStart | ToolArguments):
                kept.append(event)
        return kept


class Forced:
    """A text that a grammar constrains to the arguments of a named tool or, without a name, to one whole call.

    A truncated call has the arguments so far; if its name is incomplete, there is no call.
    """

    _CUT = re.compile(r'\s*\{\s*"name"\s*:\s*("[^"]*")\s*(?:,\s*"arguments"\s*:\s*(.*))?', re.DOTALL)

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._held = ""
        self._started = False

    def feed(self, text: str) -> list[Event]:
        if self._name is None:
            self._held += text
            return []
        if not text:
            return []
        start: list[Event] = [] if self._started else [ToolStart(self._name)]
        self._started = True
        return [*start, ToolArguments(text)]

    def finish(self) -> list[Event]:
        if self._name is not None or not self._held:
            return []
        if (events := call_events(self._held)) is not None:
            return events
        cut = self._CUT.match(self._held)
        return [] if cut is None else [ToolStart(json.loads(cut[1])), ToolArguments(cut[2] or "")]
