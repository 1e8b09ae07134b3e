"""Find tool calls in an answer, in all the forms in which models write them.

A model slips: it leaves out an opening tag, writes JSON in a fence instead of tags, or the form of another model. So
one parser reads every form, whatever the model's template says, and the name of an offered tool makes a text a call:

    opening marks, one after the other   <tool_call>  [TOOL_CALLS]  <|python_tag|>  ```json  ...; or none
    a body                               {"name": NAME, "arguments": {...}}, or a list of those
                                         NAME[ARGS]{...}, and other separators after an opening mark
                                         call:NAME{key:<|"|>text<|"|>}, after an opening mark
                                         [{NAME: {...}}], after an opening mark
                                         NAME(key=value) or NAME(value), in a list or after an opening mark
                                         <function=NAME> with {...} or tagged parameters
                                         NAME with <arg_key>KEY</arg_key><arg_value>VALUE</arg_value>, or NAME alone,
                                         after an opening mark
    closing marks, separators            </tool_call>  ```  ;  ...; or none

Text that turns out not to be a call is content, unchanged. The parser takes each character once and never goes back
to it, so the work is linear in the text: where a body stops being one, content goes on from there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from xla_engine.text.parsers.calls import (
    ABOUT,
    ARGUMENTS,
    MAX_DEPTH,
    NAMES,
    WRAPPERS,
    Schemas,
    call_events,
    json_calls,
    tagged_arguments,
)
from xla_engine.text.parsers.json_value import PYTHON, JsonValue
from xla_engine.text.parsers.kinds import Kinds, argument_kinds
from xla_engine.text.parsers.scan import BLANKS, Content, Event, Marks, Scanner, incremental, next_mark
from xla_engine.text.parsers.tagged_values import (
    ARG_KEY,
    CLOSERS,
    DEEPSEEK,
    DSML,
    END,
    FENCE,
    GLM,
    HEADS,
    QWEN,
    TOOL_CALL,
    WORDS,
    TaggedValue,
    Tags,
)

MAX_CALL = 1 << 20  # characters of one group of calls
ARGS = "[ARGS]"
_OPENERS = frozenset(
    {
        *(form.format(word) for word in WORDS for form in ("<{}>", "<|{}|>", "<|{}_start|>", "<|{}_begin|>")),
        *("[TOOL_CALLS]", "[TOOL_CALL]", "<|python_tag|>", "<|START_ACTION|>", "functools"),
        *("<|tool_calls_section_begin|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        *(
            "<|tool_call>",
            "<|tools_prefix|>",
            "<minimax:tool_call>",
            DSML + "function_calls>",
            DSML + "tool_calls>",
        ),
    }
)
_STRAY = frozenset(",;}])")  # between calls, and after the last: separators, and brackets too many
_FENCES_OF_CALLS = ("tool_call", "tool_calls", "tool_code", "function_call", "tool")
_BODIES = (*_OPENERS, *HEADS, FENCE, "{", "[")
_CODE, _QUOTES = frozenset("=([{\\"), frozenset("\"'`")
_CALL = "call:"  # before the name, in Gemma 4's form
_BEFORE_NAME = Marks.of("function<｜tool▁sep｜>", "functions.", _CALL)
_AFTER_NAME = Marks.of(
    *(ARGS, "[CALL_ID]", "<｜tool▁sep｜>", "<|tool_call_argument_begin|>", ":", FENCE, "{", "("),
    *(ARG_KEY, "</tool_call>"),
)
_VALUES, _LITERALS = frozenset("\"'[{-+.0123456789"), frozenset(("true", "false", "null", *PYTHON))
_IN_LIST, _NEXT_ARGUMENT, _EQUALS = Marks.of(",", "]"), Marks.of(",", ")"), Marks.of("=")
_INFO, _NAME = re.compile(r"[A-Za-z_+-]+"), re.compile(r"[A-Za-z0-9_.-]+")
_DIGITS, _ID, _WORD = re.compile(r"[0-9]+"), re.compile(r"[A-Za-z0-9]+"), re.compile(r"[A-Za-z0-9_]+")
_MAX_KEY = 200  # characters of a parameter's name
_MAX_FRAMES = 2 * MAX_DEPTH  # objects and lists around a call

Calls = Generator[None, None, list[Event] | None]


@incremental
def tool_calls(
    scan: Scanner, schemas: Schemas, kinds_of: Callable[[str], Mapping[str, Kinds]] | None = None
) -> Iterator[Event | None]:
    """Tool calls, with text around them. Blanks around a call belong to it; a call is emitted when it is complete.

    schemas: of the offered tools; if empty, any name after an opening mark is a tool's. kinds_of: the JSON types of a
    tool's arguments.
    """
    read_kinds = kinds_of or cache(lambda name: argument_kinds(schemas.get(name, {})))
    bodies = Marks.of(*_BODIES, *(name + ARGS for name in schemas))
    after = Marks.of(*_BODIES, *(name + ARGS for name in schemas), *CLOSERS, *_STRAY)
    shown = _Shown()
    fenced = False  # a fence that does not begin with a call is open
    while True:
        text, mark = scan.until(bodies)
        yield from shown.content(text)
        if mark is None:
            if scan.ended:
                yield from shown.end()
                return
            yield None
            continue
        before = ""  # between two calls
        while mark:  # calls that follow one another
            reader = _Reader(scan, schemas, read_kinds, fenced=fenced, held=[before, mark])
            if mark == FENCE and fenced:
                events, fenced = None, False
            elif mark in ("{", "[") and (fenced or shown.is_code):
                events = None
                reader.begin_json()
            else:
                events = yield from reader.calls(mark, bodies)
                fenced = reader.fenced
            if events is None:
                yield from shown.content("".join(reader.held))
                yield from _other_json(scan, reader.value, shown)
                break
            shown.call()
            yield from events
            held: list[str] = []
            while True:
                mark = yield from next_mark(scan, after, held)
                if mark in CLOSERS or (mark == FENCE and fenced):
                    fenced = fenced and mark != FENCE
                    held.clear()
                elif mark not in _STRAY:
                    break
            before = "".join(held).removesuffix(mark)
            if not mark and not (scan.ended and not scan.peek()):
                yield from shown.content(before)


def _other_json(scan: Scanner, value: JsonValue | None, shown: _Shown) -> Iterator[Event | None]:
    """The rest of a value that is not a call: no call begins within it. A line break in a string ends it."""
    while value is not None and value.is_open:
        if piece := value.step(scan):
            yield from shown.content(piece)
            if piece == "\n" and value.before == "string":
                return
        elif value.is_open:
            yield None


class _Shown:
    """Content without the blanks around calls."""

    def __init__(self) -> None:
        self._last = ""  # character that is not blank; empty after a call
        self._blanks: list[str] = []  # those that may belong to a following call
        self._after_call = False  # nothing but blanks since a call

    @property
    def is_code(self) -> bool:
        """Whether JSON that follows is part of a text about it, as in `x = {...}` or a quotation."""
        return self._last in _CODE or (self._last in _QUOTES and not any(self._blanks))

    def content(self, text: str) -> Iterator[Event]:
        if self._after_call:
            text = text.lstrip()
        shown = text.rstrip()
        if shown:
            yield Content("".join([*self._blanks, shown]))
            self._blanks.clear()
            self._after_call, self._last = False, shown[-1]
        if not self._after_call:
            self._blanks.append(text[len(shown) :])

    def call(self) -> None:
        """A call follows."""
        self._blanks.clear()
        self._after_call, self._last = True, ""

    def end(self) -> Iterator[Event]:
        if blanks := "".join(self._blanks):
            yield Content(blanks)


@dataclass(slots=True)
class _Reader:
    """Reads a group of calls from one opening mark on.

    fenced: whether a fence is open. held: what was taken. value: the JSON value that was begun last.
    """

    scan: Scanner
    schemas: Schemas
    kinds_of: Callable[[str], Mapping[str, Kinds]]
    fenced: bool
    held: list[str]
    value: JsonValue | None = None

    def calls(self, mark: str, bodies: Marks) -> Calls:
        """The events of the calls; None if it is something else, of which `held` and the rest of `value` are part."""
        is_marked = False  # the model says that it is a call
        while mark in _OPENERS or (mark == FENCE and not self.fenced):
            is_marked = is_marked or mark != FENCE
            if mark == FENCE:
                self.fenced = True
                is_marked = (yield from self._run(_INFO)) in _FENCES_OF_CALLS or is_marked
            mark = yield from self.next_mark(bodies)
        if not (is_marked or self.schemas):  # no name makes it a call
            if mark in ("{", "["):
                self.begin_json()
            return None
        if mark in HEADS:
            return (yield from self._function(mark))
        if mark == "[":
            return (yield from self._list(is_marked=is_marked))
        if mark == "{":
            while not self.scan.peek() and not self.scan.ended:
                yield None
            if (
                self.scan.peek() == "{"
            ):  # some models write two, as templates do; `tool_calls` drops the second end
                self.held.append(self.scan.take(1))
            return (yield from self._json(is_marked=is_marked))
        if mark.endswith(ARGS):
            return (yield from self._arguments(mark.removesuffix(ARGS)))
        if mark == FENCE:
            self.fenced = False
        return (yield from self._named()) if is_marked and not mark else None

    def begin_json(self) -> JsonValue:
        """A JSON value that begins with the last mark."""
        self.scan.put_back(self.held.pop())
        self.value = JsonValue()
        return self.value

    def next_mark(self, marks: Marks) -> Generator[None, None, str]:
        return next_mark(self.scan, marks, self.held)

    def _run(self, pattern: re.Pattern[str], most: int = MAX_CALL) -> Generator[None, None, str]:
        """Take all that a pattern of characters matches, and a little more than `most` of them at the most."""
        found = ""
        while True:
            found += (more := self.scan.run(pattern))
            self.held.append(more)
            if len(found) > most or self.scan.peek() or self.scan.ended:
                return found
            yield None

    def _name(self, pattern: re.Pattern[str] = _NAME) -> Generator[None, None, str]:
        """Take a name; empty if it is not, or cannot become, that of a tool."""
        found = ""
        while True:
            found += (more := self.scan.run(pattern))
            self.held.append(more)
            if self.scan.peek() or self.scan.ended or not self._may_be_tool(found):
                name = found.strip(" \"'").removesuffix(".call")
                return name if name in self.schemas or not self.schemas else ""
            yield None

    def _may_be_tool(self, beginning: str) -> bool:
        beginning = beginning.lstrip(" \"'").rstrip(" \"'>").removesuffix(".call")
        return len(beginning) <= _MAX_KEY and (
            not self.schemas
            or any(name.startswith(beginning) or beginning.startswith(name + ".") for name in self.schemas)
        )

    # ---- JSON

    def _json(self, *, is_marked: bool) -> Calls:
        """A call in JSON, or a list of calls."""
        value = self.begin_json()
        if not (yield from self._take(value, lambda: self._is_other(value, is_marked=is_marked))):
            return None
        return json_calls(value.text(), self.schemas, bare=value.is_broken or not is_marked)

    def _take(
        self, value: JsonValue, is_other: Callable[[], bool] | None = None
    ) -> Generator[None, None, bool]:
        """Take a value to its end, or to where nothing but closing brackets is missing. False for anything else.

        is_other: for a value that holds calls, whether it turned out not to.
        """
        size = 0
        while value.is_open:
            if piece := value.step(self.scan):
                self.held.append(piece)
                if (size := size + len(piece)) > MAX_CALL or (is_other is not None and is_other()):
                    return False
            elif value.is_open:
                yield None
        if not value.is_broken:
            return True
        if value.before != "end":
            return False
        if self.scan.ended and not self.scan.peek():  # a token limit may have cut off more arguments
            return is_other is not None and len(_path(value)) <= 1
        place = len(self.held)
        mark = yield from self.next_mark(END)
        self.scan.put_back("".join(self.held[place:]))
        del self.held[place:]
        return bool(mark) and (mark != FENCE or self.fenced)

    def _is_other(self, value: JsonValue, *, is_marked: bool) -> bool:
        """Whether what was read of a value shows that it is not a call."""
        path = _path(value)
        if len(value.frames) > _MAX_FRAMES:
            return len(path) <= 1
        if not path or len(path) > 1 or value.before in ("value", "key"):
            return not path and bool(value.frames) and bool(value.string)
        is_whole, text = value.before not in ("string", "literal"), value.string
        known: tuple[str, ...]
        if value.is_key and is_marked:  # the key may be the name of a tool
            known = (*NAMES, *ARGUMENTS, *ABOUT, *WRAPPERS, *self.schemas) if self.schemas else ()
        elif value.is_key:
            known = (*NAMES, *ARGUMENTS, *ABOUT, *WRAPPERS)
        elif path[0] in NAMES and value.string:
            known = tuple(self.schemas)
        else:
            return False
        return bool(known) and not (
            text in known if is_whole else any(each.startswith(text) for each in known)
        )

    # ---- names before arguments

    def _named(self) -> Calls:
        """A name, separators, and the arguments in JSON or in Python."""
        marked = (yield from self.next_mark(_BEFORE_NAME)) == _CALL
        name = yield from self._name()
        if not name:
            return None
        while True:
            mark = yield from self.next_mark(_AFTER_NAME)
            if mark == "{":
                self.scan.put_back(self.held.pop())
                return (yield from self._arguments(name, marked=marked))
            if mark == "(":
                return (yield from self._python(name))
            if mark == ARG_KEY:
                return (yield from self._parameters(name, GLM))
            if mark == "</tool_call>":
                return call_events(name, "{}") if self.schemas else None
            if mark == FENCE:
                self.fenced = True
                yield from self._run(_INFO)
            elif mark:
                yield from self._run(_DIGITS if mark == ":" else _ID if mark == "[CALL_ID]" else BLANKS)
            else:
                return None

    def _arguments(self, name: str, *, marked: bool = False) -> Calls:
        """The arguments as an object. marked: in Gemma 4's form."""
        yield from self._run(BLANKS)
        value = self.value = JsonValue(marked=marked)
        if not (yield from self._take(value)):
            return None
        text = value.text().strip()
        return call_events(name, text) if text.startswith("{") else None

    def _list(self, *, is_marked: bool) -> Calls:
        """A list of calls, in JSON or in Python."""
        begin = len(self.held) - 1
        yield from self._run(BLANKS)
        if not (char := self.scan.peek()).isalpha() and char != "_":
            self.scan.put_back("".join(self.held[begin + 1 :]))
            del self.held[begin + 1 :]
            return (yield from self._json(is_marked=is_marked))
        found: list[Event] = []
        while True:
            yield from self._run(BLANKS)
            name = yield from self._name()
            if not name or self.scan.peek() != "(":
                return None
            self.held.append(self.scan.take(1))
            events = yield from self._python(name)
            mark = (yield from self.next_mark(_IN_LIST)) if events is not None else ""
            if events is None or not mark:
                return None
            found += events
            if mark == "]":
                return found

    def _python(self, name: str) -> Calls:
        """The arguments of a call in Python, whose opening bracket was taken. Those without a name have the names of
        the schema's properties, in their order."""
        members: dict[str, str] = {}
        properties = self.schemas.get(name, {}).get("properties")
        names = list(properties) if isinstance(properties, Mapping) else []
        places = 0  # arguments without a name
        while True:
            mark = yield from self.next_mark(_NEXT_ARGUMENT)
            if mark == ")":
                return call_events(name, "{" + ", ".join(f"{k}: {v}" for k, v in members.items()) + "}")
            if bool(mark) != bool(members):
                return None
            yield from self._run(BLANKS)
            if mark and self.scan.peek() == ")":
                continue
            key = yield from self._key()
            if key is None:
                return None
            if not key:
                if places != len(members) or places == len(names):
                    return None
                key, places = names[places], places + 1
            if (key := json.dumps(key, ensure_ascii=False)) in members:
                return None
            yield from self._run(BLANKS)
            value = JsonValue()
            if not (yield from self._take(value)) or value.is_broken:
                return None
            while not self.scan.peek() and not self.scan.ended:
                yield None
            if value.reopens(self.scan):
                self.held.append(self.scan.take(1))
                if not (yield from self._take(value)) or value.is_broken:
                    return None
            members[key] = value.text()

    def _key(self) -> Generator[None, None, str | None]:
        """The name of an argument in Python, with the sign after it; empty if it has none, None if no argument."""
        if self.scan.peek() in _VALUES:
            return ""
        begin = len(self.held)
        key = yield from self._run(_WORD, _MAX_KEY)
        if not key:
            return None
        if (yield from self.next_mark(_EQUALS)):
            return key
        if key not in _LITERALS:
            return None
        self.scan.put_back("".join(self.held[begin:]))
        del self.held[begin:]
        return ""

    # ---- tags

    def _function(self, mark: str) -> Calls:
        """A call whose arguments are JSON, or text in tags."""
        head, tags = mark, DEEPSEEK if mark.startswith(DSML) else QWEN
        name = yield from self._attribute(is_tool=True)
        if name is None:
            return None
        mark = yield from self.next_mark(tags.in_head)
        if mark == "{":
            self.scan.put_back(self.held.pop())
            return (yield from self._arguments(name))
        if mark not in tags.opens:
            return call_events(name, "{}") if mark else None
        own_lines = True if head == "<function=" else None if tags is QWEN else False
        return (yield from self._parameters(name, tags, own_lines=own_lines))

    def _parameters(self, name: str, tags: Tags, *, own_lines: bool | None = False) -> Calls:
        """A call whose arguments are text in tags; the first opening tag was taken. own_lines: see
        `tagged_arguments`."""
        values: dict[str, str] = {}
        schema, kinds = self.schemas.get(name, {}), self.kinds_of(name)
        known = kinds if kinds and schema.get("additionalProperties") is False else None
        key = yield from self.parameter(tags)
        while key is not None:
            read = yield from TaggedValue(self, tags, {*values, key}, kinds.keys(), known).read(key)
            if read is None:
                return None
            found, key = read
            values.update(found)
        return call_events(name, tagged_arguments(values, kinds, own_lines=own_lines)) if values else None

    def parameter(self, tags: Tags) -> Generator[None, None, str | None]:
        """The name of a parameter whose opening tag was taken, with all up to its value; None if it is none."""
        if not tags.between:
            return (yield from self._attribute())
        name = (yield from self._run(_IN_TAG, _MAX_KEY)).strip()
        for tag in tags.between:
            if not (yield from self.next_mark(tag)):
                return None
        return name or None

    def _attribute(self, *, is_tool: bool = False) -> Generator[None, None, str | None]:
        """What follows in a tag, with the end of the tag; None if it is not the name of a tool or parameter."""
        pattern = _IN_TAG
        if is_tool:
            name = yield from self._name(pattern)
        else:
            name = (yield from self._run(pattern, _MAX_KEY)).strip(" \"'").partition('"')[0]
        if not name or self.scan.peek() != ">":
            return None
        self.held.append(self.scan.take(1))
        return name

    def after_head(self, mark: str, tags: Tags) -> Generator[None, None, str]:
        """The tag after a tag in a value, if they begin a call as `<function=NAME>` and a parameter or an end do."""
        if tags is GLM:
            yield from self._run(BLANKS)
            yield from self._run(_NAME, _MAX_KEY)
            return (yield from self.next_mark(tags.in_head))
        if mark == TOOL_CALL:
            mark = yield from self.next_mark(_HEADS)
        if not mark or (yield from self._attribute()) is None:
            return ""
        return (yield from self.next_mark(tags.in_head))


_IN_TAG = re.compile(r"[^<>\n]+")
_HEADS = Marks.of(*HEADS)


def _path(value: JsonValue) -> list[str]:
    """The keys down to a value's place, without lists and members that hold calls around it."""
    keys = [frame.key or "" for frame in value.frames[:_MAX_FRAMES] if frame.close == "}"]
    outer = 0
    while outer < len(keys) - 1 and keys[outer] in WRAPPERS:
        outer += 1
    return keys[outer:]
