"""Everything that `LLM`, `AsyncLLM`, their vLLM counterparts and engines offer, with two engines: the results of one
engine, or `OneEngineError` with what to do instead. A new method without a case here fails the first test."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from xla_engine import LLM, AsyncLLM, LoRARequest, SamplingParams, vllm
from xla_engine.data_parallel.engine import DataParallelEngine
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.engine.turn import drive
from xla_engine.environment import embedded_model_directory
from xla_engine.errors import ConfigError, EngineClosedError, OneEngineError, XlaEngineError
from xla_engine.model_loader.safetensors_files import open_weight_files
from xla_engine.open_engine import EngineClient
from xla_engine.outputs import RequestOutput
from xla_engine.vllm.engine import AsyncLLM as VllmAsyncLLM
from xla_engine.vllm.engine import LLMEngine

pytestmark = pytest.mark.full

OPTIONS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_model_len": 128,
    "prefill_lanes": (2,),
    "self_check": False,
    "enable_lora": True,
    "max_loras": 2,
    "enable_dry": True,
    "scheduling_policy": "round_robin",
}
PARAMS = SamplingParams(temperature=0.9, seed=3, max_tokens=6, logprobs=1, ignore_eos=True)
PROMPTS = ["def f(x):", "import os", "class A:"]
CHAT = [{"role": "user", "content": "def g():"}]
TEMPLATE = "{{ messages[0]['content'] }}"


@dataclass(frozen=True)
class Holder:
    """An engine, or two, and what holds it. adapter: of the embedded model."""

    llm: LLM
    adapter: LoRARequest

    @property
    def engine(self) -> EngineClient:
        return self.llm.engine

    @property
    def vllm(self) -> vllm.LLM:
        found = vllm.LLM.__new__(vllm.LLM)
        found._ends, found._queued = OutputCollector(every_token=False), {}
        found._llm, found._profile_directory = self.llm, "profile"
        return found

    @property
    def vllm_engine(self) -> LLMEngine:
        found = LLMEngine.__new__(LLMEngine)
        found._engine, found._streams, found._held = self.engine, {}, deque()
        return found

    @property
    def vllm_async(self) -> VllmAsyncLLM:
        found = VllmAsyncLLM.__new__(VllmAsyncLLM)
        found._llm = AsyncLLM.from_engine(self.engine)
        return found


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> LoRARequest:
    path, draw = tmp_path_factory.mktemp("adapter"), np.random.default_rng(0)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    matrices = {"A.weight": draw.normal(size=(8, 256)), "B.weight": draw.normal(size=(256, 8))}
    tensors = {name + each: values.astype(np.float32) for each, values in matrices.items()}
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16}))
    return LoRARequest("mine", 1, str(path))


@pytest.fixture(scope="module")
def holders(adapter: LoRARequest) -> Iterator[list[Holder]]:
    with LLM(**OPTIONS) as one, LLM(**OPTIONS, data_parallel_size=2) as two:
        yield [Holder(each, adapter) for each in (one, two)]


Call = Callable[[Holder], Any]


def submitted(holder: Holder, **options: Any) -> str:
    return holder.engine.submit(PROMPTS[0], PARAMS, request_id="r", **options)


def after(holder: Holder, change: Callable[[EngineClient], Any]) -> Any:
    """What `change` gives with a request that has not ended, and the request's results."""
    submitted(holder)
    return change(holder.engine), holder.engine.drain()


def read(holder: Holder, prompt: Callable[[AsyncLLM], Any]) -> Any:
    async def outputs() -> list[Any]:
        return [output async for output in prompt(AsyncLLM.from_engine(holder.engine)) if output.finished]

    return asyncio.run(outputs())


def awaited(make: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(make)


def turned(holder: Holder) -> Any:
    submitted(holder)
    while holder.engine.has_work:
        drive(holder.engine.turn())
    return holder.engine.drain()


def advanced(holder: Holder) -> Any:
    collector = OutputCollector(every_token=False)
    submitted(holder, collector=collector)
    while holder.engine.has_work:
        holder.engine.advance()
    return [request.output() for request in collector.take()]


def called_back(holder: Holder) -> Any:
    seen: list[RequestOutput] = []
    holder.llm.start()
    holder.llm.submit(PROMPTS[0], PARAMS, on_output=seen.append, only_finished=True)
    holder.llm.stop()
    return seen


def stepped(engine: Any) -> list[Any]:
    outputs = []
    while engine.has_unfinished_requests() if hasattr(engine, "add_request") else engine.has_unfinished:
        outputs += [output for output in engine.step() if output.finished]
    return outputs


def added(holder: Holder) -> LLMEngine:
    engine = holder.vllm_engine
    engine.add_request("r", PROMPTS[0], vllm.SamplingParams(temperature=0.9, seed=3, max_tokens=6))
    return engine


def pinned(holder: Holder) -> Any:
    engine = holder.engine
    found = [engine.pin_lora(1), engine.add_lora(holder.adapter), engine.pin_lora(1), engine.remove_lora(1)]
    return [*found, engine.list_loras()]


async def paused(llm: AsyncLLM) -> Any:
    await llm.pause()
    before = llm.is_paused
    llm.resume()
    llm.keep_running()
    return before, llm.is_paused


async def aborted(llm: AsyncLLM) -> Any:
    ends = []
    async for output in llm.generate(PROMPTS[0], PARAMS, request_id="r"):
        ends.append((output.finished and output.outputs[0].finish_reason, llm.abort("r")))
    return ends[-1][0] in ("abort", "length"), llm.abort("r")


def tensors() -> dict[str, Any]:
    """The embedded model's own weights, so that results stay."""
    files = open_weight_files(embedded_model_directory())
    return {name: files.read(name) for name in files.tensors}


OF_LLM: dict[str, Call] = {
    "tokenizer": lambda h: h.llm.tokenizer is not None,
    "get_tokenizer": lambda h: h.llm.get_tokenizer().encode("x = 1"),
    "get_default_sampling_params": lambda h: h.llm.get_default_sampling_params(),
    "generate": lambda h: [
        h.llm.generate(PROMPTS, PARAMS, use_tqdm=False),
        h.llm.generate(PROMPTS[0], PARAMS, use_tqdm=False, lora_request=h.adapter, priority=-2),
        h.llm.generate(PROMPTS[0], replace(PARAMS, dry_multiplier=2.0, max_tokens=40), use_tqdm=False),
    ],
    "chat": lambda h: h.llm.chat([CHAT, CHAT], PARAMS, use_tqdm=False, chat_template=TEMPLATE),
    "stream": lambda h: [output for output in h.llm.stream(PROMPTS[0], PARAMS) if output.finished],
    "score": lambda h: h.llm.score(PROMPTS, "\n    return", use_tqdm=False),
    "extend": lambda h: h.llm.extend(h.llm.generate(PROMPTS[0], PARAMS, use_tqdm=False), 4, use_tqdm=False),
    "embed": lambda h: h.llm.embed(PROMPTS, use_tqdm=False),
    "classify": lambda h: h.llm.classify(PROMPTS, use_tqdm=False),
    "score_documents": lambda h: h.llm.score_documents("a", PROMPTS, use_tqdm=False),
    "rerank": lambda h: h.llm.rerank("a", PROMPTS, use_tqdm=False),
    "start": called_back,
    "submit": called_back,
    "stop": called_back,
    "update_weights": lambda h: [
        h.llm.update_weights(tensors()),
        h.llm.generate(PROMPTS, PARAMS, use_tqdm=False),
    ],
    "metrics_text": lambda h: sorted({line.split("{")[0] for line in h.llm.metrics_text().splitlines()}),
    "from_engine": lambda h: LLM.from_engine(h.engine).generate(PROMPTS[0], PARAMS, use_tqdm=False),
}
OF_ASYNC: dict[str, Call] = {
    "generate": lambda h: read(h, lambda llm: llm.generate(PROMPTS[0], PARAMS, request_id="r")),
    "chat": lambda h: read(h, lambda llm: llm.chat(CHAT, PARAMS, request_id="r", chat_template=TEMPLATE)),
    "extend": lambda h: read(h, lambda llm: llm.extend("r", 4)),
    "abort": lambda h: awaited(aborted(AsyncLLM.from_engine(h.engine))),
    "pause": lambda h: awaited(paused(AsyncLLM.from_engine(h.engine))),
    "resume": lambda h: awaited(paused(AsyncLLM.from_engine(h.engine))),
    "is_paused": lambda h: AsyncLLM.from_engine(h.engine).is_paused,
    "keep_running": lambda h: awaited(paused(AsyncLLM.from_engine(h.engine))),
    "from_engine": lambda h: read(h, lambda llm: llm.generate(PROMPTS[1], PARAMS, request_id="r")),
}


def queued(h: Holder) -> Any:
    """The ids are made by a counter, as others' are."""
    llm = h.vllm
    ids = llm.enqueue(PROMPTS, vllm.SamplingParams(temperature=0, max_tokens=3))
    return len(ids), [output.outputs[0].text for output in llm.wait_for_completion()]


OF_VLLM: dict[str, Call] = {
    "llm_engine": lambda h: h.vllm.llm_engine is h.engine,
    "generate": lambda h: h.vllm.generate(PROMPTS, vllm.SamplingParams(temperature=0, max_tokens=5)),
    "chat": lambda h: h.vllm.chat(
        CHAT, vllm.SamplingParams(temperature=0, max_tokens=5), chat_template=TEMPLATE
    ),
    "embed": lambda h: h.vllm.embed(PROMPTS),
    "classify": lambda h: h.vllm.classify(PROMPTS),
    "score": lambda h: h.vllm.score("a", PROMPTS),
    "encode": lambda h: h.vllm.encode(PROMPTS, pooling_task="embed"),
    "get_tokenizer": lambda h: h.vllm.get_tokenizer().encode("x"),
    "beam_search": lambda h: [
        [(beam.tokens, beam.text) for beam in output.sequences]
        for output in h.vllm.beam_search(PROMPTS, vllm.BeamSearchParams(beam_width=2, max_tokens=3))
    ],
    "enqueue": queued,
    "wait_for_completion": queued,
    "get_world_size": lambda h: h.vllm.get_world_size(include_dp=False),
    "sleep": lambda h: h.vllm.sleep(),
    "wake_up": lambda h: h.vllm.wake_up(),
    "collective_rpc": lambda h: h.vllm.collective_rpc("method"),
    "apply_model": lambda h: h.vllm.apply_model(print),
    "get_default_sampling_params": lambda h: h.vllm.get_default_sampling_params().temperature,
    "get_metrics": lambda h: [(type(metric), metric.name) for metric in h.vllm.get_metrics()],
    "reset_prefix_cache": lambda h: h.vllm.reset_prefix_cache(),
    "start_profile": lambda h: [h.vllm.start_profile(), h.vllm.stop_profile()],
    "stop_profile": lambda h: [h.vllm.start_profile(), h.vllm.stop_profile()],
}
OF_VLLM_ENGINE: dict[str, Call] = {
    "add_request": lambda h: stepped(added(h)),
    "step": lambda h: stepped(added(h)),
    "has_unfinished_requests": lambda h: [added(h).has_unfinished_requests(), h.engine.drain()][0],
    "abort_request": lambda h: [
        (engine := added(h)).abort_request("r"),
        [one.outputs[0].finish_reason for one in stepped(engine)],
    ],
    "reset_prefix_cache": lambda h: h.vllm_engine.reset_prefix_cache(),
    "get_tokenizer": lambda h: h.vllm_engine.get_tokenizer() is not None,
}


async def of_vllm_async(llm: VllmAsyncLLM, name: str) -> Any:
    if name == "generate":
        params = vllm.SamplingParams(temperature=0, max_tokens=5)
        return [output async for output in llm.generate(PROMPTS[0], params, "r")][-1]
    if name == "abort":
        return await llm.abort("r")
    if name == "get_tokenizer":
        return (await llm.get_tokenizer()).encode("x")
    if name == "reset_prefix_cache":
        return await llm.reset_prefix_cache()
    await llm.pause_generation(mode="keep")
    before = await llm.is_paused()
    await llm.resume_generation()
    return before, await llm.is_paused()


OF_VLLM_ASYNC: dict[str, Call] = {
    name: lambda h, name=name: awaited(of_vllm_async(h.vllm_async, name))  # type: ignore[misc]
    for name in (
        *("generate", "abort", "pause_generation", "resume_generation", "is_paused"),
        *("get_tokenizer", "reset_prefix_cache"),
    )
}
OF_ENGINE: dict[str, Call] = {
    "config": lambda h: h.engine.config.num_slots,
    "default_params": lambda h: h.engine.default_params,
    "tokenizer": lambda h: h.engine.tokenizer is not None,
    "chat_template": lambda h: h.engine.chat_template,
    "validator": lambda h: h.engine.validator.check_options("submit", {"priority": 3}),
    "max_model_len": lambda h: h.engine.max_model_len,
    "max_num_seqs": lambda h: isinstance(h.engine.max_num_seqs, int),
    "clock": lambda h: isinstance(h.engine.clock(), float),
    "lock": lambda h: h.engine.lock.acquire() and h.engine.lock.release(),
    "observers": lambda h: h.engine.observers is not None,
    "watches": lambda h: isinstance(h.engine.watches, bool),
    "closed_because": lambda h: h.engine.closed_because,
    "has_work": lambda h: after(h, lambda engine: engine.has_work),
    "has_unfinished": lambda h: after(h, lambda engine: engine.has_unfinished),
    "num_running": lambda h: h.engine.num_running,
    "num_waiting": lambda h: after(h, lambda engine: engine.num_waiting + engine.num_running),
    "saved": lambda h: h.engine.saved,
    "read_pictures": lambda h: h.engine.read_pictures("no pictures"),
    "render_chat": lambda h: h.engine.render_chat(CHAT, chat_template=TEMPLATE),
    "submit": lambda h: [submitted(h, quantum=2, deadline_s=60.0), h.engine.drain()],
    "adapter_named": lambda h: [
        isinstance(h.engine.add_lora(h.adapter), bool),
        h.engine.adapter_named("mine"),
        h.engine.remove_lora(1),
    ],
    "abort": lambda h: [
        submitted(h),
        h.engine.abort("r"),
        h.engine.abort("r"),
        [one.outputs[0].finish_reason for one in h.engine.drain()],
    ],
    "abort_all": lambda h: [
        submitted(h),
        h.engine.abort_all("enough"),
        [(one.outputs[0].finish_reason, one.error) for one in h.engine.drain()],
    ],
    "advance": advanced,
    "turn": turned,
    "step": lambda h: [submitted(h), stepped(h.engine)],
    "drain": lambda h: after(h, lambda engine: None),
    "stream": lambda h: [submitted(h), [output for output in h.engine.stream() if output.finished]],
    "seed_of": lambda h: h.engine.seed_of("name", SamplingParams()),
    "extend": lambda h: [submitted(h), h.engine.drain(), h.engine.extend("r", 3), h.engine.drain()],
    "save": lambda h: h.engine.save("r"),
    "free": lambda h: h.engine.free("nothing"),
    "restore": lambda h: h.engine.restore("r@0"),
    "fork": lambda h: after(h, lambda engine: engine.fork("r", request_id="forked")),
    "preempt": lambda h: after(h, lambda engine: engine.preempt("r")),
    "add_lora": pinned,
    "remove_lora": pinned,
    "pin_lora": pinned,
    "list_loras": pinned,
    "update_weights": lambda h: h.engine.update_weights(tensors()),
    "snapshot": lambda h: type(h.engine.snapshot()),
    "peek": lambda h: type(h.engine.peek()),
    "stats": lambda h: type(h.engine.stats()),
    "metrics": lambda h: [family.name for family in h.engine.metrics()],
    "metrics_text": lambda h: bool(h.engine.metrics_text()),
    "identity": lambda h: h.engine.identity().differences(h.engine.identity()),
    "limits": lambda h: set(h.engine.limits()) - {"data_parallel_size"},
    "inventory_report": lambda h: len(h.engine.inventory_report()) > 3,
    "reset_prefix_cache": lambda h: h.engine.reset_prefix_cache(),
    "blank": lambda h: h.engine.blank(),
    "finish_shadow": lambda h: h.engine.finish_shadow(),
    "step_shadow": lambda h: h.engine.step_shadow(),
    "draft_with": lambda h: h.engine.draft_with(None),  # type: ignore[arg-type]
    "start_profile": lambda h: [h.engine.start_profile("profile"), h.engine.stop_profile()],
    "stop_profile": lambda h: [h.engine.start_profile("profile"), h.engine.stop_profile()],
}
# What ends an engine is tried last; what only makes an object is done above.
ENDS = {"pids", "close", "shutdown", "drain", "stop_taking", "fail", "engine", "from_engine_args"}
CASES: dict[type, dict[str, Call]] = {
    LLM: OF_LLM,
    AsyncLLM: OF_ASYNC,
    vllm.LLM: OF_VLLM,
    LLMEngine: OF_VLLM_ENGINE,
    VllmAsyncLLM: OF_VLLM_ASYNC,
    DataParallelEngine: OF_ENGINE,
}
REFUSED = {
    *("extend", "save", "restore", "fork", "preempt", "peek", "inventory_report", "blank", "finish_shadow"),
    *("draft_with", "start_profile", "stop_profile", "update_weights"),
}


def public(kind: type) -> set[str]:
    """Names that `kind` and what it is made of declare."""
    bases = [base for base in kind.__mro__ if base.__module__.startswith("xla_engine")]
    names = {name for base in bases for name in (*vars(base), *vars(base).get("__annotations__", {}))}
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_every_public_name_has_a_case(kind: type) -> None:
    assert public(kind) - ENDS <= set(CASES[kind])


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, cases in CASES.items() for name in cases],
    ids=lambda each: each if isinstance(each, str) else f"{each.__module__.split('.')[1]}.{each.__name__}",
)
def test_two_engines_do_what_one_does(
    holders: list[Holder], kind: type, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # for profiles
    one, two = (outcome(CASES[kind][name], holder) for holder in holders)
    if name in REFUSED:
        assert isinstance(two, OneEngineError), two
        assert "needs a single engine (no data_parallel_size); with several, " in str(two)
    elif isinstance(one, Exception):
        assert (type(two), str(two)) == (type(one), str(one))
    else:
        assert two == one
    for holder in holders:
        holder.engine.abort_all()
        holder.engine.drain()


def outcome(call: Call, holder: Holder) -> Any:
    try:
        return plain(call(holder))
    except XlaEngineError as error:
        return error


def plain(value: Any) -> Any:
    """Without what may differ: names that engines give, times, and what caches did."""
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if hasattr(value, "outputs") and hasattr(value, "prompt_token_ids"):
        return [list(value.prompt_token_ids or ()), [plain_completion(each) for each in value.outputs]]
    if is_dataclass(value) and type(value).__name__ == "EngineIdentity":
        return type(value)
    return value


def plain_completion(each: Any) -> Any:
    return each.text, tuple(each.token_ids), str(each.logprobs), each.finish_reason, each.cumulative_logprob


def test_what_several_engines_cannot_be_is_refused_before_any_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", started)
    for options in ({"keep_finished": 4}, {"runner": "pooling"}):
        with pytest.raises(OneEngineError, match=r"leave out .*data_parallel_size"):
            LLM(**OPTIONS | {"enable_lora": False, "max_loras": 1} | options, data_parallel_size=2)
    with pytest.raises(ConfigError, match="1 to 64"):
        LLM(data_parallel_size=0)


def test_the_ends_of_two_engines_are_those_of_one(holders: list[Holder]) -> None:
    """Last, as they end them."""
    for holder in holders:
        awaited(AsyncLLM.from_engine(holder.engine).drain())
        with pytest.raises(EngineClosedError, match="no more requests"):
            submitted(holder)
        holder.engine.stop_taking()
        holder.engine.fail("a planted cause")
        with pytest.raises(EngineClosedError, match="a planted cause"):
            submitted(holder)
        holder.vllm_async.shutdown()
        holder.vllm_engine.close()
        holder.vllm.close()
        holder.llm.close()
