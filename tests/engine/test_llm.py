"""`LLM` as a vLLM user expects it, on the embedded model."""

from __future__ import annotations

import pytest

from xla_engine import LLM, SamplingParams
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import EngineClosedError, InvalidRequestError, TokenLimitError

GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPTS = ["def fibonacci(n):", "import os", "class Queue:\n    def push(self, item):"]


@pytest.fixture
def llm(embedded: XlaBatchEngine) -> LLM:
    """An LLM around the session's engine."""
    return LLM.from_engine(embedded)


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    outputs = llm.generate(
        PROMPTS, [SamplingParams(temperature=0, max_tokens=n) for n in (20, 1, 9)], use_tqdm=False
    )
    assert [output.prompt for output in outputs] == PROMPTS
    assert [len(output.outputs[0].token_ids) for output in outputs] == [20, 1, 9]
    assert all(output.finished for output in outputs)


def test_text_is_the_decoded_tokens(llm: LLM) -> None:
    assert llm.tokenizer is not None
    for output in llm.generate(
        PROMPTS, SamplingParams(max_tokens=40, seed=5, temperature=1.2), use_tqdm=False
    ):
        completion = output.outputs[0]
        shown = completion.token_ids[:-1] if completion.finish_reason == "stop" else completion.token_ids
        assert completion.text == llm.tokenizer.decode(shown)


def test_token_ids_and_text_are_the_same_prompt(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(PROMPTS[0])
    as_text, as_ids = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in (PROMPTS[0], ids))
    assert as_text.outputs == as_ids.outputs
    assert as_ids.prompt is None and as_ids.prompt_token_ids == tuple(ids)


def test_logprobs_are_given_when_asked_for(llm: LLM) -> None:
    plain, asked = llm.generate(
        [PROMPTS[0]] * 2, [GREEDY, SamplingParams(temperature=0, max_tokens=24, logprobs=0)], use_tqdm=False
    )
    assert plain.outputs[0].logprobs is None and plain.outputs[0].cumulative_logprob is None
    logprobs = asked.outputs[0].logprobs
    assert logprobs is not None and len(logprobs) == len(asked.outputs[0].token_ids)
    assert all(value <= 0 for value in logprobs)
    assert asked.outputs[0].cumulative_logprob == pytest.approx(sum(logprobs))
    assert asked.outputs[0].token_ids == plain.outputs[0].token_ids


def test_stream_yields_deltas_and_ends_each_request_once(llm: LLM) -> None:
    final = {o.request_id: o for o in llm.stream(PROMPTS, GREEDY) if o.finished}
    assert len(final) == len(PROMPTS)
    again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert sorted(o.outputs[0].text for o in final.values()) == sorted(o.outputs[0].text for o in again)


def test_a_chat_streams_without_asyncio(llm: LLM) -> None:
    """The pieces add up to the answer of `chat`, for one conversation and for several."""
    params = SamplingParams(temperature=0, max_tokens=12)
    chats = [[{"role": "user", "content": text}] for text in ("Add two numbers.", "Reverse a list.")]
    whole = {output.prompt: output.outputs[0].text for output in llm.chat(chats, params, use_tqdm=False)}
    found: dict[str | None, str] = {}
    seen = 0
    for output in llm.chat(chats, params, stream=True):
        assert output.outputs[0].text.startswith(found.get(output.prompt, ""))
        found[output.prompt], seen = output.outputs[0].text, seen + 1
    assert found == whole and seen > 8


def test_closing_the_stream_aborts_what_is_left(llm: LLM) -> None:
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    stream.close()
    llm.engine.step()
    assert llm.engine.num_running == llm.engine.num_waiting == 0


def test_a_bad_prompt_is_named_and_none_runs(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="prompt 1: the prompt is empty"):
        llm.generate([PROMPTS[0], "", PROMPTS[1]], GREEDY, use_tqdm=False)
    assert llm.engine.num_waiting == 0
    with pytest.raises(InvalidRequestError, match="2 sampling_params for 3 prompts"):
        llm.generate(PROMPTS, [GREEDY, GREEDY], use_tqdm=False)


def test_text_that_cannot_fit_is_refused_before_it_is_tokenised(llm: LLM) -> None:
    with pytest.raises(TokenLimitError, match="10000000 characters"):
        llm.generate("x" * 10_000_000, GREEDY, use_tqdm=False)


def test_the_embedded_model_writes_python(llm: LLM) -> None:
    """Recognisable Python: most greedy completions of small functions compile as a whole or up to their last line."""
    prompts = [
        f"def {name}:" for name in ("get_name(self)", "is_valid(value)", "read(path)", "size(self)", "main()")
    ]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
    assert sum(_compiles(prompt + o.outputs[0].text) for prompt, o in zip(prompts, outputs, strict=True)) >= 3


def _compiles(source: str) -> bool:
    lines = source.splitlines()
    for end in range(len(lines), 1, -1):
        try:
            compile("\n".join(lines[:end]), "completion", "exec")
        except (SyntaxError, ValueError):
            continue
        return True
    return False


def test_context_manager_closes() -> None:
    with LLM(max_num_seqs=8, max_model_len=128, prefill_lanes=(2,)) as llm:
        assert llm.generate("import sys", GREEDY, use_tqdm=False)[0].finished
    with pytest.raises(EngineClosedError, match=r"close\(\) was called"):
        llm.generate("import sys", GREEDY, use_tqdm=False)


def test_without_max_tokens_a_request_runs_to_the_end_of_its_slot(llm: LLM) -> None:
    open_ended = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    limit = llm.engine.max_model_len
    prompt = [5] * (limit - 20)
    [output] = llm.generate(prompt, open_ended, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 20 and output.outputs[0].finish_reason == "length"
    with pytest.raises(TokenLimitError, match=r"max_tokens \(1\)"):
        llm.generate([5] * limit, open_ended, use_tqdm=False)


@pytest.mark.full
def test_without_max_tokens_a_request_gets_the_blocks_there_are() -> None:
    with LLM(
        max_num_seqs=8, max_model_len=256, prefill_lanes=(2,), num_blocks=6, block_size=32, self_check=False
    ) as llm:
        [output] = llm.generate(
            [5] * 20, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True), use_tqdm=False
        )
        assert 100 < len(output.outputs[0].token_ids) < 200


def test_any_number_of_stop_ids_ends_a_request_at_the_first_of_them(llm: LLM) -> None:
    """The host checks stop ids beyond those that the device has room for."""
    [free] = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    tokens, vocabulary = free.outputs[0].token_ids, llm.engine.checkpoint.config.vocab_size
    unused = [token for token in range(vocabulary) if token not in tokens]
    for stop in (tokens[0], tokens[7], tokens[-1]):
        many = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[*unused[:1000], stop], logprobs=0)
        [output] = llm.generate(PROMPTS[0], many, use_tqdm=False)
        completion, end = output.outputs[0], tokens.index(stop) + 1
        assert completion.token_ids == tokens[:end] and completion.stop_reason == stop
        assert completion.finish_reason == "stop" and len(completion.logprobs or ()) == end
        assert llm.tokenizer is not None and completion.text == llm.tokenizer.decode(tokens[: end - 1])
    with pytest.raises(InvalidRequestError, match="with min_tokens at most 8"):
        llm.generate(PROMPTS[0], SamplingParams(min_tokens=2, stop_token_ids=unused[:9]), use_tqdm=False)
