"""gpt-oss: attention sinks, alternating windows, and experts with interleaved gate and up rows, often in MXFP4."""

from typing import Any

import numpy as np

from xla_engine.graphs.config import ModelConfig
from xla_engine.model_loader.families.experts import each_expert, routed_experts
from xla_engine.model_loader.families.family import Family, Source, Sources, Tensors
from xla_engine.model_loader.families.llama import ATTENTION, MODEL, PRE_NORMS
from xla_engine.model_loader.families.windows import sliding
from xla_engine.model_loader.json_fields import Fields

Array = np.ndarray[Any, Any]


def apart(rows: Array) -> Array:
    """Deinterleave rows `[e, 2 F, ...]` of gate, up pairs: all gates first."""
    return np.concatenate([rows[:, ::2], rows[:, 1::2]], axis=1)


def _biases(name: str, *, gated: bool) -> Sources:
    def sources(config: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
        assert config.experts is not None
        count = config.experts.num_experts
        return (Source(name=name, shape=(count, shape[0] // count), convert=apart if gated else None),)

    return sources


def _transposed(name: str, *, gated: bool) -> Sources:
    """The tensor of all experts, stored as `[experts, inputs, outputs]`."""

    def convert(block: Array) -> Array:
        rows = block.swapaxes(1, 2)
        return apart(rows) if gated else rows

    def sources(_: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
        return (Source(name=name, shape=(shape[0], shape[2], shape[1]), convert=convert),)

    return sources


def _mxfp4(name: str, *, gated: bool) -> Sources:
    """The rows of all experts (`mxfp4.Mxfp4Matrix`)."""

    def sources(_: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
        rows = np.arange(shape[0] * shape[1]).reshape(shape[:2])
        order = apart(rows).reshape(-1) if gated else None
        return (Source(name=f"{name}_blocks", shape=(rows.size, shape[2]), order=order),)

    return sources


def _flags(fields: Fields) -> dict[str, Any]:
    if fields.number("swiglu_alpha", high=1e6) != 1.702:
        fields.fail("swiglu_alpha", "not supported (another slope of the gate than 1.702)")
    limit = fields.number("swiglu_limit", high=1e6)
    bias = fields.flag("attention_bias", default=True)
    return {
        "experts": routed_experts(
            fields, "num_local_experts", "intermediate_size", bias=True, swiglu_limit=limit
        ),
        "attention_sinks": True,
        **sliding(fields, lambda index: index % 2 == 0),
        "qkv_bias": bias,
        "output_bias": bias,
    }


def _vector_of_each_expert(*names: str) -> Sources:
    """As `each_expert`, of vectors."""

    def sources(config: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
        assert config.experts is not None
        count = config.experts.num_experts
        return tuple(
            Source(name=name.format(expert=expert), shape=(shape[0] // count // len(names),))
            for expert in range(count)
            for name in names
        )

    return sources


def _in_gguf(part: str) -> tuple[str, str, str]:
    gate, up, down = (f"mlp.experts.{{expert}}.{name}_proj.{part}" for name in ("gate", "up", "down"))
    return gate, up, down


GGUF_EXPERTS: Tensors = {  # gates and ups in tensors of their own
    "experts.gate_up": each_expert(*_in_gguf("weight")[:2]),
    "experts.gate_up_bias": _vector_of_each_expert(*_in_gguf("bias")[:2]),
    "experts.down": each_expert(_in_gguf("weight")[2]),
    "experts.down_bias": _vector_of_each_expert(_in_gguf("bias")[2]),
}
_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    tensors={
        **MODEL,
        **ATTENTION,
        **PRE_NORMS,
        "sinks": ("self_attn.sinks",),
        "experts.router": ("mlp.router.weight",),
        "experts.router_bias": ("mlp.router.bias",),
        "experts.gate_up": _transposed(_GATE_UP, gated=True),
        "experts.gate_up_bias": _biases(f"{_GATE_UP}_bias", gated=True),
        "experts.down": _transposed(_DOWN, gated=False),
        "experts.down_bias": _biases(f"{_DOWN}_bias", gated=False),
    },
    mxfp4={"experts.gate_up": _mxfp4(_GATE_UP, gated=True), "experts.down": _mxfp4(_DOWN, gated=False)},
    flags=_flags,
    reads=("attention_bias", "sliding_window", "layer_types"),
    defaults={
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
    },
    rope_theta=150000.0,
)
