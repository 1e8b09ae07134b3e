"""Structured output on the embedded model: texts match their constraints in any batch; a bad constraint ends only its
own request."""

from __future__ import annotations

import builtins
import json
import random
import re
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.support.requests import comparable
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import InvalidRequestError
from xla_engine.sampling_params import SamplingParams
from xla_engine.structured_outputs import StructuredOutputsParams
from xla_engine.text.grammar import Grammars
from xla_engine.text.token_mask import TokenMask, pack_bits
from xla_engine.text.worker_process import WorkerProcess

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
REGEX = r"[a-z]{2,5}-[0-9]{1,3}"
CHOICES = ["yes", 'no "thanks"', "perhaps\n"]


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.2, "seed": 5, "max_tokens": 80, **fields})


def test_json_regex_and_choice_come_out_right(embedded: XlaBatchEngine) -> None:
    """Eight seeds of each at the same time, together with unconstrained rows, at lag 1."""
    expected: dict[str, Any] = {}
    for seed in range(8):
        for kind, given in (("json", SCHEMA), ("regex", REGEX), ("choice", CHOICES)):
            wanted = params(seed=seed, structured_outputs={kind: given})
            expected[embedded.submit("x = ", wanted, request_id=f"{kind}-{seed}")] = kind
        embedded.submit("import os", params(seed=seed, max_tokens=20), request_id=f"free-{seed}")
    outputs = {output.request_id: output.outputs[0] for output in embedded.drain()}
    assert len(outputs) == 32
    for name, kind in expected.items():
        choice = outputs[name]
        assert choice.finish_reason == "stop", (name, choice)
        if kind == "json":
            record = json.loads(choice.text)
            assert record.keys() == {"name", "size", "tags"} and len(record["name"]) <= 8
            assert 0 <= record["size"] <= 999 and set(record["tags"]) <= {"a", "b"}
        elif kind == "regex":
            assert re.fullmatch(REGEX, choice.text)
        else:
            assert choice.text in CHOICES
    assert len({outputs[f"regex-{seed}"].text for seed in range(8)}) > 1


def test_constrained_rows_alone_equal_batched(embedded: XlaBatchEngine) -> None:
    """Law 1 with grammars, bad words of several tokens, penalties and log-probabilities mixed, at lag 0, 1 and 2."""
    draw = random.Random(1)
    requests = []
    for seed in range(24):
        fields: dict[str, Any] = {"seed": seed, "max_tokens": draw.randint(2, 30), "logprobs": seed % 3}
        if seed % 2:
            kind, given = draw.choice((("json", SCHEMA), ("regex", REGEX), ("choice", CHOICES)))
            fields["structured_outputs"] = {kind: given}
        if seed % 3 == 0:
            fields["bad_words"] = ["import sys", "self.assert", "the"]
        if seed % 5 == 0:
            fields.update(repetition_penalty=1.3, logit_bias={300: 5.0})
        requests.append((draw.choice(("x = ", "import os\n", "def f(")), params(**fields)))
    alone = []
    for prompt, wanted in requests:
        embedded.submit(prompt, wanted)
        alone.append(comparable(embedded.drain()[0]))
    for lag in (0, 1, 2):
        embedded.lag = lag
        found = {}
        waiting = draw.sample(list(enumerate(requests)), len(requests))
        while waiting or embedded.has_unfinished:
            for index, (prompt, wanted) in (
                waiting.pop() for _ in range(min(draw.randint(0, 3), len(waiting)))
            ):
                embedded.submit(prompt, wanted, request_id=str(index))
            found.update({int(o.request_id): comparable(o) for o in embedded.step() if o.finished})
        assert [index for index in range(len(requests)) if found[index] != alone[index]] == [], lag


def test_bad_words_do_not_come(embedded: XlaBatchEngine) -> None:
    """A bad word may have several tokens; then its beginning may appear."""
    wanted = params(temperature=0, max_tokens=40, ignore_eos=True)
    embedded.submit("import", wanted)
    text = embedded.drain()[0].outputs[0].text
    assert embedded.tokenizer is not None and len(text) > 40
    words = [text[3:12].strip(), text[20:30].strip(), text[31:34].strip() or "the"]
    assert all(len(embedded.tokenizer.encode(word)) > 1 for word in words[:2])
    embedded.submit("import", params(temperature=0, max_tokens=40, ignore_eos=True, bad_words=words))
    other = embedded.drain()[0].outputs[0]
    spelled = {
        tuple(embedded.tokenizer.encode(prefix + word, add_special_tokens=False))
        for word in words
        for prefix in ("", " ")
    }
    ids = other.token_ids
    assert not any(
        ids[at : at + len(word)] == word for word in spelled for at in range(len(ids) - len(word) + 1)
    )


def test_min_tokens_gives_way_to_a_text_that_is_complete(embedded: XlaBatchEngine) -> None:
    embedded.submit("x", params(structured_outputs={"regex": "a{1,30}"}, min_tokens=8))
    assert len(embedded.drain()[0].outputs[0].token_ids) > 8
    embedded.submit("x", params(structured_outputs={"choice": ["yes"]}, min_tokens=50))
    assert embedded.drain()[0].outputs[0].text == "yes"


def test_a_row_that_may_sample_nothing_ends_alone(embedded: XlaBatchEngine) -> None:
    """The only continuation of its choice is a bad word, so it ends with an error; its peer is unaffected."""
    assert embedded.tokenizer is not None
    first, *rest = embedded.tokenizer.encode("yes", add_special_tokens=False)
    assert rest
    embedded.submit("def f(", params(temperature=0, max_tokens=20), request_id="alone")
    (alone,) = embedded.drain()
    embedded.submit("def f(", params(temperature=0, max_tokens=20), request_id="peer")
    wanted = params(
        structured_outputs={"regex": "yes"}, bad_words=["yes", "es", "s"], logit_bias={first: 100}
    )
    embedded.submit("x", wanted, request_id="stuck")
    outputs = {output.request_id: output for output in embedded.drain()}
    assert outputs["stuck"].outputs[0].finish_reason == "error"
    assert "leave none to sample" in str(outputs["stuck"].error)
    assert comparable(outputs["peer"]) == comparable(alone)


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({}, "exactly one of"),
        ({"json": {}, "regex": "a"}, "exactly one of"),
        ({"json": "not json"}, "structured_outputs"),
        ({"json": {"type": "objec"}}, "Invalid type"),
        ({"json": 5}, "must be a schema"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": 5}, "regex must be text"),
        ({"choice": []}, "0 choices"),
        ({"choice": ["a", 5]}, "must be a string"),
        ({"choice": "ab"}, "list of strings"),
        ({"grammar": "nonsense"}, "structured_outputs"),
        ({"structural_tag": "x"}, "'structural_tag' is not supported"),
        ({"jsn": {}}, "unknown field 'jsn'"),
        ({"json_object": 1}, "must be true or false"),
        ({"regex": "a" * (1 << 19)}, "characters; at most"),
    ],
)
def test_a_bad_constraint_is_refused_by_name(embedded: XlaBatchEngine, constraint: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        embedded.submit("x", SamplingParams(structured_outputs=constraint))
    assert not embedded.has_unfinished


@pytest.mark.parametrize(
    "regex", ["(.{0,10000}){1000}", "(a?){50000}b", "(((((x{1,99}){1,99}){1,99}){1,99}){1,99})"]
)
def test_a_hostile_constraint_ends_in_time(embedded: XlaBatchEngine, regex: str) -> None:
    """It is refused or runs within its limits, so that it cannot block the engine."""
    try:
        embedded.submit("x", params(max_tokens=3, structured_outputs={"regex": regex}))
    except InvalidRequestError as error:
        assert "structured_outputs" in str(error)
    assert all(output.finished for output in embedded.drain())


def test_response_format_is_openais() -> None:
    of = StructuredOutputsParams.from_response_format
    assert of({"type": "text"}) is None
    assert of({"type": "json_object"}) == StructuredOutputsParams(json_object=True)
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    assert of(named) == StructuredOutputsParams(json=SCHEMA)
    assert of({"type": "json_object", "schema": SCHEMA}) == StructuredOutputsParams(json=SCHEMA)
    for wrong in (
        {"type": "xml"},
        {},
        "json_object",
        {"type": "json_schema"},
        {"type": "json_object", "schema": 123},
        {"type": "json_schema", "json_schema": {}},
    ):
        with pytest.raises(InvalidRequestError, match="response_format"):
            of(wrong)


def test_a_batch_line_may_bring_response_format(embedded: XlaBatchEngine) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    wanted = SamplingParams.from_mapping({"response_format": named, "max_tokens": 80, "seed": 1})
    embedded.submit("x = ", wanted)
    assert json.loads(embedded.drain()[0].outputs[0].text).keys() == {"name", "size", "tags"}
    assert SamplingParams.from_mapping({"response_format": {"type": "text"}}) == SamplingParams()
    with pytest.raises(InvalidRequestError, match="both given"):
        SamplingParams.from_mapping({"response_format": named, "structured_outputs": {"regex": "a"}})


def test_without_llguidance_the_request_is_refused_with_the_remedy(
    embedded: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name == "llguidance":
            raise ImportError(name)
        return real(name, *rest, **named)

    assert embedded.tokenizer is not None
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidRequestError, match=r"pip install '\.\[structured\]'"):
        Grammars(embedded.tokenizer, 4096, (0,))


def test_a_check_without_masks_refuses_what_a_matcher_refuses(
    embedded: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run checks so. In the second round no token spells x."""
    tokenizer = embedded.tokenizer
    assert tokenizer is not None

    def said(call: Any, params: StructuredOutputsParams) -> str | None:
        try:
            call(params)
        except InvalidRequestError as error:
            return str(error)
        return None

    tried = [
        StructuredOutputsParams(json={"type": "object"}),
        StructuredOutputsParams(regex="a(b"),
        StructuredOutputsParams(regex="xy"),
        StructuredOutputsParams(grammar="start: missing"),
    ]
    every = tokenizer.bytes_of_all(4096)
    without = [b"" if b"x" in each else each for each in every]
    for tokens, accepted in ((every, [True, False, True, False]), (without, [True, False, False, False])):
        monkeypatch.setattr(tokenizer, "bytes_of_all", lambda count, tokens=tokens: tokens)
        checks, matches = (Grammars(tokenizer, 4096, (0,)) for _ in range(2))
        monkeypatch.setattr(checks, "_mask_tokenizer", None)  # a call fails
        verdicts = [said(checks.check, params) for params in tried]
        assert verdicts == [said(matches.matcher, params) for params in tried]
        assert [each is None for each in verdicts] == accepted
        monkeypatch.setattr(checks, "_accepted", None)  # a call fails
        assert [said(checks.check, params) for params in tried] == verdicts


def test_a_check_is_no_permission_to_compile(embedded: XlaBatchEngine) -> None:
    """A check goes without slices, in which a library may fail, too, so a matcher makes a trial with them first."""
    assert embedded.tokenizer is not None
    worker, asked = WorkerProcess("trial_worker.py"), []

    def ask(cpu_limit_s: float, request: str) -> dict[str, Any]:
        fields = json.loads(request)
        asked.append((fields["kind"], fields.get("slices")))
        return worker.ask(cpu_limit_s, request)

    grammars = Grammars(embedded.tokenizer, 4096, (0,), process=cast("Any", SimpleNamespace(ask=ask)))
    tried = StructuredOutputsParams(regex="once more, x*")

    def asks(slices: bool) -> list[tuple[str, bool | None]]:
        return [("try_constraint", None), ("keep_tokenizer", slices), ("try_constraint", None)]

    grammars.check(tried)
    assert asked == asks(False)
    grammars.check(tried)
    assert asked == asks(False)
    grammars.matcher(tried)
    assert asked == asks(False) + asks(True)
    worker.stop()


def test_masks_follow_the_tokens() -> None:
    """Masks by hand: words of one and of two tokens, a reset, and the positions of bits."""
    mask = TokenMask(70, bad_words=[(3,), (5, 64)], allowed=[3, 5, 64, 69])
    assert mask.constrained and mask.words.shape == (3,)

    def allowed() -> list[int]:
        return np.nonzero(np.unpackbits(mask.words.view(np.uint8), bitorder="little"))[0].tolist()

    assert allowed() == [5, 64, 69]
    mask.push(5)
    assert allowed() == [5, 69]
    mask.push(69)
    assert allowed() == [5, 64, 69]
    mask.push(5)
    mask.reset()
    assert allowed() == [5, 64, 69]
    assert not TokenMask(70, allowed=[1]).constrained
    assert pack_bits([0, 31, 32], 33).tolist() == [0x80000001, 1]
