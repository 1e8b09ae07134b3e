"""Encoders: what each pools is what numpy, transformers and sentence-transformers compute, and depends on it alone."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.pooling.test_lines import answers
from tests.support.encoder_models import (
    BERT,
    CONFIG,
    ROBERTA,
    XLM_ROBERTA,
    encoder_tensors,
    hidden_states,
    word_piece,
    write_encoder,
)
from tests.support.tiers import default
from xla_engine import LLM
from xla_engine.errors import CheckpointError, ConfigError, InvalidRequestError
from xla_engine.pooling_params import PoolingParams
from xla_engine.runner.native_library.instruction_sets import available

MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
FIRST = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 70, 96)
DRAW = random.Random(5)
PROMPTS = [[DRAW.randrange(2, CONFIG["vocab_size"]) for _ in range(length)] for length in LENGTHS]
TEXTS = ["the cat sat", "a", "unable cats", "the cat sat on the mat and the hat " * 2, "playing documents"]
EXACT: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4}
ISAS = (*(each.name for each in available()), "none")


def vectors(llm: LLM, prompts: Any, **options: Any) -> list[list[float]]:
    return [each.outputs.embedding for each in llm.embed(prompts, use_tqdm=False, **options)]


def unit(vector: Any) -> Any:
    return vector / np.linalg.norm(vector)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bare BERT that pools by the mean."""
    directory = tmp_path_factory.mktemp("bert")
    return write_encoder(directory, encoder_tensors(BERT), "BertModel", BERT, pooling=MEAN)


@pytest.mark.full
def test_bert_pools_by_the_mean(bert: Path) -> None:
    """WordPiece, learned positions, LayerNorm with bias, exact GELU, attention in both directions, length 1."""
    tensors, tokenizer = encoder_tensors(BERT), word_piece()
    tokenizer.no_padding()
    tokenizer.no_truncation()
    with LLM(bert, **EXACT) as llm:
        expected = [unit(hidden_states(tensors, BERT, each).mean(0)) for each in PROMPTS]
        np.testing.assert_allclose(vectors(llm, PROMPTS), expected, rtol=0, atol=1e-5)
        ids = [tokenizer.encode(text).ids for text in TEXTS]
        assert vectors(llm, TEXTS) == vectors(llm, ids)
        scores = llm.score_documents(TEXTS[0], TEXTS, use_tqdm=False)
        found = np.array(vectors(llm, TEXTS))
        np.testing.assert_allclose([each.outputs.score for each in scores], found @ found[0], atol=1e-6)
        with pytest.raises(InvalidRequestError, match="97 tokens, more than max_model_len 96"):
            llm.embed([[3] * 97], use_tqdm=False)
        long = " ".join(TEXTS * 9)
        read = tokenizer.encode(long).ids
        assert len(read) > 96
        cut = PoolingParams(truncate_prompt_tokens=-1)
        assert vectors(llm, [long], pooling_params=cut) == vectors(llm, [[*read[:95], 3]])
        asked = {"input": [*TEXTS, long], "truncate_prompt_tokens": -1}
        [record] = answers(llm, [("/v1/embeddings", asked)])
        found = [each["embedding"] for each in record["response"]["body"]["data"]]
        assert found == vectors(llm, [*TEXTS, long], pooling_params=cut)
        cut = PoolingParams(truncate_prompt_tokens=7)
        assert vectors(llm, [long, [*range(5, 20)]], pooling_params=cut) == vectors(
            llm, [[*read[:6], 3], [*range(5, 12)]]
        )
        with pytest.raises(InvalidRequestError, match="does not generate"):
            llm.generate("the cat")


@pytest.mark.parametrize("isa", default(ISAS))
def test_a_vector_depends_on_its_text_alone(bert: Path, isa: str) -> None:
    """In any batch and order, whatever the number of slots; without C++ kernels, the number of slots stays."""
    options: dict[str, Any] = {"isa": isa, "dtype": "float32" if isa == "none" else "auto"}
    with LLM(bert, max_num_seqs=64, **options) as llm:
        alone = [vectors(llm, [each])[0] for each in PROMPTS]
        assert len({tuple(each) for each in alone}) == len(PROMPTS)
        for seed in range(4):
            order = random.Random(seed).choices(range(len(PROMPTS)), k=random.Random(seed).randrange(1, 60))
            found = vectors(llm, [PROMPTS[at] for at in order])
            assert found == [alone[at] for at in order]
        assert llm.engine.runner.compiles.after == 0
    with LLM(bert, max_num_seqs=3, **options) as llm:
        assert vectors(llm, PROMPTS) == alone


@pytest.mark.full
def test_half_precision_keeps_the_vectors(bert: Path) -> None:
    """By default an encoder runs in bfloat16."""
    with LLM(bert, max_num_seqs=4) as llm:
        assert llm.engine.limits()["dtype"] == "bfloat16"
        found = np.array(vectors(llm, PROMPTS))
    tensors = encoder_tensors(BERT)
    expected = [unit(hidden_states(tensors, BERT, each).mean(0)) for each in PROMPTS]
    assert (found * expected).sum(1).min() > 0.9995


CLASSIFIERS = [
    pytest.param("BertForSequenceClassification", BERT, "bert.", "bert", id="bert"),
    pytest.param("RobertaForSequenceClassification", ROBERTA, "roberta.", "roberta", id="roberta"),
    pytest.param("XLMRobertaForSequenceClassification", XLM_ROBERTA, "roberta.", "roberta", id="xlm-roberta"),
]


@pytest.mark.full
@pytest.mark.parametrize(("architecture", "fields", "prefix", "head"), CLASSIFIERS)
def test_cross_encoders_score_pairs(
    tmp_path: Path, architecture: str, fields: dict[str, Any], prefix: str, head: str
) -> None:
    """The first token, a layer with tanh, one class; with BERT, the second text's tokens have type 1."""
    tensors = encoder_tensors(fields, prefix, head, labels=1)
    write_encoder(tmp_path, tensors, architecture, fields, num_labels=1)
    names = (
        ("bert.pooler.dense", "classifier") if head == "bert" else ("classifier.dense", "classifier.out_proj")
    )
    tokenizer = word_piece()
    tokenizer.no_padding()
    tokenizer.no_truncation()

    def logit(query: str, document: str) -> float:
        found = tokenizer.encode(query, document)
        second = found.type_ids.index(1) if fields["type_vocab_size"] > 1 else None
        vector = hidden_states(tensors, fields, found.ids, second)[0]
        vector = np.tanh(tensors[f"{names[0]}.weight"] @ vector + tensors[f"{names[0]}.bias"])
        return float((tensors[f"{names[1]}.weight"] @ vector + tensors[f"{names[1]}.bias"])[0])

    with LLM(tmp_path, **EXACT) as llm:
        expected = np.array([logit(TEXTS[0], each) for each in TEXTS])
        found = llm.score_documents(TEXTS[0], TEXTS, use_tqdm=False)
        np.testing.assert_allclose(
            [each.outputs.score for each in found], 1 / (1 + np.exp(-expected)), atol=1e-5
        )
        raw = PoolingParams(task="score", use_activation=False)
        found = llm.score_documents(TEXTS[0], TEXTS, pooling_params=raw, use_tqdm=False)
        np.testing.assert_allclose([each.outputs.score for each in found], expected, atol=1e-4)
        best = llm.rerank(TEXTS[0], TEXTS, top_n=1, use_tqdm=False)[0]
        assert best.index == int(expected.argmax())
        asked = {"query": TEXTS[0], "documents": TEXTS, "top_n": 1}
        [record] = answers(llm, [("/v1/rerank", asked)])
        (first,) = record["response"]["body"]["results"]
        assert (first["index"], first["relevance_score"]) == (best.index, best.relevance_score)


@pytest.mark.full
def test_modules_of_sentence_transformers(tmp_path: Path) -> None:
    """The first token, a Dense module with its activation, no Normalize; and the length of texts that they read."""
    tensors, size = encoder_tensors(BERT, "bert."), 24
    modules = ("Transformer", "Pooling", "Dense")
    write_encoder(tmp_path, tensors, "BertForMaskedLM", BERT, pooling=FIRST, modules=modules)
    draw = np.random.default_rng(9)
    weight, bias = draw.standard_normal((size, CONFIG["hidden_size"])), draw.standard_normal(size)
    dense = {"linear.weight": weight.astype(np.float32), "linear.bias": bias.astype(np.float32)}
    save_file(dense, tmp_path / "2_Dense" / "model.safetensors")
    shape = {"in_features": CONFIG["hidden_size"], "out_features": size, "bias": True}
    activation = {"activation_function": "torch.nn.modules.activation.Tanh"}
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(shape | activation))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 40}))
    with LLM(tmp_path, **EXACT) as llm:
        assert llm.engine.limits()["max_model_len"] == 40
        short = [each for each in PROMPTS if len(each) <= 40]
        first = [hidden_states(tensors, BERT, each)[0] for each in short]
        expected = [np.tanh(weight @ each + bias) for each in first]
        np.testing.assert_allclose(vectors(llm, short), expected, rtol=0, atol=3e-5)


def test_what_is_no_encoder_of_ours_is_refused(bert: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="generates no text"):
        LLM(bert, runner="generate")
    with pytest.raises(ConfigError, match="encoders do not support num_blocks"):
        LLM(bert, num_blocks=8)
    write_encoder(tmp_path, encoder_tensors(BERT), "BertModel", BERT, position_embedding_type="relative_key")
    with pytest.raises(CheckpointError, match="position_embedding_type"):
        LLM(tmp_path)


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["BertModel", "RobertaModel", "XLMRobertaModel"])
def test_numpy_agrees_with_transformers(tmp_path: Path, name: str) -> None:
    import torch
    import transformers

    fields = {"BertModel": BERT, "RobertaModel": ROBERTA, "XLMRobertaModel": XLM_ROBERTA}[name]
    tensors = encoder_tensors(fields)
    write_encoder(tmp_path, tensors, name, fields)
    model = getattr(transformers, name).from_pretrained(
        tmp_path, dtype=torch.float32, add_pooling_layer=False
    )
    for prompt in PROMPTS:
        with torch.no_grad():
            found = model(torch.tensor([prompt])).last_hidden_state[0].numpy()
        np.testing.assert_allclose(found, hidden_states(tensors, fields, prompt), rtol=0, atol=2e-5)


@pytest.mark.oracle
@pytest.mark.parametrize(("architecture", "fields", "prefix", "head"), CLASSIFIERS)
def test_scores_are_those_of_transformers(
    tmp_path: Path, architecture: str, fields: dict[str, Any], prefix: str, head: str
) -> None:
    import torch
    import transformers

    write_encoder(
        tmp_path, encoder_tensors(fields, prefix, head, labels=3), architecture, fields,
        id2label={str(at): f"class {at}" for at in range(3)},
    )  # fmt: skip
    model = getattr(transformers, architecture).from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = [model(torch.tensor([each])).logits[0].softmax(-1).tolist() for each in PROMPTS]
    with LLM(tmp_path, **EXACT) as llm:
        found = [each.outputs.probs for each in llm.classify(PROMPTS, use_tqdm=False)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
