"""Parsers of the formats in which models write reasoning and tool calls.

Each is a generator that reads a `Scanner`: it yields events, and None where it needs more text.
"""

import json
import re
from collections.abc import Callable, Iterator

from xla_engine.text.parsers.calls import call_events, list_events
from xla_engine.text.parsers.scan import (
    Content,
    Event,
    Parser,
    Reasoning,
    Scanner,
    ToolArguments,
    ToolStart,
    incremental,
)


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
def think(scan: Scanner, rest: Parser, *, begun: bool) -> Iterator[Event | None]:
    """`<think>` reasoning `</think>`, followed by text for another parser.

    begun: the prompt ended with the opening tag. Otherwise the text has reasoning only if it begins with the tag.
    """
    lead = ""  # blanks before anything else
    blank = True  # nothing but blanks since the last tag
    while not begun:
        before, tag = scan.until(["<think>"])
        lead += before
        if lead.strip() or (tag is None and scan.ended):
            blank = False
            yield from rest.feed(lead + (tag or "") + scan.rest())
            break
        begun = tag is not None
        if not begun:
            yield None
    while begun:
        piece, tag = scan.until(["</think>"])
        if piece := piece.lstrip() if blank else piece:
            blank = False
            yield Reasoning(piece)
        if tag is not None:
            blank = True
        if tag is not None or scan.ended:
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


OPEN, CLOSE = "<tool_call>", "</tool_call>"


@incremental
def hermes(scan: Scanner, read: Callable[[str], list[Event] | None] = call_events) -> Iterator[Event | None]:
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>`, any number, with text in between (Hermes, Qwen).

    Blanks around a call belong to it. A call is emitted when it is complete. read: parses the text between the tags.
    """
    blanks = ""  # those that may belong to a following call
    after_call = False  # nothing but blanks since a call
    while True:
        piece, opening = scan.until([OPEN])
        text = blanks + (piece.lstrip() if after_call else piece)
        shown = text.rstrip()
        blanks, after_call = text[len(shown) :], after_call and not shown
        if shown:
            yield Content(shown)
        if opening is None and not scan.ended:
            yield None
        elif opening is None:
            if blanks and not after_call:
                yield Content(blanks)
            return
        else:
            call, closing = scan.until([CLOSE])
            while closing is None and not scan.ended:
                yield None
                piece, closing = scan.until([CLOSE])
                call += piece
            if (events := read(call)) is None:
                yield Content(f"{blanks}{OPEN}{call}{closing or ''}")
            else:
                yield from events
                after_call = True
            blanks = ""


@incremental
def whole(
    scan: Scanner, marks: tuple[str, ...], *, bare: bool = False, separator: str | None = None
) -> Iterator[Event | None]:
    """A text that is tool calls from a mark on, or from its beginning; text before the mark is content.

    marks: those that begin calls. bare: a text that begins with `{` or `[` is calls, too. separator: between objects.
    """
    blanks = ""
    while True:
        piece, mark = scan.until(marks)
        text = blanks + piece
        if bare and text.lstrip().startswith(("{", "[")):
            blanks, calls, mark = "", text + (mark or ""), ""
            break
        shown = text.rstrip()
        blanks, bare = text[len(shown) :], bare and not shown
        if shown:
            yield Content(shown)
        if mark is not None:
            calls = ""
            break
        if scan.ended:
            if blanks:
                yield Content(blanks)
            return
        yield None
    while not scan.ended:
        yield None
    calls += scan.rest()
    events = _whole_calls(calls, mark, separator)
    yield from [Content(blanks + mark + calls)] if events is None else events


_NAMED = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*(?:\[CALL_ID\][A-Za-z0-9]*)?\[ARGS\]\s*(.*)", re.DOTALL)


def _whole_calls(text: str, mark: str, separator: str | None) -> list[Event] | None:
    """The events of calls that each begin with a mark, if there is one; None if the text is not only calls."""
    found: list[Event] = []
    for piece in [piece for piece in text.split(mark) if piece.strip()] if mark else [text]:
        named = _NAMED.fullmatch(piece)
        events: list[Event] | None
        if named is not None:
            events = [ToolStart(named[1]), ToolArguments(named[2].rstrip())]
        else:
            events = list_events(piece, separator=separator)
        if events is None:
            return None
        found += events
    return found or None


_HARMONY = ("<|message|>", "<|end|>", "<|start|>", "<|channel|>", "<|call|>", "<|return|>")
_TO = re.compile(r"to=functions\.([A-Za-z0-9_.-]+)")


@incremental
def harmony(scan: Scanner) -> Iterator[Event | None]:
    """gpt-oss: messages in channels. analysis is reasoning, final is content, `to=functions.NAME` is a tool call."""
    header = ""
    body: type[Content | Reasoning | ToolArguments] | None = None  # what it is; None in a header
    while True:
        piece, tag = scan.until(_HARMONY)
        if body is None:
            header += piece
        elif piece:
            yield body(piece)
        if tag is None:
            if scan.ended:
                return
            yield None
        elif tag == "<|message|>":
            if (to := _TO.search(header)) is not None:
                yield ToolStart(to[1])
                body = ToolArguments
            else:
                body = Reasoning if "analysis" in header.split() else Content
            header = ""
        elif tag in ("<|start|>", "<|channel|>") and body is None:
            header += " "
        else:
            header, body = "", None


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
    if (events := call_events(text)) is not None:
        yield from events
    elif (cut := _CUT.match(text)) is not None:
        yield from (ToolStart(json.loads(cut[1])), ToolArguments(cut[2] or ""))
