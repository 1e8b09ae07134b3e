"""Families with later forms of DeltaNet: OLMo Hybrid."""

from typing import Any

from xla_engine.graphs.config import LINEAR, ModelConfig
from xla_engine.graphs.recurrent_forms import DeltaForm
from xla_engine.model_loader.families.dense import OLMO, OLMO2, all_but_each, layer_count, layer_types
from xla_engine.model_loader.families.family import Family, Source, Sources, Tensors
from xla_engine.model_loader.json_fields import Fields

_WIDEST = 2**14
_NORM_EPS = 1e-5  # of the output norm, whatever the other norms have


def _form(config: ModelConfig) -> DeltaForm:
    assert config.delta is not None
    return config.delta


def _projections(*names: str) -> Sources:
    """Those of queries, keys and values, then those that `names` name, one after the other."""

    def sources(config: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
        form, d = _form(config), shape[1]
        keys = form.key_heads * form.key_dim
        rows = (keys, keys, form.inner_features, form.inner_features, form.value_heads, form.value_heads)
        return tuple(Source(name=name, shape=(count, d)) for name, count in zip(names, rows, strict=True))

    return sources


def _convolutions(module: str) -> Sources:
    """The filters of queries, keys and values, which the file has apart."""

    def sources(config: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
        form = _form(config)
        keys = form.key_heads * form.key_dim
        return tuple(
            Source(name=f"{module}.{part}_conv1d.weight", shape=(rows, 1, shape[1]))
            for part, rows in (("q", keys), ("k", keys), ("v", form.inner_features))
        )

    return sources


# OLMo's attention layers have norms after each sublayer, its DeltaNet layers before.
_OLMO_HYBRID: Tensors = {
    **OLMO,
    "input_norm": ("attention_layer_norm.weight",),
    "pre_feedforward_norm": ("feedforward_layer_norm.weight",),
    "delta.projected": _projections(*(f"linear_attn.{part}_proj.weight" for part in "qkvgba")),
    "delta.convolution": _convolutions("linear_attn"),
    "delta.decay": ("linear_attn.A_log",),
    "delta.step_bias": ("linear_attn.dt_bias",),
    "delta.scale": ("linear_attn.o_norm.weight",),
    "delta.output": ("linear_attn.o_proj.weight",),
}


def _olmo_hybrid(fields: Fields) -> dict[str, Any]:
    """Every fourth layer attends; sizes of DeltaNet follow from those of attention, unless the file has them."""
    count, hidden = layer_count(fields), fields.integer("hidden_size", high=2**20)
    heads = fields.integer("num_attention_heads", high=_WIDEST)
    slow = all_but_each(4)
    types = layer_types(fields, LINEAR, lambda index: slow(index) and (count >= 4 or index + 1 < count))
    keys = fields.integer("linear_num_key_heads", high=_WIDEST, default=heads)
    key_dim = fields.integer("linear_key_head_dim", high=_WIDEST, default=int(0.75 * hidden / keys))
    form = DeltaForm(
        key_heads=keys,
        value_heads=fields.integer("linear_num_value_heads", high=_WIDEST, default=heads),
        key_dim=key_dim,
        value_dim=fields.integer("linear_value_head_dim", high=_WIDEST, default=2 * key_dim),
        kernel=fields.integer("linear_conv_kernel_dim", low=2, high=2**10, default=4),
        norm_eps=_NORM_EPS,
        rate_factor=2.0 if fields.flag("linear_allow_neg_eigval", default=True) else 1.0,
        pre_norm=True,
    )
    return {
        **OLMO2.flags(fields),
        "layer_types": tuple(types),
        "delta": form,
        "no_rope_layers": tuple(range(count)) if _is_still(fields) else (),
    }


def _is_still(fields: Fields) -> bool:
    """Whether the file says by a null that there is no rotary embedding, as published models do."""
    sources = (fields, *fields.objects("rope_parameters", "rope_scaling"))
    if any(source.given("rope_theta") for source in sources):
        return False
    nulls = any("rope_theta" in source.values for source in sources)
    return nulls or ("rope_parameters" in fields.values and not fields.given("rope_parameters"))


OLMO_HYBRID = Family(
    architecture="OlmoHybridForCausalLM",
    model_type="olmo_hybrid",
    tensors=_OLMO_HYBRID,
    flags=_olmo_hybrid,
    reads=("attention_bias", "layer_types"),
    defaults={"max_position_embeddings": 65536},
)
