"""The host side of pooling requests: computes a vector from what the device pools of each chunk."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from xla_engine.errors import InvalidRequestError
from xla_engine.graphs.config import MEAN
from xla_engine.model_loader.pooling import PoolingForm
from xla_engine.pooling_params import PoolingParams

Array = np.ndarray[Any, np.dtype[Any]]


class PooledPrompt:
    """Collects what the device pools of a prompt.

    numbers: the result, once the request has ended.
    """

    def __init__(self, form: PoolingForm, params: PoolingParams) -> None:
        self.numbers: tuple[float, ...] | None = None
        self._form, self._params = form, params
        self._chunks: dict[int, Array] = {}  # by start position, since some come again after a preemption

    def add(self, start: int, vectors: Array) -> None:
        """Add what the device pooled of the chunk that begins at position `start`, f32 `[G, D]`."""
        self._chunks[start] = vectors

    def finish(self, tokens: int, *, whole: bool) -> None:
        """Compute the result and drop the chunks.

        tokens: of the prompt. whole: whether all of it was pooled; if not, there is no result.

        Raises InvalidRequestError if the vector is not finite.
        """
        parts = [self._chunks[start] for start in sorted(self._chunks)]
        self._chunks.clear()
        if whole:
            vector = pooled_vector(self._form, parts, tokens)
            self.numbers = pooled_numbers(self._form, vector, self._params)


def params_for(form: PoolingForm, params: PoolingParams, hidden_size: int) -> PoolingParams:
    """The parameters of a request, completed by the model's form. Raises InvalidRequestError if they do not match."""
    classes = 0 if form.classifier is None else len(form.classifier)
    if params.task != "embed" and not classes:
        raise InvalidRequestError(
            "this model returns embeddings and has no classifier: use embed, and compare the vectors"
        )
    if params.task == "score" and classes != 1:
        raise InvalidRequestError(f"the model's classifier has {classes} classes and no score; use classify")
    wanted, hidden_size = params.dimensions, form.size(hidden_size)
    if wanted is not None and wanted != hidden_size:
        if form.dimensions is not None and wanted not in form.dimensions:
            remedy = f"use {', '.join(map(str, form.dimensions))}" if form.dimensions else "leave them out"
            raise InvalidRequestError(
                f"config.json does not say that the model was trained for {wanted} dimensions: {remedy}, or declare "
                'it with hf_overrides {"is_matryoshka": true}'
            )
        if wanted > hidden_size:
            raise InvalidRequestError(f"dimensions must be at most {hidden_size}, not {wanted}")
    return replace(params, pooling_type=form.pooling_type)


def pooled_vector(form: PoolingForm, parts: Sequence[Array], tokens: int) -> Array:
    """The vector f32 `[D]` of a prompt of `tokens` tokens. parts: the `[G, D]` of its chunks, in order.

    Rows are added one after the other, so that no bit depends on where the prompt was cut into chunks.
    """
    if form.pooling_type != MEAN:
        return np.asarray(parts[-1][-1])
    total: Array = np.zeros(parts[0].shape[1], np.float32)
    for part in parts:  # along this axis, numpy adds row after row
        total = np.add.reduce(np.concatenate([total[None], part]), axis=0)
    return total / np.float32(tokens)


def pooled_numbers(form: PoolingForm, vector: Array, params: PoolingParams) -> tuple[float, ...]:
    """The result of a request from its vector f32 `[D]`: an embedding, or one number for each class, as float32.

    Sums are in float64 over arrays of fixed shape, so that they depend on nothing else. Raises InvalidRequestError if
    the vector is not finite.
    """
    if not np.isfinite(vector).all():
        raise InvalidRequestError("no vector could be computed: the model's numbers are not finite")
    wide: Array = vector.astype(np.float64)
    for layer in form.dense:
        wide = _activated(layer.activation, (layer.weight * wide).sum(axis=1) + layer.bias)
        if layer.norm is not None:
            wide = wide - wide.mean()
            wide = wide / np.sqrt((wide * wide).mean() + layer.norm_eps) * layer.norm[0] + layer.norm[1]
    active = form.use_activation if params.use_activation is None else params.use_activation
    if params.task == "embed":
        wide = wide[: params.dimensions]
        if active:
            wide = wide / max(float(np.sqrt((wide * wide).sum())), 1e-12)
    else:
        assert form.classifier is not None
        wide = (form.classifier * wide).sum(axis=1)
        wide = wide if form.classifier_bias is None else wide + form.classifier_bias
        wide = _activated(form.activation, wide) if active else wide
    return tuple(wide.astype(np.float32).tolist())


def _activated(name: str, numbers: Array) -> Array:
    if name == "identity":
        return numbers
    if name == "tanh":
        tanh: Array = np.tanh(numbers)
        return tanh
    if name == "sigmoid":
        return np.tanh(numbers / 2) / 2 + 0.5  # avoids overflow
    if name == "relu":
        return np.maximum(numbers, 0)
    if name == "gelu":
        return numbers * np.array([1 + math.erf(each / math.sqrt(2)) for each in numbers.tolist()]) / 2
    exponentials = np.exp(numbers - numbers.max())
    return exponentials / exponentials.sum()
