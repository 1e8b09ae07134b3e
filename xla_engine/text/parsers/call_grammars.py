r"""Grammars of answers with tool calls, in llguidance's Lark.

The answer to a chat is free or has a format, and the calls in it fit the schemas of strict tools. A grammar describes
the text in the form that models of a dialect are trained to write, special tokens included (`<|python_tag|>`,
`<[TOOL_CALLS]>`). Blanks, the order of `name` and `arguments`, and the order of parameters in tags are free.

llguidance splits a text into terminals, the longest first. So where free text and a call may both come, the terminals
of both run over the same text up to where they differ: free text is lazy and ends where a call begins.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from xla_engine.structured_outputs import MAX_CONSTRAINT_CHARACTERS, StructuredOutputsParams
from xla_engine.text.parsers.gemma_grammar import COMMON as GEMMA
from xla_engine.text.parsers.gemma_grammar import GemmaRules
from xla_engine.text.parsers.kinds import ANY, Kinds, argument_kinds
from xla_engine.text.parsers.parameter_bits import MOST, all_set
from xla_engine.text.parsers.thoughts import Thought
from xla_engine.utils.json_size import is_longer


class Offer(Protocol):
    """The tools of a request. schemas: of each tool's arguments, by its name. strict: whose calls must fit them."""

    @property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]: ...

    @property
    def strict(self) -> frozenset[str]: ...


# Masks allow every spelling of what must follow, so that a call that fits stays as the model writes it.
_FREE_SPELLING = '%llguidance {"no_forcing": true}\n'
_MOST = f"at most {MAX_CONSTRAINT_CHARACTERS} characters are held"
_logger = logging.getLogger(__name__)
_FREE_OBJECT = {"type": "object", "additionalProperties": True}

_COMMON = r"""
WS: /[ \t\n\r]+/
TEXT: /(.|\n)+/
STRING: /"([^"\\]|\\.)*"/
ARGUMENTS: /"(arguments|parameters)"/
about: /"(id|type|index|call_id|tool_call_id)"/ WS? ":" WS? (STRING | /[0-9]+/)
json_call: "{" WS? (about WS? "," WS?)* pair (WS? "," WS? about)* WS? "}"
json_list: "[" WS? json_call (WS? "," WS? json_call)* WS? "]"
"""


def calls_grammar(
    tools: Offer,
    dialect: str | None,
    answer: StructuredOutputsParams | None = None,
    *,
    thought: Thought | None = None,
    begun: bool = False,
) -> StructuredOutputsParams | None:
    """The constraint of an answer that may have calls in the form of a dialect.

    answer: the format of an answer without calls, a schema; None if any text is one. thought: the tags around
    reasoning, if the model reasons; with a format, the reasoning that comes before it is free. begun: the answer
    begins inside reasoning.

    Returns None if nothing can be held: no strict tool and no format, a dialect without a grammar, or a format that is
    no schema.
    """
    if is_longer(tools.schemas, MAX_CONSTRAINT_CHARACTERS):
        _logger.warning("tools: strict is left out, because the schemas are too long; %s", _MOST)
        return None
    write = _DIALECTS.get(dialect or "", _no_calls) if tools.schemas else _no_calls
    if dialect == "harmony":
        write, thought = _harmony, None
    held = None if answer is None else _answer(answer)
    if held is None:
        if answer is not None or write is _no_calls or not tools.strict:
            return None
        grammar = _FREE_SPELLING + write(tools, None)
    elif write is _no_calls and thought is None:
        return None
    else:
        grammar = f"{write(tools, held)}\nanswer: {held}\n"
        if thought is not None:
            grammar = grammar.replace("start: ", _thought(thought, begun=begun), 1)
    if len(grammar) > MAX_CONSTRAINT_CHARACTERS:
        _logger.warning(
            "tools: strict is left out, because the schemas make a grammar of %d characters; %s",
            len(grammar),
            _MOST,
        )
        return None
    return StructuredOutputsParams(grammar=grammar)


def _thought(tags: Thought, *, begun: bool) -> str:
    """What comes before the rule `body`. The tags may be tokens or text. begun: the answer begins inside reasoning."""
    opening, closing = (re.escape(tag).replace("/", r"\/") for tag in (tags.opening, tags.closing))
    open_token, close_token = map(_as_token, (tags.opening, tags.closing))
    if begun:
        return rf"""start: (thought | TEXT? {close_token}) WS? body
thought[lazy]: /(.|\n)*{closing}/
body: """
    return rf"""start: ((thought | {open_token} TEXT? {close_token}) WS?)? body
thought[lazy]: /\s*{opening}(.|\n)*{closing}/
body: """


def _as_token(tag: str) -> str:
    """A tag as the token that it begins with, and text after it."""
    token, end, rest = tag.partition(">")
    named = f"{token}{end}" if tag.startswith("<") else f"<{tag}>"
    return f"{named} {_quoted(rest)}" if rest and tag.startswith("<") else named


def _no_calls(_: Offer, answer: str | None) -> str:
    return f"start: answer\n{_COMMON_TEXT}"


def forced_call(tools: Offer) -> StructuredOutputsParams:
    """The constraint of an answer that is one call of any tool: {"name":"...","arguments":{...}}."""
    compact = {"whitespace_flexible": False}
    calls = []
    for name, schema in tools.schemas.items():
        head = '{"name":' + json.dumps(name) + ',"arguments":'
        calls.append(f'{_quoted(head)} {_schema(name, schema, compact)} "}}"')
    return StructuredOutputsParams(grammar="start: " + "\n  | ".join(calls) + "\n")


def _answer(answer: StructuredOutputsParams) -> str | None:
    """The schema of a format; None if it is none."""
    schema: Any = {"type": "object"} if answer.json_object else answer.json
    try:
        schema = json.loads(json.dumps(schema))
    except (ValueError, TypeError, RecursionError):
        return None  # by itself it is refused with the reason
    if not isinstance(schema, dict):
        return None
    guidance = {"whitespace_flexible": not answer.disable_any_whitespace}
    return f"%json {json.dumps({**schema, 'x-close': True, 'x-guidance': guidance})}"


_ANY_ESCAPES = {"json_allow_general_unicode_escapes": True}  # of characters that need none


def _schema(name: str, schema: Mapping[str, Any], guidance: Mapping[str, Any] = _ANY_ESCAPES) -> str:
    """The arguments of a tool. `x-tool` is whose they are: if the schema is invalid, other tools go on."""
    return f"%json {json.dumps({**schema, 'x-tool': name, 'x-guidance': guidance})}"


def _arguments(tools: Offer) -> Iterator[str]:
    """A rule for the arguments of each tool; those of tools that are not strict are any object."""
    for number, (name, schema) in enumerate(tools.schemas.items()):
        yield f"arguments_{number}: {_schema(name, schema if name in tools.strict else _FREE_OBJECT)}\n"


def _json_rules(tools: Offer) -> str:
    """Rules for calls in JSON of all tools: `json_call` and `json_list`."""
    pairs = []
    for number, name in enumerate(tools.schemas):
        named = f'/"name"/ WS? ":" WS? {_quoted(json.dumps(name))}'
        arguments = f'ARGUMENTS WS? ":" WS? arguments_{number}'
        pairs += [f'{named} WS? "," WS? {arguments}', f'{arguments} WS? "," WS? {named}']
    return _COMMON + "".join(_arguments(tools)) + "pair: " + "\n  | ".join(pairs) + "\n"


def _free_rules(tools: Offer, tag: str = "") -> str:
    """Rules for text with slips: bare calls of strict tools in JSON, wherever they stand, fit their schemas.

    `free` is all of such a text; `slip` is text up to the end of a bare call, or of an object with another name; REST
    is text without either. tag: what REST does not have either.
    """
    names = [name for name in tools.schemas if name in tools.strict]
    either = "|".join(map(re.escape, names))
    tails = []
    for number, name in enumerate(tools.schemas):
        if name in tools.strict:
            arguments = f'ARGUMENTS WS? ":" WS? arguments_{number} (WS? "," WS? about)* WS? "}}"'
            tails.append(f'{_quoted(name + chr(34))} WS? ("}}" | "," WS? (OTHER_KEY | {arguments}))')
    head = r'\{\s*"name"\s*:\s*"'
    without = "".join(rf" & ~/(.|\n)*{each}(.|\n)*/" for each in (head, tag) if each)
    return rf"""
free: slip* REST?
slip: head (OTHER_NAME | {" | ".join(tails)})
head[lazy]: /(.|\n)*{head}/
OTHER_NAME: /([^"\\]|\\.)*"/ & ~/({either})"/
OTHER_KEY: /"([^"\\]|\\.)*"/ & ~/"(arguments|parameters)"/
REST: /(.|\n)+/{without}
"""


# Calls without tags that stand in place of an answer with a format.
_SLIPS = '(json_list | json_call | "```json" WS? (json_list | json_call) WS? "```") WS?'


def _hermes(tools: Offer, answer: str | None) -> str:
    """Calls between `<tool_call>` and its closing tag, which the last may lack."""
    call = '"<tool_call>" WS? json_call WS?'
    if answer is not None:
        start = f'start: answer | {_SLIPS} | WS? ({call} "</tool_call>" WS?)* {call} ("</tool_call>" WS?)?\n'
        return start + _json_rules(tools)
    start = r"""start: (slip | opened WS? json_call WS? "</tool_call>")* (REST | opened WS? json_call WS?)?
opened[lazy]: /(.|\n)*<tool_call>/
"""
    return start + _free_rules(tools, "<tool_call>") + _json_rules(tools)


def _mistral(tools: Offer, answer: str | None) -> str:
    named = [
        f"{_quoted(name)} WS? (<[CALL_ID]> WS? /[A-Za-z0-9]+/ WS?)? <[ARGS]> WS? arguments_{number}"
        for number, name in enumerate(tools.schemas)
    ]
    calls = "(<[TOOL_CALLS]> WS? call WS?)"
    start = (
        f"start: answer | {_SLIPS} | {calls}+\n"
        if answer is not None
        else f"start: free {calls}*\n" + _free_rules(tools)
    )
    return start + "call: json_list | json_call | " + "\n  | ".join(named) + "\n" + _json_rules(tools)


def _bare(tools: Offer, answer: str | None, mark: str | None = None) -> str:
    """Calls in JSON from a mark on, or by themselves. mark: a token."""
    calls = 'json_list | json_call (WS? ";" WS? json_call)*'
    marked = f"{mark} WS? ({calls}) WS?"
    if answer is not None:
        start = f"start: answer | ({calls}) WS?" + (f" | {marked}" if mark else "") + "\n"
        return start + _json_rules(tools)
    # other text after the mark, such as code, is no call
    after = rf" ({marked} | {mark} /[^\s{{\[](.|\n)*/)?" if mark else ""
    return f"start: free{after}\n" + _free_rules(tools) + _json_rules(tools)


@dataclass(frozen=True, slots=True)
class _Marks:
    """The marks around calls, which are special tokens of some tokenizers and text of others.

    begin, end: of all calls. call, ended: of one call. between: what follows the name.
    """

    begin: str
    end: str
    call: str
    ended: str
    between: str

    def rules(self) -> str:
        """A rule for each mark but the first: `calls_end`, `call_begin`, `call_end` and `between`."""
        marks = (
            ("calls_end", self.end),
            ("call_begin", self.call),
            ("call_end", self.ended),
            ("between", self.between),
        )
        return "".join(f"{name}: {mark} | {_quoted(mark)}\n" for name, mark in marks)


_DEEPSEEK = _Marks(
    *(
        f"<\uff5ctool\u2581{name}\uff5c>".replace(" ", "\u2581")
        for name in ("calls begin", "calls end", "call begin", "call end", "sep")
    )
)
_KIMI = _Marks(
    *(
        f"<|tool_call{name}|>"
        for name in ("s_section_begin", "s_section_end", "_begin", "_end", "_argument_begin")
    )
)


def _deepseek(tools: Offer, answer: str | None) -> str:
    """Calls of DeepSeek V3 (the arguments in a fence) and V3.1."""
    calls = []
    for number, name in enumerate(tools.schemas):
        arguments = f"WS? arguments_{number} WS?"
        calls += [
            f'"function" between {_quoted(name)} WS? "```json" {arguments} "```" WS?',
            f"{_quoted(name)} between {arguments}",
        ]
    return _marked(tools, answer, _DEEPSEEK, calls)


def _kimi_k2(tools: Offer, answer: str | None) -> str:
    """Calls named `functions.NAME:NUMBER`."""
    calls = [
        f"WS? {_quoted(f'functions.{name}:')} /[0-9]+/ WS? between WS? arguments_{number} WS?"
        for number, name in enumerate(tools.schemas)
    ]
    return _marked(tools, answer, _KIMI, calls)


def _gemma4(tools: Offer, answer: str | None) -> str:
    """Calls of Gemma 4, one after the other. After the last, the model may write the mark of a result."""
    calls, lines = [], list[str]()
    for number, (name, schema) in enumerate(tools.schemas.items()):
        rules = GemmaRules(name, number)
        arguments = rules.object(schema) if name in tools.strict else "gemma_object"
        calls.append(f"{_quoted(f'call:{name}')} WS? {arguments}")
        lines += rules.lines
    begin, end, result = (
        f"({each} | {_quoted(each)})" for each in ("<|tool_call>", "<tool_call|>", "<|tool_response>")
    )
    more = f"WS? call WS? {end} (WS? {begin} WS? call WS? {end})* WS? {result}?"
    start = _started_by("<|tool_call>", more, answer)
    return start + "call: " + "\n  | ".join(calls) + "\n" + "".join(lines) + GEMMA + _COMMON_TEXT


def _started_by(begin: str, calls: str, answer: str | None) -> str:
    """The rule `start`: calls from a mark on, a token or text, that come after other text or in place of an answer."""
    if answer is not None:
        return f"start: answer | WS? ({begin} | {_quoted(begin)}) {calls}\n"
    text = re.escape(begin).replace("/", r"\/")
    return rf"""start: REST? | (opened | REST? {begin}) {calls}
opened[lazy]: /(.|\n)*{text}/
REST: /(.|\n)+/ & ~/(.|\n)*{text}(.|\n)*/
"""


def _marked(tools: Offer, answer: str | None, marks: _Marks, calls: list[str]) -> str:
    """Calls between marks. calls: from the name to the arguments of each tool."""
    start = _started_by(marks.begin, "calls", answer)
    block = "calls: WS? (call_begin call call_end WS?)+ calls_end WS?\n" + marks.rules()
    return start + block + "call: " + "\n  | ".join(calls) + "\n" + _COMMON_TEXT + "".join(_arguments(tools))


_COMMON_TEXT = "\n".join(line for line in _COMMON.splitlines() if line.startswith(("WS:", "TEXT:"))) + "\n"
_HARMONY = r"""
marked: (PLAIN? (<|channel|> | <|constrain|> | <|start|>))*
end: <|end|> | <|call|> | <|return|>
to[lazy]: /(.|\n)*to=functions\./
PLAIN: /(.|\n)+/ & ~/(.|\n)*to=functions\.(.|\n)*/
MORE: /[^A-Za-z0-9_.\-](.|\n)*/
ANALYSIS: /\s*analysis\s*/
FINAL: /\s*final\s*/
ASSISTANT: /\s*assistant\s*/
"""


def _harmony(tools: Offer, answer: str | None) -> str:
    """Messages in channels, of which those to functions are calls. The first begins after its role."""
    calls = [
        f"{_quoted(name)} MORE? ((<|channel|> | <|constrain|>) PLAIN?)* <|message|> WS? arguments_{number} WS?"
        for number, name in enumerate(tools.schemas)
    ]
    call = f"call: marked to ({' | '.join(calls)})\n" if calls else ""
    if answer is None:
        message = "marked PLAIN? <|message|> TEXT?" + (" | call" if calls else "")
        start = f"start: message (end+ message)* end*\nmessage: {message}\n"
    else:
        thought = "<|channel|> ANALYSIS <|message|> TEXT? <|end|> <|start|> ASSISTANT"
        final = "<|channel|> FINAL (<|constrain|> PLAIN?)? <|message|> answer"
        start = f"start: ({thought})* ({final}{' | call (end+ call)*' if calls else ''}) end*\n"
    return start + call + _HARMONY + _COMMON_TEXT + "".join(_arguments(tools))


@dataclass(frozen=True, slots=True)
class _Tagged:
    """How a dialect writes parameters whose values are text between tags, as terms of a rule.

    opens: what comes before the value of a parameter whose name stands for `{}`. any_: the same for any name. close:
    what ends a value. around: expression of the line breaks that may surround a value and are not part of it.
    """

    opens: str
    any_: str
    close: str
    around: str

    def any_parameter(self) -> str:
        """The rules `any_parameter`, and `text` for a value that is text, with what ends it."""
        end = self.close.replace("/", r"\/")
        return f"any_parameter: {self.any_} text WS?\ntext[lazy]: /(.|\\n)*{end}/\n"


_QWEN = _Tagged('"<parameter={}>"', r"/<parameter=[^>\n]+>/", "</parameter>", r"/\n?/")
_GLM = _Tagged(
    '"<arg_key>{}</arg_key>" WS? "<arg_value>"',
    r'/<arg_key>[^<\n]+<\/arg_key>/ WS? "<arg_value>"',
    "</arg_value>",
    "",
)


def _qwen3_coder(tools: Offer, answer: str | None) -> str:
    """Values between tags: text is free, anything else is JSON. Parameters come in any order. The tags around a
    function may lack; one with another name is text."""
    names = "|".join(map(re.escape, tools.schemas))
    if answer is not None:
        start = (
            'start: answer | WS? ("<tool_call>" WS?)? "<function=" function WS? ("</tool_call>" WS?)? more*\n'
        )
        start += 'more: ("<tool_call>" WS?)? "<function=" function WS? ("</tool_call>" WS?)?\n'
    else:
        start = rf"""start: (opened (function | OTHER_NAME))* REST?
opened[lazy]: /(.|\n)*<function=/
OTHER_NAME: /[^>]*>/ & ~/({names})>/
REST: /(.|\n)+/ & ~/(.|\n)*<function=(.|\n)*/
"""
    return start + _tagged_functions(tools, "{}>", "</function>", _QWEN) + _COMMON_TEXT


def _glm(tools: Offer, answer: str | None) -> str:
    """Calls between `<tool_call>` and its closing tag: the name, then values between tags as in `_qwen3_coder`."""
    functions = _tagged_functions(tools, "{}", "</tool_call>", _GLM)
    if answer is not None:
        start = f'start: answer | {_SLIPS} | WS? ("<tool_call>" WS? function WS?)+\n'
        return start + functions + _json_rules(tools)
    start = r"""start: (slip | opened WS? function)* REST?
opened[lazy]: /(.|\n)*<tool_call>/
"""
    return start + functions + _free_rules(tools, "<tool_call>") + _json_rules(tools)


def _tagged_functions(tools: Offer, head: str, end: str, tags: _Tagged) -> str:
    """The rule `function`: a call with values between tags, from its name on.

    head: of a call, with `{}` for the name. end: of a call.
    """
    functions = [
        f"{_quoted(head.format(name))} WS? parameters_{number} {_quoted(end)}"
        for number, name in enumerate(tools.schemas)
    ]
    rules = "".join(_parameters(tools, name, number, tags) for number, name in enumerate(tools.schemas))
    return "function: " + "\n  | ".join(functions) + "\n" + rules + tags.any_parameter()


def _parameters(tools: Offer, name: str, number: int, tags: _Tagged) -> str:
    """The rule of a function's parameters: each of those that its schema lists at most once, and all required ones."""
    schema, rule = tools.schemas[name], f"parameters_{number}"
    properties, required = schema.get("properties"), schema.get("required")
    properties = dict(properties) if isinstance(properties, Mapping) else {}
    required = [each for each in required if isinstance(each, str)] if isinstance(required, list) else []
    properties |= {each: True for each in required if each not in properties}
    open_ = schema.get("additionalProperties", False) is not False or "patternProperties" in schema
    if (
        name not in tools.strict
        or open_
        or not (schema.keys() & {"properties", "additionalProperties"})
        or schema.keys() & {"$ref", "anyOf", "allOf", "oneOf"}
        or len(properties) > MOST
    ):
        return f"{rule}: any_parameter*\n"
    kinds = argument_kinds(schema)
    lines = [f'{rule}_more::_: "" %if {all_set([n for n, key in enumerate(properties) if key in required])}']
    for bit, (key, each) in enumerate(properties.items()):
        opens = tags.opens.replace("{}", _quoted(key)[1:-1])
        value = _value(name, each, schema, kinds.get(key, ANY), tags)
        lines.append(f"  | {opens} {value} WS? {rule}_more::set_bit({bit}) %if bit_clear({bit})")
    return f"{rule}: {rule}_more::0x0\n" + "\n".join(lines) + "\n"


def _value(name: str, schema: Any, root: Mapping[str, Any], allowed: Kinds, tags: _Tagged) -> str:
    """What may stand between the tags, with the closing one."""
    close = _quoted(tags.close)
    schema = schema if isinstance(schema, Mapping) else {}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values and all(isinstance(each, str) for each in values):
        return f"{tags.around} ({' | '.join(map(_quoted, values))}) {tags.around} {close}"
    if not allowed or "string" in allowed:
        return "text"
    definitions = {
        key: root[key] for key in ("$defs", "definitions") if key in root and "$ref" in json.dumps(schema)
    }
    return f"WS? {_schema(name, {**definitions, **schema})} WS? {close}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_DIALECTS: dict[str, Callable[[Offer, str | None], str]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen3_coder,
    "glm": _glm,
    "mistral": _mistral,
    "llama3": lambda tools, answer: _bare(tools, answer, "<|python_tag|>"),
    "json": _bare,
    "deepseek": _deepseek,
    "kimi_k2": _kimi_k2,
    "gemma4": _gemma4,
    "harmony": _harmony,
}
