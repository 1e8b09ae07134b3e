"""Make the golden files of encoders: tiny random models of transformers' own architectures, in float32.

    python tests/golden/make/make_golden_encoders.py [NAME ...]     # all that are named; without a name, all

Run with the `oracle` extra installed. `tests/golden/encoders/NAME/` is a model directory, weights in bfloat16, plus
`golden.npz`:

    prompts  int32 [N, L]     token ids, padded with -1: shorter and longer than windows
    first    float32 [N, D]   the last layer's output for the first token
    mean     float32 [N, D]   its mean over all tokens
    logits   float32 [N, C]   of a classifier, if the model has one

Of models that their authors publish with code of their own, transformers writes those tensor names, but fields of its
own into config.json; `publish` puts back those of the authors. It imports nothing of this package.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

torch.set_num_threads(1)  # sums in one order on every machine

GOLDEN = Path(__file__).parents[1] / "encoders"
VOCABULARY = 99
PROMPT_LENGTHS = (1, 2, 7, 15, 16, 17, 33, 64, 90)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
}
MODERN = {**SIZES, "num_hidden_layers": 5, "local_attention": 16, "cls_token_id": 1, "sep_token_id": 2}
MODERN |= {"bos_token_id": 1, "eos_token_id": 2}
DISTIL = {"vocab_size": VOCABULARY, "dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4}
DISTIL |= {"max_position_embeddings": 96, "pad_token_id": 0}
GEMMA = {**SIZES, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 16}
GEMMA |= {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "query_pre_attn_scalar": 32}

# name -> (architecture, configuration)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "modernbert": ("ModernBertModel", MODERN),
    "modernbert_old": ("ModernBertForMaskedLM", MODERN),
    "modernbert_bias": (
        "ModernBertForSequenceClassification",
        MODERN
        | dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True)
        | {"classifier_pooling": "mean", "num_labels": 3},
    ),
    "modernbert_reranker": ("ModernBertForSequenceClassification", MODERN | {"num_labels": 1}),
    "distilbert": ("DistilBertModel", DISTIL),
    "distilbert_classifier": ("DistilBertForSequenceClassification", DISTIL | {"num_labels": 2}),
    "mpnet": ("MPNetModel", SIZES | {"max_position_embeddings": 322, "pad_token_id": 1}),
    "embeddinggemma": ("Gemma3TextModel", GEMMA | {"use_bidirectional_attention": True}),
    "nomic": ("NomicBertModel", SIZES),
    "nomic_published": ("NomicBertModel", SIZES),
    "gte": ("GteModel", SIZES),
    "gte_classifier": ("GteForSequenceClassification", SIZES | {"num_labels": 1, "type_vocab_size": 0}),
    "new_published": ("GteModel", SIZES),
    "qwen2_bidirectional": ("Qwen2Model", SIZES | {"num_key_value_heads": 2, "is_causal": False}),
}
NTK = 8.0


def publish(name: str, directory: Path) -> None:
    """Rewrite config.json as the authors of such models publish it."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    if name == "nomic_published":
        config = {
            "architectures": ["NomicBertModel"],
            "model_type": "nomic_bert",
            "n_embd": 64,
            "n_inner": 96,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 96,
            "vocab_size": VOCABULARY,
            "activation_function": "swiglu",
            "layer_norm_epsilon": 1e-12,
            "rotary_emb_base": 1000,
            "rotary_emb_fraction": 1.0,
            "rotary_emb_interleaved": False,
            "rotary_emb_scale_base": None,
            "rotary_scaling_factor": None,
            "prenorm": False,
            "qkv_proj_bias": False,
            "mlp_fc1_bias": False,
            "mlp_fc2_bias": False,
            "use_rms_norm": False,
            "parallel_block": False,
            "type_vocab_size": 2,
            "pad_token_id": 0,
            "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling.NomicBertModel"},
        }
    elif name == "new_published":
        for field in ("rope_parameters", "tie_word_embeddings"):
            config.pop(field, None)
        config |= {"architectures": ["NewModel"], "model_type": "new", "pack_qkv": True, "rope_theta": 20000}
        config |= {"rope_scaling": {"type": "ntk", "factor": NTK}, "position_embedding_type": "rope"}
        config |= {
            "layer_norm_type": "layer_norm",
            "logn_attention_scale": False,
            "logn_attention_clip1": False,
        }
    elif name == "modernbert_old":
        for field in ("rope_parameters", "layer_types"):
            config.pop(field, None)
        config |= {
            "global_attn_every_n_layers": 3,
            "global_rope_theta": 160000.0,
            "local_rope_theta": 10000.0,
        }
    else:
        return
    file.write_text(json.dumps(config, indent=1))


def scaled(model: Any) -> None:
    """GTE's NTK scaling, as the models' own code has it (NTKScalingRotaryEmbedding without `mixed_b`)."""
    size = 16
    inverse = 1.0 / ((20000 * NTK) ** (torch.arange(0, size, 2).float() / size))
    model.rotary_emb.inv_freq = inverse / NTK ** (2 / size)


def make(name: str) -> None:
    architecture, fields = CASES[name]
    cls = getattr(transformers, architecture)
    config = cls.config_class(**fields)
    config._attn_implementation = "eager"
    torch.manual_seed(11)
    model = cls(config)
    draw = np.random.default_rng(5)
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            noise = torch.tensor(draw.standard_normal(weight.shape), dtype=torch.float32)
            norm = weight.ndim == 1 and weight_name.endswith("weight")
            base = 0.0 if "Gemma" in architecture else 1.0
            weight.copy_((base + 0.2 * noise if norm else 0.2 * noise).to(torch.bfloat16).float())
    model.eval()
    directory = GOLDEN / name
    directory.mkdir(parents=True, exist_ok=True)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(directory)  # which rounds rotary frequencies, too
    publish(name, directory)
    if name == "new_published":
        scaled(model)
    lengths = (
        (*PROMPT_LENGTHS, 300) if name == "mpnet" else PROMPT_LENGTHS
    )  # distances beyond the last bucket
    prompts = np.full((len(lengths), max(lengths)), -1, np.int32)
    found: dict[str, list[Any]] = {"first": [], "mean": [], "logits": []}
    for row, length in zip(prompts, lengths, strict=True):
        row[:length] = draw.integers(3, VOCABULARY, length)
        ids = torch.tensor(row[None, :length].astype(np.int64))
        with torch.no_grad():
            out = model(ids, output_hidden_states=True)
            base = model.base_model if model.base_model is not model else model
            hidden = base(ids).last_hidden_state[0]
        found["first"].append(hidden[0].numpy())
        found["mean"].append(hidden.mean(0).numpy())
        if "Classification" in architecture:
            found["logits"].append(out.logits[0].numpy())
    arrays = {key: np.stack(each).astype(np.float32) for key, each in found.items() if each}
    np.savez_compressed(directory / "golden.npz", prompts=prompts, **arrays)


if __name__ == "__main__":
    for each in sys.argv[1:] or CASES:
        make(each)
        print(each)
