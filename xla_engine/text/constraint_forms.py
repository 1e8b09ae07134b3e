"""The form in which llguidance is asked to hold a constraint: the exact one, or the narrowest that it accepts.

A keyword of a JSON schema that no grammar holds is left to whoever reads the text; it never refuses a request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from xla_engine.structured_outputs import MAX_CONSTRAINT_CHARACTERS, StructuredOutputsParams
from xla_engine.text.json_schema import WIDER, SchemaError, hold, patterns_of, without
from xla_engine.text.lark import as_lark, lark_parts
from xla_engine.text.trials import TRIAL_ENDED
from xla_engine.utils.shown import shown

MAX_DEPTH = 100  # of a schema
_LARGEST_INTEGER = 2**64  # in a schema
_MOST_PATTERNS = 16  # that are tried one by one
_MOST_ENDED = 3  # tools whose schemas may end a trial's process, a second each


@dataclass(frozen=True, slots=True)
class ConstraintForm:
    """A grammar without its name, in llguidance's format. left: what it does not hold, for messages."""

    body: dict[str, Any]
    left: tuple[str, ...] = ()


WhyNot = Callable[[ConstraintForm], str | None]


class ConstraintError(ValueError):
    """A constraint is invalid; the text says why."""


def constraint_text(params: StructuredOutputsParams) -> str:
    """A text that is the same for the same constraint, about as long as its schema, expression or grammar."""
    value = getattr(params, params.kind)
    text = value if isinstance(value, str) else json.dumps(value)
    return f"{params.kind} {params.disable_any_whitespace} {params.disable_additional_properties} {text}"


def accepted_form(
    params: StructuredOutputsParams, id_of: Callable[[str], int | None], why_not: WhyNot
) -> ConstraintForm:
    """The narrowest form of a constraint that llguidance accepts.

    id_of: the id of a token's name. why_not: why it does not accept a form; None if it does. Raises ConstraintError.
    """
    if params.regex is not None:
        return _first(why_not, [ConstraintForm({"lark_grammar": f"start: {_expression(params.regex)}"})])
    if params.choice is not None:
        choices = " | ".join(map(json.dumps, params.choice))
        return _first(why_not, [ConstraintForm({"lark_grammar": f"start: {choices}"})])
    close = params.disable_additional_properties
    if params.grammar is not None:
        parts = list(lark_parts(as_lark(params.grammar), id_of))
        return _Schemas(parts, {}, close=close is True).accepted(why_not)
    parts = [{"type": "object"} if params.json_object else _schema(params.json)]
    whitespace = {"whitespace_flexible": not params.disable_any_whitespace}
    return _Schemas(parts, whitespace, close=close is not False).accepted(why_not)


def _first(why_not: WhyNot, forms: Iterable[ConstraintForm], *, give_up: bool = True) -> ConstraintForm:
    """The first form that llguidance accepts. Raises ConstraintError with the reason for the first of them."""
    first = None
    for form in forms:
        if (why := why_not(form)) is None:
            return form
        first = first or why
        if give_up and (why.startswith(TRIAL_ENDED) or "nsatisfiable" in why):
            break  # wider forms would take as long, or are not meant
    raise ConstraintError(first)


@dataclass(frozen=True, slots=True)
class _Schemas:
    """A schema, or a grammar with schemas in it.

    parts: as of `lark_parts`; or one schema. options: llguidance's, for all of them. close: see `hold`; `x-close` of a
    schema in a grammar decides for itself. A schema with `x-tool`, the name of a tool, that is invalid becomes that of
    any object, so that it does not refuse the other tools.
    """

    parts: list[Any]
    options: dict[str, Any]
    close: bool

    def accepted(self, why_not: WhyNot) -> ConstraintForm:
        exact, left = self._held(may_close=True)
        if (why := why_not(_form(exact, left))) is None:
            return _form(exact, left)
        if why.startswith(TRIAL_ENDED[1]):  # perhaps not because of this constraint
            raise ConstraintError(why)
        tools = [part["x-tool"] for part in self.parts if isinstance(part, dict) and "x-tool" in part]
        if tools and len(self.parts) > 1:
            exact, left = self._tool_by_tool(exact, left, why_not)
            forms = [_form(exact, left), *self._without_tools()]
            return _first(why_not, forms, give_up=False)
        if exact == self.parts or why.startswith(TRIAL_ENDED):
            raise ConstraintError(why)
        if "nsatisfiable" in why:
            form = _form(*self._held(may_close=False))
            return _first(why_not, [_form(exact, left)] if form.body == _form(exact, left).body else [form])
        return _first(why_not, self._wider(exact, left, why_not))

    def _without_tools(self) -> Iterator[ConstraintForm]:
        """What holds if all tools together are too much: the format of the answer; or, for calls that are not forced,
        nothing."""
        left = ("strict, because the schemas of all tools together are too much",)
        answers = [part for part in self.parts if isinstance(part, dict) and "x-close" in part]
        if answers:
            yield _form([self._hold(answers[0], True, {})], left)
        elif "no_forcing" in self.parts[0]:
            yield ConstraintForm({"lark_grammar": "start: <[*]>*"}, left)

    def _tool_by_tool(
        self, exact: list[Any], left: tuple[str, ...], why_not: WhyNot
    ) -> tuple[list[Any], tuple[str, ...]]:
        """The schema of each tool in the form that is accepted for it alone."""
        parts, ended = list(exact), 0
        for place, part in enumerate(self.parts):
            if isinstance(part, str) or "x-tool" not in part or ended == _MOST_ENDED:
                continue
            try:
                form = _Schemas([part], self.options, True).accepted(why_not)
            except ConstraintError as error:
                ended += str(error).startswith(TRIAL_ENDED)
                parts[place] = {"type": "object"}
                left = (*left, f"the schema of the tool {part['x-tool']!r} ({str(error).splitlines()[0]})")
            else:
                parts[place] = form.body["json_schema"]
                left = (*left, *form.left)
        return parts, left

    def _held(self, *, may_close: bool) -> tuple[list[Any], tuple[str, ...]]:
        left: dict[str, None] = {}
        parts = [part if isinstance(part, str) else self._hold(part, may_close, left) for part in self.parts]
        return parts, tuple(left)

    def _hold(self, schema: dict[str, Any], may_close: bool, left: dict[str, None]) -> dict[str, Any]:
        try:
            _check_bounds(schema)
            marked = "x-tool" in schema or schema.get("x-close") is True
            found = hold(schema, close=may_close and (self.close or marked))
        except (SchemaError, ConstraintError) as error:
            if (tool := schema.get("x-tool")) is None:
                raise ConstraintError(f"json is not a schema: {error}") from error
            left[f"the invalid schema of the tool {tool!r} ({error})"] = None
            return {"type": "object"}
        left |= dict.fromkeys(found.left)
        guidance = schema.get("x-guidance")
        guidance = guidance if isinstance(guidance, dict) else {}
        return {**found.schema, "x-guidance": {"coerce_one_of": True, **guidance, **self.options}}

    def _wider(self, exact: list[Any], left: tuple[str, ...], why_not: WhyNot) -> Iterator[ConstraintForm]:
        """Wider forms: without the expressions that llguidance cannot read; without one group of keywords; without
        more and more of them; any value of the type."""
        yield _form(exact, left)
        patterns = sorted({pattern for part in exact for pattern in patterns_of(part)})
        bad = {
            pattern for pattern in patterns[:_MOST_PATTERNS] if why_not(_pattern_form(pattern)) is not None
        }
        if bad:
            exact = _changed(exact, lambda each: without(each, ("pattern",), lambda _, value: value in bad))
            left = (*left, *(f"pattern {shown(each)}" for each in sorted(bad)))
            yield _form(exact, left)
        for keywords in WIDER:
            if (wider := _changed(exact, partial(without, keywords=keywords))) != exact:
                yield _form(wider, (*left, *keywords))
        for keywords in WIDER:
            if (wider := _changed(exact, partial(without, keywords=keywords))) != exact:
                exact, left = wider, (*left, *keywords)
                yield _form(exact, left)
        yield _form(_changed(exact, _type_alone), (*left, "all but the type"))


def _form(parts: list[Any], left: tuple[str, ...]) -> ConstraintForm:
    if len(parts) == 1 and not isinstance(parts[0], str):
        return ConstraintForm({"json_schema": parts[0]}, left)
    texts = [part if isinstance(part, str) else json.dumps(part) for part in parts]
    return ConstraintForm({"lark_grammar": "".join(texts)}, left)


def _pattern_form(pattern: str) -> ConstraintForm:
    return ConstraintForm({"json_schema": {"type": "string", "pattern": pattern}})


def _changed(parts: list[Any], change: Callable[[Any], Any]) -> list[Any]:
    return [part if isinstance(part, str) else change(part) for part in parts]


def _type_alone(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in ("type", "x-guidance") if key in schema}


def _schema(given: Any) -> dict[str, Any]:
    """A schema as an object."""
    try:
        text = given if isinstance(given, str) else json.dumps(given)
        schema = json.loads(text) if len(text) <= MAX_CONSTRAINT_CHARACTERS else {}
    except (ValueError, TypeError, RecursionError) as error:
        raise ConstraintError(f"json is not a schema: {error}") from error
    if not isinstance(schema, dict):
        raise ConstraintError(f"json is not a schema: it must be an object, not {shown(schema)}")
    return schema


def _expression(regex: str) -> str:
    """A regular expression in Lark."""
    import llguidance

    return str(
        json.loads(llguidance.LLMatcher.grammar_from_regex(regex))["grammars"][0]["lark_grammar"]
    ).removeprefix("start: ")


def _check_bounds(schema: object) -> None:
    """Raise ConstraintError for a schema with too deep nesting or too large integers."""
    values = [(schema, 1)]
    while values:
        value, depth = values.pop()
        if isinstance(value, int) and abs(value) >= _LARGEST_INTEGER:
            raise ConstraintError(f"an integer of more than 64 bits, {shown(value)}; use a smaller one")
        if isinstance(value, dict | list) and depth > MAX_DEPTH:
            raise ConstraintError(f"nested deeper than {MAX_DEPTH}; make it flatter, for example with $ref")
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        values += [(each, depth + 1) for each in inner]
