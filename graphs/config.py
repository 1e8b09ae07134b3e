"""What a model is: sizes and flags, frozen. No weights, no files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"  # Hugging Face's words
LAST, MEAN = "LAST", "MEAN"  # vLLM's words for how one vector is made of a prompt
POOLING_TYPES = (LAST, MEAN)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are changed to reach further; fields and types are those of Hugging Face configs.

    rope_type: "linear" divides them by `factor` (Chen et al. 2023). "dynamic" enlarges the base so that the engine's
        longest request fits (NTK-aware). "yarn" divides low frequencies by `factor`, keeps high ones and ramps in
        between (Peng et al. 2023). "llama3" does so by wavelengths (Llama 3.1 release notes). "longrope" divides each
        by a factor of its own (Ding et al. 2024).
    original_max_position_embeddings: the context before scaling.
    factor: how much further positions reach.
    low_freq_factor: turns in the original context up to which "llama3" divides by the whole `factor`.
    high_freq_factor: turns from which "llama3" divides by nothing.
    beta_fast: turns from which "yarn" divides by nothing.
    beta_slow: turns up to which "yarn" divides by the whole `factor`.
    truncate: "yarn" ramps between whole dimensions.
    attention_factor: cosines and sines are multiplied by it (yarn, longrope).
    short_factor: the divisors of "longrope".
    long_factor: the same where the engine's longest request is longer than the original context.
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
    """Rotary embedding of a layer: base and scaling."""

    theta: float
    scaling: RopeScaling | None

    @property
    def follows_context(self) -> bool:
        """Whether the angles depend on the longest request that an engine takes."""
        return self.scaling is not None and self.scaling.rope_type in ("dynamic", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionForm:
    """What is static of a layer's attention.

    scale: factor of the scores. window: keys that a query sees at most, its own included; None sees all before it.
    softcap: scores become `softcap * tanh(score / softcap)`. norm_eps: of query and key norms.
    """

    scale: float
    window: int | None
    softcap: float | None
    norm_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """MLPs of which every token takes the few that a router scores highest (Shazeer et al. 2017).

    num_experts: how many there are.
    num_experts_per_tok: experts that a token takes.
    moe_intermediate_size: width of each expert.
    norm_topk_prob: the probabilities of the experts that a token takes are made to sum to one.
    shared_expert_intermediate_size: width of one more that every token takes, behind a gate of its own; 0: none.
    bias: router and experts have biases.
    swiglu_limit: the gate is gpt-oss's, clamped (`graphs.experts.routing.gate`); None is SwiGLU.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool = True
    shared_expert_intermediate_size: int = 0
    bias: bool = False
    swiglu_limit: float | None = None

    def __post_init__(self) -> None:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) exceeds the {self.num_experts} experts"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaForm:
    """Sizes of a gated DeltaNet layer (`graphs.delta_net.layer`); each key head serves consecutive value heads.

    kernel: positions that the convolution sees, its own included. norm_eps: of the norm of the output.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    norm_eps: float

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"linear_num_value_heads ({self.value_heads}) must be a multiple of "
                f"linear_num_key_heads ({self.key_heads})"
            )

    @property
    def mixed_features(self) -> int:
        """Features that the convolution runs over: queries, keys, values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def inner_features(self) -> int:
        """Features of the output, before the last product."""
        return self.value_heads * self.value_dim

    @property
    def projected_features(self) -> int:
        """Rows of the fused projection: queries, keys, values, gates, then rate and step of each value head."""
        return self.mixed_features + self.inner_features + 2 * self.value_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and flags of a decoder. Field names are those of the checkpoint's config.json where it has one.

    vocab_size: token ids.
    hidden_size: features of the residual stream.
    intermediate_size: features inside the MLP.
    num_hidden_layers: layers.
    num_attention_heads: query heads.
    num_key_value_heads: key and value heads; each serves consecutive query heads.
    head_dim: features of a head.
    max_position_embeddings: positions a request may have, rope scaling included.
    rms_norm_eps: of every norm.
    hidden_act: activation of the MLP's gate.
    tie_word_embeddings: the output head is the embedding.
    layer_types: "full_attention", "sliding_attention" or "linear_attention" of each layer; empty is full.
    sliding_window: keys that a query of a sliding layer sees, None all.
    rope_theta: base of the rotary embedding.
    rope_scaling: how its frequencies are changed, None not at all.
    partial_rotary_factor: part of each head that is rotated, the first dimensions in the checkpoint.
    rope_interleaved: the checkpoint's rotary pairs are neighbours, not half a head apart.
    rope_local_base_freq: base, without scaling, of the sliding layers; None: theirs is that of the others.
    no_rope_layers: indices of the layers without rotary embedding.
    attention_multiplier: scale of the scores; None is `head_dim ** -0.5`.
    attn_logit_softcapping: bound of the scores, by tanh; None: no bound.
    final_logit_softcapping: bound of the logits, by tanh; None: no bound.
    qk_norm: "head" normalises every query and key head, "all" the heads of a token together.
    attention_sinks: every query head has one more logit in its softmax, of no value.
    attn_output_gate: the output of attention is multiplied by a sigmoid of the layer's input.
    delta: sizes of the linear layers.
    experts: what stands in place of the MLP.
    mlp_only_layers: indices of the layers that have an MLP all the same.
    qkv_bias: on q, k and v.
    output_bias: on the attention's output.
    mlp_bias: on gate, up and down.
    pre_norm: a norm before attention, and one before the MLP.
    post_norm: a norm behind attention, and one behind the MLP.
    layer_norm: norms subtract the mean.
    use_parallel_residual: attention and MLP read the same normed input.
    embedding_multiplier: factor of the embeddings.
    residual_multiplier: factor of what attention and MLP add to the residual stream.
    logit_scale: factor of the logits.
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
        if LINEAR in self.layer_types and self.delta is None:
            raise ValueError("linear_attention layers need their sizes")

    @property
    def qkv_features(self) -> int:
        """Rows of the fused q/k/v projection, and of the output's gate behind it."""
        gates = self.num_attention_heads if self.attn_output_gate else 0
        return (self.num_attention_heads + 2 * self.num_key_value_heads + gates) * self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    def layer_type(self, index: int) -> str:
        return self.layer_types[index] if self.layer_types else FULL

    def is_linear(self, index: int) -> bool:
        """Whether layer `index` keeps a recurrent state in place of keys and values."""
        return self.layer_type(index) == LINEAR

    def experts_of(self, index: int) -> RoutedExperts | None:
        """The experts of layer `index`, None where it has one MLP."""
        return None if index in self.mlp_only_layers else self.experts

    def attention(self, index: int) -> AttentionForm:
        """How layer `index` attends."""
        scale = self.head_dim**-0.5 if self.attention_multiplier is None else self.attention_multiplier
        return AttentionForm(
            scale=scale,
            window=self.sliding_window if self.layer_type(index) == SLIDING else None,
            softcap=self.attn_logit_softcapping,
            norm_eps=self.rms_norm_eps,
        )

    def rope(self, index: int) -> Rope | None:
        """Rotary embedding of layer `index`, None where it has none."""
        if index in self.no_rope_layers:
            return None
        if self.rope_local_base_freq is not None and self.layer_type(index) == SLIDING:
            return Rope(self.rope_local_base_freq, None)
        return Rope(self.rope_theta, self.rope_scaling)

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """The K distinct rotary embeddings of the layers."""
        return tuple(dict.fromkeys(self.rope(index) for index in range(self.num_hidden_layers)))

    def rope_index(self, index: int) -> int:
        """Which of `ropes` layer `index` uses."""
        return self.ropes.index(self.rope(index))

    def within(self, context_length: int) -> ModelConfig:
        """The same model for requests of at most `context_length`: a window that reaches over all of it is none."""
        reaches = self.sliding_window is not None and self.sliding_window >= context_length
        return replace(self, sliding_window=None) if reaches else self
