"""Ways of use that vLLM's own example scripts have, on models small enough for a test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.adapters import adapters, llama_checkpoint
from tests.support.models import TINY_ENGINE
from tests.support.pooling_models import qwen3_tensors, write_model
from xla_engine import LLM as PlainLLM
from xla_engine import AsyncLLM as PlainAsyncLLM
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import AdaptersBusyError, CheckpointError, ConfigError, InvalidRequestError
from xla_engine.vllm import (
    LLM,
    AsyncLLM,
    EngineArgs,
    LLMEngine,
    PoolerConfig,
    ProfilerConfig,
    RequestOutputKind,
    SamplingParams,
    engine,
    llm,
    print_embeddings,
)

SMALL: dict[str, Any] = {
    "max_num_seqs": 4, "max_model_len": 128, "chunk_size": 16, "prefill_lanes": (4,), "key_buckets": (128,),
    "dtype": "float32", "self_check": False,
}  # fmt: skip
YARN = {
    "rope_theta": 50000.0,
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    return write_model(tmp_path / "qwen3", qwen3_tensors(), "Qwen3ForCausalLM")


@pytest.fixture
def shared(embedded: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[XlaBatchEngine]:
    """Engines that are made are the session's."""
    monkeypatch.setattr(llm.llm, "LLM", lambda model, **options: PlainLLM.from_engine(embedded))
    plain = PlainAsyncLLM.from_engine
    monkeypatch.setattr(engine.async_llm, "AsyncLLM", lambda model, **options: plain(embedded))
    yield embedded


@pytest.mark.full
def test_overrides_stretch_a_context(qwen3: Path) -> None:
    """YaRN by `hf_overrides` is YaRN by config.json, to the bit, and not what the file says without."""
    overrides = {"rope_parameters": YARN, "max_model_len": 1024}
    fields = json.loads((qwen3 / "config.json").read_text())
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=0, ignore_eos=True)
    prompt = list(range(3, 90))

    def logprobs(**options: Any) -> tuple[int, list[float] | None]:
        with LLM(qwen3, **(SMALL | options)) as model:
            length = model.llm_engine.checkpoint.config.max_position_embeddings
            return length, model.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_logprobs

    stretched, plain = logprobs(hf_overrides=overrides), logprobs()
    del fields["rope_theta"]
    written = {**fields, "rope_parameters": YARN, "max_position_embeddings": 1024}
    (qwen3 / "config.json").write_text(json.dumps(written))
    assert stretched == logprobs() and stretched[1] != plain[1]
    assert (stretched[0], plain[0]) == (1024, 256)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rope_theta": "large"}, "a number"),
        ({"rope_parameters": [1]}, "an object"),
        ({"max_model_len": 0}, "a number of tokens"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "spiral"),
        ({"is_matryoshka": True}, "for models that pool"),
    ],
)
def test_overrides_that_cannot_be(qwen3: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=message):
        LLM(qwen3, hf_overrides=overrides, **SMALL)


def test_numbers_come_as_arrays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path, qwen3_tensors(labels=1), "Qwen3ForSequenceClassification")
    args = EngineArgs(model=str(tmp_path), runner="pooling", **SMALL)
    with LLM.from_engine_args(args) as model:
        texts = ["def push(self)", "the cat sat"]
        rewards = model.encode(texts, pooling_task="classify", use_tqdm=False)
        probs = [each.outputs.probs for each in model.classify(texts, use_tqdm=False)]
        assert [each.outputs.data.tolist() for each in rewards] == [
            np.array(each, np.float32).tolist() for each in probs
        ]
        print_embeddings(rewards[0].outputs.data.tolist(), prefix="Reward")
        assert capsys.readouterr().out == f"Reward: [{probs[0][0]}] (size=1)\n"
        with pytest.raises(InvalidRequestError, match="one vector"):
            model.encode(texts, pooling_task="token_classify")


def test_vectors_come_as_arrays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path, qwen3_tensors(""), "Qwen3Model")
    with LLM(tmp_path, pooler_config=PoolerConfig(pooling_type="MEAN"), **SMALL) as model:
        [found] = model.encode("def", pooling_task="embed", use_tqdm=False)
        [vector] = model.embed("def", use_tqdm=False)
    assert found.outputs.data.shape == (48,) and found.prompt_token_ids == vector.prompt_token_ids
    np.testing.assert_array_equal(found.outputs.data, np.float32(vector.outputs.embedding))
    print_embeddings(vector.outputs.embedding)
    assert capsys.readouterr().out.endswith(", ...] (size=48)\n")


def test_engine_args_tell_options_that_were_not_given() -> None:
    args = EngineArgs("a/model", max_num_seqs=2)
    assert (args.max_num_seqs, args.tensor_parallel_size, args.load_format, args.enable_lora) == (
        2,
        1,
        "auto",
        False,
    )
    with pytest.raises(AttributeError):
        _ = args.no_such_thing


@pytest.mark.full
def test_requests_wait_for_room_for_their_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One adapter fits; each request has the tokens that it has in an engine with room for both."""
    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    loras = adapters(tmp_path, llama_checkpoint(), 2)

    def run(max_loras: int) -> tuple[list[str], dict[str, list[int]]]:
        config = replace(TINY_ENGINE, enable_lora=True, max_loras=max_loras)
        with XlaBatchEngine(llama_checkpoint(), None, config) as made:
            monkeypatch.setattr(engine.llm, "LLM", lambda *_, **__: PlainLLM.from_engine(made))
            stepped, order, found = LLMEngine.from_engine_args(EngineArgs()), [], {}
            for number, lora in enumerate([None, *loras, None]):
                stepped.add_request(str(number), [number + 1, 5, 9], params, lora_request=lora)
            stepped.add_request("gone", [1], params, lora_request=loras[1])
            stepped.abort_request("gone")
            while stepped.has_unfinished_requests():
                for output in stepped.step():
                    order.append(output.request_id)
                    lora = {"1": loras[0], "2": loras[1]}.get(output.request_id)
                    assert output.lora_request == lora or output.request_id == "gone"
                    found[output.request_id] = output.outputs[0].token_ids
            if max_loras == 1:  # for what is pinned there is no waiting
                assert made.pin_lora(2)
                with pytest.raises(AdaptersBusyError):
                    stepped.add_request("late", [1], params, lora_request=loras[0])
                assert not stepped.has_unfinished_requests()
            return order, found

    (order, found), (_, roomy) = run(1), run(2)
    assert order.index("1") < order.index("2")
    assert found == {name: roomy[name] for name in found} and set("0123") <= set(found)


def test_a_profile_is_written(shared: XlaBatchEngine, tmp_path: Path) -> None:
    model = LLM(profiler_config=ProfilerConfig(profiler="torch", torch_profiler_dir=str(tmp_path)))
    model.start_profile()
    with pytest.raises(ConfigError, match="Stop the profile"):
        model.start_profile()
    model.generate("def", SamplingParams(max_tokens=2), use_tqdm=False)
    model.stop_profile()
    assert list(tmp_path.rglob("*.xplane.pb"))
    with pytest.raises(ConfigError, match="Start a profile"):
        model.stop_profile()
    with pytest.raises(ConfigError, match="torch_profiler_dir"):
        LLM().start_profile()


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_generation_is_paused(shared: XlaBatchEngine, mode: Any) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)

    async def main() -> None:
        made, counts = AsyncLLM.from_engine_args(EngineArgs()), [0]

        async def read() -> str | None:
            async for output in made.generate("Once upon a time", params, "one"):
                counts.append(len(output.outputs[0].token_ids))
            return output.outputs[0].finish_reason

        task = asyncio.create_task(read())
        while counts[-1] < 3:
            await asyncio.sleep(0)
        await made.pause_generation(mode=mode)
        paused = counts[-1]
        await asyncio.sleep(0.05)
        assert await made.is_paused() and counts[-1] == paused < 12
        await made.resume_generation()
        assert await task == {"keep": "length", "abort": "abort"}[mode] and not await made.is_paused()
        with pytest.raises(InvalidRequestError, match="wait until the requests have ended"):
            await made.pause_generation(mode="wait")  # type: ignore[arg-type]

    asyncio.run(asyncio.wait_for(main(), 300))
