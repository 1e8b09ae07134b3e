"""What scripts written for vLLM do, with `xla_engine.vllm` in place of `vllm`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from xla_engine import LLM as PlainLLM
from xla_engine import SamplingParams as PlainParams
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import ConfigError, InvalidRequestError
from xla_engine.observability.histogram import FEW
from xla_engine.observability.histogram import Histogram as CountsValues
from xla_engine.vllm import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    BeamSearchParams,
    Counter,
    EngineArgs,
    FlexibleArgumentParser,
    Histogram,
    LLMEngine,
    RequestOutputKind,
    SamplingParams,
    Vector,
    cleanup_dist_env_and_memory,
    engine,
    llm,
)
from xla_engine.vllm.metrics import metrics

PROMPTS = ["def main(", "import os", "x ="]


@pytest.fixture
def shared(embedded: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines that are made are the session's."""

    def made(model: Any = None, **options: Any) -> PlainLLM:
        assert model is None
        return PlainLLM.from_engine(embedded)

    monkeypatch.setattr(llm.llm, "LLM", made)
    monkeypatch.setattr(engine.llm, "LLM", made)
    yield
    assert not embedded.has_unfinished


@pytest.mark.usefixtures("shared")
def test_parameters_change_and_outputs_are_lists_and_dicts(embedded: XlaBatchEngine) -> None:
    model = LLM()
    params = model.get_default_sampling_params()
    params.max_tokens, params.temperature, params.logprobs, params.prompt_logprobs = 5, 0.0, 2, 1
    outputs = model.generate(PROMPTS, params, False, lora_request=None)
    plain = PlainParams(max_tokens=5, temperature=0.0, logprobs=2, prompt_logprobs=1)
    expected = PlainLLM.from_engine(embedded).generate(PROMPTS, plain, use_tqdm=False)
    for output, other in zip(outputs, expected, strict=True):
        one, same = output.outputs[0], other.outputs[0]
        assert isinstance(output.outputs, list) and one.token_ids == list(same.token_ids) and one.finished()
        assert one.token_logprobs == list(same.logprobs or ())
        assert one.logprobs is not None and same.top_logprobs is not None
        for token, value, found in zip(one.token_ids, one.token_logprobs, one.logprobs, strict=True):
            assert found[token].logprob == value and 2 <= len(found) <= 3
            assert found[token].rank == 1 and isinstance(found[token].decoded_token, str)
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert model.get_default_sampling_params().max_tokens == PlainParams().max_tokens  # it was a copy


@pytest.mark.usefixtures("shared")
def test_logprobs_of_the_sampled_token_alone() -> None:
    [output] = LLM().generate("def", SamplingParams(max_tokens=3, logprobs=0), use_tqdm=False)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert [[*found] for found in completion.logprobs] == [[token] for token in completion.token_ids]


def test_a_change_is_checked_and_a_copy_is_its_own() -> None:
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    params = SamplingParams.from_optional(temperature=0.5, top_p=None)
    copy = params.clone()
    copy.top_k = 3
    assert (params.top_k, copy.top_k, copy.temperature) == (PlainParams().top_k, 3, 0.5)
    assert params != copy and params == SamplingParams(temperature=0.5)
    with pytest.raises(InvalidRequestError, match="temperature"):
        params.temperature = -1
    assert params.temperature == 0.5


def test_vllms_defaults_are_taken_and_other_values_refused() -> None:
    params = SamplingParams(
        spaces_between_special_tokens=True,
        flat_logprobs=False,
        seed=None,
        logits_processors=None,
        extra_args=None,
    )
    assert params == SamplingParams() and SamplingParams.from_optional(stop=None, max_tokens=16) == params
    params.flat_logprobs = False
    assert SamplingParams(prompt_logprobs=0, prompt_logprob_start=3).logprobs_start == 3
    for field, match in (
        ({"flat_logprobs": True}, "flat_logprobs"),
        ({"logprobs": -1}, "the whole vocabulary"),
        ({"extra_args": {"a": 1}}, "extra_args"),
    ):
        with pytest.raises(InvalidRequestError, match=match):
            SamplingParams(**field)


@pytest.mark.usefixtures("shared")
def test_a_tokenizer_has_the_methods_that_scripts_call(embedded: XlaBatchEngine) -> None:
    model, text = LLM(), "def main():"
    tokenizer, plain = model.get_tokenizer(), embedded.tokenizer
    assert plain is not None
    ids = tokenizer(text).input_ids
    assert ids == tokenizer.encode(text) == plain.encode(text) and tokenizer(text)["attention_mask"] == [
        1
    ] * len(ids)
    assert tokenizer([text, "x"], truncation=True, max_length=2).input_ids[0] == ids[:2]
    assert tokenizer.batch_decode([ids], skip_special_tokens=True) == [text]
    assert (tokenizer.eos_token_id,) == embedded.validator.eos_token_ids[:1]
    assert tokenizer.encode(tokenizer.eos_token, add_special_tokens=False) == [tokenizer.eos_token_id]
    assert len(tokenizer) == plain.vocab_size
    messages = [{"role": "user", "content": "Add."}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template([messages, messages], add_generation_prompt=True)[1]
    params = SamplingParams(temperature=0, max_tokens=4)
    by_ids = model.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0]
    by_chat = model.chat(messages, params, use_tqdm=False)[0]
    assert by_chat.prompt == prompt and by_chat.outputs[0].token_ids == by_ids.outputs[0].token_ids
    with pytest.raises(InvalidRequestError, match="return_tensors"):
        tokenizer.apply_chat_template(messages, return_tensors="pt")


@pytest.mark.usefixtures("shared")
def test_prompts_are_tokenised_as_asked(tmp_path: Path) -> None:
    model, params = LLM(), SamplingParams(temperature=0, max_tokens=2)
    ids = model.get_tokenizer().encode("def main(): pass")

    def seen(**kwargs: Any) -> list[int]:
        [output] = model.generate("def main(): pass", params, use_tqdm=False, tokenization_kwargs=kwargs)
        return output.prompt_token_ids

    assert seen(truncate_prompt_tokens=3) == ids[-3:] and seen(truncation=True, max_length=2) == ids[-2:]
    assert seen(truncation=True, max_length=2, truncation_side="right") == ids[:2]
    assert seen(truncate_prompt_tokens=-1) == seen(add_special_tokens=True) == ids
    with pytest.raises(InvalidRequestError, match="unknown tokenizer argument 'stride'"):
        seen(stride=1)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "template.jinja").write_text(template)
    messages = [{"role": "user", "content": "def f("}]
    for given in (template, tmp_path / "template.jinja"):
        assert LLM(chat_template=given).chat(messages, params, use_tqdm=False)[0].prompt == "def f("
    with pytest.raises(ConfigError, match="neither jinja2 source nor a file"):
        LLM(chat_template="nowhere")


@pytest.mark.usefixtures("shared")
def test_beams_are_the_likeliest_sequences(embedded: XlaBatchEngine) -> None:
    """A beam as wide as it may be finds no worse than greedy; scores are those of `xla_engine.LLM.score`."""
    model, plain = LLM(), PlainLLM.from_engine(embedded)
    params = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
    found = model.beam_search(["def f(", {"prompt": "import "}], params)
    for prompt, output in zip(["def f(", "import "], found, strict=True):
        ids = model.get_tokenizer().encode(prompt)
        sums = [each.cum_logprob for each in output.sequences]
        assert len(sums) == 3 and sums == sorted(sums, reverse=True)
        for each in output.sequences:
            assert each.tokens[: len(ids)] == ids and each.text is not None and len(each.logprobs) == 4
            score = plain.score(ids, each.tokens[len(ids) :], use_tqdm=False)[0]
            assert each.cum_logprob == pytest.approx(score.logprob, abs=1e-5)
        greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
        [one] = model.generate(prompt, greedy, use_tqdm=False)
        assert one.outputs[0].cumulative_logprob is not None
        assert sums[0] >= one.outputs[0].cumulative_logprob - 1e-5
    with pytest.raises(InvalidRequestError, match="beam_width"):
        BeamSearchParams(beam_width=11, max_tokens=4)
    with pytest.raises(InvalidRequestError, match="does not support temperature"):
        BeamSearchParams(beam_width=2, max_tokens=4, temperature=1.0)


@pytest.mark.usefixtures("shared")
def test_queued_prompts_run_when_they_are_waited_for() -> None:
    model, params = LLM(), SamplingParams(temperature=0, max_tokens=4)
    names = model.enqueue(PROMPTS[:2], params) + model.enqueue(PROMPTS[2], [params], priority=[3])
    # they may run meanwhile, and are not lost
    assert model.generate("y =", params, use_tqdm=False)[0].finished
    found = model.wait_for_completion()
    assert [each.request_id for each in found] == names and model.wait_for_completion() == []
    expected = model.generate(PROMPTS, params, use_tqdm=False)
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]


@pytest.mark.usefixtures("shared")
def test_what_there_is_not_is_refused_by_name() -> None:
    model = LLM()
    for call in (model.sleep, model.wake_up):
        with pytest.raises(ConfigError, match=r"close\(\) it and create it again"):
            call()
    with pytest.raises(ConfigError, match="no workers to call"):
        model.collective_rpc("method", args=(1,))
    assert model.get_world_size() == 1


@pytest.mark.usefixtures("shared")
def test_an_engine_is_made_of_the_command_line_and_stepped() -> None:
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    args = parser.parse_args(["--max_model_len", "100", "--enforce-eager", "--gpu-memory-utilization=0.5"])
    made = EngineArgs.from_cli_args(args)
    assert made.options == {"max_model_len": 100, "enforce_eager": True, "gpu_memory_utilization": 0.5}
    stepped = LLMEngine.from_engine_args(made)
    kinds = [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY]
    for index, kind in enumerate(kinds):
        params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, output_kind=kind)
        stepped.add_request(str(index), "def f(", params)
    seen: dict[str, list[Any]] = {str(index): [] for index in range(3)}
    while stepped.has_unfinished_requests():
        for output in stepped.step():
            seen[output.request_id].append(output)
    whole, parts, last = (seen[str(index)] for index in range(3))
    assert len(last) == 1 and last[0].finished and len(parts) == len(whole) > 1
    assert [token for part in parts for token in part.outputs[0].token_ids] == last[0].outputs[0].token_ids
    assert "".join(part.outputs[0].text for part in parts) == last[0].outputs[0].text
    assert [x for part in parts for x in part.outputs[0].token_logprobs] == last[0].outputs[0].token_logprobs
    assert whole[-1].outputs[0].token_ids == last[0].outputs[0].token_ids


@pytest.mark.usefixtures("shared")
def test_streams_of_an_event_loop(embedded: XlaBatchEngine) -> None:
    async def read(made: AsyncLLM, name: str, kind: RequestOutputKind) -> str:
        params = SamplingParams(temperature=0, max_tokens=12, output_kind=kind)
        text = ""
        async for output in made.generate(prompt="import", sampling_params=params, request_id=name):
            new = output.outputs[0].text
            text = text + new if kind is RequestOutputKind.DELTA else new
        return text

    async def both() -> list[str]:
        made = AsyncLLM.from_engine_args(AsyncEngineArgs(enforce_eager=True))
        return await asyncio.gather(
            read(made, "a", RequestOutputKind.DELTA), read(made, "b", RequestOutputKind.CUMULATIVE)
        )

    first, second = asyncio.run(both())
    assert first == second != ""


@pytest.mark.usefixtures("shared")
def test_counters_have_vllms_names(embedded: XlaBatchEngine) -> None:
    model = LLM()

    def count(name: str) -> int:
        [metric] = [each for each in model.get_metrics() if each.name == name]
        assert isinstance(metric, Counter)
        return metric.value

    before = count("vllm:generation_tokens")
    model.generate("def", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert count("vllm:generation_tokens") == before + 4


@pytest.mark.usefixtures("shared")
def test_histograms_have_vllms_shape(embedded: XlaBatchEngine) -> None:
    model = LLM()
    model.generate("def", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    found = [each for each in model.get_metrics() if isinstance(each, Histogram)]
    assert "vllm:time_to_first_token_seconds" in {each.name for each in found}
    for each in found:
        counts = list(each.buckets.values())
        assert counts == sorted(counts) and each.buckets["+Inf"] == each.count
    cleanup_dist_env_and_memory()


def test_accepted_drafts_are_a_vector() -> None:
    counted = [0, 3, 1, 5, 9, 0]
    histogram = CountsValues(FEW)
    for value in counted:
        histogram.add(value)
    histograms = SimpleNamespace(accepted_drafts=histogram.now())
    engine = SimpleNamespace(metrics=lambda: (), stats=lambda: SimpleNamespace(distributions=histograms))
    [vector] = metrics(engine)  # type: ignore[arg-type]
    assert isinstance(vector, Vector)
    assert vector.values == [sum(value > place for value in counted) for place in range(5)]


@pytest.mark.usefixtures("shared")
def test_a_chat_takes_its_arguments_by_place() -> None:
    conversation = [{"role": "user", "content": "Add."}]
    outputs = LLM().chat([conversation, conversation], SamplingParams(temperature=0, max_tokens=4), False)
    assert np.array_equal(outputs[0].outputs[0].token_ids, outputs[1].outputs[0].token_ids)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        LLM(gpu_memory_utilisation=0.5)
