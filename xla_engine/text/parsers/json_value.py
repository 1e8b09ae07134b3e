"""A JSON value in text that comes in pieces: where it ends, and what it is where a model wrote it almost right."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from xla_engine.text.parsers.scan import Marks, Scanner

_BLANKS = re.compile(r"[ \t\n\r]+")
_PLAIN = {quote: re.compile(rf"[^{quote}\\\x00-\x1f]+") for quote in "\"'"}
_WORD = re.compile(r"[-+.0-9A-Za-z_]+")
_LITERAL = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_QUOTE = '<|"|>'
_MARK = Marks.of(_QUOTE)  # around each of Gemma 4's strings, which have no escapes
_BARE_KEY = re.compile(r"[^:,{}\[\]<\s]+")
_HEX = re.compile(r"[0-9A-Fa-f]{4}")
MAX_WORD = 400  # characters of a number; of a string, those that are kept apart
PYTHON = {"True": "true", "False": "false", "None": "null"}  # Python's literals, which models sometimes write
_CONTROLS = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f"}


@dataclass(slots=True)
class Frame:
    """An object or list that has not ended. close: its last character. key: the latest key of an object."""

    close: str
    key: str | None = None


class JsonValue:
    """Takes the JSON value that begins at a scanner's place, one piece after the other.

    With `marked` it is written as Gemma 4 writes it: `{city:<|"|>Paris<|"|>,days:3}`.

    It mends what has only one meaning: line breaks and tabs in strings, backslashes that escape nothing (as in "\\d"),
    Python's True, False, None and strings in single or triple quotes, and commas before a closing bracket.

    frames: the objects and lists around this place. string: the latest string or literal so far, but not all of a long
    one; empty after a bracket. is_key: whether that is a key. before: what comes next: "value", "key", "colon", "end"
    (a comma, or a closing bracket), "string" or "literal" (the rest of one) or "nothing". is_broken: what came next is
    none of these; of that, only the letters of a literal were taken.
    """

    def __init__(self, *, marked: bool = False) -> None:
        self._marked = marked
        self.frames: list[Frame] = []
        self.before = "value"
        self.string = ""
        self.is_key = False
        self.is_broken = False
        self._mended: list[str] = []
        self._comma: int | None = None  # the place of one that may turn out to be the last
        self._quote = ""  # of the latest string
        self._is_triple = False  # it is in triple quotes
        self._may_reopen = (
            False  # it was empty and has just ended: one more quote makes it one in triple quotes
        )
        self._told = 0

    @property
    def is_open(self) -> bool:
        return self.before != "nothing" and not self.is_broken

    def text(self) -> str:
        """The value as valid JSON, with the brackets that are still missing. before: "end" or "nothing"."""
        return "".join([*self._mended, *(frame.close for frame in reversed(self.frames))])

    def news(self) -> str:
        """The part of `text` that has become known since the last call, without missing brackets."""
        certain = len(self._mended) - (self._may_reopen and self.before == "end")
        begin, self._told = self._told, certain if self._comma is None else self._comma
        return "".join(self._mended[begin : self._told])

    def step(self, scan: Scanner) -> str:
        """Take the next piece of an open value and return it as written; empty if more text is needed."""
        if self.before == "string":
            return self._string(scan)
        if self.before == "literal":
            return self._literal(scan)
        if self.before == "end" and self.reopens(scan):
            return scan.take(1)
        if blanks := scan.run(_BLANKS):
            self._may_reopen = False
            self._mended.append(blanks)
            return blanks
        char = scan.peek()
        if not char:
            self.is_broken = scan.ended
            return ""
        self._may_reopen = False
        if (
            self._marked
            and self.before in ("value", "key")
            and (char == "<" or self.before == "key" != char != "}")
        ):
            return self._begin_marked(scan, char)
        if char in _PLAIN and self.before in ("value", "key"):
            self._begin('"')
            self.string, self.is_key, self.before = "", self.before == "key", "string"
            self._quote, self._is_triple = char, False
        elif char in "[{" and self.before == "value":
            self._begin(char)
            self.frames.append(Frame("]" if char == "[" else "}"))
            self.before = "value" if char == "[" else "key"
        elif char == ":" and self.before == "colon":
            self._mended.append(char)
            self.before = "value"
        elif char == "," and self.before == "end":
            self._comma = len(self._mended)
            self._mended.append(char)
            self.before = "key" if self.frames[-1].close == "}" else "value"
        elif self.frames and char == self.frames[-1].close and self._may_end():
            if self._comma is not None:
                self._mended[self._comma], self._comma = "", None
            self.string, self.is_key = "", False
            self._mended.append(char)
            self.frames.pop()
            self._ended()
        elif self.before == "value" and _WORD.match(char):
            self._begin("")
            self.string, self.is_key, self.before = "", False, "literal"
            return self._literal(scan)
        else:
            self.is_broken = True
            return ""
        return scan.take(1)

    def reopens(self, scan: Scanner) -> bool:
        """Whether a quote follows an empty string, which then goes on as one in triple quotes."""
        if not (self._may_reopen and scan.peek() == self._quote):
            return False
        self._mended.pop()
        self.before, self._may_reopen, self._is_triple = "string", False, True
        return True

    def _may_end(self) -> bool:
        """Whether the innermost object or list may end here: after a value, or before the first one or a comma's."""
        return self.before == "end" or (
            self.before == ("key" if self.frames[-1].close == "}" else "value")
            and (self._comma is not None or self._mended_ends_with_opening())
        )

    def _mended_ends_with_opening(self) -> bool:
        last = next((part for part in reversed(self._mended) if not part.isspace()), "")
        return last in ("[", "{")

    def _begin(self, text: str) -> None:
        """A key or value begins, so that the comma before it was not the last."""
        self._mended.append(text)
        self._comma = None

    def _read(self, text: str) -> None:
        if len(self.string) < MAX_WORD:
            self.string += text

    def _ended(self) -> None:
        self.before = "end" if self.frames else "nothing"

    def _literal(self, scan: Scanner) -> str:
        """Take more of a literal, or find that it has ended."""
        if more := scan.run(_WORD):
            self._read(more)
            return more
        if scan.peek() or scan.ended:
            found = PYTHON.get(self.string, self.string)
            self.is_broken = len(found) >= MAX_WORD or _LITERAL.fullmatch(found) is None
            self._mended.append(found)
            self._ended()
            return self.step(scan) if self.is_open else ""
        return ""

    def _begin_marked(self, scan: Scanner, char: str) -> str:
        """The beginning of a string between marks, or of a key without any."""
        if char == "<" and (mark := scan.mark(_MARK)) is None:
            return ""
        elif char != "<":
            mark = ""
        self.is_broken = char == "<" and not mark
        if self.is_broken:
            return ""
        self._begin('"')
        self.string, self.is_key, self.before = "", self.before == "key", "string"
        self._quote = mark or ":"
        return mark or self._string(scan)

    def _string(self, scan: Scanner) -> str:
        if self._quote == _QUOTE:
            return self._between_marks(scan)
        if self._quote == ":":
            return self._bare_key(scan)
        if plain := scan.run(_PLAIN[self._quote]):
            self._read(plain)
            self._mended.append(plain if self._quote == '"' else plain.replace('"', '\\"'))
            return plain
        char = scan.peek()
        if char and char == self._quote:
            if self._is_triple and (end := scan.peek(3)) != 3 * char:
                if len(end) < 3 and end == len(end) * char and not scan.ended:
                    return ""
                self._read(char)
                self._mended.append('\\"' if char == '"' else char)
                return scan.take(1)
            if self._is_triple:
                self._mended.append('"')
                self._ended()
                return scan.take(3)
            self._may_reopen = not (self.is_key or self.string)
            self._string_ended()
            return scan.take(1)
        if char != "\\":  # a control character, or nothing
            self.is_broken = not char and scan.ended
            self._mended.append(_CONTROLS.get(char, f"\\u{ord(char):04x}" if char else ""))
            self._read(char)
            return scan.take(len(char))
        return self._escape(scan)

    def _between_marks(self, scan: Scanner) -> str:
        text, mark = scan.until(_MARK)
        self._read(text)
        self._mended.append(json.dumps(text, ensure_ascii=False)[1:-1])
        if mark is None:
            self.is_broken = scan.ended
            return text
        self._string_ended()
        return text + mark

    def _bare_key(self, scan: Scanner) -> str:
        if key := scan.run(_BARE_KEY):
            self._read(key)
            self._mended.append(json.dumps(key, ensure_ascii=False)[1:-1])
            return key
        if not scan.peek() and not scan.ended:
            return ""
        self.is_broken = not self.string
        self._string_ended()
        return self.step(scan) if self.is_open else ""

    def _string_ended(self) -> None:
        self._mended.append('"')
        if self.is_key:
            self.frames[-1].key = self.string
            self.before = "colon"
        else:
            self._ended()

    def _escape(self, scan: Scanner) -> str:
        size = 6 if scan.peek(2) == "\\u" else 2
        escape = scan.peek(size)
        if len(escape) < size and not scan.ended:
            return ""
        if len(escape) < 2:
            self.is_broken = True
            return ""
        if escape[1] == "'":
            mended = "'"
        elif escape[1] in '"\\/bfnrt' or (size == 6 and _HEX.fullmatch(escape, 2)):
            mended = escape
        else:  # the backslash stands for itself
            escape, mended = escape[:1], "\\\\"
        self._read(escape)
        self._mended.append(mended)
        return scan.take(len(escape))
