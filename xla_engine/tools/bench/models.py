"""Models for the benchmark: real shapes with random weights, written once as Hugging Face directories."""

import json
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from xla_engine.config import EngineConfig
from xla_engine.environment import embedded_model_directory
from xla_engine.errors import CheckpointError, ConfigError
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.forms import RopeScaling
from xla_engine.model_loader.config_json import read_config
from xla_engine.model_loader.describe import describe_decoder
from xla_engine.model_loader.families import LLAMA, QWEN2, QWEN3, Family, tensor_sources
from xla_engine.model_loader.model_files import open_model

SMOLLM2_135M = ModelConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    tie_word_embeddings=True,
)
LLAMA_3_2_1B = ModelConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(
        rope_type="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
    tie_word_embeddings=True,
)
QWEN3_0_6B = ModelConfig(
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    qk_norm="head",
    tie_word_embeddings=True,
)
SHAPES = {"smollm2-135m": SMOLLM2_135M, "qwen3-0.6b": QWEN3_0_6B, "llama-3.2-1b": LLAMA_3_2_1B}
_WRITTEN = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta"),
    "tie_word_embeddings",
)
_LLAMA3 = ("rope_type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_RECIPE = 2  # of `lively_weights`; part of the directory's name
# Standard deviations of what all layers together add to the residual, before attention averages it.
_ADDED = (("output", 2.0), ("down", 1.2))
_SAME, _TURNED = 3.0, 1.15  # feature 0 of every row, and deviation of what a query or a key makes of it
_HEAD_NORM = 1.5  # weights of norms of queries and keys
_STRETCH = 0.2

Weights = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchModel:
    """A model in the forms that engines read.

    directory: a Hugging Face directory, bfloat16; for a GGUF file of a family that is not written, the file itself.
    file: the GGUF file that the model was given as, if it was.
    text: token ids of an English text, if there is a tokenizer: trained weights say little of random ids.
    """

    directory: Path
    file: Path | None = None
    text: tuple[int, ...] = ()

    @property
    def config(self) -> ModelConfig:
        if self.directory.is_dir():
            return read_config(self.directory)
        return describe_decoder(open_model(self.directory), EngineConfig()).config


def find_model(name: str, cache: Path) -> BenchModel:
    """The model "embedded", of a shape in `SHAPES`, or that `open_model` finds.

    Shapes and GGUF files are written below `cache` on first use, so that every peer has the same weights.

    Raises ConfigError and CheckpointError.
    """
    models = cache / "models"
    if name in SHAPES:
        config = SHAPES[name]
        directory = write_once(config, models / f"{name}-random{_RECIPE}", lambda: lively_weights(config))
        return BenchModel(directory=directory)
    try:
        files = open_model(embedded_model_directory() if name == "embedded" else name)
    except CheckpointError as error:
        raise ConfigError(f"model {name!r} is not embedded, {', '.join(SHAPES)}, and: {error}") from error
    tokenizer = files.tokenizer()
    text = () if tokenizer is None else tuple(tokenizer.encode(_text(), add_special_tokens=False).ids)
    if files.path.is_dir():
        return BenchModel(directory=files.path, text=text)
    from xla_engine.model_loader.checkpoint import load_checkpoint  # imports jax

    checkpoint = load_checkpoint(files, dtype="bfloat16")
    # of its file: leaves are as transformers has them
    config = replace(checkpoint.config, rope_interleaved=False)
    with tempfile.TemporaryDirectory() as folder:
        write_config(config, Path(folder))
        if read_config(Path(folder)) != config:  # engines that read the file itself need no other form
            return BenchModel(directory=files.path, file=files.path, text=text)
    directory = models / f"{files.path.stem}-bfloat16"
    write_once(config, directory, lambda: dict(checkpoint.weights))
    return BenchModel(directory=directory, file=files.path, text=text)


def write_once(config: ModelConfig, directory: Path, weights: Callable[[], Weights]) -> Path:
    """`write_checkpoint` of what `weights` returns, unless there is such a directory; returns it. A run that is cut
    short leaves none."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    if not directory.exists():
        with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
            write_checkpoint(config, weights(), Path(folder) / "model")
            os.replace(Path(folder) / "model", directory)
    return directory


def _text() -> str:
    """Python's own manual, which every interpreter has."""
    return "\n".join(topics[name] for name in sorted(topics))


def lively_weights(config: ModelConfig, *, seed: int = 0) -> Weights:
    """Random bf16 weights whose greedy streams hold many distinct tokens, show faults, and hardly round otherwise.

    A wrong position, or a row that reads another's slot, changes such streams; those of plain normal weights repeat a
    token or two whatever happens. Strong attention to random content would not do either: it is chaotic, so that
    roundings change streams as faults do. So here:

    - a token's embedding has deviation 1, and sublayers together add about as much;
    - feature 0 is the same in every row, and queries and keys make of it vectors that only turn with the position: a
      head attends to a few distances of its own, hence to other tokens at every step, whatever is rounded;
    - a tied head prefers the token it was just given: random signs in the last norm undo that;
    - the best of many normal logits leads the second by little more than bf16 rounds: rows of the embedding are
      stretched by a log-normal factor, so that fewer tokens compete. With more of it few tokens would ever win.
    """
    from xla_engine.model_loader.checkpoint import random_weights  # imports jax

    weights = random_weights(config, dtype="float32", seed=seed, scale=1.0)
    generator = np.random.default_rng([seed, 1])
    gains = {
        "qkv": 1.0,
        "gate_up": 1.0,
        **{name: g / math.sqrt(config.num_hidden_layers) for name, g in _ADDED},
    }
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    for leaf, values in weights.items():
        kind = leaf.rsplit(".", 1)[-1]
        if kind in ("embed", "head"):
            values *= np.exp(_STRETCH * generator.standard_normal((config.vocab_size, 1), dtype=np.float32))
            values[:, 0] = _SAME if kind == "embed" else 0
        elif kind in gains:
            values *= np.float32(gains[kind] / math.sqrt(values.shape[1]))
            values[:, 0] = 0
        elif kind.endswith("norm"):
            values[...] = _HEAD_NORM if kind in ("q_norm", "k_norm") else 1
        if kind in ("output", "down"):
            values[0] = 0
        elif kind == "qkv":
            turned = generator.standard_normal((queries + keys, 1), dtype=np.float32)[:, 0]
            pair = np.arange(queries + keys) % (config.head_dim // 2)
            fast = pair < config.head_dim // 8  # these turn within some hundred positions
            values[: queries + keys, 0] = _TURNED * turned * fast
        if values.ndim > 1:
            weights[leaf] = values.astype(ml_dtypes.bfloat16)
    weights["final_norm"] = generator.choice(np.array([-1, 1], np.float32), config.hidden_size)
    return weights


def write_checkpoint(config: ModelConfig, weights: Weights, directory: Path) -> None:
    """Write `directory`, all bfloat16, for `load_checkpoint` and every peer; no eos id, no tokenizer."""
    tensors = {}
    for leaf, stacked in tensor_sources(config, _family(config)).items():
        row = 0
        for source in stacked:
            rows = source.shape[0]
            tensors[source.name] = weights[leaf][row : row + rows].astype(ml_dtypes.bfloat16)
            row += rows
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_config(config, directory)


def write_config(config: ModelConfig, directory: Path) -> None:
    """The config.json of a Llama, of a Qwen2 if q, k and v have biases, or of a Qwen3 if heads are normed."""
    family = _family(config)
    fields = {name: getattr(config, name) for name in _WRITTEN} | {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if config.rope_scaling is not None:
        fields["rope_scaling"] = {name: getattr(config.rope_scaling, name) for name in _LLAMA3}
    (directory / "config.json").write_text(json.dumps(fields, indent=2))


def _family(config: ModelConfig) -> Family:
    if config.qk_norm == "head":
        return QWEN3
    return QWEN2 if config.qkv_bias else LLAMA
