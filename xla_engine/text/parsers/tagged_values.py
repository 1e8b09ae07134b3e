"""Parameters of tool calls whose values are text between tags, as Qwen3-Coder and GLM write them."""

from __future__ import annotations

from collections.abc import Container, Generator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from xla_engine.text.parsers.scan import Marks, Scanner

WORDS = (
    *("tool_call", "tool_calls", "toolcall", "TOOLCALL", "tool", "tools", "function", "functions"),
    *("function_call", "function_calls", "response", "json", "xml"),
)
FENCE = "```"
DSML = "<｜DSML｜"  # what tags of DeepSeek V3.2 and later begin with
_DSML_END = "</｜DSML｜"
HEADS = ("<function=", "<function name=", "<invoke name=", "<tool_call name=", DSML + "invoke name=")
TOOL_CALL, ARG_KEY = "<tool_call>", "<arg_key>"
CLOSERS = frozenset(
    {
        *(form.format(word) for word in WORDS for form in ("</{}>", "<|/{}|>", "<|{}_end|>")),
        *("</invoke>", "[/TOOL_CALLS]", "[/TOOL_CALL]", "<|END_ACTION|>", "<|eom_id|>", "<|eot_id|>"),
        *("<|tool_calls_section_end|>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>", "<|call|>"),
        *("<tool_call|>", "<|tool_response>", "<|tools_suffix|>", "</minimax:tool_call>"),
        *(_DSML_END + word for word in ("invoke>", "function_calls>", "tool_calls>")),
    }
)
END = Marks.of(*CLOSERS, FENCE)


@dataclass(frozen=True, slots=True)
class Tags:
    """How a form writes parameters whose values are text between tags.

    opens: what a parameter's name follows. ends: of a value. call_ends: of a call whose last value has no end. heads:
    what a call may begin with. between: the tags between a parameter's name and its value; empty: the name is in the
    opening tag. The other marks follow from these: what may matter in a value, after it, and after a call's name.
    """

    opens: tuple[str, ...]
    ends: tuple[str, ...]
    call_ends: tuple[str, ...]
    heads: tuple[str, ...]
    in_value: Marks
    after_value: Marks
    in_head: Marks
    between: tuple[Marks, ...] = ()

    @classmethod
    def of(
        cls,
        opens: tuple[str, ...],
        ends: tuple[str, ...],
        call_ends: tuple[str, ...],
        heads: tuple[str, ...],
        between: tuple[str, ...] = (),
    ) -> Tags:
        return cls(
            opens,
            ends,
            call_ends,
            heads,
            in_value=Marks.of(*opens, *ends, *call_ends, *heads),
            after_value=Marks.of(*opens, *CLOSERS),
            in_head=Marks.of(*opens, *CLOSERS, "{"),
            between=tuple(map(Marks.of, between)),
        )


QWEN = Tags.of(
    opens=("<parameter=", "<parameter name=", "<param name=", "<param="),
    ends=("</parameter>", "</param>"),
    call_ends=("</function>", "</invoke>"),
    heads=(*HEADS, TOOL_CALL),
)
DEEPSEEK = Tags.of(
    opens=(DSML + "parameter name=",),
    ends=(_DSML_END + "parameter>",),
    call_ends=(_DSML_END + "invoke>",),
    heads=(DSML + "invoke name=",),
)
GLM = Tags.of(
    opens=(ARG_KEY,),
    ends=("</arg_value>",),
    call_ends=("</tool_call>",),
    heads=(TOOL_CALL,),
    between=("</arg_key>", "<arg_value>"),
)


class TagReader(Protocol):
    """What reads an answer, and the tags that may follow a value. held: what was taken."""

    scan: Scanner
    held: list[str]

    def next_mark(self, marks: Marks) -> Generator[None, None, str]:
        """Take blanks and the mark that follows them; empty if none does."""
        ...

    def parameter(self, tags: Tags) -> Generator[None, None, str | None]:
        """The name of a parameter whose opening tag was taken, with all up to its value; None if it is none."""
        ...

    def after_head(self, mark: str, tags: Tags) -> Generator[None, None, str]:
        """The tag after the mark `mark`, if they begin a call; empty if they do not."""
        ...


@dataclass(slots=True)
class TaggedValue:
    """Reads a value in tags: any text, to a closing tag that is followed by another parameter or the end of the call.

    The value may even hold whole calls. So a call ends only when another begins, or the text ends, before another
    closing tag; what follows is put back.

    Models leave closing tags out, so two more things end a value without one in it: a parameter of the tool that was
    not given yet, and the end of the call before another call or the end of the text; each at the beginning of a line.

    given: the names of this and earlier parameters. properties: those of the tool's schema. known: the names that may
    come, if others may not.
    """

    reader: TagReader
    tags: Tags
    given: Container[str]
    properties: Container[str]
    known: Container[str] | None
    starts: dict[str, tuple[int, int]] = field(
        default_factory=dict
    )  # parameters in it: where the tag begins and ends
    has_ends: bool = False  # the value so far holds closing tags
    has_text: bool = False  # other than blanks
    begins_line: bool = False  # nothing but blanks since a line break
    seen: int = 0  # pieces of `held` that the last two are about

    def read(self, key: str) -> Generator[None, None, tuple[dict[str, str], str | None] | None]:
        """The value, with those of parameters that began in it, and the next parameter's name, or None after the last;
        None if the value does not end."""
        reader, tags = self.reader, self.tags
        scan, held = reader.scan, reader.held
        in_value, after_value = tags.in_value, tags.after_value
        begin = self.seen = len(held)
        end: tuple[int, int] | None = None  # of the value and of the call, if it ends there
        inner = unclosed = end  # the same for a call within the value, and without a closing tag
        starts = self.starts  # in the value, if it ends there
        depth = 0  # calls within the value that have not ended
        while True:
            piece, mark = scan.until(in_value)
            held.append(piece)
            if piece.strip():
                unclosed = None
            if mark is None and not scan.ended:
                yield None
                continue
            if mark in tags.ends:
                place = len(held)
                held.append(mark)
                following = yield from reader.next_mark(after_value)
                if following in tags.opens:
                    name = yield from reader.parameter(tags)
                    is_new = name is not None and name not in self.given
                    if is_new and not depth and (self.known is None or name in self.known):
                        return self._values(
                            key, begin, place, {} if name in self.starts else self._starts()
                        ), name
                elif following or (scan.ended and not scan.peek()):
                    if depth:
                        depth, inner = depth - 1, (place, len(held))
                    else:
                        end, starts = (place, len(held)), self._starts()
                self.has_ends = self.has_ends or not depth
                unclosed = None
            elif mark in tags.opens or mark in tags.call_ends:
                self._look()
                place, may_end = (
                    len(held),
                    self.begins_line and self.has_text and not (depth or self.has_ends),
                )
                held.append(mark)
                if mark in tags.call_ends:
                    while (yield from reader.next_mark(END)):
                        pass
                    unclosed = (unclosed or (place, len(held))) if may_end else None
                    continue
                name = yield from reader.parameter(tags)
                if may_end and name in self.properties and name not in self.given:
                    self.starts.setdefault(str(name), (place, len(held)))
                unclosed = None
            else:
                if mark is not None:
                    held.append(mark)
                    following = yield from reader.after_head(mark, tags)
                    if not following:
                        unclosed = None
                        continue
                    if end is None and unclosed is None:
                        depth += following in tags.opens
                        continue
                if end is None and unclosed is not None:
                    end, starts = unclosed, self._starts()
                if (end := end or inner) is None:
                    return None
                found = self._values(key, begin, end[0], starts)
                scan.put_back("".join(held[end[1] :]))
                del held[end[1] :]
                return found, None

    def _look(self) -> None:
        """Look at the pieces that were taken since the last time."""
        held = self.reader.held
        for piece in held[self.seen :]:
            _, line_break, line = piece.rpartition("\n")
            self.begins_line = (self.begins_line or bool(line_break)) and not line.strip()
            self.has_text = self.has_text or (not piece.isspace() and bool(piece))
        self.seen = len(held)

    def _starts(self) -> dict[str, tuple[int, int]]:
        """The parameters that began in the value so far, if closing tags are missing."""
        return {} if self.has_ends else dict(self.starts)

    def _values(
        self, key: str, begin: int, end: int, starts: Mapping[str, tuple[int, int]]
    ) -> dict[str, str]:
        """The values between two places. starts: of parameters between them."""
        held = self.reader.held
        firsts = {key: begin, **{name: after for name, (_, after) in starts.items()}}
        lasts = [*(place for place, _ in starts.values()), end]
        return {
            name: "".join(held[first:last]) for (name, first), last in zip(firsts.items(), lasts, strict=True)
        }
