"""Any constraint is followed or refused; the process lives. The number of examples is the time budget."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import InvalidRequestError
from xla_engine.structured_outputs import StructuredOutputsParams

pytest.importorskip("llguidance")

FUZZ = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from(
        ["string", "object", "array", "integer", "#", "#/$defs/a", "date-time", "(a+)+$", "^[a-z]*$"]
    )
)
WORDS = (
    "type properties items prefixItems anyOf oneOf allOf enum const pattern $ref not $defs a minLength maxLength "
    "minimum maximum multipleOf required minItems maxItems additionalProperties patternProperties format if then"
)
KEYS = st.sampled_from(WORDS.split())
SCHEMAS = st.dictionaries(
    KEYS,
    st.recursive(
        SCALARS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)
EXPRESSION = r"a b ( ) [ ] * + ? {2,3} {0,99999} | \ \d \p{L} . ^ $ (?i) (?=a) é [^ && \b \u{1F600}"
PIECES = st.sampled_from([*EXPRESSION.split(), "\0"])
GRAMMAR = 'start a b : | "x" /[a-z]+/ ( ) * ? ~3..5 %ignore %import -> ! _ %json {} [ ] <[1]> [capture] B'
RULES = st.sampled_from([*GRAMMAR.split(), "\n"])


def follows_or_refuses(engine: XlaBatchEngine, constraint: dict[str, Any]) -> None:
    """Follow a constraint for some tokens. Single tokens are allowed as the mask says, without a mask."""
    grammars, ends = engine.validator.grammars, set(engine.validator.eos_token_ids)
    try:
        matcher = grammars.matcher(StructuredOutputsParams.from_mapping(constraint))
        for _ in range(6):
            words = matcher.words()
            if not words.any():
                break
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits)
            token, last = int(allowed[0]), int(allowed[-1])
            for each in {token, last, last // 2, last // 3, *matcher.forced()[:1]} - ends:
                assert matcher.allows(each) == bits[each], each
            matcher.push(token)
    except InvalidRequestError as error:
        assert "structured_outputs" in str(error) and len(str(error)) < 4000


@FUZZ
@given(schema=SCHEMAS)
def test_any_schema(embedded: XlaBatchEngine, schema: dict[str, Any]) -> None:
    follows_or_refuses(embedded, {"json": schema})


@FUZZ
@given(text=st.text(max_size=30) | SCHEMAS.map(json.dumps).map(lambda text: text[:-1]))
def test_any_text_as_a_schema(embedded: XlaBatchEngine, text: str) -> None:
    follows_or_refuses(embedded, {"json": text})


@FUZZ
@given(pieces=st.lists(PIECES, min_size=1, max_size=14))
def test_any_expression(embedded: XlaBatchEngine, pieces: list[str]) -> None:
    follows_or_refuses(embedded, {"regex": "".join(pieces)})


@FUZZ
@given(rules=st.lists(RULES, max_size=20), begins=st.booleans())
def test_any_grammar(embedded: XlaBatchEngine, rules: list[str], begins: bool) -> None:
    follows_or_refuses(embedded, {"grammar": ("start: " if begins else "") + " ".join(rules)})


@FUZZ
@given(choice=st.lists(st.text(st.characters(), max_size=6), max_size=4))
def test_any_choice(embedded: XlaBatchEngine, choice: list[str]) -> None:
    follows_or_refuses(embedded, {"choice": choice})
