"""GGUF files load to the same weights as the safetensors that they were made from; anything else is one clear
error."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.gguf_checks import GOLDEN, embedded_tokenizer
from tests.support.gguf_files import Kind, random_blocks, write_gguf, write_qwen3_moe
from tests.support.models import TINY
from tests.support.tiers import default
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.environment import embedded_model_directory
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.graphs.ops.rope import rotary_order
from xla_engine.model_loader.checkpoint import load_checkpoint, random_weights
from xla_engine.model_loader.gguf.reader import GgufReader, quantised_kinds
from xla_engine.model_loader.model_files import open_model
from xla_engine.model_loader.weights import read_rows
from xla_engine.sampling_params import SamplingParams
from xla_engine.text.tokenizer import Tokenizer
from xla_engine.tools.bench.models import write_checkpoint

BLOCKS = replace(TINY, hidden_size=64, intermediate_size=96)  # rows of whole blocks of 32


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose rows can be quantised."""
    directory = tmp_path_factory.mktemp("blocks") / "model"
    write_checkpoint(BLOCKS, random_weights(BLOCKS, dtype="bfloat16", scale=0.3), directory)
    return directory


@pytest.fixture(scope="module")
def large_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with three key/value heads whose rows can be quantised by 256."""
    model = replace(TINY, hidden_size=256, intermediate_size=256, num_attention_heads=6, head_dim=128)
    directory = tmp_path_factory.mktemp("large_blocks") / "model"
    write_checkpoint(model, random_weights(model, dtype="bfloat16", scale=0.3), directory)
    return directory


@pytest.mark.parametrize("name", ["gqa_tied", "untied_odd_heads"])
def test_a_float32_file_has_the_bits_of_its_source(name: str, tmp_path: Path) -> None:
    stored = load_checkpoint(write_gguf(GOLDEN / name, tmp_path / "m.gguf"))
    source = load_checkpoint(GOLDEN / name)
    assert replace(stored.config, rope_interleaved=False) == source.config and stored.dtype == "float32"
    assert stored.weights.keys() == source.weights.keys()
    for leaf in source.weights:
        np.testing.assert_array_equal(stored.weights[leaf], source.weights[leaf])


KINDS = [Kind[name] for name in ("F32", "F16", "BF16", *quantised_kinds(gguf))]


def test_the_usual_kinds_are_read() -> None:
    """These are the kinds in files on the hub."""
    usual = (
        "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS IQ3_S IQ3_XXS IQ2_S IQ2_XS IQ2_XXS"
    )
    assert set(usual.split()) <= {kind.name for kind in KINDS}


@pytest.mark.parametrize("kind", default(KINDS, 6), ids=lambda kind: kind.name)
@settings(max_examples=15)
@given(
    shape=st.lists(st.integers(1, 5), max_size=2),
    width=st.integers(1, 3),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    places=st.lists(st.integers(0, 10_000), max_size=8),
)
def test_rows_are_cut_as_from_the_whole_tensor(
    kind: Kind,
    shape: list[int],
    width: int,
    cut: tuple[float, float],
    places: list[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Read no rows, some rows, and rows twice of vectors, matrices and stacks; a vector may be cut within a block."""
    whole_shape = (*shape, width * gguf.GGML_QUANT_SIZES[kind][0])
    stored = random_blocks(whole_shape, kind, seed=width)
    path = tmp_path_factory.getbasetemp() / f"{kind.name}.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor("t", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = GgufReader(path).weights({})
    whole = files.read("t")
    assert whole.shape == whole_shape
    expected = gguf.quants.dequantize(stored.reshape(-1, stored.shape[-1]), kind).reshape(whole_shape)
    np.testing.assert_array_equal(whole.astype(np.float32), expected)
    np.testing.assert_array_equal(np.concatenate(list(files.blocks("t"))), whole)
    begin, end = sorted(round(part * len(whole)) for part in cut)
    for rows in (np.arange(begin, end), np.array(places, np.int64) % len(whole)):
        found = files.rows("t", rows)
        assert found.dtype == whole.dtype and found.shape == (len(rows), *whole_shape[1:])
        np.testing.assert_array_equal(found, whole[rows])


@pytest.mark.parametrize("kind", default(KINDS, 6), ids=lambda kind: kind.name)
def test_every_device_reads_its_part_of_each_leaf(large_blocks: Path, tmp_path: Path, kind: Kind) -> None:
    """With three key/value heads, each of four devices has one or none."""
    checkpoint = load_checkpoint(write_gguf(large_blocks, tmp_path / "m.gguf", kind=kind))
    spec = ModelSpec(checkpoint.config, jnp.dtype(jnp.bfloat16), devices=4)
    empty = 0
    for leaf in checkpoint.weights:
        whole = checkpoint.weights[leaf].reshape(-1, *spec.leaves[leaf].shape[1:][-1:])
        cut = spec.leaves[leaf].cut
        indices = [np.array([2, -1, 0]), np.array([-1, -1]), np.array([], np.int64)]
        if cut is not None:
            indices += [cut.flat_rows(place, spec.leaves[leaf].shape) for place in range(4)]
        for index in indices:
            expected = whole[index]
            expected[index < 0] = 0
            np.testing.assert_array_equal(read_rows(checkpoint.weights, leaf, index), expected, err_msg=leaf)
        empty += sum(bool((index[len(index) // 2 :] < 0).all()) for index in indices[3:])
    assert empty


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
    """unsaid: fields of the golden models that llama.cpp's metadata cannot express, or round."""
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
    model = write_qwen3_moe(
        tmp_path / "model", hidden_size=64, intermediate_size=64, moe_intermediate_size=32
    )
    stored = load_checkpoint(
        write_gguf(model, tmp_path / "m.gguf", arch="qwen3moe", kind=kind), dtype="float32"
    )
    source = load_checkpoint(model, dtype="float32")
    assert stored.config == source.config and stored.config.experts is not None
    for leaf, array in source.weights.items():
        if kind != Kind.F32 and array.ndim > 1:
            array = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
        np.testing.assert_array_equal(stored.weights[leaf], array, err_msg=leaf)


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


def test_rotary_rows_really_differ_in_the_file(tmp_path: Path) -> None:
    """The engine's order differs from the file's, so the tests above do test the reordering."""
    config = load_checkpoint(write_gguf(GOLDEN / "gqa_tied", tmp_path / "m.gguf")).config
    assert not np.array_equal(rotary_order(config), np.arange(config.head_dim))
