"""GGUF files: the same leaves as the safetensors they were made from, and one clear error for everything else."""

from __future__ import annotations

import json
import shutil
import struct
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tests.conftest import TINY
from tests.support.gguf_files import Kind, rewrite_gguf, write_gguf
from xla_engine.bench.models import write_checkpoint
from xla_engine.config import EngineConfig, embedded_model_directory
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import CheckpointError
from xla_engine.graphs.ops.rope import rotary_order
from xla_engine.model_loader.checkpoint import load_checkpoint, random_weights
from xla_engine.model_loader.config_json import read_model
from xla_engine.model_loader.families import tensor_sources
from xla_engine.model_loader.model_files import open_model
from xla_engine.sampling_params import SamplingParams
from xla_engine.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
BLOCKS = replace(TINY, hidden_size=64, intermediate_size=96)  # rows of whole blocks of 32


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose rows can be quantised."""
    directory = tmp_path_factory.mktemp("blocks") / "model"
    write_checkpoint(BLOCKS, random_weights(BLOCKS, dtype="bfloat16", scale=0.3), directory)
    return directory


def assert_refused(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        dict(load_checkpoint(path).weights)
    for word in (str(path), *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["gqa_tied", "untied_odd_heads"])
def test_a_float32_file_has_the_bits_of_its_source(name: str, tmp_path: Path) -> None:
    stored = load_checkpoint(write_gguf(GOLDEN / name, tmp_path / "m.gguf"))
    source = load_checkpoint(GOLDEN / name)
    assert replace(stored.config, rope_interleaved=False) == source.config and stored.dtype == "float32"
    assert stored.weights.keys() == source.weights.keys()
    for leaf in source.weights:
        np.testing.assert_array_equal(stored.weights[leaf], source.weights[leaf])


@pytest.mark.parametrize(
    ("name", "arch", "unsaid"),
    [
        ("qwen2", "qwen2", ""),
        ("qwen3", "qwen3", ""),
        ("olmo2", "olmo2", ""),
        ("granite", "granite", ""),
        ("granite_bias", "granite", ""),
        ("llama_linear", "llama", ""),
        ("llama_yarn", "llama", "rope_scaling"),
        ("phi3_long", "phi3", "rope_scaling"),
        ("phi3_short", "phi3", "rope_scaling"),
        ("cohere", "command-r", ""),
        ("gemma", "gemma", ""),
        ("gemma2", "gemma2", "attention_multiplier"),
        ("gemma3", "gemma3", "layer_types rope_local_base_freq"),
        ("smollm3", "smollm3", "no_rope_layers"),
        ("mixtral", "llama", ""),
    ],
)
def test_each_architecture_is_the_family_it_came_from(
    name: str, arch: str, unsaid: str, tmp_path: Path
) -> None:
    """unsaid: fields of the odd golden models that llama.cpp's metadata cannot say or round."""
    model = GOLDEN / "families" / name
    stored, source = (
        load_checkpoint(write_gguf(model, tmp_path / "m.gguf", arch=arch)),
        load_checkpoint(model),
    )
    differing = {
        field for field, value in asdict(source.config).items() if asdict(stored.config)[field] != value
    }
    assert differing - {"rope_interleaved"} <= set(unsaid.split())
    assert stored.weights.keys() == source.weights.keys()
    for leaf in source.weights:
        np.testing.assert_array_equal(stored.weights[leaf], source.weights[leaf], err_msg=leaf)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
def test_experts_are_taken_out_of_their_stack(kind: Kind, tmp_path: Path) -> None:
    """Qwen3-MoE with experts in every layer, as llama.cpp has it."""
    model = tmp_path / "model"
    model.mkdir()
    fields = json.loads((GOLDEN / "families" / "qwen3_moe" / "config.json").read_text())
    fields |= {"decoder_sparse_step": 1, "hidden_size": 64, "num_attention_heads": 4}
    fields |= {"intermediate_size": 64, "moe_intermediate_size": 32}
    (model / "config.json").write_text(json.dumps(fields))
    config, family = read_model(open_model(model))
    draw = np.random.default_rng(0)
    sources = [source for stacked in tensor_sources(config, family).values() for source in stacked]
    tensors = {source.name: draw.standard_normal(source.shape, np.float32) for source in sources}
    save_file(tensors, model / "model.safetensors")
    stored = load_checkpoint(
        write_gguf(model, tmp_path / "m.gguf", arch="qwen3moe", kind=kind), dtype="float32"
    )
    source = load_checkpoint(model, dtype="float32")
    assert stored.config == source.config and stored.config.experts is not None
    for leaf, array in source.weights.items():
        if kind != Kind.F32 and array.ndim > 1:
            array = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
        np.testing.assert_array_equal(stored.weights[leaf], array, err_msg=leaf)


def test_a_stack_of_other_length_is_refused(tmp_path: Path) -> None:
    path = write_gguf(GOLDEN / "families" / "mixtral", tmp_path / "m.gguf")
    content = path.read_bytes()
    key = b"llama.expert_count" + struct.pack("<I", 4)
    assert content.count(key) == 1
    at = content.index(key) + len(key)
    path.write_bytes(content[:at] + struct.pack("<I", 4) + content[at + 4 :])  # of five
    assert_refused(path, "experts.0.w2.weight is missing")


@pytest.mark.parametrize(("kind", "dtype"), [(Kind.BF16, ml_dtypes.bfloat16), (Kind.F16, np.float16)])
def test_half_precision_is_read_as_it_is(blocks: Path, kind: Kind, dtype: Any, tmp_path: Path) -> None:
    stored = load_checkpoint(write_gguf(blocks, tmp_path / "m.gguf", kind=kind), dtype="float32")
    source = load_checkpoint(blocks, dtype="float32")
    for leaf, array in source.weights.items():
        wanted = array if array.ndim == 1 else array.astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(stored.weights[leaf], wanted)
    assert load_checkpoint(tmp_path / "m.gguf").dtype == "bfloat16"


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0])
def test_quantised_tensors_are_what_the_library_makes_of_them(
    blocks: Path, kind: Kind, tmp_path: Path
) -> None:
    stored = load_checkpoint(write_gguf(blocks, tmp_path / "m.gguf", kind=kind), dtype="float32")
    source = load_checkpoint(blocks, dtype="float32")
    for leaf, array in source.weights.items():
        rounded = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind) if array.ndim > 1 else array
        np.testing.assert_array_equal(stored.weights[leaf], rounded)
    assert load_checkpoint(tmp_path / "m.gguf").dtype == "bfloat16"


@pytest.mark.parametrize("original", [8192, 32])
def test_llama_3_scaling_is_found_again_in_its_divisors(original: int, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(GOLDEN / "llama3_rope", model)
    text = (model / "config.json").read_text()
    (model / "config.json").write_text(
        text.replace(
            '"original_max_position_embeddings": 32', f'"original_max_position_embeddings": {original}'
        )
    )
    wanted = load_checkpoint(model).config.rope_scaling
    found = load_checkpoint(write_gguf(model, tmp_path / "m.gguf")).config.rope_scaling
    assert wanted is not None and found is not None
    if original == 8192:  # as in all of Meta's models
        assert found == wanted
    else:
        assert found.rope_type == "longrope" and max(found.short_factor) == wanted.factor


def embedded_tokenizer(writer: gguf.GGUFWriter) -> None:
    """The embedded model's byte-level tokenizer as llama.cpp's converter writes one."""
    state = json.loads((embedded_model_directory() / "tokenizer.json").read_text())
    special = {token["content"] for token in state["added_tokens"]}
    vocabulary = sorted(state["model"]["vocab"], key=state["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in special else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")


def test_the_engine_gives_the_same_bits_from_a_gguf_file(embedded: XlaBatchEngine, tmp_path: Path) -> None:
    path = write_gguf(
        embedded_model_directory(), tmp_path / "m.gguf", kind=Kind.BF16, tokenizer=embedded_tokenizer
    )
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=12, logprobs=2)
    prompts = ["def add(a, b):", "class Naïve"]
    with XlaBatchEngine.from_pretrained(path, EngineConfig(self_check=False)) as engine:
        assert engine.chat_template is not None and engine.chat_template.sources.keys() == {"default"}
        found = [results(engine, prompt, params) for prompt in prompts]
    assert found == [results(embedded, prompt, params) for prompt in prompts]


def test_a_chat_model_ends_at_the_end_of_a_turn_too(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("no_vocab")
        writer.add_eos_token_id(1)
        writer.add_eot_token_id(106)
        writer.add_bos_token_id(2)

    checkpoint = load_checkpoint(write_gguf(GOLDEN / "gqa_tied", tmp_path / "m.gguf", tokenizer=fill))
    assert checkpoint.eos_token_ids == (1, 106) and checkpoint.bos_token_id == 2


def results(engine: XlaBatchEngine, prompt: str, params: SamplingParams) -> Any:
    engine.submit(prompt, params)
    (output,) = engine.drain()
    completion = output.outputs[0]
    return output.prompt_token_ids, completion.text, completion.token_ids, completion.logprobs


def test_a_tokenizer_json_beside_the_file_is_taken(tmp_path: Path) -> None:
    path = write_gguf(GOLDEN / "gqa_tied", tmp_path / "m.gguf")
    files = open_model(path)
    assert files.tokenizer() is None and files.chat_template() is None
    shutil.copy(embedded_model_directory() / "tokenizer.json", tmp_path)
    assert Tokenizer.of_model(files) is not None


# Refusals


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(GOLDEN / "gqa_tied", tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert_refused(path, "xla-engine[gguf]")


def test_paths_that_are_no_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no such directory.*\.gguf"):
        load_checkpoint(tmp_path / "absent.gguf")
    (tmp_path / "empty.gguf").touch()
    assert_refused(tmp_path / "empty.gguf", "not readable")
    (tmp_path / "text.gguf").write_text("a text that is no GGUF file")
    assert_refused(tmp_path / "text.gguf", "magic")


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({"expert_shared_count": 4}, "llama.expert_shared_count = 4"),
        ({"attention.max_alibi_bias": 8.0}, "max_alibi_bias"),
        ({"attention.sliding_window": 16}, "sliding_window"),
    ],
)
def test_what_is_not_built_in_is_refused_by_name(extra: dict[str, Any], word: str, tmp_path: Path) -> None:
    path = write_gguf(GOLDEN / "gqa_tied", tmp_path / "m.gguf", extra=extra)
    assert_refused(path, word, "not supported")


@pytest.mark.parametrize("value", ["many", True, ["a"], [2, 3], -1, 2**63, float("nan")], ids=str)
@pytest.mark.parametrize(
    "key",
    [
        *("llama.block_count", "llama.embedding_length", "llama.attention.head_count"),
        *("llama.rope.freq_base", "llama.attention.key_length", "llama.rope.dimension_count"),
    ],
)
def test_metadata_of_other_types_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    path = write_gguf(GOLDEN / "gqa_tied", tmp_path / "m.gguf")
    rewrite_gguf(path, lambda fields: fields.update({key: value}))
    assert_refused(path, key.split(".")[-1] if isinstance(value, str | bool | list) else "")


@pytest.mark.parametrize("value", [3, 0.5, "text", [1, 2], [""]], ids=str)
def test_tokens_of_other_types_are_refused_or_left_out(value: Any, tmp_path: Path) -> None:
    path = write_gguf(GOLDEN / "gqa_tied", tmp_path / "m.gguf", tokenizer=embedded_tokenizer)
    rewrite_gguf(path, lambda fields: fields.update({"tokenizer.ggml.tokens": value}))
    files = open_model(path)
    files.chat_template()
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        files.tokenizer()


def test_a_key_that_repeats_is_refused(tmp_path: Path) -> None:
    path = write_gguf(GOLDEN / "gqa_tied", tmp_path / "m.gguf")
    content = path.read_bytes()
    (count,) = struct.unpack("<Q", content[16:24])
    key = b"llama.attention.value_length"
    pair = struct.pack("<Q", len(key)) + key + struct.pack("<II", 4, 8)
    path.write_bytes(content[:16] + struct.pack("<Q", count + 1) + pair + content[24:])
    assert_refused(path, "llama.attention.value_length", "twice")


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(GOLDEN / "gqa_tied", tmp_path / "m.gguf")
    length = struct.pack("<Q", 5)
    path.write_bytes(path.read_bytes().replace(length + b"llama", length + b"mamba"))
    assert_refused(path, "general.architecture", "mamba", "qwen2")


@pytest.mark.parametrize(
    ("at", "value", "word"),
    [
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack(">I", 3), "byte order"),
        (8, struct.pack("<Q", 2**63), "tensor"),
        (16, struct.pack("<Q", 2**63), ""),
        (24, struct.pack("<Q", 2**40), "ends within its header"),
    ],
)
def test_impossible_headers_are_refused(at: int, value: bytes, word: str, tmp_path: Path) -> None:
    path = write_gguf(GOLDEN / "gqa_tied", tmp_path / "m.gguf")
    content = path.read_bytes()
    path.write_bytes(content[:at] + value + content[at + len(value) :])
    assert_refused(path, word)


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    path = write_gguf(GOLDEN / "gqa_tied", tmp_path / "m.gguf")
    content = path.read_bytes()
    for length in [*range(1, 64), *range(64, 2000, 97), len(content) // 2, len(content) - 1]:
        path.write_bytes(content[:length])
        assert_refused(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(
        st.tuples(st.integers(0, 3000), st.integers(0, 4), st.binary(max_size=8)), min_size=1, max_size=4
    )
)
def test_fuzzed_headers_load_or_are_refused(edits: list[tuple[int, int, bytes]], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    if not (tmp_path / "whole").exists():
        write_gguf(GOLDEN / "gqa_tied", tmp_path / "whole", tokenizer=embedded_tokenizer)
    content = (tmp_path / "whole").read_bytes()
    for at, deleted, inserted in edits:
        content = content[:at] + inserted + content[at + deleted :]
    path.write_bytes(content)
    try:
        files = open_model(path)
        checkpoint = load_checkpoint(files)
        Tokenizer.of_model(files)
        files.chat_template()
    except CheckpointError:
        return
    assert checkpoint.weights.keys()


def test_rotary_rows_really_differ_in_the_file(tmp_path: Path) -> None:
    """The undoing above is of something: the engine's order is not the file's."""
    config = load_checkpoint(write_gguf(GOLDEN / "gqa_tied", tmp_path / "m.gguf")).config
    assert not np.array_equal(rotary_order(config), np.arange(config.head_dim))
