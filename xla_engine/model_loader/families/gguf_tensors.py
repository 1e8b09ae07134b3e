"""Leaves that GGUF files store otherwise than transformers does: the experts of gpt-oss, DeltaNet layers, and short
convolutions.

llama.cpp's converter writes `-exp(A_log)` for `A_log`, drops the convolution's middle axis, and cuts Qwen3-Next's
projection of queries, keys, values and gates by part. For Qwen3.5 it also deals out value heads: where several share
a key head, the first value head of every key head comes first, then the second of each.
"""

import math
from collections.abc import Callable
from decimal import Context, Decimal
from typing import Any

import ml_dtypes
import numpy as np

from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.recurrent_forms import DeltaForm
from xla_engine.model_loader.families.dense import MLP
from xla_engine.model_loader.families.experts import (
    GPT_OSS,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
    QWEN_EXPERTS,
    by_key_head,
    each_expert,
)
from xla_engine.model_loader.families.family import Source, Sources, Tensors
from xla_engine.model_loader.families.gemma4 import GEMMA4
from xla_engine.model_loader.families.hybrids import LFM2, LFM2_MOE
from xla_engine.model_loader.families.mamba import FALCON_H1, GRANITE_HYBRID, MAMBA2, NEMOTRON_H

Array = np.ndarray[Any, Any]
_DIGITS = Context(prec=30)
_NEAR = 2.0**-21  # relative: some steps of float32, for libraries whose exp differs in the last bits


def log_decay(negative: Array) -> Array:
    """`A_log` from `-exp(A_log)`: the bfloat16 that gives these numbers, as in the model's own file; float32 where
    none does."""
    exact = np.fromiter(map(_log_of, -negative.ravel().astype(np.float64)), np.float64, negative.size)
    short = exact.astype(ml_dtypes.bfloat16).astype(np.float64)
    again = np.fromiter(map(_exp_of, short), np.float64, short.size)
    same = np.abs(again + negative.ravel()) <= _NEAR * np.abs(negative.ravel())
    return np.where(same, short, exact).astype(np.float32).reshape(negative.shape)


def _log_of(value: float) -> float:
    """Correctly rounded, as no maths library promises; what is not finite is reported with the tensor's name."""
    return float(Decimal(value).ln(_DIGITS)) if 0 < value < math.inf else math.nan


def _exp_of(value: float) -> float:
    return float(Decimal(value).exp(_DIGITS)) if math.isfinite(value) else value


def _dealt(form: DeltaForm, width: int) -> Array:
    """The file's row of each row of `value_heads` heads of this width, in the leaf's order."""
    each = form.value_heads // form.key_heads
    rows = np.arange(form.value_heads * width).reshape(each, form.key_heads, width)
    return rows.swapaxes(0, 1).reshape(-1)


def _grouped(form: DeltaForm, width: int) -> Array:
    """As `_dealt`, of a file in the leaf's order."""
    return np.arange(form.value_heads * width)


_Order = Callable[[DeltaForm, int], Array]


def _mixed(form: DeltaForm, order: _Order) -> Array:
    """The rows of queries, keys and values."""
    keys = 2 * form.key_heads * form.key_dim
    return np.concatenate([np.arange(keys), keys + order(form, form.value_dim)])


def _projected_next(config: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
    form, d = config.delta, shape[1]
    assert form is not None
    return (
        Source(name="linear_attn.in_proj_qkv.weight", shape=(form.mixed_features, d)),
        Source(name="linear_attn.in_proj_z.weight", shape=(form.inner_features, d)),
        by_key_head(config, shape)[1],
    )


def _projected(config: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
    form, d = config.delta, shape[1]
    assert form is not None
    orders = {
        "qkv": _mixed(form, _dealt),
        "z": _dealt(form, form.value_dim),
        "b": _dealt(form, 1),
        "a": _dealt(form, 1),
    }
    return tuple(
        Source(name=f"linear_attn.in_proj_{part}.weight", shape=(len(order), d), order=order)
        for part, order in orders.items()
    )


def _convolution(order: _Order) -> Sources:
    def sources(config: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
        assert config.delta is not None
        return (Source(name="linear_attn.conv1d.weight", shape=shape, order=_mixed(config.delta, order)),)

    return sources


def _each_head(name: str, order: _Order, convert: Callable[[Array], Array] | None = None) -> Sources:
    def sources(config: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
        assert config.delta is not None
        return (Source(name=name, shape=shape, order=order(config.delta, 1), convert=convert),)

    return sources


def _output(config: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
    form = config.delta
    assert form is not None
    columns = _dealt(form, form.value_dim)
    moved = (columns != np.arange(len(columns))).any()
    return (
        Source(
            name="linear_attn.out_proj.weight",
            shape=shape,
            convert=(lambda block: block[:, columns]) if moved else None,
        ),
    )


def _delta(order: _Order) -> Tensors:
    return {
        "delta.convolution": _convolution(order),
        "delta.decay": _each_head("linear_attn.A_log", order, log_decay),
        "delta.step_bias": _each_head("linear_attn.dt_proj.bias", order),
    }


_EXPERTS: Tensors = {  # gates and ups in tensors of their own
    "experts.gate_up": QWEN_EXPERTS["experts.gate_up"],
    "experts.gate_up_bias": each_expert(
        "mlp.experts.{expert}.gate_proj.bias", "mlp.experts.{expert}.up_proj.bias"
    ),
    "experts.down": QWEN_EXPERTS["experts.down"],
    "experts.down_bias": each_expert("mlp.experts.{expert}.down_proj.bias"),
}
_QWEN3_5: Tensors = {**_delta(_dealt), "delta.projected": _projected, "delta.output": _output}


def _whole(name: str) -> Sources:
    """A tensor of the leaf's shape."""
    return lambda _, shape: (Source(name=name, shape=shape),)


def _by_head(name: str) -> Sources:
    """A tensor with an axis for heads, of latent attention."""

    def sources(config: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
        heads = config.num_attention_heads
        return (Source(name=name, shape=(heads, shape[0] // heads, shape[1])),)

    return sources


KEYS_AND_VALUES_APART: Tensors = {part: _by_head(f"self_attn.{part}_proj.weight") for part in ("k_b", "v_b")}
"""Newer files of models with latent attention."""
_LFM2: Tensors = {"conv.convolution": _whole("conv.conv.weight")}
_LFM2_EXPERTS: Tensors = {"experts.correction": ("feed_forward.expert_bias.bias",)}


def mamba_in(module: str, *, grouped: bool) -> Tensors:
    """The tensors of a Mamba-2 layer, some with another number of axes. module: its name in the layer.

    grouped: whether norms have a row for each group. Programs that rewrite files leave out the axis of one group.
    """

    def scale(config: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
        assert config.mamba is not None
        groups = config.mamba.key_heads
        stored = (groups, shape[0] // groups) if grouped else shape
        return (Source(name=f"{module}.norm.weight", shape=stored),)

    def column(name: str, convert: Callable[[Array], Array] | None = None) -> Sources:
        return lambda _, shape: (Source(name=name, shape=(shape[0], 1), convert=convert),)

    return {
        "mamba.convolution": _whole(f"{module}.conv1d.weight"),
        "mamba.decay": column(f"{module}.A_log", log_decay),
        "mamba.step_bias": (f"{module}.dt_proj.bias",),
        "mamba.skip": column(f"{module}.D"),
        "mamba.scale": scale,
    }


_SHARED = tuple(f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down"))
_GRANITE_HYBRID: Tensors = {
    "gate_up": MLP["gate_up"],
    "down": MLP["down"],
    "experts.gate_up": QWEN_EXPERTS["experts.gate_up"],
    "experts.down": QWEN_EXPERTS["experts.down"],
    "experts.shared_gate_up": _SHARED[:2],
    "experts.shared_down": _SHARED[2:],
}
_GEMMA4: Tensors = {
    "experts.routed_gate_up": each_expert("experts.{expert}.gate_up_proj.weight"),
}
GGUF_TENSORS: dict[str, Tensors] = {  # by architecture
    GPT_OSS.architecture: _EXPERTS,
    QWEN3_NEXT.architecture: {**_delta(_grouped), "delta.projected": _projected_next},
    QWEN3_5.architecture: _QWEN3_5,
    QWEN3_5_MOE.architecture: _QWEN3_5,
    GEMMA4.architecture: _GEMMA4,
    GRANITE_HYBRID.architecture: _GRANITE_HYBRID,
    LFM2.architecture: _LFM2,
    LFM2_MOE.architecture: _LFM2 | _LFM2_EXPERTS,
}
MAMBA_MODULES = {  # of the models that have Mamba-2 layers, the name of these
    GRANITE_HYBRID.architecture: "mamba",
    FALCON_H1.architecture: "mamba",
    NEMOTRON_H.architecture: "mixer",
    MAMBA2.architecture: "mixer",
}
