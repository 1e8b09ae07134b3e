"""A truncated prompt is the end of the whole one, and its answer that of the shortened prompt, bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.models import TINY
from xla_engine import LLM
from xla_engine.cli import main
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.requests.validation import RequestValidator
from xla_engine.errors import InvalidRequestError, TokenLimitError
from xla_engine.openai.requests import LineRequest, parse_line
from xla_engine.outputs import RequestOutput
from xla_engine.sampling_params import SamplingParams
from xla_engine.text.fill_in import FillIn

LIMIT = 64
VALIDATOR = RequestValidator(
    vocab_size=TINY.vocab_size, eos_token_ids=(1,), max_model_len=LIMIT, tokenizer=None
)
TEXT = "x = 1\n" * 400 + "def area(width, height):"  # far more tokens than the engines below take


@given(
    ids=st.lists(st.integers(0, TINY.vocab_size - 1), min_size=1, max_size=2 * LIMIT),
    most=st.sampled_from([-1, 1, 2, 7, LIMIT - 1, 3 * LIMIT]),
    new=st.sampled_from([None, 1, 5, LIMIT - 1]),
    blocks=st.sampled_from([LIMIT, 20]),
)
@settings(max_examples=60)
def test_what_is_kept_is_the_end_and_as_much_as_the_number_says(
    ids: list[int], most: int, new: int | None, blocks: int
) -> None:
    validator = replace(
        VALIDATOR, never_fits=lambda prompt, tokens: "too few blocks" if prompt + tokens > blocks else None
    )
    params = SamplingParams(max_tokens=new, truncate_prompt_tokens=most)
    room = min(blocks, LIMIT) - (new or 1)  # for the prompt
    kept = room if most == -1 else most
    if min(len(ids), max(kept, 1)) > room:
        with pytest.raises(TokenLimitError):
            validator.token_ids(ids, params)
        return
    found = validator.checked(ids, params, {}, add_special_tokens=True)
    assert found.token_ids == tuple(ids[-kept:]) == validator.token_ids(ids, params)
    assert found.params.truncate_prompt_tokens is None, "what continues the request would be cut again"
    assert len(found.token_ids) + found.params.token_limit <= LIMIT


def test_without_it_a_long_prompt_is_refused_with_its_name() -> None:
    with pytest.raises(TokenLimitError, match="truncate_prompt_tokens -1 keeps"):
        VALIDATOR.token_ids(range(LIMIT + 5), SamplingParams())


@pytest.mark.parametrize("value", [0, -2, 1.5, "3", True])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens must be"):
        SamplingParams(truncate_prompt_tokens=value)


def outcome(output: RequestOutput) -> tuple[object, ...]:
    (answer,) = output.outputs
    return output.prompt, output.prompt_token_ids, output.prompt_logprobs, answer.token_ids, answer.logprobs


def test_the_answer_has_the_bits_of_the_shortened_prompt(embedded: XlaBatchEngine) -> None:
    """Text and ids, among others and alone; the shortened prompt may come from the prefix cache."""
    tokenizer = embedded.tokenizer
    assert tokenizer is not None
    fields: dict[str, Any] = {"seed": 3, "max_tokens": 6, "logprobs": 2, "prompt_logprobs": 1}
    ids = tokenizer.encode(TEXT)
    llm = LLM.from_engine(embedded)
    cut = SamplingParams(truncate_prompt_tokens=40, **fields)
    outputs = llm.generate([TEXT, "import os", ids], [cut, SamplingParams(**fields), cut])
    kept = ids[-40:]
    alone = llm.generate(
        [{"prompt_token_ids": kept, "prompt": tokenizer.decode(kept)}], SamplingParams(**fields)
    )
    assert outcome(outputs[0]) == outcome(alone[0])
    assert outcome(outputs[2])[1:] == outcome(alone[0])[1:] and outputs[2].prompt is None
    assert outputs[0].prompt is not None and TEXT.endswith(outputs[0].prompt)
    (short,) = llm.generate(["import os"], SamplingParams(truncate_prompt_tokens=40, **fields))
    assert outcome(short) == outcome(outputs[1]), "a short prompt changes"


def test_of_a_text_far_too_long_the_end_is_tokenised(
    embedded: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, sizes = embedded.tokenizer, []
    assert tokenizer is not None
    encode = type(tokenizer).encode

    def counting(self: Any, text: str, *rest: Any, **options: Any) -> list[int]:
        sizes.append(len(text))
        return encode(self, text, *rest, **options)

    monkeypatch.setattr(type(tokenizer), "encode", counting)
    bound = 4 * tokenizer.longest_token * embedded.max_model_len
    text = "a = 1\n" * (bound // 3) + TEXT
    params = SamplingParams(truncate_prompt_tokens=-1, max_tokens=4)
    checked = embedded.validator.checked(text, params, {}, add_special_tokens=True)
    assert len(checked.token_ids) == embedded.max_model_len - 4 and max(sizes) <= bound < len(text)
    assert checked.token_ids == tuple(encode(tokenizer, text)[-len(checked.token_ids) :])


def test_prompts_that_have_parts_are_not_cut(embedded: XlaBatchEngine) -> None:
    params = SamplingParams(truncate_prompt_tokens=4)
    ready = FillIn("def a():\n", "\n", token_ids=(5, 6, 7, 8, 9))
    for prompt, pictured, name in ((ready, False, "a suffix"), ([5, 6, 7, 8, 9], True, "pictures")):
        with pytest.raises(TokenLimitError, match=f"a prompt with {name} cannot be truncated"):
            embedded.validator.token_ids(prompt, params, pictured=pictured)


def test_lines_take_it() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "truncate_prompt_tokens": -1}
    lines: list[dict[str, Any]] = [
        {"prompt": "a", "truncate_prompt_tokens": 2},
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body},
    ]
    for line, expected in zip(lines, (2, -1), strict=True):
        found = parse_line(json.dumps(line).encode(), 1)
        assert isinstance(found, LineRequest) and found.params.truncate_prompt_tokens == expected


@pytest.mark.full
def test_the_command_sets_it_for_lines_that_do_not(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    long = {"prompt": TEXT, "max_tokens": 4, "temperature": 0}
    lines = [
        long,
        {**long, "truncate_prompt_tokens": 9},
        {**long, "truncate_prompt_tokens": None, "prompt": "a ="},
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--max-model-len", "64", "--max-num-seqs", "4", "--truncate-prompt-tokens", "-1"]
    dry = CliRunner().invoke(main, ["run", str(source), "--dry-run", *options])
    assert dry.exit_code == 0 and "3" in dry.output, dry.output
    done = CliRunner().invoke(main, ["run", str(source), "-o", str(output), "--ordered", *options])
    assert done.exit_code == 0, done.output
    usage = [
        json.loads(line)["response"]["body"]["usage"]["prompt_tokens"]
        for line in BytesIO(output.read_bytes())
    ]
    assert usage[:2] == [60, 9] and usage[2] < 9
