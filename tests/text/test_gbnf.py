"""Grammars of llama.cpp and vLLM, and classes of pydantic, as constraints."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import InvalidRequestError
from xla_engine.sampling_params import SamplingParams
from xla_engine.structured_outputs import StructuredOutputsParams
from xla_engine.text.lark import MAX_RULES, as_lark

pytest.importorskip("llguidance")

SQL = """
root ::= "SELECT " column " from " table " where " condition
column ::= "col_1" | "col_2"
table ::= "table_1" | "table_2"
condition ::= column " = " number
number ::= [1-9] [0-9]?
"""


def constrained(engine: XlaBatchEngine, **kind: Any) -> str:
    params = SamplingParams(
        temperature=1, seed=3, max_tokens=80, structured_outputs=StructuredOutputsParams(**kind)
    )
    engine.submit("x = ", params)
    [output] = engine.drain()
    assert output.outputs[0].finish_reason == "stop", output
    return output.outputs[0].text


def test_gbnf_comes_out_right(embedded: XlaBatchEngine) -> None:
    text = constrained(embedded, grammar=SQL)
    assert re.fullmatch(r"SELECT col_[12] from table_[12] where col_[12] = [1-9][0-9]?", text)


def test_lark_stays_as_it_is() -> None:
    lark = 'start: "a" | "b"\n'
    assert as_lark(lark) is lark


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("root ::= (", "Expected"),
        ('other ::= "a"', "root"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "flatter"),
        ("\n".join(f'r{i} ::= "a"' for i in range(MAX_RULES)) + "\nroot ::= r0", "rules"),
        ("root ::= " + '"a" ' * 50_000, "characters"),
        ("root ::= other", "other"),
    ],
)
def test_bad_gbnf_is_refused_in_time(grammar: str, words: str) -> None:
    began = time.process_time()
    with pytest.raises(InvalidRequestError, match=words):
        as_lark(grammar)
    assert time.process_time() - began < 5


def test_a_class_of_pydantic_is_its_schema(embedded: XlaBatchEngine) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Car(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        model_config = pydantic.ConfigDict(extra="forbid")
        doors: int = pydantic.Field(ge=2, le=5)
        new: bool

    Car.model_rebuild(_types_namespace={"int": int, "bool": bool})
    found = json.loads(constrained(embedded, json=Car))
    assert Car.model_validate(found).doors in range(2, 6)
    with pytest.raises(InvalidRequestError, match="json must be a schema"):
        StructuredOutputsParams(json=int)
