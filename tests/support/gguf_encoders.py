"""GGUF files of encoders for the tests, written from Hugging Face directories as llama.cpp's converter does."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from safetensors.numpy import load_file

from xla_engine.model_loader.families import encoder_fields, encoder_of
from xla_engine.model_loader.json_fields import Fields

_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "rope.freq_base": "rope_theta",
}
_PREFIXES = ("bert.", "roberta.", "distilbert.", "nomic_bert.", "model.")
_CONTROL, _NORMAL = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL


def write_encoder_gguf(
    model: Path,
    path: Path,
    arch: str,
    *,
    rows: int = 0,
    pooling: int | None = None,
    extra: Mapping[str, Any] | None = None,
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
    without: tuple[str, ...] = (),
) -> Path:
    """Write `path` from the directory `model`, in float32.

    rows: of the table of positions that the converter cuts off (RoBERTa's). pooling: `pooling_type`.
    without: beginnings of names of tensors that are left out.
    """
    raw = Fields.of_file(model / "config.json")
    name = encoder_of(raw.values["architectures"][0])
    assert name is not None
    config = encoder_fields(raw, name).values
    rope = config.get("rope_parameters") or {}
    theta = rope.get("full_attention", rope).get("rope_theta")
    config = {**config, **({"rope_theta": theta} if theta else {})}
    writer = gguf.GGUFWriter(str(path), arch)
    own = {key: config[field] for key, field in _KEYS.items() if config.get(field) is not None}
    own |= {
        "attention.causal": False,
        **({} if pooling is None else {"pooling_type": pooling}),
        **(extra or {}),
    }
    own["context_length"] -= rows
    for key, value in own.items():
        adders = {
            float: writer.add_float32,
            list: writer.add_array,
            bool: writer.add_bool,
            str: writer.add_string,
        }
        adders.get(type(value), writer.add_uint32)(f"{arch}.{key}", value)
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        tokenizer(writer)
    kinds = {known: number for number, known in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[arch], config["num_hidden_layers"])
    for stored, tensor in load_file(model / "model.safetensors").items():
        for prefix in _PREFIXES:
            stored = stored.removeprefix(prefix)
        if stored.startswith(without) or stored.startswith(("vocab_", "pooler.", "decoder.", "cls.")):
            continue
        target = names.get_name(stored, (".weight", ".bias"))
        assert target is not None, stored
        values = tensor.astype(np.float32)
        writer.add_tensor(target, values[rows:].copy() if target == "position_embd.weight" else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def word_pieces(backend: tokenizers.Tokenizer) -> Callable[[gguf.GGUFWriter], None]:
    """The metadata of a WordPiece tokenizer: the first piece of a word has a space in front of it."""
    state = json.loads(backend.to_str())
    vocabulary = sorted(state["model"]["vocab"], key=state["model"]["vocab"].get)
    special = {token["content"] for token in state["added_tokens"]}

    def spelled(token: str) -> str:
        if token in special:
            return token
        return token[2:] if token.startswith("##") else "\u2581" + token

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("bert")
        writer.add_tokenizer_pre("bert-bge")
        writer.add_token_list([spelled(token) for token in vocabulary])
        writer.add_token_types([_CONTROL if token in special else _NORMAL for token in vocabulary])
        writer.add_token_type_count(2)
        for add, token in {
            writer.add_unk_token_id: "[UNK]",
            writer.add_sep_token_id: "[SEP]",
            writer.add_pad_token_id: "[PAD]",
            writer.add_bos_token_id: "[CLS]",
        }.items():
            add(vocabulary.index(token))

    return fill


def xlm_pieces(backend: tokenizers.Tokenizer) -> Callable[[gguf.GGUFWriter], None]:
    """The metadata of XLM-RoBERTa's tokenizer. Rows of the embedding without a token have names of their own."""
    state = json.loads(backend.to_str())
    pieces = [*state["model"]["vocab"], ("[PAD80]", -10000.0), ("[PAD81]", -10000.0)]
    kinds = {"<unk>": gguf.TokenType.UNKNOWN, **dict.fromkeys(("<s>", "<pad>", "</s>"), _CONTROL)}

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("t5")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([token for token, _ in pieces])
        writer.add_token_scores([score for _, score in pieces])
        unused = {token: gguf.TokenType.UNUSED for token, _ in pieces[-2:]}
        writer.add_token_types([(kinds | unused).get(token, _NORMAL) for token, _ in pieces])
        writer.add_add_space_prefix(True)
        writer.add_remove_extra_whitespaces(True)
        writer.add_precompiled_charsmap(base64.b64decode(state["normalizer"]["precompiled_charsmap"]))
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(2)

    return fill
