"""From the vectors of a prompt's tokens to an embedding or to the numbers of a classifier: the host's part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from xla_engine.errors import InvalidRequestError
from xla_engine.graphs.steps.pooling import LAST, MEAN
from xla_engine.pooling.params import PoolingParams

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pooler:
    """How a model pools.

    pooling_type: LAST, the last token's vector, or MEAN, that of all.
    use_activation: embeddings are scaled to length 1, and a classifier's numbers go through `activation`.
    dimensions: lengths to which an embedding may be cut; empty: none, None: any.
    classifier: f32 `[classes, D]`; None where there is none.
    activation: "sigmoid", "softmax" or "identity".
    """

    pooling_type: str = LAST
    use_activation: bool = True
    dimensions: tuple[int, ...] | None = ()
    classifier: Array | None = None
    activation: str = "sigmoid"

    def checked(self, params: PoolingParams, hidden_size: int) -> PoolingParams:
        """The request as this model runs it. Raises InvalidRequestError for what it cannot do."""
        classes = 0 if self.classifier is None else len(self.classifier)
        if params.task != "embed" and not classes:
            raise InvalidRequestError(
                "this model has no classifier, it makes embeddings: use embed, and compare the vectors"
            )
        if params.task == "score" and classes != 1:
            raise InvalidRequestError(
                f"the model's classifier has {classes} classes and no score; use classify"
            )
        wanted = params.dimensions
        if wanted is not None and wanted != hidden_size:
            if self.dimensions is not None and wanted not in self.dimensions:
                remedy = (
                    f"use {', '.join(map(str, self.dimensions))}" if self.dimensions else "leave them out"
                )
                raise InvalidRequestError(
                    f"the model is not said to be trained for {wanted} dimensions: {remedy}, or say it with "
                    'hf_overrides {"is_matryoshka": true}'
                )
            if wanted > hidden_size:
                raise InvalidRequestError(f"dimensions must be at most {hidden_size}, not {wanted}")
        return replace(params, pooling_type=self.pooling_type)

    def pooled(self, parts: Sequence[Array], tokens: int) -> Array:
        """The vector f32 `[D]` of a prompt of so many tokens, from the `[G, D]` of its chunks, in order.

        Sums go on row after row, so that the cut into chunks shows in no bit.
        """
        if self.pooling_type != MEAN:
            return np.asarray(parts[-1][-1])
        total: Array = np.zeros(parts[0].shape[1], np.float32)
        for part in parts:
            for row in part:
                total += row
        return total / np.float32(tokens)

    def finish(self, vector: Array, params: PoolingParams) -> tuple[float, ...]:
        """What the request gets of its vector f32 `[D]`: its numbers, or those of the classes, as float32.

        Sums are in float64 over arrays of one shape: they depend on nothing else. Raises InvalidRequestError for a
        vector that is none.
        """
        if not np.isfinite(vector).all():
            raise InvalidRequestError("no vector could be made: the model's numbers are not finite")
        wide: Array = vector.astype(np.float64)
        active = self.use_activation if params.use_activation is None else params.use_activation
        if params.task == "embed":
            wide = wide[: params.dimensions]
            if active:
                wide = wide / max(float(np.sqrt((wide * wide).sum())), 1e-12)
        else:
            assert self.classifier is not None
            wide = (self.classifier * wide).sum(axis=1)
            wide = _activated(self.activation, wide) if active else wide
        return tuple(wide.astype(np.float32).tolist())


def _activated(name: str, numbers: Array) -> Array:
    if name == "identity":
        return numbers
    if name == "sigmoid":
        return np.tanh(numbers / 2) / 2 + 0.5  # the sigmoid, without overflow
    exponentials = np.exp(numbers - numbers.max())
    return exponentials / exponentials.sum()
