"""A SmolVLM checkpoint that needs no network: the text model of this package beside a tower of random weights.

It reads pictures of all forms, as a real one does, but cannot see: what it writes about a picture means nothing.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

SIDE, PATCH = 24, 4  # pixels of a tile and of a patch
WIDTH, LAYERS = 32, 2  # of the tower
SCALE = 2  # patches in a row that become one token
TOKENS = (SIDE // PATCH // SCALE) ** 2  # of a tile
MARKS = ["<image>", "<fake_token_around_image>", "<global-img>"]
MARKS += [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)]
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else '# ' ~ part.text ~ '\n' }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}def{% endif %}"
)


def make(directory: Path) -> Path:
    """Write the checkpoint, and return its directory."""
    directory.mkdir(parents=True)
    text = Path(str(files("xla_engine"))) / "embedded"
    config = json.loads((text / "config.json").read_text())
    vocabulary = config["vocab_size"]
    config |= {"model_type": "llama", "vocab_size": vocabulary + len(MARKS)}
    vision = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "image_size": SIDE,
        "patch_size": PATCH,
    }

    def write(name: str, value: dict[str, Any]) -> None:
        (directory / name).write_text(json.dumps(value))

    write(
        "config.json",
        {
            "architectures": ["SmolVLMForConditionalGeneration"],
            "model_type": "smolvlm",
            "scale_factor": SCALE,
            "tie_word_embeddings": True,
            "image_token_id": vocabulary,
            "text_config": config,
            "vision_config": vision,
        },
    )
    write(
        "preprocessor_config.json",
        {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 3 * SIDE},
            "max_image_size": {"longest_edge": SIDE},
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        },
    )
    write("processor_config.json", {"image_seq_len": TOKENS})
    tokenizer = json.loads((text / "tokenizer.json").read_text())
    kind = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    tokenizer["added_tokens"] += [
        {"id": vocabulary + index, "content": mark, **kind} for index, mark in enumerate(MARKS)
    ]
    write("tokenizer.json", tokenizer)
    settings = json.loads((text / "tokenizer_config.json").read_text())
    write("tokenizer_config.json", settings | {"chat_template": TEMPLATE})
    save_file(
        _weights(load_file(text / "model.safetensors"), config["hidden_size"]),
        directory / "model.safetensors",
    )
    return directory


def _weights(text: dict[str, Any], text_size: int) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    embeddings = text["model.embed_tokens.weight"]
    spread = float(embeddings.astype(np.float32).std())

    def random(*shape: int, scale: float = 0.2) -> Any:
        return (draw.standard_normal(shape) * scale).astype(ml_dtypes.bfloat16)

    weights = {name.replace("model.", "model.text_model.", 1): value for name, value in text.items()}
    weights["model.text_model.embed_tokens.weight"] = np.concatenate(
        [embeddings, random(len(MARKS), text_size, scale=spread).astype(embeddings.dtype)]
    )
    ones, zeros = np.ones(WIDTH, ml_dtypes.bfloat16), np.zeros(WIDTH, ml_dtypes.bfloat16)
    tower = "model.vision_model."
    weights |= {
        f"{tower}embeddings.patch_embedding.weight": random(WIDTH, 3, PATCH, PATCH),
        f"{tower}embeddings.patch_embedding.bias": zeros,
        f"{tower}embeddings.position_embedding.weight": random((SIDE // PATCH) ** 2, WIDTH),
        f"{tower}post_layernorm.weight": ones,
        f"{tower}post_layernorm.bias": zeros,
        "model.connector.modality_projection.proj.weight": random(text_size, WIDTH * SCALE**2, scale=0.01),
    }
    shapes = {f"self_attn.{name}_proj": (WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
    shapes |= {"mlp.fc1": (2 * WIDTH, WIDTH), "mlp.fc2": (WIDTH, 2 * WIDTH)}
    for layer in range(LAYERS):
        prefix = f"{tower}encoder.layers.{layer}."
        for name, (rows, columns) in shapes.items():
            weights[f"{prefix}{name}.weight"] = random(rows, columns)
            weights[f"{prefix}{name}.bias"] = np.zeros(rows, ml_dtypes.bfloat16)
        for name in ("layer_norm1", "layer_norm2"):
            weights |= {f"{prefix}{name}.weight": ones, f"{prefix}{name}.bias": zeros}
    return weights
