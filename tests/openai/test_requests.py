"""Any bytes of a line become a request or an error record, and never anything else."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.batch_lines import MESSAGES, batch, finished, parsed, talk
from xla_engine.batch.record_ids import record_id
from xla_engine.openai.fields import MAX_CUSTOM_ID
from xla_engine.openai.requests import (
    MAX_MESSAGE,
    MAX_PROMPTS,
    Chat,
    LineError,
    LineRequest,
    parse_line,
    parse_record,
)
from xla_engine.openai.results import ResultHeader, error_line, result_line
from xla_engine.sampling_params import SamplingParams
from xla_engine.structured_outputs import StructuredOutputsParams
from xla_engine.utils.json_line import MAX_NESTING


def test_plain_line() -> None:
    request = parsed(
        b'{"prompt": "def f(", "max_tokens": 3, "temperature": 0, "custom_id": "a", "logprobs": 0}'
    )
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=0)
    assert request == LineRequest(line=7, custom_id="a", prompts=("def f(",), params=params)


def test_batch_line() -> None:
    request = parsed(batch({"model": "any", "prompt": "def f(", "max_tokens": 3, "logprobs": 0}))
    params = SamplingParams(max_tokens=3, logprobs=0)
    assert request == LineRequest(
        line=7, custom_id="c", prompts=("def f(",), params=params, model="any", default_sampling=True
    )


def test_chat_line() -> None:
    request = parsed(
        talk(
            max_completion_tokens=3,
            logprobs=True,
            top_logprobs=0,
            user="u",
            metadata={"a": "b"},
            service_tier="auto",
            tool_choice="none",
            response_format={"type": "text"},
            chat_template_kwargs={"enable_thinking": False},
        )
    )
    options = {"chat_template_kwargs": {"enable_thinking": False}}
    assert request.prompts == (Chat(messages=tuple(MESSAGES), options=options),)
    assert request.params == SamplingParams(max_tokens=3, logprobs=0) and request.model == "m"
    assert request.is_chat and parsed(talk(logprobs=False)).params.logprobs is None


def test_without_max_tokens_a_chat_gets_all_that_fit_and_a_prompt_16_tokens() -> None:
    assert parsed(talk()).params.max_tokens is None
    assert parsed(talk(max_tokens=None)).params.max_tokens is None
    assert parsed(json.dumps({"messages": MESSAGES}).encode()).params.max_tokens is None
    assert parsed(talk(), max_tokens=9).params.max_tokens == 9
    assert parsed(b'{"prompt": "x", "max_tokens": null}').params.max_tokens == 16
    assert parsed(b'{"prompt": "x"}').params.max_tokens == 16
    assert parsed(batch({"prompt": "x", "max_tokens": None})).params.max_tokens == 16


def test_response_format_is_structured_outputs() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    params = parsed(talk(response_format=wanted)).params
    constraint = StructuredOutputsParams.from_response_format(wanted)
    assert params == SamplingParams(structured_outputs=constraint, max_tokens=None)
    assert params.structured_outputs is not None and params.structured_outputs.json == schema
    raw = json.dumps({"prompt": "x", "structured_outputs": {"choice": ["a", "b"]}}).encode()
    assert parsed(raw).params.structured_outputs == StructuredOutputsParams(choice=["a", "b"])


def test_plain_chat_line() -> None:
    raw = json.dumps({"messages": MESSAGES, "max_tokens": 3, "add_generation_prompt": False}).encode()
    request = parsed(raw)
    assert request.prompts == (Chat(messages=tuple(MESSAGES), options={"add_generation_prompt": False}),)
    assert request.params == SamplingParams(max_tokens=3)


def test_a_completions_body_may_list_prompts() -> None:
    assert parsed(batch({"prompt": ["a", [1, 2], "b"]})).prompts == ("a", (1, 2), "b")


def test_prompt_of_token_ids() -> None:
    assert parsed(b'{"prompt": [1, 2, 3]}').prompts == ((1, 2, 3),)
    assert parsed(batch({"prompt": [0]})).prompts == ((0,),)


@pytest.mark.parametrize(
    "raw", [b'{"prompt": "x"}', b'{"prompt": "x", "custom_id": null}', batch({"prompt": "x"}, custom_id=...)]
)
def test_a_line_without_id_is_named_by_its_number(raw: bytes) -> None:
    assert parsed(raw, line=12).custom_id == "line-12"


def test_id_is_another_name_for_custom_id() -> None:
    assert parsed(b'{"id": "a", "prompt": "x"}').custom_id == "a"


def test_defaults_apply_where_the_line_is_silent() -> None:
    request = parsed(b'{"prompt": "x", "temperature": 0.5}', temperature=0, max_tokens=9)
    assert (request.params.temperature, request.params.max_tokens) == (0.5, 9)


def test_crlf_and_spaces_around_a_line() -> None:
    assert parsed(b' \t{"prompt": "x"} \r').prompts == ("x",)


def test_openai_bodies_may_spell_out_that_they_want_nothing() -> None:
    body = {"prompt": "x", "n": 1, "best_of": 1, "echo": False, "stream": False, "stop": None, "suffix": None}
    body |= {
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "temperature": None,
        "seed": None,
    }
    assert parsed(batch(body)).params == SamplingParams()


NOT_JSON = {
    "broken": (b'{"prompt": "x"', "delimiter"),
    "two objects": (b'{"prompt": "x"} {"prompt": "y"}', "Extra data"),
    "Infinity": (b'{"prompt": "x", "temperature": -Infinity}', "-Infinity"),
    "1e400": (b'{"prompt": "x", "temperature": 1e400}', "too large"),
    "400 digits": (b'{"prompt": "x", "max_tokens": %s}' % (b"9" * 400), "64 bits"),
    "5000 digits": (b'{"prompt": "x", "max_tokens": %s}' % (b"9" * 5000), "digits"),
    "invalid UTF-8": (b'{"prompt": "\xff"}', "byte 13"),
    "UTF-8 of a surrogate": (b'{"prompt": "\xed\xa0\x80"}', "not UTF-8"),
    "lone surrogate": (rb'{"prompt": "\ud800"}', "surrogate"),
    "lone surrogate in a name": (rb'{"prompt": "x", "\udfff": 1}', "surrogate"),
    "UTF-16": ('{"prompt": "x"}'.encode("utf-16"), "not UTF-8"),
    "byte order mark inside the file": (b'\xef\xbb\xbf{"prompt": "x"}', "BOM"),
    "list": (b"[1, 2]", "not a list"),
    "string": (b'"x"', "not a string"),
    "number": (b"3", "not a number"),
    "null": (b"null", "not null"),
    "bare word": (b"hello", "Expecting value"),
    "control character": (b'{"prompt": "a\x00b"}', "control character"),
    "name twice": (b'{"prompt": "x", "prompt": "y"}', "'prompt' occurs twice"),
    "deep list": (b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}", "nested"),
    "very deep list": (b'{"prompt": ' + b"[" * 60_000 + b"]" * 60_000 + b"}", "nested"),
    "very deep object": (b'{"a": ' * 30_000 + b"1" + b"}" * 30_000, "nested"),
    "very many lists": (b'{"prompt": ' + b"[" * 10**6 + b"]" * 10**6 + b"}", "more than 65536 strings"),
}


@pytest.mark.parametrize("name", NOT_JSON)
def test_invalid_json_line(name: str) -> None:
    raw, message = NOT_JSON[name]
    error = parse_line(raw, 7)
    assert isinstance(error, LineError)
    assert (error.code, error.line, error.custom_id) == ("invalid_json_line", 7, "line-7")
    assert message in error.message


PLAIN_REFUSED = {
    "no prompt": ({}, 'no "prompt"'),
    "empty prompt": ({"prompt": ""}, "empty"),
    "empty list": ({"prompt": []}, "empty"),
    "null prompt": ({"prompt": None}, 'no "prompt"'),
    "number as prompt": ({"prompt": 3}, "not a number"),
    "object as prompt": ({"prompt": {}}, "not an object"),
    "several prompts": ({"prompt": ["a", "b"]}, "list of prompts"),
    "several token lists": ({"prompt": [[1], [2]]}, "list of prompts"),
    "float token": ({"prompt": [1, 2.5]}, "prompt[1]"),
    "boolean token": ({"prompt": [True]}, "prompt[0]"),
    "negative token": ({"prompt": [1, -1]}, "prompt[1]"),
    "huge token": ({"prompt": [2**40]}, "prompt[0]"),
    "max_tokens 0": ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    "negative temperature": ({"prompt": "x", "temperature": -0.1}, "temperature"),
    "temperature as text": ({"prompt": "x", "temperature": "0"}, "temperature"),
    "top_p 0": ({"prompt": "x", "top_p": 0}, "top_p"),
    "top-N logprobs": ({"prompt": "x", "logprobs": 21}, "logprobs"),
    "unknown field": ({"prompt": "x", "temprature": 0}, "'temprature'"),
    "misspelt prompt": ({"promt": "x"}, "did you mean 'prompt'?"),
    "misspelt messages": ({"mesages": []}, "did you mean 'messages'?"),
    "misspelt field": ({"prompt": "x", "temprature": 0}, "did you mean 'temperature'?"),
    "unsupported field": ({"prompt": "x", "best_of": 2}, "'best_of'"),
    "endless bias id": ({"prompt": "x", "logit_bias": {"7" * 5000: 1}}, "logit_bias id must be an integer"),
    "empty stop string": ({"prompt": "x", "stop": ["\n", ""]}, "stop string is empty"),
    "number as id": ({"prompt": "x", "custom_id": 3}, "custom_id"),
    "empty id": ({"prompt": "x", "custom_id": ""}, "custom_id"),
    "long id": ({"prompt": "x", "custom_id": "i" * (MAX_CUSTOM_ID + 1)}, "custom_id"),
    "both ids": ({"prompt": "x", "custom_id": "a", "id": "a"}, "keep one"),
    "deepest value": ({"prompt": "x", "seed": json.loads("[" * MAX_NESTING + "]" * MAX_NESTING)[0]}, "seed"),
}


@pytest.mark.parametrize("name", PLAIN_REFUSED)
def test_invalid_plain_request(name: str) -> None:
    record, message = PLAIN_REFUSED[name]
    error = parse_line(json.dumps(record).encode(), 7)
    assert isinstance(error, LineError)
    assert error.code == "invalid_request" and message in error.message


BATCH_REFUSED = {
    "moderations": (batch({"input": "x"}, url="/v1/moderations"), "not supported"),
    "no url": (batch({"prompt": "x"}, url=...), 'no "url"'),
    "url of another type": (batch({"prompt": "x"}, url=["/v1/completions"]), "not supported"),
    "GET": (batch({"prompt": "x"}, method="GET"), "POST"),
    "no body": (batch({}, body=...), "body"),
    "body of another type": (batch({}, body="prompt"), "body"),
    "model of another type": (batch({"prompt": "x", "model": 3}), "model"),
    "sampling next to the body": (batch({"prompt": "x"}, temperature=0), "put sampling fields into the body"),
    "id inside the body": (batch({"prompt": "x", "custom_id": "c"}), "next to the body"),
    "n 200": (batch({"prompt": "x", "n": 200}), "n must be"),
    "true is not 1": (batch({"prompt": "x", "n": True}), "n must be an integer"),
    "false is not 0": (batch({"prompt": "x", "presence_penalty": False}), "presence_penalty"),
    "unknown null": (batch({"prompt": "x", "temprature": None}), "'temprature'"),
    "an empty prompt of several": (batch({"prompt": ["a", ""]}), "empty"),
    "several prompts of two kinds": (batch({"prompt": ["a", 3]}), "not a number"),
    "lists in a prompt of several": (batch({"prompt": [[1], [[2]]]}), "list of prompts"),
    "too many prompts": (batch({"prompt": ["a"] * (MAX_PROMPTS + 1)}), "at most 128"),
    "no messages": (talk(messages=...), "messages"),
    "empty messages": (talk(messages=[]), "at least one"),
    "messages as text": (talk(messages="hello"), "messages"),
    "prompt in a chat": (talk(prompt="x"), "'prompt'"),
    "messages in a completion": (batch({"prompt": "x", "messages": []}), "'messages'"),
    "tools as text": (talk(tools="search"), "tools must be"),
    "a tool that must be called": (talk(tool_choice="required"), "tool_choice"),
    "echo as text": (batch({"prompt": "x", "echo": "yes"}), "echo must be"),
    "echo of a chat": (talk(echo=True), "'echo'"),
    "scores asked for twice": (
        batch({"prompt": "x", "echo": True, "logprobs": 1, "prompt_logprobs": 1}),
        "remove prompt_logprobs",
    ),
    "nothing to do": (batch({"prompt": "x", "max_tokens": 0}), "max_tokens"),
    "misspelt id": (batch({"prompt": "x"}, custom_idd="a"), "did you mean 'custom_id'?"),
    "misspelt field": (batch({"prompt": "x", "max_token": 3}), "did you mean 'max_tokens'?"),
    "misspelt option": (batch({"prompt": "x", "prioritty": 3}), "did you mean 'priority'?"),
    "misspelt messages": (batch({"message": []}, url="/v1/chat/completions"), '"messages"'),
    "logprobs of a chat as number": (talk(logprobs=1), "true or false"),
    "top_logprobs alone": (talk(top_logprobs=1), "needs logprobs"),
    "top_logprobs of a completion": (batch({"prompt": "x", "top_logprobs": 1}), "'top_logprobs'"),
    "two caps": (talk(max_tokens=1, max_completion_tokens=2), "keep one"),
    "cap of a chat": (talk(max_completion_tokens=0), "max_tokens"),
    "generation prompt as text": (talk(add_generation_prompt="yes"), "add_generation_prompt"),
    "template variables as list": (talk(chat_template_kwargs=[1]), "chat_template_kwargs"),
    "a stream": (talk(stream=True), "'stream'"),
    "an unknown form": (talk(response_format={"type": "xml"}), "response_format"),
    "a form as text": (batch({"prompt": "x", "response_format": "json"}), "response_format"),
    "two forms": (
        talk(response_format={"type": "json_object"}, structured_outputs={"regex": "a"}),
        "keep one",
    ),
}


@pytest.mark.parametrize("name", BATCH_REFUSED)
def test_invalid_batch_request(name: str) -> None:
    raw, message = BATCH_REFUSED[name]
    error = parse_line(raw, 7)
    assert isinstance(error, LineError)
    assert (error.code, error.custom_id) == ("invalid_request", "c") and message in error.message


def test_a_hostile_value_is_not_echoed_at_length() -> None:
    error = parse_line(json.dumps({"prompt": "x", "temperature": "y" * 10**6}).encode(), 7)
    assert isinstance(error, LineError) and len(error.message) <= MAX_MESSAGE


def test_duplicate_names_are_found_in_linear_time() -> None:
    names = b",".join(b'"%d": 0' % number for number in range(60_000))
    error = parse_line(b"{" + names + b', "59999": 1}', 7)
    assert isinstance(error, LineError) and "'59999'" in error.message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=5), children, max_size=4)
    ),
    max_leaves=10,
)
known_names = {field.name for field in fields(SamplingParams)}
field_names = st.sampled_from(
    [
        "prompt",
        "custom_id",
        "id",
        "method",
        "url",
        "body",
        "model",
        "n",
        "stop",
        "stream",
        "x",
        *sorted(known_names),
    ]
)
likely_values = json_values | st.sampled_from(
    ["x", "POST", "/v1/completions", 0, 1, 0.5, [1, 2], {"prompt": "x"}, True]
)
records = st.dictionaries(field_names, likely_values, max_size=6)
lines = st.one_of(
    st.binary(max_size=80),
    json_values.map(lambda value: json.dumps(value).encode()),
    records.map(lambda record: json.dumps(record).encode()),
    records.map(lambda record: json.dumps({"url": "/v1/completions", "body": record}).encode()),
    st.tuples(records.map(json.dumps), st.integers(0, 60), st.binary(max_size=3)).map(
        lambda parts: parts[0].encode()[: parts[1]] + parts[2] + parts[0].encode()[parts[1] :]
    ),
)


@given(raw=lines, line=st.integers(1, 10**6))
@example(raw=b'{"prompt": "x", "temperature": %s}' % (b"9" * 300), line=1)
@example(raw=b'{"url": {}, "body": []}', line=1)
def test_any_line_is_a_request_or_an_error_that_can_be_written(raw: bytes, line: int) -> None:
    result = parse_line(raw, line)
    assert result.line == line and result.custom_id
    if isinstance(result, LineError):
        record = json.loads(error_line(result, record_id(line, 0)))
        assert record["response"] is None
        assert record["error"] == {"code": result.code, "message": result.message, "line": line}
        assert result.code in ("invalid_json_line", "invalid_request") and result.message
    else:
        outputs = [finished()] * len(result.prompts)
        record = json.loads(
            result_line(result, outputs, record_id(line, 0), ResultHeader(created=1, model="m"))
        )
        assert result.prompts and record["error"] is None
    assert record["custom_id"] == result.custom_id


def test_prompts_times_n_of_one_line_are_bounded() -> None:
    """Refused when the line is read, before a prompt is tokenised."""
    for prompts, n, fits in ((128, 128, False), (8, 128, True), (9, 128, False)):
        body = {"prompt": ["x"] * prompts, "n": n}
        record = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
        line = parse_record(record, 1)
        assert isinstance(line, LineRequest) == fits
        assert fits or f"{prompts * n} sequences" in line.message
