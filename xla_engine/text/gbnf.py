"""Grammars in the dialect of llama.cpp (GBNF, and the EBNF of vLLM's examples), as Lark."""

from __future__ import annotations

from xla_engine.errors import InvalidRequestError

MAX_RULES = 256  # the converter's time grows with their square
MAX_CHARACTERS = 1 << 16
_ASSIGNS = "::="  # no Lark grammar has it outside of a text


def as_lark(grammar: str) -> str:
    """The same grammar in Lark, whose first rule is `start` where GBNF's is `root`; Lark is given back as it is.

    Raises InvalidRequestError for GBNF that is broken or larger than the limits.
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
    except Exception as error:  # the converter raises plain ones
        raise InvalidRequestError(f"structured_outputs: grammar is not GBNF: {error}") from error
