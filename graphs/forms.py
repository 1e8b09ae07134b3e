"""Parts of a model's configuration: rotary embedding, attention, routed experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """RoPE scaling for longer contexts; fields and types are those of Hugging Face configs.

    rope_type: "linear" divides all frequencies by `factor` (Chen et al. 2023). "dynamic" enlarges the base so that the
        engine's longest request fits (NTK-aware). "yarn" divides low frequencies by `factor`, keeps high ones and
        interpolates between (Peng et al. 2023). "llama3" does so by wavelength (Llama 3.1 release notes). "longrope"
        divides each frequency by its own factor (Ding et al. 2024). "proportional" turns the first pairs only, as fast
        as if all did (Gemma 4).
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
    turning: the share of the pairs that turn, of "proportional".
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
    turning: float = 1.0


class Rope(NamedTuple):
    """The rotary embedding of a layer: base, scaling, and how many dimensions of a head it rotates."""

    theta: float
    scaling: RopeScaling | None
    dims: int

    @property
    def follows_context(self) -> bool:
        """Whether the angles depend on the engine's context length."""
        return self.scaling is not None and self.scaling.rope_type in ("dynamic", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionForm:
    """The static parameters of a layer's attention.

    scale: factor of the scores. window: the most keys that a query attends to, including its own; None: no limit.
    softcap: scores become `softcap * tanh(score / softcap)`. norm_eps: of query and key norms. norm_last: these come
    behind the rotation. stored_parts: see `ModelConfig.stored_parts`. value_norm: each value head is normalised,
    without a weight.
    """

    scale: float
    window: int | None
    softcap: float | None
    norm_eps: float
    stored_parts: int = 2
    value_norm: bool = False
    norm_last: bool = False


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
    beside_mlp: the experts stand beside an MLP, each with norms of its own; the router normalises the residual stream
        itself, and has a factor for each expert's output (Gemma 4).
    gelu: the experts' gate is GELU by tanh, not SiLU.
    n_group, topk_group: a token's experts come from the best `topk_group` of `n_group` groups of the same size
        (`graphs.experts.routing.Groups`).
    plain: experts have no gate, but the square of ReLU between their products, and so has the shared expert.
    moe_latent_size: width of the vector that experts take and make; 0: that of the residual stream (Nemotron 3).
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
    beside_mlp: bool = False
    gelu: bool = False
    n_group: int = 1
    topk_group: int = 1
    plain: bool = False
    moe_latent_size: int = 0

    def __post_init__(self) -> None:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) exceeds the {self.num_experts} experts"
            )
        if self.topk_group > self.n_group:
            raise ValueError(f"topk_group ({self.topk_group}) exceeds the {self.n_group} groups")
        in_group, rest = divmod(self.num_experts, self.n_group)
        if rest:
            raise ValueError(f"n_group ({self.n_group}) does not divide the {self.num_experts} experts")
        if self.topk_group * in_group < self.num_experts_per_tok:
            raise ValueError(f"topk_group ({self.topk_group}) groups of {in_group} have too few experts")
        if self.topk_group < self.n_group and self.scoring_func == "sigmoid" and in_group < 2:
            raise ValueError(f"n_group ({self.n_group}) leaves groups of one expert, which have no best two")

    @property
    def widths(self) -> list[int]:
        """Features between the products of a layer; 0 where there are none."""
        return [self.moe_intermediate_size, self.shared_expert_intermediate_size, self.moe_latent_size]


LATENT_EPS = 1e-6  # of the norms within latent attention, whatever those of the layers have


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentForm:
    """Sizes of latent attention (MLA, DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values of all heads are
    products with one short vector, and a rotary part of the keys is shared by all heads.

    The cache has the short vector and the rotary part: one key head, which is the value head too. A query is
    multiplied by its head's product for keys, and a head's output by that for values, so that no key or value of a
    head is ever made (the "absorbed" form).

    q_lora_rank: width of the vector from which queries are made; 0: of the layer's input.
    kv_lora_rank: the same for keys and values.
    qk_nope_head_dim, qk_rope_head_dim: the part of a query and key head without rotary embedding, and that with.
    v_head_dim: features of a value head.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        if self.qk_nope_head_dim % 2 or self.qk_rope_head_dim % 2:
            raise ValueError("qk_nope_head_dim and qk_rope_head_dim must be even")
        if self.kv_lora_rank % 2:
            raise ValueError("kv_lora_rank must be even")

    @property
    def key_dim(self) -> int:
        """Features of the key in the cache: halves of the rotary part and of the short vector."""
        return self.qk_rope_head_dim + self.kv_lora_rank

    @property
    def query_dim(self) -> int:
        """Features of a query head before its product: without rotary embedding, then with."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def widths(self, heads: int) -> list[int]:
        """Features between the products of a layer."""
        ranks = [self.q_lora_rank, self.kv_lora_rank, self.kv_lora_rank + self.qk_rope_head_dim]
        return [*ranks, heads * self.query_dim, self.qk_nope_head_dim, self.v_head_dim]
