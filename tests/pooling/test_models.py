"""Models as they are published: what each pools is what numpy, and transformers, compute of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.pooling_models import CONFIG, Tensors, hidden_states, qwen3_tensors, write_model
from xla_engine import LLM, outputs, pooling_outputs
from xla_engine.config import EngineConfig
from xla_engine.engine.inspection import inspect_model
from xla_engine.errors import CheckpointError, ConfigError, InvalidRequestError
from xla_engine.model_loader.describe import describe
from xla_engine.model_loader.model_files import open_model
from xla_engine.openai.pooling import CLASSIFY_URL, PoolingRequest, pooling_body
from xla_engine.outputs import RequestOutput
from xla_engine.pooling_params import PoolingParams
from xla_engine.text.tokenizer import Tokenizer

LENGTHS = (1, 15, 16, 17, 70)
PROMPTS = [np.random.default_rng(n).integers(0, CONFIG["vocab_size"], n).tolist() for n in LENGTHS]
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 8, "max_model_len": 128, "chunk_size": 16, "prefill_lanes": (4,), "key_buckets": (128,),
    "dtype": "float32", "self_check": False,
}  # fmt: skip
LAST = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}
MEAN = {"pooling_mode": "mean"}
NARROW = qwen3_tensors(labels=1)
NARROW["score.weight"] = NARROW["score.weight"][:, :7]


def unit(vector: Any) -> Any:
    return vector / np.linalg.norm(vector)


def sigmoid(number: Any) -> Any:
    return 1 / (1 + np.exp(-number))


def softmax(numbers: Any) -> Any:
    return np.exp(numbers) / np.exp(numbers).sum()


def close(found: list[list[float]], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


def test_qwen3_embedding(tmp_path: Path) -> None:
    """A bare decoder's names, a generating architecture, the last token, length 1, and lengths it was trained for."""
    tensors = qwen3_tensors(prefix="")
    write_model(
        tmp_path, tensors, "Qwen3ForCausalLM", modules=("Transformer", "Pooling", "Normalize"), pooling=LAST,
        matryoshka_dimensions=[8, 24],
    )  # fmt: skip
    hidden = [hidden_states(tensors, prompt)[-1] for prompt in PROMPTS]
    with LLM(tmp_path, **OPTIONS) as llm:
        found = llm.embed(PROMPTS, use_tqdm=False)
        close([each.outputs.embedding for each in found], [unit(each) for each in hidden])
        assert [each.prompt_token_ids for each in found] == PROMPTS
        short = llm.embed(PROMPTS, pooling_params=PoolingParams(dimensions=8), use_tqdm=False)
        close([each.outputs.embedding for each in short], [unit(each[:8]) for each in hidden])
        raw = llm.embed(PROMPTS, pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
        close([each.outputs.embedding for each in raw], hidden)
        # without a classifier, documents are scored by the cosine of vectors
        texts = ["def push(self)", "the cat sat", "naïve café"]
        vectors = [np.array(each.outputs.embedding) for each in llm.embed(texts, use_tqdm=False)]
        scores = llm.score_documents(texts[0], texts, use_tqdm=False)
        close([[each.outputs.score] for each in scores], [[vectors[0] @ each] for each in vectors])
        ranks = llm.rerank(texts[1], texts, top_n=2, use_tqdm=False)
        assert (ranks[0].index, ranks[0].document, len(ranks)) == (1, texts[1], 2)
        with pytest.raises(InvalidRequestError, match="was trained for 9 dimensions: use 8, 24"):
            llm.embed("a", pooling_params=PoolingParams(dimensions=9), use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="no classifier"):
            llm.classify("a", use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="pools and does not generate"):
            llm.generate("a", use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="pools and does not generate"):
            llm.score("a", "b", use_tqdm=False)


@pytest.mark.release
def test_a_mean_of_a_bare_decoder(tmp_path: Path) -> None:
    tensors = qwen3_tensors(prefix="")
    write_model(tmp_path, tensors, "Qwen3Model", modules=("Transformer", "Pooling"), pooling=MEAN)
    with LLM(tmp_path, **OPTIONS) as llm:
        found = llm.embed(PROMPTS, use_tqdm=False)
    close(
        [each.outputs.embedding for each in found],
        [hidden_states(tensors, prompt).mean(0) for prompt in PROMPTS],
    )


@pytest.mark.parametrize(
    ("labels", "activate"), [pytest.param(3, softmax, marks=pytest.mark.release), (1, sigmoid)]
)
def test_sequence_classifiers(tmp_path: Path, labels: int, activate: Callable[[Any], Any]) -> None:
    tensors = qwen3_tensors(labels=labels)
    write_model(tmp_path, tensors, "Qwen3ForSequenceClassification", tie_word_embeddings=labels == 1)
    head = tensors["score.weight"]
    expected = [activate(head @ hidden_states(tensors, prompt)[-1]) for prompt in PROMPTS]
    with LLM(tmp_path, **OPTIONS) as llm:
        close([each.outputs.probs for each in llm.classify(PROMPTS, use_tqdm=False)], expected)
        if labels == 3:
            with pytest.raises(InvalidRequestError, match="3 classes and no score"):
                llm.score_documents("a", "b", use_tqdm=False)
            return
        tokenizer = llm.get_tokenizer()
        ids = [tokenizer.encode("the cat", text) for text in ("sat", "on the mat")]
        found = llm.score_documents("the cat", ["sat", "on the mat"], use_tqdm=False)
        assert [each.prompt_token_ids for each in found] == ids
        close(
            [[each.outputs.score] for each in found],
            [sigmoid(head @ hidden_states(tensors, each)[-1]) for each in ids],
        )
        template = "Q: {{ messages[0].content }} D: {{ messages[1].content }} {{ messages[1].role }}"
        [told] = llm.score_documents("the cat", "sat", chat_template=template, use_tqdm=False)
        text = "Q: the cat D: sat document"
        assert told.prompt_token_ids == tokenizer.encode(text, add_special_tokens=False)


def test_qwen3_reranker_is_how_much_likelier_yes_is_than_no(tmp_path: Path) -> None:
    """Its checkpoint generates; vLLM's `hf_overrides` make a classifier of two rows of its output head."""
    tensors = qwen3_tensors()
    draw = np.random.default_rng(1)
    tensors["lm_head.weight"] = draw.standard_normal(tensors["model.embed_tokens.weight"].shape, np.float32)
    write_model(tmp_path, tensors, "Qwen3ForCausalLM", tie_word_embeddings=False)
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["n", "y"],
        "is_original_qwen3_reranker": True,
    }
    with LLM(tmp_path, runner="pooling", hf_overrides=overrides, **OPTIONS) as llm:
        found = llm.score_documents("the cat", "sat", use_tqdm=False)[0]
        no, yes = (llm.get_tokenizer().encode(each, add_special_tokens=False)[0] for each in "ny")
    logits = tensors["lm_head.weight"] @ hidden_states(tensors, found.prompt_token_ids)[-1]
    close([[found.outputs.score]], [[softmax(logits[[no, yes]])[1]]])


def _loaded(directory: Path, **options: Any) -> Any:
    files = open_model(directory)
    tokenizer = Tokenizer.of_model(files)
    assert tokenizer is not None
    return describe(files, EngineConfig(**options), tokenizer.plain_ids).pooling


def _with(directory: Path, **change: Any) -> Path:
    parts = {"modules": ("Transformer", "Pooling"), "pooling": MEAN, "tensors": qwen3_tensors(labels=1)}
    name = change.pop("architecture", "Qwen3ForCausalLM")
    parts |= change
    return write_model(directory, parts.pop("tensors"), name, **parts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"modules": ("Transformer", "Pooling", "CNN")}, {}, "'CNN' is not supported"),
        ({"pooling": {"pooling_mode_cls_token": True}}, {}, "cls_token; supported are the last token and the mean"),
        ({"pooling": {}}, {}, "pools by nothing"),
        ({"architecture": "Qwen3ForSequenceClassification", "tensors": qwen3_tensors()}, {}, "weight is missing"),
        ({"architecture": "Qwen3ForSequenceClassification", "tensors": NARROW}, {}, r"shape \[1, 7\]"),
        ({}, {"pooler_config": {"pooling_type": "CLS"}}, "LAST or MEAN"),
        ({}, {"hf_overrides": {"vocab_size": 3}}, "edit the checkpoint's config.json"),
        ({"modules": ()}, {"hf_overrides": {"is_matryoshka": True}}, "for models that pool"),
        ({"architecture": "Qwen3ForSequenceClassification", "id2label": ["a"]}, {}, "id2label must be an object"),
        (
            {"architecture": "Qwen3ForSequenceClassification"},
            {"hf_overrides": {"classifier_from_token": ["not one token"]}},
            "must be one token",
        ),
    ],
)  # fmt: skip
def test_what_is_not_built_in_is_refused(
    tmp_path: Path, change: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises((CheckpointError, ConfigError), match=message):
        _loaded(_with(tmp_path, **change), **options)


def test_inspect_knows_them(tmp_path: Path) -> None:
    tensors = qwen3_tensors(labels=3)
    found = inspect_model(
        _with(tmp_path, architecture="Qwen3ForSequenceClassification", tensors=tensors), EngineConfig()
    )
    assert found.ok and found.architecture == "Qwen3ForSequenceClassification", found.problems


def test_what_a_caller_says_goes_before_the_files(tmp_path: Path) -> None:
    directory = _with(tmp_path)
    assert _loaded(directory, runner="generate") is None
    assert (_loaded(directory).pooling_type, _loaded(directory).use_activation) == ("MEAN", False)
    chosen = _loaded(directory, pooler_config={"pooling_type": "LAST", "use_activation": True})
    assert (chosen.pooling_type, chosen.use_activation) == ("LAST", True)
    entries = json.loads((directory / "modules.json").read_text())
    entries[1]["path"] = "../elsewhere"
    (directory / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(CheckpointError, match="leads out of the model directory"):
        _loaded(directory)
    (directory / "modules.json").write_text("{")
    with pytest.raises(CheckpointError, match="not a list of modules"):
        _loaded(directory)


@pytest.mark.oracle
@pytest.mark.parametrize("labels", [0, 1, 3])
def test_numpy_agrees_with_transformers(tmp_path: Path, labels: int) -> None:
    import torch
    import transformers

    tensors: Tensors = qwen3_tensors(labels=labels, prefix="model." if labels else "")
    name = "Qwen3ForSequenceClassification" if labels else "Qwen3Model"
    write_model(tmp_path, tensors, name, num_labels=labels or 2, pad_token_id=0)
    model = getattr(transformers, name).from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    for prompt in ([each or 1 for each in prompt] for prompt in PROMPTS):  # 0 pads
        with torch.no_grad():
            found = model(torch.tensor([prompt]))
        hidden = hidden_states(tensors, prompt)
        if labels:
            close([found.logits[0].tolist()], [tensors["score.weight"] @ hidden[-1]])
        else:
            close(found.last_hidden_state[0].tolist(), list(hidden))


@pytest.mark.oracle
@pytest.mark.parametrize("pooling", [LAST, MEAN], ids=["last token", "mean"])
def test_embeddings_are_those_of_sentence_transformers(tmp_path: Path, pooling: dict[str, Any]) -> None:
    """From the same directory: tokens, pooling and length 1. In float32, each number to 1e-5."""
    from sentence_transformers import SentenceTransformer

    texts = ["def push(self)", "the cat sat on the mat", "naïve café", "x", "import os\nimport sys\n" * 4]
    size = {"word_embedding_dimension": CONFIG["hidden_size"]}
    write_model(
        tmp_path, qwen3_tensors(prefix=""), "Qwen3Model", modules=("Transformer", "Pooling", "Normalize"),
        pooling={**size, **pooling},
    )  # fmt: skip
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|end|>", "padding_side": "left"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(words))
    theirs = SentenceTransformer(str(tmp_path), device="cpu").encode(texts, normalize_embeddings=True)
    with LLM(tmp_path, **OPTIONS) as llm:
        found = llm.embed(texts, use_tqdm=False)
    ours = np.array([each.outputs.embedding for each in found])
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    assert np.abs(theirs - theirs[0]).max(1)[1:].min() > 0.1, "texts differ"


@pytest.mark.parametrize(
    ("fields", "labels"),
    [
        ({}, ("LABEL_0", "LABEL_1", "LABEL_2")),  # transformers' own
        (
            {"id2label": {"0": "negative", "1": "neutral", "2": "positive"}},
            ("negative", "neutral", "positive"),
        ),
        ({"id2label": {"1": "neutral", "9": "nothing"}}, (None, "neutral", None)),
    ],
)
def test_classes_have_the_names_of_the_config(
    tmp_path: Path, fields: dict[str, Any], labels: tuple[str | None, ...]
) -> None:
    directory = write_model(tmp_path, qwen3_tensors(labels=3), "Qwen3ForSequenceClassification", **fields)
    assert _loaded(directory).labels == labels
    found = [
        RequestOutput(
            request_id="", prompt=None, prompt_token_ids=(1,), outputs=(), finished=True, pooled=probs
        )
        for probs in ((0.5, 0.3, 0.2), (0.1, 0.2, 0.7), (0.4, 0.4, 0.2))
    ]
    body = pooling_body(PoolingRequest(url=CLASSIFY_URL), found, "id", "m", 1, labels)
    assert [each["label"] for each in body["data"]] == [labels[0], labels[2], labels[0]]


def test_scores_and_vectors_keep_their_old_place() -> None:
    """`xla_engine.outputs` had them in 0.2.0, and vLLM's module of that name has them."""
    for name in ("Score", "EmbeddingRequestOutput", "PoolingRequestOutput", "RerankResult"):
        assert getattr(outputs, name) is getattr(pooling_outputs, name)
    assert not hasattr(outputs, "math")
