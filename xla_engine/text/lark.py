"""Lark grammars in llguidance's syntax: made of GBNF, and with ids in place of the names of tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from xla_engine.errors import InvalidRequestError

MAX_RULES = 256  # the converter takes quadratic time
MAX_CHARACTERS = 1 << 16
_ASSIGNS = "::="  # never in a Lark grammar, except inside strings


def as_lark(grammar: str) -> str:
    """Convert GBNF to Lark, and its first rule `root` to `start`. Returns a Lark grammar unchanged.

    Raises InvalidRequestError for GBNF that is invalid or exceeds the limits.
    """
    if _ASSIGNS not in grammar:
        return grammar
    rules = grammar.count(_ASSIGNS)
    if rules > MAX_RULES or len(grammar) > MAX_CHARACTERS:
        raise InvalidRequestError(
            f"structured_outputs: grammar has {rules} rules and {len(grammar)} characters; at most {MAX_RULES} and "
            f"{MAX_CHARACTERS} in GBNF. Write a larger one in Lark"
        )
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except RecursionError:
        raise InvalidRequestError(
            "structured_outputs: grammar is nested too deeply; make it flatter"
        ) from None
    except Exception as error:  # the converter raises plain Exceptions
        raise InvalidRequestError(f"structured_outputs: grammar is not GBNF: {error}") from error


# What a Lark grammar may contain between its symbols: texts, comments, expressions, token ids and names, schemas.
_LARK = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|#[^\n]*|/(?:[^/\\\n]|\\.)+/|<(\[[*^]?[\dMAX,-]*\])>|<(\[[^\]\n]+\])>|(<[^<>\s]+>)|(%json\s*)'
)
_decoder = json.JSONDecoder()


def lark_parts(grammar: str, id_of: Callable[[str], int | None]) -> Iterator[str | dict[str, Any]]:
    """The text of a Lark grammar, with the schemas of `%json` as parts of their own.

    The names of tokens, `<|name|>` or `<[name]>`, are replaced by their ids. The tokens need not be special. A token
    that the tokenizer does not have is replaced by its name as text.
    """
    done, text, place = 0, "", 0
    while (found := _LARK.search(grammar, place)) is not None:
        place = found.end()
        if (name := found[3] or found[2]) is not None:
            number = id_of(name)
            text += grammar[done : found.start()] + (json.dumps(name) if number is None else f"<[{number}]>")
            done = place
        elif found[4] is not None:
            try:
                schema, place = _decoder.raw_decode(grammar, place)
            except (ValueError, RecursionError):
                continue  # llguidance says what is wrong
            if isinstance(schema, dict):
                yield text + grammar[done : found.end()]
                yield schema
                text, done = "", place
    yield text + grammar[done:]
