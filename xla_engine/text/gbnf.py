"""Convert grammars in llama.cpp's dialect (GBNF, and the EBNF of vLLM's examples) to Lark."""

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
