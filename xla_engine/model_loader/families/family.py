"""What a model family is: how its config.json becomes flags, and which checkpoint tensors make up which leaf."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.model.decoder import parameter_shapes
from xla_engine.graphs.ops.rope import rotary_order
from xla_engine.model_loader.json_fields import Fields

ACTIVATIONS: Mapping[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkpoint tensor as a part of a leaf: its rows come behind those of the parts before it.

    name: in the file.
    shape: in the file.
    turned: where its first rows, those of heads that turn by position, stand once each head is in the engine's rotary
        order (`turned_rows`); None: all rows stay as they are.
    offset: added in float32 (Gemma stores norm weights less one).
    order: its rows that the leaf takes, in the leaf's order; None: all of them as they stand.
    convert: what becomes of a block of its leading entries before it is cut into rows.
    scales: the tensor of its scales where it is stored in MXFP4, as `[..., blocks, 16]` bytes.
    """

    name: str
    shape: tuple[int, ...]
    turned: np.ndarray[Any, Any] | None = None
    offset: float = 0.0
    order: np.ndarray[Any, Any] | None = None
    convert: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]] | None = None
    scales: str | None = None

    def in_engine_order(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """What stands for each row of the file, with the heads' rows in the engine's rotary order."""
        if self.turned is None:
            return rows
        return np.concatenate([rows[self.turned], rows[len(self.turned) :]])


# The sources of a leaf of this shape, their names below the layer.
Sources = Callable[[ModelConfig, tuple[int, ...]], tuple[Source, ...]]
Tensors = dict[str, tuple[str, ...] | Sources]


def no_flags(_: Fields) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture of transformers, as data.

    architecture: config.json's name of it.
    model_type: config.json's other name of it.
    tensors: the tensors of each leaf of a layer, below `layer`, or a function that gives its sources; of the leaves
        beside the layers, whole names.
    mxfp4: the same of the leaves that an MXFP4 checkpoint stores in another way.
    flags: gives the fields of `ModelConfig` beside the sizes that all families share.
    reads: fields that `flags` knows; every other one that would change the computation is refused by name.
    defaults: values of fields that real files leave out (null is not left out).
    rope_theta: rotary base where a file leaves it out.
    rope_local: sliding layers have a rotary base of their own, without scaling.
    activations: config.json's words for the activations that are built in.
    norm_offset: added to every norm weight.
    ignores: pattern of tensors that are no part of the decoder.
    text_type: model_type of config.json's `text_config`, which describes the decoder where it is a part of a model.
    layer: what the names of a layer's tensors begin with.
    """

    architecture: str
    model_type: str
    tensors: Mapping[str, tuple[str, ...] | Sources]
    mxfp4: Mapping[str, Sources] = field(default_factory=dict)
    flags: Callable[[Fields], dict[str, Any]] = no_flags
    reads: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rope_theta: float = 10000.0
    rope_local: bool = False
    activations: Mapping[str, Literal["silu", "gelu_tanh"]] = field(default_factory=lambda: ACTIVATIONS)
    norm_offset: float = 0.0
    ignores: str = ""
    text_type: str = ""
    layer: str = "model.layers.{index}."


def within_vision_model(family: Family, architecture: str, model_type: str) -> Family:
    """The text decoder of a checkpoint that also takes pictures; the weights for pictures are not read."""
    beside = {
        leaf: names for leaf, names in family.tensors.items() if leaf in ("embed", "final_norm", "head")
    }
    renamed = {
        leaf: tuple(f"language_model.{name}" for name in names) if not callable(names) else names
        for leaf, names in beside.items()
    }
    return replace(
        family,
        architecture=architecture,
        model_type=model_type,
        tensors={**family.tensors, **renamed},
        layer="language_model.model.layers.{index}.",
        ignores=r"(vision_tower|multi_modal_projector)\..*",
        text_type=family.model_type,
    )


def tensor_sources(config: ModelConfig, family: Family) -> dict[str, tuple[Source, ...]]:
    """Leaf name to the checkpoint tensors stacked in it, top rows first, for every leaf of `config`."""
    sources = {}
    for leaf, shape in parameter_shapes(config).items():
        prefix, kind = "", leaf
        if leaf.startswith("layers."):
            _, index, kind = leaf.split(".", 2)
            prefix = family.layer.format(index=index)
        names = family.tensors[kind]
        if callable(names):
            sources[leaf] = tuple(_below(prefix, part) for part in names(config, shape))
            continue
        parts = zip(names, _rows(config, kind, shape, len(names)), strict=True)
        sources[leaf] = tuple(
            Source(
                name=prefix + name,
                shape=(rows, *shape[1:]),
                turned=turned_rows(config, _rotary_heads(config, kind, name, rows)),
                offset=family.norm_offset if kind.endswith("norm") else 0.0,
            )
            for name, rows in parts
        )
    return sources


def turned_rows(config: ModelConfig, heads: int) -> np.ndarray[Any, Any] | None:
    """The row of the file at each of the leaf's first rows, which are `heads` heads in the engine's rotary order;
    None where that is the file's."""
    if not heads or not (config.rope_interleaved or config.rotary_dim != config.head_dim):
        return None
    begins = np.arange(heads)[:, None] * config.head_dim
    turned: np.ndarray[Any, Any] = (begins + rotary_order(config)).reshape(-1)
    return turned


def _below(prefix: str, part: Source) -> Source:
    scales = None if part.scales is None else prefix + part.scales
    return replace(part, name=prefix + part.name, scales=scales)


def _rows(config: ModelConfig, kind: str, shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """Rows that each of the tensors of a leaf has."""
    if parts == 1:
        return (shape[0],)
    if kind.startswith("qkv"):
        keys = config.num_key_value_heads * config.head_dim
        return (shape[0] - 2 * keys, keys, keys)
    return (shape[0] // parts,) * parts


def _rotary_heads(config: ModelConfig, kind: str, name: str, rows: int) -> int:
    """How many heads of queries and keys a tensor begins with."""
    if not kind.startswith(("qkv", "q_norm", "k_norm")) or ".v_proj" in name:
        return 0
    return min(rows // config.head_dim, config.num_attention_heads + config.num_key_value_heads)
