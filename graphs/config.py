"""The configuration of a model: sizes and flags, frozen; no weights or files."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from xla_engine.graphs.alternating_form import AlternatingForm
from xla_engine.graphs.encoder_form import EncoderForm
from xla_engine.graphs.forms import AttentionForm, LatentForm, Rope, RopeScaling, RoutedExperts
from xla_engine.graphs.recurrent_forms import ConvolutionForm, DeltaForm, MambaForm, Recurrent

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"  # layer types
CONV, MAMBA, PARALLEL, MLP = "conv", "mamba", "hybrid", "mlp"
LAST, MEAN, CLS = "LAST", "MEAN", "CLS"  # vLLM's pooling types
POOLING_TYPES = (LAST, MEAN, CLS)
KEY_SPAN = 256  # positions of a span: cache lengths and key buckets are its multiples (findings/kv_cache.md)


def whole_spans(length: int) -> int:
    """`length` rounded up to whole spans."""
    return -(-length // KEY_SPAN) * KEY_SPAN


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and flags of a decoder or encoder. Field names are those of config.json if it has the field.

    vocab_size: token ids.
    hidden_size: features of the residual stream.
    intermediate_size: features inside the MLP.
    num_hidden_layers: layers.
    num_attention_heads: query heads.
    num_key_value_heads: key and value heads; consecutive query heads share one.
    head_dim: features of a head.
    max_position_embeddings: the most positions of a request, with RoPE scaling.
    rms_norm_eps: of every norm.
    hidden_act: activation of the MLP's gate.
    tie_word_embeddings: the output head shares the embedding's weight.
    layer_types: for each layer "full_attention", "sliding_attention", "linear_attention" (gated DeltaNet), "conv"
        (short convolution), "mamba", "hybrid" (full attention and Mamba side by side) or "mlp"; empty: all full.
    sliding_window: keys that a query of a sliding layer attends to, up to its own; None: all.
    rope_theta: base of the rotary embedding.
    rope_scaling: its scaling; None: none.
    partial_rotary_factor: the share of each head's dimensions that is rotated; in the checkpoint they come first.
    rope_interleaved: the checkpoint's rotary pairs are adjacent, not half a head apart.
    rope_local_base_freq: base of the sliding layers, without scaling; None: the same as in other layers.
    no_rope_layers: indices of the layers without rotary embedding.
    attention_multiplier: scale of the scores; None: `1 / sqrt(head_dim)`.
    llama_4_scaling_beta: the queries at position p are multiplied by `1 + beta log(1 + p // original)`, with the
        original context length of the rope scaling; None: they are not.
    attn_logit_softcapping: soft cap of the scores, by tanh; None: none.
    final_logit_softcapping: soft cap of the logits, by tanh; None: none.
    qk_norm: "head" normalises each query and key head, "rotated" behind the rotation; "all" all heads of a token.
    attention_sinks: every query head has an additional logit in its softmax, without a value.
    attn_output_gate: the attention output is multiplied by a sigmoid of the layer's input.
    delta: sizes of the gated DeltaNet layers.
    experts: mixture of experts in place of the MLP.
    mlp_only_layers: indices of the layers that have an MLP all the same.
    qkv_bias: bias on q, k and v.
    output_bias: bias on the attention output.
    mlp_bias: bias on gate, up and down.
    pre_norm: a norm before attention, and one before the MLP.
    post_norm: a norm after attention, and one after the MLP.
    layer_norm: norms subtract the mean.
    norm_bias: norms of the residual stream have a bias.
    gated_mlp: the MLP has a gate; otherwise it is two products with the activation between them.
    head_bias: the output head has a bias.
    use_parallel_residual: attention and MLP have the same normalised input.
    embedding_multiplier: factor of the embeddings.
    residual_multiplier: factor of the outputs of attention and MLP.
    logit_scale: factor of the logits.
    encoder: what makes the model an encoder; None: it has a decoder's layers.
    bidirectional: a decoder's tokens see later ones as they see earlier ones: the model is an encoder.
    convolution: sizes of the short convolutions.
    global_head_dim: features of a head in full-attention layers; None: as in the others.
    num_global_key_value_heads: key and value heads of full-attention layers; None: as in the others.
    attention_k_eq_v: in full-attention layers, the projected keys are the values as well.
    num_kv_shared_layers: so many last layers attend to the keys and values of the last one of their type before.
    use_double_wide_mlp: the MLPs of these layers have twice the width.
    value_norm: every value head is normalised, without a weight.
    hidden_size_per_layer_input: features of a token's embedding for each layer; 0: there is none.
    vocab_size_per_layer_input: rows of its table.
    layer_scalar: the residual stream after each layer is multiplied by a number of the layer.
    latent: sizes of latent attention. A key head is then what is in the cache, and there is one.
    stored_parts: of keys and values in a layer's projection: 2; 1 if the keys are the values; 0 if it has none.
    mamba: sizes of the Mamba-2 layers.
    one_sublayer: a layer is a token mixer or, of type "mlp", an MLP; otherwise it is both.
    attention_output_multiplier: factor of attention's output.
    mlp_multipliers: factors of the MLP's gate and of its output.
    alternating: what layers with several residual streams have; None: there is one.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    hidden_act: Literal["silu", "gelu_tanh", "relu2"] = "silu"
    tie_word_embeddings: bool = False
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: float = 1.0
    rope_interleaved: bool = False
    rope_local_base_freq: float | None = None
    no_rope_layers: tuple[int, ...] = ()
    attention_multiplier: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    qk_norm: str | None = None
    attention_sinks: bool = False
    attn_output_gate: bool = False
    delta: DeltaForm | None = None
    experts: RoutedExperts | None = None
    mlp_only_layers: tuple[int, ...] = ()
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    layer_norm: bool = False
    use_parallel_residual: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_scale: float = 1.0
    encoder: EncoderForm | None = None
    llama_4_scaling_beta: float | None = None
    norm_bias: bool = False
    gated_mlp: bool = True
    head_bias: bool = False
    bidirectional: bool = False
    convolution: ConvolutionForm | None = None
    global_head_dim: int | None = None
    num_global_key_value_heads: int | None = None
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    value_norm: bool = False
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int = 0
    layer_scalar: bool = False
    stored_parts: int = 2
    latent: LatentForm | None = None
    mamba: MambaForm | None = None
    one_sublayer: bool = False
    attention_output_multiplier: float = 1.0
    mlp_multipliers: tuple[float, float] = (1.0, 1.0)
    alternating: AlternatingForm | None = None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2 or self.rotary_dim % 2:
            raise ValueError(
                f"head_dim and its rotary part must be even, not {self.head_dim} and {self.rotary_dim}"
            )
        scaling = self.rope_scaling
        if scaling is not None and scaling.rope_type == "longrope":
            counts = {len(scaling.short_factor), len(scaling.long_factor)}
            if counts != {self.rotary_dim // 2}:
                raise ValueError(
                    f"short_factor and long_factor must have {self.rotary_dim // 2} numbers each"
                )
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types must name {self.num_hidden_layers} layers, not {len(self.layer_types)}"
            )
        if self.llama_4_scaling_beta is not None and scaling is None:
            raise ValueError("llama_4_scaling_beta needs a rope scaling")
        for kind, form in ((LINEAR, self.delta), (CONV, self.convolution), (MAMBA, self.mamba)):
            if kind in self.layer_types and form is None:
                raise ValueError(f"{kind} layers need their sizes")
        if self.bidirectional and (self.recurrent is not None or self.llama_4_scaling_beta is not None):
            raise ValueError(
                "attention to later tokens needs layers without a state, and queries without a scale"
            )
        types = [self.layer_type(index) for index in range(self.num_hidden_layers)]
        if missing := {*types} - {*types[: self.num_hidden_layers - self.num_kv_shared_layers]}:
            raise ValueError(f"num_kv_shared_layers leaves no keys for layers of type {min(missing)}")

    @property
    def qkv_features(self) -> int:
        """Rows of the fused q/k/v projection, including the output gates at its end."""
        gates = self.num_attention_heads if self.attn_output_gate else 0
        stored = self.stored_parts * self.num_key_value_heads
        return (self.num_attention_heads + stored + gates) * self.head_dim

    @property
    def encodes(self) -> bool:
        """Whether every token attends to all others, so that the model generates nothing."""
        return self.encoder is not None or self.bidirectional

    @property
    def rotary_dim(self) -> int:
        """How many dimensions of a head are rotated."""
        if self.latent is not None:
            return self.latent.qk_rope_head_dim
        return int(self.head_dim * self.partial_rotary_factor)

    def layer_type(self, index: int) -> str:
        return self.layer_types[index] if self.layer_types else FULL

    @property
    def is_uniform(self) -> bool:
        """Whether the projections of all attention layers, and all MLPs, have the same sizes."""
        own = self.global_head_dim is not None or self.num_global_key_value_heads is not None
        return not (own or self.attention_k_eq_v or self.num_kv_shared_layers)

    def layer(self, index: int) -> ModelConfig:
        """The same model with the heads, the MLP and the norms of layer `index`."""
        own = not self.is_uniform or (self.delta is not None and self.delta.pre_norm)
        return _of_layer(self, index) if own else self

    def keys_of(self, index: int) -> int:
        """The layer whose keys and values layer `index` attends to: itself, or an earlier one."""
        first = self.num_hidden_layers - self.num_kv_shared_layers
        if index < first:
            return index
        return max(at for at in range(first) if self.layer_type(at) == self.layer_type(index))

    @property
    def recurrent(self) -> Recurrent | None:
        """Sizes of the recurrent layers, which are all of one kind; None if there are none."""
        return self.delta or self.convolution or self.mamba

    def is_recurrent(self, index: int) -> bool:
        """Whether layer `index` has a recurrent state."""
        return self.layer_type(index) in (LINEAR, CONV, MAMBA, PARALLEL)

    def attends(self, index: int) -> bool:
        """Whether layer `index` has keys and values."""
        return self.layer_type(index) in (FULL, SLIDING, PARALLEL)

    def experts_of(self, index: int) -> RoutedExperts | None:
        """The experts of layer `index`; None if it has an MLP."""
        return None if index in self.mlp_only_layers else self.experts

    def attention(self, index: int) -> AttentionForm:
        """The attention parameters of layer `index`."""
        own = self.layer(index)
        return AttentionForm(
            scale=self.attention_multiplier or 1 / math.sqrt(own.head_dim),
            window=self.sliding_window if self.layer_type(index) == SLIDING else None,
            softcap=self.attn_logit_softcapping,
            norm_eps=self.rms_norm_eps,
            stored_parts=own.stored_parts,
            value_norm=self.value_norm,
            norm_last=self.qk_norm == "rotated",
        )

    def rope(self, index: int) -> Rope | None:
        """The rotary embedding of layer `index`; None if it has none."""
        if index in self.no_rope_layers or (self.encoder is not None and self.encoder.positions):
            return None
        if self.rope_local_base_freq is not None and self.layer_type(index) == SLIDING:
            return Rope(self.rope_local_base_freq, None, self.layer(index).rotary_dim)
        return Rope(self.rope_theta, self.rope_scaling, self.layer(index).rotary_dim)

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """The K distinct rotary embeddings of the layers."""
        return tuple(dict.fromkeys(self.rope(index) for index in range(self.num_hidden_layers)))

    @property
    def widest_head(self) -> int:
        """Features of a head of the layers whose heads are widest."""
        return max(self.head_dim, self.global_head_dim or 0)

    @property
    def rotary_tables(self) -> int:
        """How many tables by position there are: of each rotary embedding, and one of factors of queries."""
        return len(self.ropes) + (self.llama_4_scaling_beta is not None)

    def rope_index(self, index: int) -> int:
        """Which of `ropes` layer `index` uses."""
        return self.ropes.index(self.rope(index))

    def within(self, context_length: int) -> ModelConfig:
        """The same model for requests of at most `context_length` tokens: drops a window that covers all of it."""
        reaches = self.sliding_window is not None and self.sliding_window >= context_length
        return replace(self, sliding_window=None) if reaches else self


@functools.lru_cache(256)
def _of_layer(config: ModelConfig, index: int) -> ModelConfig:
    """See `ModelConfig.layer`."""
    changes: dict[str, Any] = {}
    if config.layer_type(index) == FULL:
        changes["head_dim"] = config.global_head_dim or config.head_dim
        changes["num_key_value_heads"] = config.num_global_key_value_heads or config.num_key_value_heads
        changes["stored_parts"] = 1 if config.attention_k_eq_v else 2
    if config.keys_of(index) != index:
        changes["stored_parts"] = 0
        if config.use_double_wide_mlp:
            changes["intermediate_size"] = 2 * config.intermediate_size
    if config.delta is not None and config.delta.pre_norm and config.layer_type(index) == LINEAR:
        changes |= {"pre_norm": True, "post_norm": False}
    # What makes layers differ is gone: this one is all there is.
    changes |= {"global_head_dim": None, "num_global_key_value_heads": None, "attention_k_eq_v": False}
    return replace(config, **changes, num_kv_shared_layers=0)
