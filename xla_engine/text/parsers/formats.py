"""Parsers of the formats in which models write reasoning and tool calls.

Each is a generator that reads a `Scanner`: it yields events, and None where it needs more text. Calls in other forms
than harmony's are read by `tool_calls`.
"""

import json
import re
from collections.abc import Callable, Generator, Iterator

from xla_engine.text.parsers.calls import Schemas, json_calls
from xla_engine.text.parsers.json_value import JsonValue
from xla_engine.text.parsers.scan import (
    BLANKS,
    Content,
    Event,
    Marks,
    Parser,
    Reasoning,
    Scanner,
    ToolArguments,
    ToolStart,
    incremental,
    next_mark,
)
from xla_engine.text.parsers.thoughts import THOUGHTS, Thought


@incremental
def plain(scan: Scanner) -> Iterator[Event | None]:
    """All text is content."""
    while True:
        if text := scan.rest():
            yield Content(text)
        if scan.ended:
            return
        yield None


@incremental
def think(
    scan: Scanner, rest: Parser, *, begun: bool, may_call: bool = False, tags: Thought = THOUGHTS["think"]
) -> Iterator[Event | None]:
    """`<think>` reasoning `</think>`, or the same between other tags, followed by text for another parser.

    begun: the prompt ended with the opening tag. Otherwise the text has reasoning only if it begins with the tag.
    may_call: if the reasoning does not end, a call that it ends with is one.
    """
    opening, closing = Marks.of(tags.opening), Marks.of(tags.closing)
    either = Marks.of(tags.closing, tags.call)
    lead = ""  # blanks before anything else
    blank = True  # nothing but blanks since the last tag
    while not begun:
        before, tag = scan.until(opening)
        lead += before
        if lead.strip() or (tag is None and scan.ended):
            blank = False
            yield from rest.feed(lead + (tag or "") + scan.rest())
            break
        begun = tag is not None
        if not begun:
            yield None
    call: list[str] = []  # reasoning from an opening tag of a call on
    while begun:
        piece, tag = scan.until(either if may_call and not call else closing)
        if piece := piece.lstrip() if blank and not call else piece:
            blank = False
            if call:
                call.append(piece)
            else:
                yield Reasoning(piece)
        if tag == tags.call:
            call.append(tag)
            continue
        if tag is not None or scan.ended:
            if call and tag is None:
                events = [*rest.feed("".join(call)), *rest.finish()]
                called = any(isinstance(event, ToolStart) for event in events)
                yield from events if called else [Reasoning("".join(call))]
                return
            if call:
                yield Reasoning("".join(call))
            blank = True
            break
        yield None
    while True:
        text = scan.rest()
        if text := text.lstrip() if blank else text:
            blank = False
            yield from rest.feed(text)
        if scan.ended:
            break
        yield None
    yield from rest.finish()


_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_BETWEEN = Marks.of(*_ENDS, _START, _CHANNEL, _MESSAGE, "to=")
_HEADER = Marks.of(_START, _CHANNEL, _MESSAGE)
_BODY = Marks.of(*_ENDS, _START, _CHANNEL)
_ROLES, _CHANNELS = Marks.of("assistant"), Marks.of("analysis", "commentary", "final")
_TO = re.compile(r"to=(functions\.)?([A-Za-z0-9_.-]+)")
_MAX_HEADER = 1000  # characters
Events = Iterator[Event | None]


@incremental
def harmony(
    scan: Scanner, schemas: Schemas | None = None, rest: Callable[[], Parser] = lambda: plain()
) -> Events:
    """gpt-oss: messages in channels. analysis is reasoning, `to=functions.NAME` is a tool call, others are content.

    A mark in a call's JSON, or one that is not followed by what can follow it, is text. schemas: of the offered tools;
    empty if any name is a tool's, None if there are none. rest: makes parsers of content.
    """
    while True:
        header, text = yield from _header(scan)
        content = rest()
        yield from content.feed(text)
        to = _TO.search(header)
        if to is not None and schemas is not None and (to[2] in schemas or (to[1] and not schemas)):
            yield ToolStart(to[2])
            yield from _arguments(scan)
        elif to is not None and to[1]:
            yield Content(header)
            end = yield from _body(scan, lambda piece: [Content(piece)])
            yield from [Content(end)] if end else []
        elif "analysis" in header.replace(_MESSAGE, " ").replace(_CHANNEL, " ").split():
            yield from _body(scan, lambda piece: [Reasoning(piece)])
        else:
            yield from _body(scan, content.feed)
        yield from content.finish()
        if scan.ended and not scan.peek():
            return


def _header(scan: Scanner) -> Generator[None, None, tuple[str, str]]:
    """Take a message's header. Without one, or where it is too long, returns an empty one and text before the body."""
    held: list[str] = []
    while (mark := (yield from next_mark(scan, _BETWEEN, held))) in _ENDS:
        held.clear()
    if not mark:
        return "", "".join(held) if scan.peek() else ""
    size = 0
    while mark != _MESSAGE:
        piece, found = scan.until(_HEADER)
        held.append(piece + (found or ""))
        size += len(held[-1])
        if size > _MAX_HEADER:
            return "", "".join(held)
        if found is not None:
            mark = found
        elif scan.ended:
            return "", ""  # the token limit cut the header off
        else:
            yield None
    return "".join(held), ""


def _arguments(scan: Scanner) -> Events:
    """The arguments of a call, in JSON to its end; text that is not JSON is passed on."""
    value, is_empty = JsonValue(), True
    while value.is_open:
        if value.step(scan):
            if news := value.news():
                is_empty = is_empty and not news.strip()
                yield ToolArguments(news)
        elif value.is_open:
            yield None
    while not value.is_broken and not scan.peek() and not scan.ended:
        scan.run(BLANKS)
        yield None
    scan.run(BLANKS)
    end = yield from _body(scan, lambda piece: [ToolArguments(piece)])
    if is_empty and end and value.before == "value":
        yield ToolArguments("{}")


def _body(scan: Scanner, event: Callable[[str], list[Event]]) -> Generator[Event | None, None, str]:
    """A message's text to its end; returns the mark that ended it, if one did."""
    while True:
        piece, mark = scan.until(_BODY)
        if piece:
            yield from event(piece)
        if mark is None:
            if scan.ended:
                return ""
            yield None
            continue
        held: list[str] = []
        if mark in _ENDS:
            follows = bool((yield from next_mark(scan, _BETWEEN, held))) or (scan.ended and not scan.peek())
        else:
            follows = bool((yield from next_mark(scan, _ROLES if mark == _START else _CHANNELS, held)))
            held.insert(0, mark)
            mark = "" if follows else mark
        if follows:
            scan.put_back("".join(held))
            return mark
        yield from event("".join(held) if held[0] == mark else mark + "".join(held))


@incremental
def first_call(scan: Scanner, parser: Parser) -> Iterator[Event | None]:
    """Drops all tool calls but the first from another parser's events: `parallel_tool_calls: false`."""
    calls = 0
    while True:
        for event in [*parser.feed(scan.rest()), *(parser.finish() if scan.ended else ())]:
            calls += isinstance(event, ToolStart)
            if calls <= 1 or not isinstance(event, ToolStart | ToolArguments):
                yield event
        if scan.ended:
            return
        yield None


_CUT = re.compile(r'\s*\{\s*"name"\s*:\s*("[^"]*")\s*(?:,\s*"arguments"\s*:\s*(.*))?', re.DOTALL)


@incremental
def forced(scan: Scanner, name: str | None) -> Iterator[Event | None]:
    """A text that a grammar constrains to the arguments of a named tool or, without a name, to one whole call.

    A truncated call has the arguments so far; if its name is incomplete, there is no call.
    """
    begun = False
    while name is not None:
        if text := scan.rest():
            if not begun:
                yield ToolStart(name)
            begun = True
            yield ToolArguments(text)
        if scan.ended:
            return
        yield None
    while not scan.ended:
        yield None
    text = scan.rest()
    if (events := json_calls(text, {})) is not None:
        yield from events
    elif (cut := _CUT.match(text)) is not None:
        yield from (ToolStart(json.loads(cut[1])), ToolArguments(cut[2] or ""))
