"""Small encoders as they are published, and what plain numpy computes of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import models, normalizers, pre_tokenizers, processors

Tensors = dict[str, np.ndarray[Any, Any]]

WORDS = (
    *("the", "cat", "sat", "on", "mat", "hat", "un", "##able", "##s", "play", "##ing"),
    *("queries", "documents", "token", "a", "b", "c"),
)
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu",
    "vocab_size": 32,
}
BERT = {"model_type": "bert", "max_position_embeddings": 96, "type_vocab_size": 2, "pad_token_id": 0}
ROBERTA = {"model_type": "roberta", "max_position_embeddings": 98, "type_vocab_size": 1, "pad_token_id": 1}
XLM_ROBERTA = {**ROBERTA, "model_type": "xlm-roberta"}


def word_piece() -> tokenizers.Tokenizer:
    """As BERT's; with padding and truncation, as many files have them."""
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ends
    )
    backend.add_special_tokens(SPECIAL)
    backend.enable_truncation(16)
    backend.enable_padding(length=16)
    return backend


def encoder_tensors(fields: dict[str, Any], prefix: str = "", head: str = "", labels: int = 0) -> Tensors:
    """Random weights, float32. head: "bert" or "roberta", whose classifier of `labels` classes is among them."""
    d, f, draw = CONFIG["hidden_size"], CONFIG["intermediate_size"], np.random.default_rng(3)
    tensors: Tensors = {}

    def linear(name: str, rows: int, columns: int) -> None:
        tensors[f"{name}.weight"] = draw.standard_normal((rows, columns)) * 0.3
        tensors[f"{name}.bias"] = draw.standard_normal(rows) * 0.2

    def norm(name: str) -> None:
        tensors[f"{name}.weight"] = 1 + 0.2 * draw.standard_normal(d)
        tensors[f"{name}.bias"] = 0.2 * draw.standard_normal(d)

    for name, rows in (
        ("word", CONFIG["vocab_size"]),
        ("position", fields["max_position_embeddings"]),
        ("token_type", fields["type_vocab_size"]),
    ):
        tensors[f"{prefix}embeddings.{name}_embeddings.weight"] = draw.standard_normal((rows, d))
    norm(f"{prefix}embeddings.LayerNorm")
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"{prefix}encoder.layer.{layer}."
        for part in ("query", "key", "value"):
            linear(f"{at}attention.self.{part}", d, d)
        linear(f"{at}attention.output.dense", d, d)
        norm(f"{at}attention.output.LayerNorm")
        linear(f"{at}intermediate.dense", f, d)
        linear(f"{at}output.dense", d, f)
        norm(f"{at}output.LayerNorm")
    if head == "bert":
        linear("bert.pooler.dense", d, d)
        linear("classifier", labels, d)
    elif head == "roberta":
        linear("classifier.dense", d, d)
        linear("classifier.out_proj", labels, d)
    return {name: array.astype(np.float32) for name, array in tensors.items()}


def write_encoder(
    directory: Path,
    tensors: Tensors,
    architecture: str,
    fields: dict[str, Any],
    *,
    pooling: dict[str, Any] | None = None,
    modules: Sequence[str] = ("Transformer", "Pooling", "Normalize"),
    **more: Any,
) -> Path:
    """A model directory. pooling: `1_Pooling/config.json`, with `modules`; None: no modules."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    config = {**CONFIG, **fields, "architectures": [architecture], **more}
    (directory / "config.json").write_text(json.dumps(config))
    word_piece().save(str(directory / "tokenizer.json"))
    if pooling is not None:
        entries = [
            {
                "idx": at,
                "name": str(at),
                "path": f"{at}_{kind}" if at else "",
                "type": f"sentence_transformers.models.{kind}",
            }
            for at, kind in enumerate(modules)
        ]
        (directory / "modules.json").write_text(json.dumps(entries))
        for each in entries[1:]:
            (directory / str(each["path"])).mkdir()
        size = {"word_embedding_dimension": CONFIG["hidden_size"]}
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(size | pooling))
    return directory


def hidden_states(
    tensors: Tensors, fields: dict[str, Any], token_ids: Sequence[int], second: int | None = None
) -> np.ndarray[Any, Any]:
    """The output of the last layer, by the formulas of the BERT paper in float64: `[N, D]`.

    second: the position of the first token of type 1; None: there is none.
    """
    weights = {
        name.removeprefix("bert.").removeprefix("roberta."): each.astype(np.float64)
        for name, each in tensors.items()
    }
    count, heads, eps = len(token_ids), CONFIG["num_attention_heads"], CONFIG["layer_norm_eps"]

    def linear(x: Any, name: str) -> Any:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: Any, name: str) -> Any:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    offset = 0 if fields["model_type"] == "bert" else fields["pad_token_id"] + 1
    types = np.arange(count) >= (count if second is None else second)
    x = weights["embeddings.word_embeddings.weight"][list(token_ids)]
    x = x + weights["embeddings.position_embeddings.weight"][offset : offset + count]
    x = norm(
        x + weights["embeddings.token_type_embeddings.weight"][types.astype(int)], "embeddings.LayerNorm"
    )
    erf = np.vectorize(math.erf)
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"encoder.layer.{layer}."
        q, k, v = (
            linear(x, f"{at}attention.self.{part}").reshape(count, heads, -1)
            for part in ("query", "key", "value")
        )
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[2])
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weight, v).reshape(count, -1)
        x = norm(x + linear(mixed, f"{at}attention.output.dense"), f"{at}attention.output.LayerNorm")
        hidden = linear(x, f"{at}intermediate.dense")
        hidden = hidden * (1 + erf(hidden / np.sqrt(2))) / 2
        x = norm(x + linear(hidden, f"{at}output.dense"), f"{at}output.LayerNorm")
    return x
