"""The configuration of a model: sizes and flags, frozen; no weights or files."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from xla_engine.graphs.encoder_form import EncoderForm
from xla_engine.graphs.recurrent_forms import ConvolutionForm, DeltaForm, Recurrent

FULL, SLIDING, LINEAR, CONV = (
    "full_attention",
    "sliding_attention",
    "linear_attention",
    "conv",
)  # layer types of Hugging Face
LAST, MEAN, CLS = "LAST", "MEAN", "CLS"  # vLLM's pooling types
POOLING_TYPES = (LAST, MEAN, CLS)
KEY_SPAN = 256  # positions of a span: cache lengths and key buckets are its multiples (findings/kv_cache.md)


def whole_spans(length: int) -> int:
    """`length` rounded up to whole spans."""
    return -(-length // KEY_SPAN) * KEY_SPAN


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """RoPE scaling for longer contexts; fields and types are those of Hugging Face configs.

    rope_type: "linear" divides all frequencies by `factor` (Chen et al. 2023). "dynamic" enlarges the base so that the
        engine's longest request fits (NTK-aware). "yarn" divides low frequencies by `factor`, keeps high ones and
        interpolates between (Peng et al. 2023). "llama3" does so by wavelength (Llama 3.1 release notes). "longrope"
        divides each frequency by its own factor (Ding et al. 2024).
    original_max_position_embeddings: the context length before scaling.
    factor: by how much the context is extended.
    low_freq_factor: rotations in the original context up to which "llama3" divides by the full `factor`.
    high_freq_factor: rotations from which "llama3" does not divide.
    beta_fast: rotations from which "yarn" does not divide.
    beta_slow: rotations up to which "yarn" divides by the full `factor`.
    truncate: "yarn" interpolates between whole dimensions.
    attention_factor: multiplies cosines and sines (yarn, longrope).
    short_factor: the divisors of "longrope".
    long_factor: the divisors if the engine's longest request exceeds the original context.
    """

    rope_type: str
    original_max_position_embeddings: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


class Rope(NamedTuple):
    """The rotary embedding of a layer: base and scaling."""

    theta: float
    scaling: RopeScaling | None

    @property
    def follows_context(self) -> bool:
        """Whether the angles depend on the engine's context length."""
        return self.scaling is not None and self.scaling.rope_type in ("dynamic", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionForm:
    """The static parameters of a layer's attention.

    scale: factor of the scores. window: the most keys that a query attends to, including its own; None: no limit.
    softcap: scores become `softcap * tanh(score / softcap)`. norm_eps: of query and key norms.
    """

    scale: float
    window: int | None
    softcap: float | None
    norm_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """A mixture of experts: each token uses the experts that a router scores highest (Shazeer et al. 2017).

    num_experts: the number of experts.
    num_experts_per_tok: experts per token.
    moe_intermediate_size: width of each expert.
    norm_topk_prob: normalise the probabilities of a token's experts to sum to one.
    shared_expert_intermediate_size: width of a shared expert that every token uses; 0: none.
    bias: router and experts have biases.
    swiglu_limit: use gpt-oss's clamped gate (`graphs.experts.routing.gate`); None: SwiGLU.
    scoring_func: of the router's logits. With "sigmoid", experts are chosen by the sum of score and a correction of
        their own (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    routed_scaling_factor: factor of the experts' weights.
    shared_expert_gate: the shared expert's output is multiplied by a gate.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool = True
    shared_expert_intermediate_size: int = 0
    bias: bool = False
    swiglu_limit: float | None = None
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    routed_scaling_factor: float = 1.0
    shared_expert_gate: bool = True

    def __post_init__(self) -> None:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) exceeds the {self.num_experts} experts"
            )


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
    layer_types: for each layer "full_attention", "sliding_attention", "linear_attention" (gated DeltaNet) or "conv"
        (short convolution); empty: all full.
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
    qk_norm: "head" normalises each query and key head; "all" normalises all heads of a token together.
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
    bidirectional: every token of a decoder's layers attends to all others, too, and a window reaches as far forwards
        as backwards: the model is an encoder.
    convolution: sizes of the short convolutions.
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
    hidden_act: Literal["silu", "gelu_tanh"] = "silu"
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
        for kind, form in ((LINEAR, self.delta), (CONV, self.convolution)):
            if kind in self.layer_types and form is None:
                raise ValueError(f"{kind} layers need their sizes")
        if self.bidirectional and (self.recurrent is not None or self.llama_4_scaling_beta is not None):
            raise ValueError(
                "attention to later tokens needs layers without a state, and queries without a scale"
            )

    @property
    def qkv_features(self) -> int:
        """Rows of the fused q/k/v projection, including the output gates at its end."""
        gates = self.num_attention_heads if self.attn_output_gate else 0
        return (self.num_attention_heads + 2 * self.num_key_value_heads + gates) * self.head_dim

    @property
    def encodes(self) -> bool:
        """Whether every token attends to all others, so that the model generates nothing."""
        return self.encoder is not None or self.bidirectional

    @property
    def rotary_dim(self) -> int:
        """How many dimensions of a head are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    def layer_type(self, index: int) -> str:
        return self.layer_types[index] if self.layer_types else FULL

    @property
    def recurrent(self) -> Recurrent | None:
        """Sizes of the recurrent layers, which are all of one kind; None if there are none."""
        return self.delta or self.convolution

    def is_recurrent(self, index: int) -> bool:
        """Whether layer `index` has a recurrent state instead of keys and values."""
        return self.layer_type(index) in (LINEAR, CONV)

    def experts_of(self, index: int) -> RoutedExperts | None:
        """The experts of layer `index`; None if it has an MLP."""
        return None if index in self.mlp_only_layers else self.experts

    def attention(self, index: int) -> AttentionForm:
        """The attention parameters of layer `index`."""
        scale = (
            1 / math.sqrt(self.head_dim) if self.attention_multiplier is None else self.attention_multiplier
        )
        return AttentionForm(
            scale=scale,
            window=self.sliding_window if self.layer_type(index) == SLIDING else None,
            softcap=self.attn_logit_softcapping,
            norm_eps=self.rms_norm_eps,
        )

    def rope(self, index: int) -> Rope | None:
        """The rotary embedding of layer `index`; None if it has none."""
        if index in self.no_rope_layers or (self.encoder is not None and self.encoder.positions):
            return None
        if self.rope_local_base_freq is not None and self.layer_type(index) == SLIDING:
            return Rope(self.rope_local_base_freq, None)
        return Rope(self.rope_theta, self.rope_scaling)

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """The K distinct rotary embeddings of the layers."""
        return tuple(dict.fromkeys(self.rope(index) for index in range(self.num_hidden_layers)))

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
