"""Sizes and flags of each kind of recurrent layers, frozen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaForm:
    """Sizes of a gated DeltaNet layer (`graphs.recurrent.delta_net`); consecutive value heads share a key head.

    kernel: positions that the convolution covers, including its own. norm_eps: of the output norm.
    rate_factor: of the rates; with 2, what is recalled may change its sign (Grazzi et al. 2024, arXiv 2411.12537).
    pre_norm: the layer has norms before its sublayers only, wherever those of the attention layers are.
    gate_rank: of Kimi Delta Attention (arXiv 2510.26692): there is a decay for each channel of a key, second products
        of this rank make decays and gates, and gates are sigmoids. 0: a decay for each head, and gates by SiLU.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    norm_eps: float
    rate_factor: float = 1.0
    pre_norm: bool = False
    gate_rank: int = 0

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"linear_num_value_heads ({self.value_heads}) must be a multiple of "
                f"linear_num_key_heads ({self.key_heads})"
            )
        if self.gate_rank and self.value_heads != self.key_heads:
            raise ValueError("decays for each channel need as many key heads as value heads")

    @property
    def mixed_features(self) -> int:
        """Features of the convolution: queries, keys, values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def inner_features(self) -> int:
        """Features of the output before the last product."""
        return self.value_heads * self.value_dim

    @property
    def decay_features(self) -> int:
        """Decays of a position."""
        return self.value_heads * (self.key_dim if self.gate_rank else 1)

    @property
    def projected_features(self) -> int:
        """Features of a position: queries, keys, values, gates, a rate of each value head, and steps of decays."""
        return self.mixed_features + self.inner_features + self.value_heads + self.decay_features

    @property
    def fused_rows(self) -> int:
        """Rows of the fused projection; second products make gates and steps of fewer features."""
        if not self.gate_rank:
            return self.projected_features
        return self.mixed_features + self.gate_rank + self.value_heads + self.gate_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionForm:
    """Sizes of a short gated convolution (`graphs.recurrent.short_convolution`).

    features: of the convolution. kernel: positions that it covers, including its own. bias: on the convolution and
    both products.
    """

    features: int
    kernel: int
    bias: bool = False

    @property
    def mixed_features(self) -> int:
        """Features of the convolution."""
        return self.features

    @property
    def inner_features(self) -> int:
        """Features of the output before the last product."""
        return self.features

    @property
    def projected_features(self) -> int:
        """Rows of the fused projection: gates of inputs, gates of outputs, inputs."""
        return 3 * self.features


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaForm:
    """Sizes of a Mamba-2 layer (`graphs.recurrent.mamba`). In the words of the rule, a head's values are its inputs,
    and keys and queries, which the heads of a group share, are what Mamba calls B and C.

    value_heads, value_dim: heads, and features of each. key_heads: groups. key_dim: the size of the state.
    kernel: positions that the convolution covers, including its own. norm_eps: of the output norm.
    bias: on both products. convolution_bias: on the convolution.
    norm: of the outputs, in groups: "gated" after the gate, "plain" before it, or none.
    step_limits: the least and the most that a step is.
    multipliers: factors of gates, inputs, B, C and steps behind the projection.
    output_multiplier: factor of the layer's output.
    """

    value_heads: int
    value_dim: int
    key_heads: int
    key_dim: int
    kernel: int
    norm_eps: float
    bias: bool = False
    convolution_bias: bool = True
    norm: Literal["gated", "plain"] | None = "gated"
    step_limits: tuple[float, float] = (0.0, math.inf)
    multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    output_multiplier: float = 1.0

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"the number of Mamba heads ({self.value_heads}) must be a multiple of that of groups "
                f"({self.key_heads})"
            )

    @property
    def mixed_features(self) -> int:
        """Features of the convolution: inputs, B, C."""
        return self.inner_features + 2 * self.key_heads * self.key_dim

    @property
    def inner_features(self) -> int:
        """Features of the output before the last product."""
        return self.value_heads * self.value_dim

    @property
    def projected_features(self) -> int:
        """Rows of the fused projection: gates, inputs, B, C, then a step of each head."""
        return self.inner_features + self.mixed_features + self.value_heads


Recurrent = DeltaForm | ConvolutionForm | MambaForm
