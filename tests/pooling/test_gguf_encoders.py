"""Encoders in GGUF files: the vectors, scores and token ids of the directories that they were made of, to the bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, normalizers, processors

from tests.model_loader.test_gguf_tokenizer import fill_byte_level
from tests.pooling.test_encoder_families import GOLDEN
from tests.support.encoder_models import (
    BERT,
    CONFIG,
    ROBERTA,
    XLM_ROBERTA,
    encoder_tensors,
    word_piece,
    write_encoder,
)
from tests.support.gguf_encoders import word_pieces, write_encoder_gguf, xlm_pieces
from tests.support.gguf_files import add_tensors, write_gguf
from tests.support.tokenizers import byte_level, xlm_roberta
from xla_engine import LLM
from xla_engine.cli import main
from xla_engine.config import EngineConfig
from xla_engine.errors import CheckpointError
from xla_engine.model_loader.checkpoint import load_weights
from xla_engine.model_loader.describe import ModelDescription, describe
from xla_engine.model_loader.gguf.reader import GgufReader
from xla_engine.model_loader.gguf.tokenizer import tokenizer_of
from xla_engine.model_loader.model_files import open_model

MEAN, FIRST, LAST, RANK = 1, 2, 3, 4  # llama.cpp's numbers
EXACT: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4}
WINDOWS = {"attention.sliding_window": 16, "attention.sliding_window_pattern": 3}
HEAD = ("classifier.", "head.")
POOLS = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
IDS = [[2, *range(5, 5 + length), 3] for length in (1, 2, 7, 20)]


def vectors(model: Path, prompts: Any, **options: Any) -> list[list[float]]:
    with LLM(model, **EXACT, **options) as llm:
        return [each.outputs.embedding for each in llm.embed(prompts, use_tqdm=False)]


def test_bert_with_its_tokenizer(tmp_path: Path) -> None:
    """all-MiniLM, BGE, E5, ...: pooling and token ids are in the metadata."""
    model = write_encoder(tmp_path / "model", encoder_tensors(BERT), "BertModel", BERT, pooling=POOLS)
    path = write_encoder_gguf(
        model, tmp_path / "m.gguf", "bert", pooling=MEAN, tokenizer=word_pieces(word_piece())
    )
    texts = ["the cat sat", "Unable CATS", "a [SEP] b", "naïve 世界 the\tmat"]
    assert vectors(path, texts) == vectors(model, texts)
    found = CliRunner().invoke(main, ["inspect", str(path)])
    assert found.exit_code == 0, found.output


FAMILIES = [
    pytest.param("nomic_published", "nomic-bert", {}, id="nomic"),
    pytest.param("modernbert", "modern-bert", WINDOWS, id="modernbert"),
    pytest.param("modernbert_bias", "modern-bert", WINDOWS, id="modernbert_bias"),
    pytest.param("distilbert", "bert", {}, id="distilbert"),
]


def described(model: Path, **options: Any) -> Any:
    return describe(open_model(model), EngineConfig(dtype="float32", **options))


def assert_same(stored: ModelDescription, source: ModelDescription) -> None:
    """The same encoder with the same weights; its positions may begin at another row."""
    one, two = (replace(each.config, encoder=None) for each in (stored, source))
    assert one == two
    forms = [each.config.encoder for each in (stored, source)]
    one, two = (
        replace(each, positions=each.positions - each.position_offset, position_offset=0) for each in forms
    )
    assert one == two
    weights = [load_weights(each).weights for each in (stored, source)]
    assert weights[0].keys() == weights[1].keys()
    for leaf, expected in weights[1].items():
        expected = expected[forms[1].position_offset :] if leaf == "positions" else expected
        np.testing.assert_array_equal(weights[0][leaf], expected, err_msg=leaf)


@pytest.mark.parametrize(("name", "arch", "extra"), FAMILIES)
def test_the_encoder_of_the_directory(name: str, arch: str, extra: dict[str, Any], tmp_path: Path) -> None:
    config = json.loads((GOLDEN / name / "config.json").read_text())
    bare = config["architectures"][0].replace("ForMaskedLM", "Model")
    path = write_encoder_gguf(
        GOLDEN / name, tmp_path / "m.gguf", arch, pooling=MEAN, extra=extra, without=HEAD
    )
    found = described(path)
    assert found.pooling.pooling_type == "MEAN"
    assert_same(found, described(GOLDEN / name, hf_overrides={"architectures": [bare]}))


@pytest.mark.parametrize(
    ("architecture", "fields"), [("RobertaModel", ROBERTA), ("XLMRobertaModel", XLM_ROBERTA)]
)
def test_positions_of_roberta_begin_at_the_first_row(
    architecture: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    model = write_encoder(tmp_path / "model", encoder_tensors(fields), architecture, fields)
    path = write_encoder_gguf(model, tmp_path / "m.gguf", "bert", rows=2, pooling=FIRST)
    assert_same(described(path), described(model))


@pytest.mark.parametrize(("pooling", "kind"), [(MEAN, "MEAN"), (FIRST, "CLS"), (LAST, "LAST"), (0, "CLS")])
def test_pooling_is_in_the_metadata(pooling: int, kind: str, tmp_path: Path) -> None:
    model = write_encoder(tmp_path / "model", encoder_tensors(BERT), "BertModel", BERT)
    path = write_encoder_gguf(model, tmp_path / "m.gguf", "bert", pooling=pooling)
    assert described(path).pooling.pooling_type == kind


@pytest.mark.full
def test_a_cross_encoder(tmp_path: Path) -> None:
    """bge-reranker: a layer, tanh, one class."""
    fields, architecture = XLM_ROBERTA, "XLMRobertaForSequenceClassification"
    tensors = encoder_tensors(fields, "roberta.", "roberta", labels=1)
    model = write_encoder(tmp_path / "model", tensors, architecture, fields, id2label={"0": "fits"})
    path = write_encoder_gguf(
        model, tmp_path / "m.gguf", "bert", rows=2, pooling=RANK, extra={"classifier.output_labels": ["fits"]}
    )
    probabilities = []
    for each in (path, model):
        with LLM(each, **EXACT) as llm:
            probabilities.append([found.outputs.probs for found in llm.classify(IDS, use_tqdm=False)])
    assert probabilities[0] == probabilities[1]


def test_a_classifier_without_its_first_layer_is_refused(tmp_path: Path) -> None:
    """llama.cpp's converter leaves the pooler of `BertForSequenceClassification` out."""
    tensors = encoder_tensors(BERT, "bert.", "bert", labels=3)
    model = write_encoder(tmp_path / "model", tensors, "BertForSequenceClassification", BERT)
    path = write_encoder_gguf(model, tmp_path / "m.gguf", "bert", pooling=RANK)
    with pytest.raises(CheckpointError, match="leaves out the first of its two layers"):
        LLM(path, **EXACT)


@pytest.mark.parametrize("dense", [False, True])
def test_embedding_gemma(dense: bool, tmp_path: Path) -> None:
    """Windows before and behind a token; two layers behind the mean, if the file has them."""
    source = GOLDEN / "embeddinggemma"
    extra = {
        "attention.sliding_window_pattern": [True, True, True, False],
        "pooling_type": MEAN,
        **({"dense_2_feat_in": 64, "dense_2_feat_out": 80, "dense_3_feat_in": 80} if dense else {}),
    }
    path = write_gguf(source, tmp_path / "m.gguf", arch="gemma-embedding", extra=extra)
    draw = np.random.default_rng(0)
    layers = [draw.standard_normal(shape).astype(np.float32) for shape in ((80, 64), (48, 80))]
    if dense:
        named = {f"dense_{number}.weight": layer for number, layer in enumerate(layers, 2)}
        add_tensors(path, named)
    found, expected = described(path), described(source)
    assert found.config == expected.config and found.pooling.pooling_type == "MEAN"
    assert [each.weight.tolist() for each in found.pooling.dense] == [
        layer.tolist() for layer in layers if dense
    ]
    stored, weights = (load_weights(each).weights for each in (found, expected))
    assert stored.keys() == weights.keys()
    for leaf in weights:
        np.testing.assert_array_equal(stored[leaf], weights[leaf], err_msg=leaf)
    assert CliRunner().invoke(main, ["inspect", str(path)]).exit_code == 0


def test_a_decoder_that_pools(tmp_path: Path) -> None:
    """Qwen3-Embedding: the metadata say how it pools, so that it does without an option."""
    model = GOLDEN.parent / "families" / "qwen3"
    path = write_gguf(model, tmp_path / "m.gguf", arch="qwen3", extra={"pooling_type": LAST})
    found = described(path)
    assert found.options.runner == "pooling" and found.pooling.pooling_type == "LAST"
    path = write_gguf(model, tmp_path / "a.gguf", arch="qwen3", extra={"attention.causal": False})
    found = described(path)
    assert found.config.bidirectional and found.pooling.pooling_type == "MEAN"
    path = write_gguf(model, tmp_path / "b.gguf", arch="qwen3", extra={"pooling_type": RANK})
    with pytest.raises(CheckpointError, match=r"pooling_type = 4: not supported \(a classifier"):
        described(path)


def test_what_modernbert_classifies_is_not_told(tmp_path: Path) -> None:
    path = write_encoder_gguf(
        GOLDEN / "modernbert", tmp_path / "m.gguf", "modern-bert", pooling=RANK, extra=WINDOWS
    )
    with pytest.raises(CheckpointError, match=r"pooling_type = 4: not supported \(a classifier"):
        described(path)


def rebuilt(tmp_path: Path, fill: Any) -> Any:
    model = write_encoder(tmp_path / "model", encoder_tensors(BERT), "BertModel", BERT)
    return tokenizer_of(GgufReader(write_encoder_gguf(model, tmp_path / "m.gguf", "bert", tokenizer=fill)))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """The original tokenizer and the one rebuilt from its metadata, by kind."""
    bert, roberta = word_piece(), byte_level()
    bert.no_padding()
    bert.no_truncation()
    bert.decoder = decoders.WordPiece()
    roberta.post_processor = processors.RobertaProcessing(
        ("<|end|>", roberta.token_to_id("<|end|>")),
        ("<|begin|>", roberta.token_to_id("<|begin|>")),
        add_prefix_space=False,
    )

    def as_roberta(writer: gguf.GGUFWriter) -> None:
        fill_byte_level(roberta, "roberta-bpe")(writer)
        writer.add_bos_token_id(roberta.token_to_id("<|begin|>"))
        writer.add_eos_token_id(roberta.token_to_id("<|end|>"))

    fills = {
        "bert": (bert, word_pieces(bert)),
        "xlm_roberta": (xlm_roberta(), xlm_pieces(xlm_roberta())),
        "roberta": (roberta, as_roberta),
    }
    return {
        name: (original, rebuilt(tmp_path_factory.mktemp(name), fill))
        for name, (original, fill) in fills.items()
    }


@pytest.mark.parametrize("name", ["bert", "xlm_roberta", "roberta"])
@settings(max_examples=200, deadline=None)
@given(
    text=st.text(max_size=40)
    | st.text(alphabet="abcehnstAÄé ▁#\n\t.,[]世🙂ﬁＦｔ\u3000", max_size=60)
    | st.just("[PAD80]"),
    other=st.text(alphabet="thecatsUN ##", max_size=20),
)
def test_ids_are_those_of_the_tokenizer(
    name: str, text: str, other: str, pairs: dict[str, tuple[Any, Any]]
) -> None:
    original, found = pairs[name]
    for each in (text, f"the {text} cats", f"[CLS]</s> {text}"):
        assert found.encode(each).ids == original.encode(each).ids
    one, two = (each.encode(text, other) for each in pairs[name])
    assert one.ids == two.ids and (name != "bert" or one.type_ids == two.type_ids)
    assert found.decode(one.ids) == original.decode(one.ids)


def cased_pieces() -> Any:
    """WordPiece's with a word that has a capital letter, and one with an accent."""
    state = json.loads(word_piece().to_str())
    for word in ("Cat", "é"):
        state["model"]["vocab"][word] = len(state["model"]["vocab"])
    state["normalizer"]["lowercase"] = False
    found = type(word_piece()).from_str(json.dumps(state))
    found.no_padding()
    found.no_truncation()
    return found


@pytest.mark.parametrize("accents", [None, True, False])
@pytest.mark.parametrize("lower", [True, False])
def test_newer_files_say_what_becomes_of_case_and_accents(
    lower: bool, accents: bool | None, tmp_path: Path
) -> None:
    original = cased_pieces()
    original.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=accents)

    def fill(writer: gguf.GGUFWriter) -> None:
        word_pieces(original)(writer)
        writer.add_bool("tokenizer.ggml.normalizer.lowercase", lower)
        if accents is not None:
            writer.add_bool("tokenizer.ggml.normalizer.strip_accents", accents)

    found = rebuilt(tmp_path, fill)
    seen = set[tuple[int, ...]]()
    for text in ("Cat cat CAT", "\u00e9 \u00c9 e\u0301 e", "the Cats \u4e16\u754c"):
        assert found.encode(text).ids == original.encode(text).ids
        seen.add(tuple(found.encode(text).ids))
    assert len(seen) == 3 and (original.token_to_id("Cat") in found.encode("Cat").ids) is not lower


def test_a_vocabulary_with_capitals_needs_its_tokenizer(tmp_path: Path) -> None:
    cased = cased_pieces()
    model = write_encoder(
        tmp_path / "model", encoder_tensors(BERT), "BertModel", BERT, vocab_size=CONFIG["vocab_size"]
    )
    path = write_encoder_gguf(model, tmp_path / "m.gguf", "bert", tokenizer=word_pieces(cased))
    with pytest.raises(CheckpointError, match="capital letters"):
        tokenizer_of(GgufReader(path))
