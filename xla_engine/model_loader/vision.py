"""Load the vision tower of a checkpoint: its shape from config.json, its leaves from the weight files."""

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from xla_engine.errors import CheckpointError
from xla_engine.graphs.vision.config import VisionConfig
from xla_engine.graphs.vision.tower import CHANNELS, vision_shapes
from xla_engine.model_loader.checkpoint import check_tensors, dtype_word, stored_dtype
from xla_engine.model_loader.config_json import transformers_model
from xla_engine.model_loader.families import Family, Source
from xla_engine.model_loader.json_fields import Fields
from xla_engine.model_loader.model_files import ModelFiles, open_model
from xla_engine.model_loader.weights import StoredWeights

# Tensors of the decoder, and of a head over the tower that no decoder reads.
_OTHERS = r"model\.text_model\..*|language_model\..*|lm_head\.weight|vision_tower\.(vision_model\.)?head\..*"
_LATER_NAMES = ("vision_tower.vision_model.", "vision_tower.")  # as new versions of transformers save them
_DEFAULTS = {  # transformers' own, for fields that real files omit
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_channels": CHANNELS,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_SIGLIP = {**_DEFAULTS, "hidden_size": 768, "num_attention_heads": 12, "patch_size": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionCheckpoint:
    """A loaded tower.

    config: its shape. weights: by the names of `vision_shapes`; matrices in `dtype`, vectors in float32, read lazily.
    dtype: "bfloat16" or "float32". fingerprint: sha256 of its shape and of the files that have its weights.
    model_type: of the family.
    """

    config: VisionConfig
    weights: StoredWeights
    dtype: str
    fingerprint: str
    model_type: str


def load_vision(model: ModelFiles | Path | str, *, dtype: str = "auto") -> VisionCheckpoint:
    """The vision tower of a directory or hub id. dtype: as in `load_checkpoint`.

    Raises CheckpointError naming file, field or tensor and remedy, also for a model without a supported tower.
    """
    files = open_model(model)
    fields = files.config_fields()
    text, family = transformers_model(files, fields)
    config = read_vision(fields, family, text.hidden_size)
    sources = vision_sources(config, family)
    tensors = files.tensors(source.name for stacked in sources.values() for source in stacked)
    sources = _as_stored(sources, tensors.tensors)
    check_tensors(tensors, sources, replace(text, tie_word_embeddings=False), _OTHERS)
    wanted = dtype_word(dtype)
    target = stored_dtype(tensors, sources) if wanted == "auto" else wanted
    weights = StoredWeights(tensors, sources, text, target, more=vision_shapes(config))
    identity = repr((asdict(config), tensors.fingerprint()))
    return VisionCheckpoint(
        config=config,
        weights=weights,
        dtype=target,
        fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
        model_type=family.model_type,
    )


def read_vision(fields: Fields, family: Family, text_size: int) -> VisionConfig:
    """The tower that config.json describes. text_size: features of a token in the decoder."""
    if not family.vision:
        fields.fail(
            "architectures",
            "no vision tower that is supported. Use a checkpoint of Idefics3, SmolVLM or Gemma 3",
        )
    vision = fields.within("vision_config")
    if vision is None:
        fields.fail("vision_config", "must describe the vision tower. Download the file again")
    averages = family.model_type == "gemma3"
    vision = vision.with_defaults(_SIGLIP if averages else _DEFAULTS)
    if vision.integer("num_channels", high=2**10) != CHANNELS:
        vision.fail("num_channels", f"only {CHANNELS} are supported. Use such a checkpoint")
    if vision.values["hidden_act"] != "gelu_pytorch_tanh":
        vision.fail("hidden_act", "only gelu_pytorch_tanh is supported. Use such a checkpoint")
    sizes = {
        name: vision.integer(name, high=2**16)
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "image_size", "patch_size")
    }
    try:
        return VisionConfig(
            **sizes,
            num_hidden_layers=vision.integer("num_hidden_layers", high=2**9),
            layer_norm_eps=vision.number("layer_norm_eps", high=1.0),
            scale_factor=_patches_of_a_token(fields, sizes)
            if averages
            else fields.integer("scale_factor", high=2**6, default=2),
            text_size=text_size,
            averages=averages,
        )
    except ValueError as error:
        raise CheckpointError(f"{fields.file}: vision_config: {error}. Use another checkpoint") from error


def _patches_of_a_token(fields: Fields, sizes: Mapping[str, int]) -> int:
    """The patches in either direction of which Gemma 3 makes one token."""
    tokens = fields.integer("mm_tokens_per_image", high=2**16, default=256)
    side, patches = math.isqrt(tokens), sizes["image_size"] // sizes["patch_size"]
    if side * side != tokens or patches % side:
        fields.fail(
            "mm_tokens_per_image",
            f"must be the square of a divisor of {patches}, the patches in a row of a tile. Correct the file",
        )
    return patches // side


def _as_stored(
    sources: dict[str, tuple[Source, ...]], stored: Collection[str]
) -> dict[str, tuple[Source, ...]]:
    """Sources with the names that files have."""
    if all(part.name in stored for parts in sources.values() for part in parts):
        return sources
    later = {
        leaf: tuple(replace(part, name=part.name.replace(*_LATER_NAMES)) for part in parts)
        for leaf, parts in sources.items()
    }
    return later if any(part.name in stored for parts in later.values() for part in parts) else sources


def vision_sources(config: VisionConfig, family: Family) -> dict[str, tuple[Source, ...]]:
    """For every leaf of the tower, the checkpoint tensors stacked in it."""
    assert family.vision is not None
    kernel = (CHANNELS, config.patch_size, config.patch_size)
    sources = {}
    for leaf, shape in vision_shapes(config).items():
        _, index, kind = leaf.split(".") if "." in leaf else ("", "", leaf)
        names = family.vision[kind]
        rest = kernel if kind == "patch" else shape[1:]
        sources[leaf] = tuple(
            Source(
                name=name.format(index=index),
                shape=(shape[0] // len(names), *rest),
                offset=1.0 if kind == "soft_norm" else 0.0,  # Gemma's norms are stored minus one
            )
            for name in names
        )
    return sources
