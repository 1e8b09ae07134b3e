"""A model family: how to read its config.json, and which checkpoint tensors form which leaf."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.ops.rope import rotary_order
from xla_engine.model_loader.json_fields import Fields

ACTIVATIONS: Mapping[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkpoint tensor as a part of a leaf; the parts of a leaf are stacked by rows.

    name: in the file.
    shape: in the file.
    turned: file rows of its first rows (the heads with rotary embedding) in the engine's rotary order
        (`turned_rows`); None if no rows are reordered.
    offset: added in float32 (Gemma stores norm weights minus one).
    order: the rows that the leaf takes, in the leaf's order; None for all in file order.
    convert: applied to a block of leading entries, those of `order`, before it is split into rows.
    converted: the shape of what `convert` makes, if the file may have that instead: newer versions of transformers
        save stacks of experts so.
    """

    name: str
    shape: tuple[int, ...]
    turned: np.ndarray[Any, Any] | None = None
    offset: float = 0.0
    order: np.ndarray[Any, Any] | None = None
    convert: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]] | None = None
    converted: tuple[int, ...] | None = None

    def in_file(self, shape: tuple[int, ...]) -> "Source":
        """The same for a file that has the tensor in this shape."""
        return replace(self, shape=shape, convert=None) if shape == self.converted else self

    def in_engine_order(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Reorder `rows`, one entry for each file row, into the engine's rotary order."""
        if self.turned is None:
            return rows
        return np.concatenate([rows[self.turned], rows[len(self.turned) :]])


# Returns the sources of a leaf of this shape; tensor names are relative to the layer.
Sources = Callable[[ModelConfig, tuple[int, ...]], tuple[Source, ...]]
Tensors = dict[str, tuple[str, ...] | Sources]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture of transformers, as data.

    architecture: its name in config.json's `architectures`.
    model_type: its `model_type` in config.json.
    also_types: other models' `model_type` that mean the same.
    tensors: for each leaf of a layer, its tensors relative to `layer`, or a function that returns its sources; for
        other leaves, full names.
    mxfp4: the same for leaves that an MXFP4 checkpoint stores differently.
    flags: returns the fields of `ModelConfig` other than the sizes common to all families.
    reads: fields that `flags` reads; any other field that would change the computation is rejected by name. Of
        "intermediate_size", that it may be a list of equal numbers.
    defaults: values of fields that real files omit (null does not count as omitted).
    rope_theta: default of the rotary base.
    rope_local: sliding-window layers have their own rotary base, without scaling.
    activations: config.json's names of supported activations.
    norm_offset: added to every norm weight.
    ignores: pattern of tensors that do not belong to the decoder; `LAYERS` stands for the number of its layers.
    text_type: model_type of config.json's `text_config`, if the decoder is a part of a larger model.
    layer: prefix of the names of a layer's tensors.
    vision: for each leaf of the vision tower (`graphs.vision.siglip.leaf_shapes`), its tensors' full names; None if
        pictures are not supported.
    """

    architecture: str
    model_type: str
    tensors: Mapping[str, tuple[str, ...] | Sources]
    flags: Callable[[Fields], dict[str, Any]]
    also_types: tuple[str, ...] = ()
    mxfp4: Mapping[str, Sources] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rope_theta: float = 10000.0
    rope_local: bool = False
    activations: Mapping[str, Literal["silu", "gelu_tanh"]] = field(default_factory=lambda: ACTIVATIONS)
    norm_offset: float = 0.0
    ignores: str = ""
    text_type: str = ""
    layer: str = "model.layers.{index}."
    vision: Mapping[str, tuple[str, ...]] | None = None

    def ignored(self, config: ModelConfig) -> str:
        """The pattern of tensors that do not belong to this decoder."""
        return self.ignores.replace("LAYERS", str(config.num_hidden_layers))


def sees_later_tokens(fields: Fields) -> bool:
    """Whether tokens of a decoder attend to later ones: transformers' field, or that of GTE-Qwen2's own code."""
    return fields.values.get("use_bidirectional_attention") is True or not fields.flag(
        "is_causal", default=True
    )


def with_bias(leaf: str, *names: str) -> dict[str, tuple[str, ...]]:
    """The tensors of a leaf that is made of these modules, and of its bias."""
    return {
        leaf: tuple(f"{name}.weight" for name in names),
        f"{leaf}_bias": tuple(f"{name}.bias" for name in names),
    }


def siglip(tower: str) -> dict[str, tuple[str, ...]]:
    """The tensors of a SigLIP tower by leaf. tower: prefix of their names."""
    layer = tower + "encoder.layers.{index}."

    return {
        **with_bias("patch", f"{tower}embeddings.patch_embedding"),
        "positions": (f"{tower}embeddings.position_embedding.weight",),
        **with_bias("norm1", f"{layer}layer_norm1"),
        **with_bias("qkv", *(f"{layer}self_attn.{part}_proj" for part in "qkv")),
        **with_bias("output", f"{layer}self_attn.out_proj"),
        **with_bias("norm2", f"{layer}layer_norm2"),
        **with_bias("up", f"{layer}mlp.fc1"),
        **with_bias("down", f"{layer}mlp.fc2"),
        **with_bias("final_norm", f"{tower}post_layernorm"),
    }


def within_vision_model(
    family: Family,
    architecture: str,
    model_type: str,
    *,
    model: str,
    ignores: str,
    head: str = "lm_head.weight",
    others: Mapping[str, tuple[str, ...] | Sources] | None = None,
    **changes: Any,
) -> Family:
    """The text decoder of a vision-language checkpoint. model: prefix of its tensors. others: the tensors of leaves
    outside of layers that other decoders do not have. changes: of other fields."""
    tensors = {
        **(others or {}),
        "embed": (f"{model}embed_tokens.weight",),
        "final_norm": (f"{model}norm.weight",),
        "head": (head,),
    }
    fields = {
        "tensors": {**family.tensors, **tensors},
        "layer": model + "layers.{index}.",
        "text_type": family.model_type,
    }
    return replace(
        family, architecture=architecture, model_type=model_type, ignores=ignores, **{**fields, **changes}
    )


def tensor_sources(config: ModelConfig, family: Family) -> dict[str, tuple[Source, ...]]:
    """For every leaf of `config`, the checkpoint tensors stacked in it, from the top row down."""
    from xla_engine.graphs.model.spec import (
        parameter_shapes,  # jax, which describing a model does not need
    )

    sources = {}
    for leaf, shape in parameter_shapes(config).items():
        prefix, kind, own = "", leaf, config
        if leaf.startswith("layers."):
            _, index, kind = leaf.split(".", 2)
            prefix, own = family.layer.format(index=index), config.layer(int(index))
        names = family.tensors[kind]
        if callable(names):
            sources[leaf] = tuple(replace(part, name=prefix + part.name) for part in names(own, shape))
            continue
        names = names[: 1 + own.stored_parts] if kind.startswith("qkv") and len(names) == 3 else names
        parts = zip(names, _rows(own, kind, shape, len(names)), strict=True)
        sources[leaf] = tuple(
            Source(
                name=prefix + name,
                shape=(rows, *shape[1:]),
                turned=turned_rows(own, _rotary_heads(own, kind, name, rows)),
                offset=family.norm_offset if kind.endswith("norm") else 0.0,
            )
            for name, rows in parts
        )
    return sources


def turned_rows(config: ModelConfig, heads: int) -> np.ndarray[Any, Any] | None:
    """The file rows of the leaf's first rows, which are `heads` heads in the engine's rotary order.

    None if the file has this order.
    """
    if not heads or not (config.rope_interleaved or config.rotary_dim != config.head_dim):
        return None
    begins = np.arange(heads)[:, None] * config.head_dim
    turned: np.ndarray[Any, Any] = (begins + rotary_order(config)).reshape(-1)
    return turned


def _rows(config: ModelConfig, kind: str, shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """The number of rows of each of a leaf's tensors."""
    if parts == 1:
        return (shape[0],)
    if kind.startswith("qkv"):
        keys = config.num_key_value_heads * config.head_dim
        return (shape[0] - (parts - 1) * keys, *[keys] * (parts - 1))
    return (shape[0] // parts,) * parts


def _rotary_heads(config: ModelConfig, kind: str, name: str, rows: int) -> int:
    """The number of query and key heads at the beginning of a tensor."""
    if not kind.startswith(("qkv", "q_norm", "k_norm")) or ".v_proj" in name:
        return 0
    return min(rows // config.head_dim, config.num_attention_heads + config.num_key_value_heads)
