"""Sizes and flags of layers with several residual streams."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AlternatingForm:
    """Layers with several residual streams (Gemma 3n, `graphs.model.alternating`).

    streams: of a token; a layer computes the first.
    laurel_rank: of the product beside attention.
    cutoffs: for each layer, how many standard deviations above the mean its MLP cuts off gates; None: it does not.
    correct_scale: what the token's embedding for the layer is multiplied with is a scaled first stream.
    """

    streams: int
    laurel_rank: int
    cutoffs: tuple[float | None, ...]
    correct_scale: bool = True
