"""Each request uses its own adapter, independent of its peers; adapters are loaded and evicted between steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.adapters import MODULES, adapters, llama_checkpoint, merged, modules_of, write_adapter
from tests.support.engine_faults import bits, fail_at
from tests.support.gguf_checks import GOLDEN
from tests.support.gguf_files import Kind, write_gguf
from tests.support.models import TINY, TINY_ENGINE
from xla_engine.batch.submit import submit_prompt
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import ConfigError, InvalidRequestError
from xla_engine.graphs.lora.form import UP, LoraForm
from xla_engine.model_loader.checkpoint import Checkpoint, given_weights, load_checkpoint, random_weights
from xla_engine.model_loader.peft.adapter import read_adapter
from xla_engine.model_loader.peft.request import LoRARequest
from xla_engine.openai.requests import LineRequest, parse_line
from xla_engine.sampling_params import SamplingParams
from xla_engine.server.settings import ServerSettings
from xla_engine.tools.bench.models import write_checkpoint

WITH_ADAPTERS = replace(TINY_ENGINE, enable_lora=True, max_loras=3, max_lora_rank=16)
PROMPTS = [[5 * n + k for k in range(1 + 7 * n)] for n in range(5)]
PARAMS = SamplingParams(temperature=0.8, max_tokens=12, logprobs=0, seed=7, ignore_eos=True)


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    return adapters(tmp_path_factory.mktemp("adapters"), llama_checkpoint(), 4)


@pytest.fixture(scope="module")
def engine() -> Iterator[XlaBatchEngine]:
    with XlaBatchEngine(llama_checkpoint(), None, WITH_ADAPTERS) as made:
        yield made


def every(loras: list[LoRARequest]) -> list[tuple[str, list[int], LoRARequest | None]]:
    """Each prompt with each of three adapters, and without."""
    return [
        (f"{at}/{number}", prompt, lora)
        for at, prompt in enumerate(PROMPTS)
        for number, lora in enumerate((None, *loras[:3]))
    ]


def alone(engine: XlaBatchEngine, loras: list[LoRARequest]) -> dict[str, bytes]:
    """The results of each request alone, with an empty cache."""
    found = {}
    for name, prompt, lora in every(loras):
        engine.blank()
        engine.submit(prompt, PARAMS, request_id=name, lora_request=lora)
        found |= ended(engine)
    return found


def ended(engine: XlaBatchEngine) -> dict[str, bytes]:
    return {output.request_id: bits(output.outputs[0]) for output in engine.drain()}


def submit_every(engine: XlaBatchEngine, loras: list[LoRARequest]) -> None:
    for name, prompt, lora in every(loras):
        engine.submit(prompt, PARAMS, request_id=name, lora_request=lora)


@pytest.mark.parametrize("path", ["as it starts", pytest.param("xla", marks=pytest.mark.release)])
def test_a_mixed_batch_has_the_bits_of_each_request_alone(
    engine: XlaBatchEngine, tiny: XlaBatchEngine, loras: list[LoRARequest], path: str,
    make_engine: Callable[..., Any],
) -> None:  # fmt: skip
    """The same in any adapter slot; requests without an adapter have the bits of an engine without adapters."""
    if path == "xla":
        engine = XlaBatchEngine(llama_checkpoint("float32"), None, replace(WITH_ADAPTERS, isa="none"))
        tiny = make_engine(replace(TINY_ENGINE, isa="none"), "float32")
    expected = alone(engine, loras)
    assert len(set(expected.values())) > 15, "adapters change what comes"
    for number in engine.list_loras():
        engine.remove_lora(number)
    for lora in reversed(loras[:3]):  # other slots
        assert engine.add_lora(lora)
    engine.blank()
    for _ in range(2):  # and again from cached prefixes
        submit_every(engine, loras)
        assert ended(engine) == expected
    for at, prompt in enumerate(PROMPTS):
        tiny.submit(prompt, PARAMS, request_id=f"{at}/0")
        assert ended(tiny)[f"{at}/0"] == expected[f"{at}/0"]
    if path == "xla":
        engine.close()


@pytest.mark.full
def test_it_computes_what_the_merged_checkpoint_computes(tmp_path: Path) -> None:
    """In float32, with adapters for every module of every layer."""
    checkpoint = llama_checkpoint("float32")
    config = replace(WITH_ADAPTERS, prefill_lanes=(2,), self_check=False)
    params = replace(PARAMS, temperature=0, max_tokens=6, prompt_logprobs=0)
    prompt = list(range(40))
    path = write_adapter(tmp_path / "adapter", checkpoint)
    with XlaBatchEngine(checkpoint, None, config) as adapting:
        adapting.submit(prompt, params, lora_request=LoRARequest("a", 1, str(path)))
        (one,) = adapting.drain()
        adapting.submit(prompt, params)
        (bare,) = adapting.drain()
    with XlaBatchEngine(merged(checkpoint, path), None, replace(config, enable_lora=False)) as whole:
        whole.submit(prompt, params)
        (other,) = whole.drain()
    assert one.outputs[0].token_ids == other.outputs[0].token_ids
    found, expected, without = (np.array(scores(output)) for output in (one, other, bare))
    np.testing.assert_allclose(found, expected, atol=2e-4)
    assert np.abs(found - without).max() > 0.1


def test_rank_stabilised_adapters_are_scaled_by_the_root_of_their_rank(tmp_path: Path) -> None:
    checkpoint, form = llama_checkpoint(), LoraForm(1, 16, np.dtype(np.float32), packed=False)
    plain = write_adapter(tmp_path / "plain", checkpoint, rank=16, alpha=8.0)
    rooted = write_adapter(tmp_path / "rooted", checkpoint, rank=16, alpha=2.0, use_rslora=True)
    one, other = (read_adapter(path, checkpoint.sources, TINY, form) for path in (plain, rooted))
    assert all(np.array_equal(one.leaves[name], other.leaves[name]) for name in one.leaves)
    assert any(leaf.any() for name, leaf in one.leaves.items() if name.endswith(UP))


def scores(output: Any) -> list[float]:
    prompt = [next(iter(each.values())).logprob for each in output.prompt_logprobs[1:]]
    return [*prompt, *output.outputs[0].logprobs]


def test_adapters_come_and_go_while_others_run(engine: XlaBatchEngine, loras: list[LoRARequest]) -> None:
    """Four adapters in three slots: idle adapters are evicted, used ones are not."""
    expected = alone(engine, loras)
    compiled = engine.stats().compiles_after_warmup
    engine.blank()
    engine.submit(PROMPTS[3], PARAMS, request_id="3/1", lora_request=loras[0])
    engine.step()
    with pytest.raises(InvalidRequestError, match="has running, waiting"):
        engine.remove_lora(1)
    # the one used longest ago goes
    engine.submit(PROMPTS[1], PARAMS, request_id="new", lora_request=loras[3])
    assert engine.list_loras() >= {1, 4} and len(engine.list_loras()) == 3
    found = ended(engine)
    assert found["3/1"] == expected["3/1"]
    submit_every(engine, loras)
    assert ended(engine) == expected
    assert engine.remove_lora(1) and not engine.remove_lora(1)
    assert engine.stats().compiles_after_warmup == compiled


def test_more_adapters_than_there_is_room_for_are_refused_by_name(
    engine: XlaBatchEngine, loras: list[LoRARequest]
) -> None:
    for lora in loras[:3]:
        engine.submit(PROMPTS[2], PARAMS, lora_request=lora)
    with pytest.raises(InvalidRequestError, match="larger max_loras"):
        engine.submit(PROMPTS[2], PARAMS, lora_request=loras[3])
    engine.abort_all()
    engine.drain()
    for lora in loras[:3]:
        assert engine.pin_lora(lora.lora_int_id)
    assert len(engine.identity().config["adapters"]) == 3, "results may name them"
    with pytest.raises(InvalidRequestError, match="pinned"):
        engine.add_lora(loras[3])
    for lora in loras[:3]:
        engine.remove_lora(lora.lora_int_id)
    assert "adapters" not in engine.identity().config
    assert engine.add_lora(loras[0]) and not engine.add_lora(loras[0])
    with pytest.raises(InvalidRequestError, match="give 'other' another id"):
        engine.submit([1], PARAMS, lora_request=LoRARequest("other", 1, loras[1].lora_path))


def test_prefixes_are_shared_within_one_adapter_only(
    engine: XlaBatchEngine, loras: list[LoRARequest]
) -> None:
    engine.blank()
    prompt = list(range(64))

    def cached(lora: LoRARequest | None) -> int:
        engine.submit(prompt, PARAMS, lora_request=lora)
        return engine.drain()[0].num_cached_tokens

    assert [cached(lora) for lora in (None, loras[0], loras[1])] == [0, 0, 0]
    assert all(cached(lora) >= 48 for lora in (None, loras[0], loras[1]))


def test_lines_and_clients_choose_an_adapter_by_its_name(
    engine: XlaBatchEngine, loras: list[LoRARequest]
) -> None:
    engine.add_lora(loras[0])
    found = []
    for name in ("adapter-1", engine.checkpoint.path.name, "adapter-9"):
        body = {
            "model": name,
            "prompt": PROMPTS[3],
            "max_tokens": 12,
            "seed": 7,
            "logprobs": 0,
            "temperature": 0.8,
        }
        record = {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/completions",
            "body": {**body, "ignore_eos": True},
        }
        request = parse_line(json.dumps(record).encode(), 1)
        assert isinstance(request, LineRequest)
        if name == "adapter-9":
            with pytest.raises(InvalidRequestError, match="no model 'adapter-9'; here are "):
                submit_prompt(engine, request, request.prompts[0], "3/1")
        else:
            submit_prompt(engine, request, request.prompts[0], "3/1")
            found.append(ended(engine)["3/1"])
    for lora, one in zip((loras[0], None), found, strict=True):
        engine.submit(PROMPTS[3], PARAMS, request_id="3/1", lora_request=lora)
        assert ended(engine)["3/1"] == one
    assert ServerSettings(model_names=("m", "a"), adapter_names=("a",)).base_names == ("m",)


def test_preempted_and_restarted_requests_keep_their_adapters(
    engine: XlaBatchEngine, loras: list[LoRARequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone(engine, loras)
    for how in engine.ways_to_preempt:
        engine.blank()
        submit_every(engine, loras)
        for turn in range(12):
            engine.step(only_finished=True)
            for name, _, _ in every(loras)[turn::5]:
                engine.preempt(name, how=how)
        found = ended(engine)
        assert found.items() <= expected.items() and len(found) > 8
    submit_every(engine, loras)
    with monkeypatch.context() as patch:
        fail_at(patch, engine, "wait", {5}, RuntimeError("a planted fault"))
        assert ended(engine) == expected
    assert engine.stats().recoveries > 0


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 60, "block_size": 32},
        pytest.param(
            {"speculative_config": {"method": "suffix", "num_speculative_tokens": 3}},
            marks=pytest.mark.release,
        ),
        pytest.param({"keep_finished": 64}, marks=pytest.mark.release),
    ],
    ids=str,
)
def test_other_engines_give_the_same_bits(
    engine: XlaBatchEngine, loras: list[LoRARequest], options: dict[str, Any]
) -> None:
    expected = alone(engine, loras)
    with XlaBatchEngine(llama_checkpoint(), None, replace(WITH_ADAPTERS, **options)) as other:
        for _ in range(2):
            submit_every(other, loras)
            assert ended(other) == expected
        if other.config.keep_finished:
            assert_they_go_on(other, loras)
        assert other.stats().compiles_after_warmup == 0


def assert_they_go_on(engine: XlaBatchEngine, loras: list[LoRARequest]) -> None:
    """An extended request keeps its adapter, which stays loaded for it; so does a fork."""
    longer = replace(PARAMS, max_tokens=20)
    engine.submit(PROMPTS[2], longer, request_id="whole", lora_request=loras[0])
    whole = ended(engine)["whole"]
    engine.extend("2/1", 8)
    assert ended(engine)["2/1"] == whole
    with pytest.raises(InvalidRequestError, match="or kept requests"):
        engine.remove_lora(1)
    engine.submit(PROMPTS[2], replace(PARAMS, max_tokens=1), request_id="one", lora_request=loras[0])
    engine.drain()
    engine.fork("one", params=replace(PARAMS, max_tokens=3), request_id="forked")
    forked = engine.drain()[0]
    engine.submit(
        forked.prompt_token_ids, replace(PARAMS, max_tokens=3), request_id="asked", lora_request=loras[0]
    )
    assert ended(engine)["asked"] == bits(forked.outputs[0])


LAYER_2, Q_OF_1 = (f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_" for layer in (2, 1))
A_OF_48 = np.ones((8, 48), np.float32)


def zeros(*names: str) -> dict[str, np.ndarray]:
    return {f"base_model.model.{name}": np.zeros((8, 8), np.float32) for name in names}


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"peft_type": "IA3"}, "only LORA"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "biases of adapters"),
        ({"rank_pattern": {"q_proj": 4}}, "same rank"),
        ({"modules_to_save": ["lm_head"]}, "merge"),
        ({"r": 32}, "max_lora_rank=32"),
        ({"r": 4}, "Use an adapter that was trained for this model"),
        ({"tensors": zeros("lm_head.lora_A.weight")}, "only one of"),
        ({"tensors": zeros("lm_head.lora_embedding_A")}, "merge_and"),
        ({"tensors": zeros("lm_head.lora_A.weight", "lm_head.lora_B.weight")}, "changes lm_head"),
        ({"modules": ()}, "has no tensors, .*Save it again"),
        (
            {"tensors": {LAYER_2 + "A.weight": A_OF_48, LAYER_2 + "B.weight": A_OF_48.T}},
            "this model's 2 layers",
        ),
        (
            {"tensors": {Q_OF_1 + "A.weight": A_OF_48 * np.inf}},
            "1.self_attn.q_proj.lora_A.* NaN or inf.* again",
        ),
        ({"tensors": {Q_OF_1 + "A.weight": A_OF_48.astype(np.int32)}}, "not a float"),
        (
            {"tensors": {Q_OF_1 + "A.weight": A_OF_48.T}},
            r"is F32\[48, 8\], not a float \[8, 48\].*trained for this model",
        ),
        ({"scales": (3e38, 3e38)}, "values as large as 3.*e.38 and .*overflow.* again"),
        ({"scales": (3e38, 1.0)}, "overflow"),
        ({"scales": (0.0, 3e38)}, "overflow"),  # as large when it is scaled
        ({"scales": (1.0, 1e7), "alpha": 1e6}, "scaled by 1.25e.05.* overflow"),
    ],
    ids=[
        *("kind", "dora", "bias", "ranks", "modules", "rank", "shape", "half", "embedding", "head", "empty"),
        *("layer", "infinite", "integers", "turned", "large", "large A", "large B", "scaled"),
    ],
)
def test_what_cannot_be_loaded_is_refused_and_nothing_else_suffers(
    engine: XlaBatchEngine, tmp_path: Path, fields: dict[str, Any], match: str
) -> None:
    before = engine.list_loras()
    path = write_adapter(tmp_path / "adapter", llama_checkpoint(), **fields)
    with pytest.raises(InvalidRequestError, match=match):
        engine.submit([1, 2], PARAMS, lora_request=LoRARequest("bad", 77, str(path)))
    assert engine.list_loras() == before
    assert not engine.has_unfinished


def test_the_largest_that_load_have_results(engine: XlaBatchEngine, tmp_path: Path) -> None:
    """As large as A and B may be by the bound on their product, in every module of every layer."""
    # inputs of the widest product; rank * scale
    largest = 0.99 * (2.0**48 / (TINY.intermediate_size * 16)) ** 0.5
    names = (f"base_model.model.{module}.lora_" for module in modules_of(llama_checkpoint()))
    shapes = modules_of(llama_checkpoint()).values()
    signs = np.random.default_rng(0).choice([-1, 1], (96, 96))
    tensors = {
        name + each: (signs[:rows, :columns] * largest).astype(np.float32)
        for name, (out, inputs) in zip(names, shapes, strict=True)
        for each, rows, columns in (("A.weight", 8, inputs), ("B.weight", out, 8))
    }
    path = write_adapter(tmp_path / "adapter", llama_checkpoint(), tensors=tensors)
    engine.submit(PROMPTS[3], PARAMS, lora_request=LoRARequest("large", 78, str(path)))
    (output,) = engine.drain()
    assert output.outputs[0].finish_reason == "length" and output.error is None
    engine.remove_lora(78)


@pytest.fixture(scope="module")
def in_two_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Llama in a directory, and as a GGUF file, whose queries and keys lie in another order."""
    model = tmp_path_factory.mktemp("files") / "model"
    write_checkpoint(TINY, random_weights(TINY, dtype="bfloat16", seed=1, scale=0.3), model)
    return model, write_gguf(model, model.with_suffix(".gguf"), kind=Kind.BF16)


@pytest.mark.full
def test_a_gguf_file_takes_adapters_and_weights_as_its_source_does(
    in_two_files: tuple[Path, Path], tmp_path: Path
) -> None:
    """Results have the same bits with two adapters and none in a batch, and after new weights for some queries."""
    source = load_checkpoint(in_two_files[0])
    loras = adapters(tmp_path, source, 2)
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    tensors = {name: np.asarray(source.weights["layers.0.qkv"], np.float32)[:48] for name in names}
    tensors[names[0]] = np.asarray(source.weights["layers.0.qkv"], np.float32)[:96]
    found = []
    for path in in_two_files:
        config = replace(WITH_ADAPTERS, max_loras=2, prefill_lanes=(2,), self_check=False)
        with XlaBatchEngine.from_pretrained(path, config) as engine:
            results = []
            for _ in range(2):
                for number, lora in enumerate((None, *loras)):
                    engine.submit(PROMPTS[3], PARAMS, request_id=str(number), lora_request=lora)
                results.append(ended(engine))
                engine.update_weights(tensors)
            found.append(results)
    assert found[0] == found[1]
    assert len({each for results in found[0] for each in results.values()}) == 6


ARCHITECTURES = {"qwen2": "qwen2", "gemma2": "gemma2", "phi3_short": "phi3", "cohere": "command-r"}


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_adapters_of_a_gguf_file_lie_as_those_of_its_source(name: str, tmp_path: Path) -> None:
    """Also if a family stores queries, keys and values in one tensor, or rotates a part of each head."""
    path = write_gguf(GOLDEN / "families" / name, tmp_path / "m.gguf", arch=ARCHITECTURES[name])
    stored, source = (load_checkpoint(each, dtype="float32") for each in (path, GOLDEN / "families" / name))
    modules = (*MODULES, "qkv_proj", "gate_up_proj")
    adapter = write_adapter(tmp_path / "adapter", source, modules=modules)
    form = LoraForm(1, 8, np.dtype(np.float32), packed=False)
    one, other = (read_adapter(adapter, each.sources, each.config, form) for each in (stored, source))
    assert one.fingerprint == other.fingerprint
    for leaf, array in other.leaves.items():
        np.testing.assert_array_equal(one.leaves[leaf], array, err_msg=leaf)
    tensors = tensors_of(source)
    given, same = (given_weights(each, tensors)[0] for each in (stored, source))
    for leaf in source.weights:
        np.testing.assert_array_equal(given[leaf], same[leaf], err_msg=leaf)


def tensors_of(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """Random tensors by the checkpoint's names; those that are used in several places are there twice."""
    draw = np.random.default_rng(3)
    shapes = {part.name: part.shape for parts in checkpoint.sources.values() for part in parts}
    return {name: draw.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def test_engines_without_room_for_adapters_say_so(tiny: XlaBatchEngine, loras: list[LoRARequest]) -> None:
    with pytest.raises(InvalidRequestError, match="enable_lora=True"):
        tiny.submit([1], lora_request=loras[0])
    with pytest.raises(InvalidRequestError, match="must be a LoRARequest"):
        tiny.submit([1], lora_request="adapter")  # type: ignore[arg-type]
    for values in (("a", 0, "x"), ("", 1, "x"), ("a", 1, "")):
        with pytest.raises(InvalidRequestError):
            LoRARequest(*values)
    latent, config = (
        load_checkpoint(GOLDEN / "families" / "deepseek_v2"),
        replace(WITH_ADAPTERS, max_model_len=128),
    )
    with pytest.raises(ConfigError, match="enable_lora is for models without latent attention"):
        XlaBatchEngine(latent, None, config)
    assert EngineConfig().options() == replace(EngineConfig(), max_loras=1).options()
