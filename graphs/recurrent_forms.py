"""Sizes and flags of each kind of recurrent layers, frozen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaForm:
    """Sizes of a gated DeltaNet layer (`graphs.recurrent.delta_net`); consecutive value heads share a key head.

    kernel: positions that the convolution covers, including its own. norm_eps: of the output norm.
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
        """Features of the convolution: queries, keys, values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def inner_features(self) -> int:
        """Features of the output before the last product."""
        return self.value_heads * self.value_dim

    @property
    def projected_features(self) -> int:
        """Rows of the fused projection: queries, keys, values, gates, then rate and step of each value head."""
        return self.mixed_features + self.inner_features + 2 * self.value_heads


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


Recurrent = DeltaForm | ConvolutionForm
