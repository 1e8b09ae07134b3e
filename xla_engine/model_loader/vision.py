"""Load the vision tower of a checkpoint: its shape from config.json, its leaves from the weight files."""

import functools
import hashlib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from xla_engine.errors import CheckpointError
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.vision.config import (
    CHANNELS,
    DeepEncoderConfig,
    PatchConfig,
    PooledForm,
    TowerConfig,
    VisionConfig,
)
from xla_engine.graphs.vision.programs import leaf_shapes
from xla_engine.model_loader.checkpoint import check_tensors, dtype_word, stored_dtype
from xla_engine.model_loader.config_json import transformers_model
from xla_engine.model_loader.families import Family, Source
from xla_engine.model_loader.json_fields import Fields
from xla_engine.model_loader.model_files import ModelFiles, open_model
from xla_engine.model_loader.weights import StoredWeights

# Tensors of the decoder, and of a head over the tower that no decoder reads.
_OTHERS = "|".join(
    (
        *(r"model\.(text|language)_model\..*", r"language_model\..*", r"lm_head\.weight", r"mtp\..*"),
        *(r"model\.(embed_tokens|layers|norm)\..*", r"visual\.vision_model\.head\..*"),
        *(r"visual\..*\.packing_position_embedding\..*", r"vision_tower\.(vision_model\.)?head\..*"),
        r"model\.(audio_tower|embed_audio)\..*",
    )
)
Convert = Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]

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

_FLAT_DEFAULTS = {**_DEFAULTS, "intermediate_size": 4304, "num_hidden_layers": 27, "image_size": 384}
_FLAT_DEFAULTS |= {"patch_size": 14, "spatial_merge_size": 2}
_GATED_DEFAULTS = {
    "depth": 24,
    "hidden_size": 1024,
    "hidden_act": "silu",
    "intermediate_size": 4096,
    "num_heads": 16,
    "in_channels": CHANNELS,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 1536,
    "rms_norm_eps": 1e-5,
}
_PATCH_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": CHANNELS,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}
_SAM_DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": CHANNELS,
    "image_size": 1024,
    "patch_size": 16,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "mlp_ratio": 4.0,
    "output_channels": 256,
    "window_size": 14,
    "global_attn_indexes": [2, 5, 8, 11],
    "downsample_channels": [512, 896],
}
_QWEN2_DEFAULTS = {  # of Qwen2's configuration, for files that describe the second stage
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}
_QWEN2_HALF = {  # Qwen2 0.5B
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "rope_theta": 1e6,
}
_POOLED_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10240,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionCheckpoint:
    """A loaded tower.

    model_type: of the family. config: its shape. weights: by the names of `leaf_shapes`; matrices in `dtype`, vectors
    in float32, read lazily.
    dtype: "bfloat16" or "float32". fingerprint: sha256 of its shape and of the files that have its weights.
    """

    model_type: str
    config: TowerConfig
    weights: StoredWeights
    dtype: str
    fingerprint: str


def load_vision(model: ModelFiles | Path | str, *, dtype: str = "auto") -> VisionCheckpoint:
    """The vision tower of a directory or hub id. dtype: as in `load_checkpoint`.

    Raises CheckpointError naming file, field or tensor and remedy, also for a model without a supported tower.
    """
    files = open_model(model)
    fields = files.config_fields()
    text, family = transformers_model(fields)
    config = read_vision(fields, family, text)
    sources = vision_sources(config, family)
    tensors = files.tensors(source.name for stacked in sources.values() for source in stacked)
    sources = _as_stored(sources, tensors.tensors)
    check_tensors(tensors, sources, replace(text, tie_word_embeddings=False), _OTHERS)
    wanted = dtype_word(dtype)
    target = stored_dtype(tensors, sources) if wanted == "auto" else wanted
    weights = StoredWeights(tensors, sources, leaf_shapes(config), target)
    identity = repr((asdict(config), tensors.fingerprint()))
    return VisionCheckpoint(
        model_type=family.model_type,
        config=config,
        weights=weights,
        dtype=target,
        fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
    )


def read_vision(fields: Fields, family: Family, text: ModelConfig) -> TowerConfig:
    """The tower that config.json describes. text: the decoder."""
    if not family.vision:
        fields.fail(
            "architectures",
            "no vision tower that is supported. Use a checkpoint of Idefics3, SmolVLM, Gemma 3 or 4, Qwen3-VL, "
            "Qwen3.5, PaddleOCR-VL, GLM-OCR or DeepSeek-OCR-2",
        )
    vision = fields.within("vision_config")
    if vision is None:
        fields.fail("vision_config", "must describe the vision tower. Download the file again")
    if "separator" in family.vision:
        return _read_deep_encoder(fields, vision, text)
    if "downsample" in family.vision:
        return _read_gated_tower(fields, vision, text)
    if "output_norm" in family.vision:
        return _read_pooled_tower(fields, vision, text)
    if {"merge_up", "final_norm"} <= family.vision.keys():
        return _read_flat_tower(fields, vision, text)
    if "merge_up" in family.vision:
        return _read_patch_tower(fields, vision, text, taps="tap_norm" in family.vision)
    averages = family.model_type == "gemma3"
    vision = vision.with_defaults(_SIGLIP if averages else _DEFAULTS)
    _check_tower(vision, "num_channels")
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
            text_size=text.hidden_size,
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
    if all(part.name in stored for parts in sources.values() for part in parts):
        return sources
    later = {
        leaf: tuple(replace(part, name=part.name.replace(*_LATER_NAMES)) for part in parts)
        for leaf, parts in sources.items()
    }
    return later if any(part.name in stored for parts in later.values() for part in parts) else sources


def _patch_tower(
    vision: Fields, text: ModelConfig, layers: str, heads: str, merge: str, **own: Any
) -> PatchConfig:
    """A tower over patches. layers, heads, merge: its names of these sizes. own: its other fields."""
    try:
        return PatchConfig(
            hidden_size=vision.integer("hidden_size", high=2**16),
            intermediate_size=vision.integer("intermediate_size", high=2**16),
            num_hidden_layers=vision.integer(layers, high=2**9),
            num_attention_heads=vision.integer(heads, high=2**16),
            patch_size=vision.integer("patch_size", high=2**10),
            merge_size=vision.integer(merge, high=2**6),
            text_size=text.hidden_size,
            **own,
        )
    except ValueError as error:
        raise CheckpointError(f"{vision.file}: vision_config: {error}. Use another checkpoint") from error


_OF_QWEN = ("depth", "num_heads", "spatial_merge_size")
_OF_SIGLIP = ("num_hidden_layers", "num_attention_heads", "spatial_merge_size")
_OF_GEMMA = ("num_hidden_layers", "num_attention_heads", "pooling_kernel_size")


def _read_patch_tower(fields: Fields, vision: Fields, text: ModelConfig, *, taps: bool) -> PatchConfig:
    """taps: whether the family has some."""
    vision = vision.with_defaults(_PATCH_DEFAULTS | {"deepstack_visual_indexes": [8, 16, 24] if taps else []})
    _check_tower(vision, "in_channels")
    _check_features(vision, text)
    layers = vision.values["deepstack_visual_indexes"] or []
    if not isinstance(layers, list) or any(type(layer) is not int for layer in layers):
        vision.fail("deepstack_visual_indexes", "must be a list of layers. Correct the file")
    if layers and not taps:
        vision.fail("deepstack_visual_indexes", "not supported for this architecture. Use another checkpoint")
    if len(layers) > text.num_hidden_layers:
        vision.fail(
            "deepstack_visual_indexes",
            f"more than the decoder's {text.num_hidden_layers} layers. Correct the file",
        )
    positions = vision.integer("num_position_embeddings", high=2**20)
    side = math.isqrt(positions)
    if side * side != positions:
        vision.fail("num_position_embeddings", "must be the square of an integer. Correct the file")
    return _patch_tower(
        *(vision, text, *_OF_QWEN),
        frames=vision.integer("temporal_patch_size", high=2**6),
        position_side=side,
        rope_theta=_tower_theta(vision),
        taps=tuple(layers),
        axes=_axes(fields, text),
    )


def _read_flat_tower(fields: Fields, vision: Fields, text: ModelConfig) -> PatchConfig:
    """PaddleOCR-VL's. It sees a patch once, whatever `temporal_patch_size` of its published file says."""
    vision = vision.with_defaults(_FLAT_DEFAULTS)
    _check_tower(vision, "num_channels")
    patch = vision.integer("patch_size", high=2**10)
    return _patch_tower(
        *(vision, text, *_OF_SIGLIP),
        position_side=vision.integer("image_size", high=2**16, low=patch) // patch,
        rope_theta=_tower_theta(vision),
        axes=_axes_in_order(fields, text),
        layer_norm_eps=vision.number("layer_norm_eps", high=1.0),
        flat=True,
    )


def _read_gated_tower(fields: Fields, vision: Fields, text: ModelConfig) -> PatchConfig:
    """GLM-OCR's."""
    vision = vision.with_defaults(_GATED_DEFAULTS)
    _check_tower(vision, "in_channels", "silu")
    _check_features(vision, text)
    if not vision.flag("attention_bias", default=True):
        vision.fail("attention_bias", "not supported (layers without biases). Use a checkpoint with true")
    return _patch_tower(
        *(vision, text, *_OF_QWEN),
        frames=vision.integer("temporal_patch_size", high=2**6),
        rope_theta=_tower_theta(vision),
        axes=_axes_in_order(fields, text),
        layer_norm_eps=vision.number("rms_norm_eps", high=1.0),
        gated=True,
    )


def _read_pooled_tower(fields: Fields, vision: Fields, text: ModelConfig) -> PatchConfig:
    """Gemma 4's."""
    vision = vision.with_defaults(_POOLED_DEFAULTS)
    _check_tower(vision, None, activation="hidden_activation")
    heads = vision.integer("num_attention_heads", high=2**16)
    if vision.integer("num_key_value_heads", high=2**16) != heads:
        vision.fail("num_key_value_heads", f"must be num_attention_heads, {heads}. Use such a checkpoint")
    if vision.flag("attention_bias", default=False):
        vision.fail("attention_bias", "not supported (layers with biases). Use a checkpoint with false")
    decoder = fields.within("text_config") or fields
    return _patch_tower(
        *(vision, text, *_OF_GEMMA),
        position_side=vision.integer("position_embedding_size", high=2**20),
        rope_theta=_tower_theta(vision, 100.0, "default"),
        layer_norm_eps=vision.number("rms_norm_eps", high=1.0),
        pooled=PooledForm(
            head_dim=vision.integer("head_dim", high=2**12),
            clipped=vision.flag("use_clipped_linears", default=False),
            standardized=vision.flag("standardize", default=False),
            in_windows=decoder.values.get("use_bidirectional_attention") == "vision",
            blank_token=decoder.integer("pad_token_id", low=0, high=text.vocab_size - 1, default=0),
        ),
    )


def _read_deep_encoder(fields: Fields, vision: Fields, text: ModelConfig) -> DeepEncoderConfig:
    """DeepSeek-OCR-2's. Its published file names a few sizes, and the rest is that of SAM-B and of Qwen2 0.5B."""
    published = vision.within("width")
    sam, encoder = vision.within("sam_config"), vision.within("encoder_config")
    if published is not None:
        sam, encoder = published.within("sam_vit_b"), published.within("qwen2-0-5b")
    if sam is None or encoder is None:
        names = "width.sam_vit_b and width.qwen2-0-5b" if published else "sam_config and encoder_config"
        vision.fail(
            "width" if published else "sam_config", f"{names} must describe the two stages. Correct the file"
        )
    if published is not None:
        sizes = {"hidden_size": sam.values.get("width"), "num_hidden_layers": sam.values.get("layers")}
        own = {"num_attention_heads": sam.values.get("heads"), "image_size": vision.values.get("image_size")}
        given = {name: value for name, value in (sizes | own).items() if value is not None}
        # The published code has a middle size of its own: the file says another, which nothing reads.
        sam = Fields(sam.file, {**sam.values, **given, "downsample_channels": [512, 896]})
        encoder = Fields(encoder.file, {**_QWEN2_HALF, "hidden_size": encoder.integer("dim", high=2**16)})
    sam, encoder = sam.with_defaults(_SAM_DEFAULTS), encoder.with_defaults(_QWEN2_DEFAULTS)
    _check_tower(sam, "num_channels", "gelu")
    _check_tower(encoder, None, "silu")
    for name in ("qkv_bias", "use_abs_pos", "use_rel_pos"):
        if not sam.flag(name, default=True):
            sam.fail(name, "not supported. Use a checkpoint with true")
    if encoder.flag("use_sliding_window", default=False):
        encoder.fail("use_sliding_window", "not supported (windowed attention). Use a checkpoint with false")
    size, patch = sam.integer("image_size", high=2**16), sam.integer("patch_size", high=2**10)
    if size != DeepEncoderConfig.view_side * patch:
        sam.fail(
            "image_size", f"must be {DeepEncoderConfig.view_side} patches of {patch} pixels. Correct the file"
        )
    width, layers = sam.integer("hidden_size", high=2**16), sam.integer("num_hidden_layers", high=2**9)
    whole = sam.values["global_attn_indexes"]
    if not isinstance(whole, list) or any(type(each) is not int or not 0 <= each < layers for each in whole):
        sam.fail("global_attn_indexes", f"must be a list of the {layers} layers. Correct the file")
    channels = sam.values["downsample_channels"]
    second = encoder.integer("hidden_size", high=2**16)
    if (
        not isinstance(channels, list)
        or len(channels) != 2
        or type(channels[0]) is not int
        or not 0 < channels[0] < 2**16
        or channels[1] != second
    ):
        sam.fail(
            "downsample_channels", f"must be a number and {second}, the second stage's size. Correct the file"
        )
    mlp = width * sam.number("mlp_ratio", high=64.0)
    try:
        return DeepEncoderConfig(
            hidden_size=width,
            intermediate_size=sam.integer("mlp_dim", high=2**16, default=int(mlp)),
            num_hidden_layers=layers,
            num_attention_heads=sam.integer("num_attention_heads", high=2**16),
            layer_norm_eps=sam.number("layer_norm_eps", high=1.0),
            patch_size=patch,
            window=sam.integer("window_size", high=DeepEncoderConfig.crop_side),
            whole_layers=tuple(sorted(set(whole))),
            neck_size=sam.integer("output_channels", high=2**16),
            middle_size=channels[0],
            encoder_size=second,
            encoder_mlp_size=encoder.integer("intermediate_size", high=2**16),
            encoder_layers=encoder.integer("num_hidden_layers", high=2**9),
            encoder_heads=encoder.integer("num_attention_heads", high=2**16),
            encoder_key_heads=encoder.integer("num_key_value_heads", high=2**16),
            encoder_eps=encoder.number("rms_norm_eps", high=1.0),
            rope_theta=_encoder_theta(encoder),
            text_size=text.hidden_size,
        )
    except ValueError as error:
        raise CheckpointError(f"{fields.file}: vision_config: {error}. Use another checkpoint") from error


def _encoder_theta(encoder: Fields) -> float:
    """The base of the rotary embedding of DeepSeek-OCR-2's second stage."""
    rope = encoder.within("rope_parameters") or encoder
    if rope.values.get("rope_type") not in (None, "default"):
        rope.fail("rope_type", 'only "default" is supported. Use such a checkpoint')
    return rope.number("rope_theta", high=1e15, default=10000.0)


def _check_features(vision: Fields, text: ModelConfig) -> None:
    """Raise CheckpointError unless a tower makes what the decoder reads."""
    if vision.integer("out_hidden_size", high=2**20) != text.hidden_size:
        vision.fail(
            "out_hidden_size", f"must be the decoder's hidden_size, {text.hidden_size}. Correct the file"
        )


def _check_tower(
    vision: Fields,
    channels: str | None,
    function: str = "gelu_pytorch_tanh",
    *,
    activation: str = "hidden_act",
) -> None:
    """Raise CheckpointError unless a tower reads colours and has this activation function.

    channels, activation: the names of these fields; None: it has none, and reads colours.
    """
    if channels is not None and vision.integer(channels, high=2**10) != CHANNELS:
        vision.fail(channels, f"only {CHANNELS} are supported. Use such a checkpoint")
    if vision.values[activation] != function:
        vision.fail(activation, f"only {function} is supported. Use such a checkpoint")


def _tower_theta(vision: Fields, default: float = 10000.0, *kinds: str) -> float:
    """The base of a tower's rotary embedding. kinds: other words for that over rows and columns."""
    rope = vision.within("rope_parameters") or Fields(vision.file, {})
    if rope.values.get("rope_type") not in (None, "axial", *kinds):
        rope.fail("rope_type", 'only "axial" is supported. Use such a checkpoint')
    return rope.number("rope_theta", high=1e15, default=default)


def _sections(fields: Fields, default: list[int] | None = None) -> tuple[Fields, list[int]]:
    """The decoder's object that says which angles are of time, rows and columns, and these three numbers."""
    decoder = fields.within("text_config") or fields
    found = decoder.objects("rope_parameters", "rope_scaling")
    rope = next((each for each in found if each.given("mrope_section")), decoder)
    sections = rope.values.get("mrope_section", default)
    if (
        not isinstance(sections, list)
        or len(sections) != 3
        or any(type(each) is not int or each < 0 for each in sections)
    ):
        rope.fail("mrope_section", "must be three numbers. Correct the file or download it again")
    return rope, sections


def _axes_in_order(fields: Fields, text: ModelConfig) -> tuple[int, ...]:
    """`PatchConfig.axes` of PaddleOCR-VL and GLM-OCR: first angles of time, then those of rows, then of columns."""
    rope, sections = _sections(fields)
    if sum(sections) != text.rotary_dim // 2:
        rope.fail(
            "mrope_section", f"must add up to the {text.rotary_dim // 2} angles of a head. Correct the file"
        )
    axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
    return (*axes, *[0] * (text.head_dim // 2 - len(axes)))


def _axes(fields: Fields, text: ModelConfig) -> tuple[int, ...]:
    """`PatchConfig.axes`: rows and columns take turns with time, up to their sections; the rest is of time."""
    rope, sections = _sections(fields, [24, 20, 20] if text.rotary_dim == 128 else [11, 11, 10])
    half = text.rotary_dim // 2
    if max(3 * sections[1] - 1, 3 * sections[2]) > half:
        rope.fail("mrope_section", f"must be three numbers of the {half} angles of a head. Correct the file")
    if not rope.flag("mrope_interleaved", default=True):
        rope.fail("mrope_interleaved", "not supported (sections one after the other). Use such a checkpoint")
    axes = [0] * (text.head_dim // 2)
    for axis in (1, 2):
        for at in range(axis, 3 * sections[axis], 3):
            axes[at] = axis
    return tuple(axes)


def vision_sources(config: TowerConfig, family: Family) -> dict[str, tuple[Source, ...]]:
    """For every leaf of the tower, the checkpoint tensors stacked in it."""
    assert family.vision is not None
    stored = _stored_forms(config)
    sources = {}
    for leaf, shape in leaf_shapes(config).items():
        group, _, kind = leaf.rpartition(".")
        index = group.partition(".")[2]
        kind = leaf if group == "neck" else f"encoder.{kind}" if group.startswith("encoder.") else kind
        names = family.vision[kind]
        rest, convert = stored.get(kind, (shape[1:], None))
        own = (math.prod(shape) // math.prod(rest) // len(names), *rest)
        if kind.endswith("_bounds"):
            own, convert = (), _finite
        sources[leaf] = tuple(
            Source(
                name=name.format(index=index),
                shape=own,
                offset=1.0 if kind == "soft_norm" else 0.0,  # Gemma's norms are stored minus one
                convert=convert,
            )
            for name in names
        )
    return sources


def _stored_forms(config: TowerConfig) -> dict[str, tuple[tuple[int, ...], Convert | None]]:
    """By the names of leaves whose rows are stored in another form: the shape of a row, and what converts blocks."""
    size = config.patch_size
    if isinstance(config, DeepEncoderConfig):
        inputs = {"mix": config.neck_size, "halve": config.neck_size, "quarter": config.middle_size}
        return {
            "patch": ((CHANNELS, size, size), None),
            "positions": ((config.view_side, config.view_side, config.hidden_size), None),
            "neck.narrow": ((config.hidden_size, 1, 1), None),
            **{f"neck.{name}": ((count, 3, 3), _by_patch) for name, count in inputs.items()},
        }
    if not isinstance(config, PatchConfig):
        return {"patch": ((CHANNELS, size, size), None)}
    if config.pooled is not None:
        return {
            "patch": ((CHANNELS * size * size,), functools.partial(_colours_first, size)),
            "positions": ((config.position_side, config.hidden_size), None),
        }
    frames = () if config.flat else (config.frames,)
    return {
        "patch": ((CHANNELS, *frames, size, size), None),
        "downsample": ((config.hidden_size, config.merge_size, config.merge_size), _by_patch),
    }


def _colours_first(size: int, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rows `[N, p p 3]` in the order of a convolution's kernel: `[N, 3, p, p]`."""
    return np.ascontiguousarray(rows.reshape(-1, size, size, CHANNELS).transpose(0, 3, 1, 2))


def _finite(bounds: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Bounds of values: infinite ones become the largest numbers."""
    largest = np.finfo(np.float32).max
    return np.clip(bounds.astype(np.float32), -largest, largest)


def _by_patch(kernels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rows of kernels `[N, D, m, m]` in the order of joined patches: `[N, m m D]`."""
    return np.ascontiguousarray(kernels.transpose(0, 2, 3, 1)).reshape(len(kernels), -1)
