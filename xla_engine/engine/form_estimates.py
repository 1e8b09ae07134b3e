"""What each form of a model's weights needs on this machine, and about how fast one request decodes."""

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from xla_engine.config import GGUF, GGUF_INT8
from xla_engine.graphs.kv_cache.cache import tree_bytes
from xla_engine.graphs.linear.native import NativeProducts, fits
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.graphs.ops.coded import StoredKinds
from xla_engine.runner import memory
from xla_engine.utils.bandwidth import read_bandwidth

# The share of the memory's bandwidth at which weights are read, and seconds of a layer that do not depend on them, for
# one request (findings/gguf_weights.md).
_SHARES: Mapping[str | None, float] = {GGUF_INT8: 0.85, "int8": 0.88, GGUF: 0.45, None: 0.9}
_LAYER_SECONDS = 80e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class FormEstimate:
    """One form.

    quantization: the option for it.
    weights: its bytes.
    tokens_per_s: of one request; None for models with routed experts, which read only a part of their weights.
    chosen: whether the given options choose it.
    """

    quantization: str
    weights: int
    tokens_per_s: float | None
    chosen: bool


def form_estimates(spec: ModelSpec, chosen: str | None, stored: StoredKinds) -> list[FormEstimate]:
    """The forms that this machine can have, the fastest first; empty without the C++ products in bfloat16.

    spec: of the options, with `quantization` `chosen`. stored: as in `make_spec`.
    """
    products = spec.products
    if not isinstance(products, NativeProducts) or spec.dtype != ml_dtypes.bfloat16:
        return []
    config, dtype, attention, _, _, devices, lora, _, _ = spec.made_of
    make = functools.partial(ModelSpec, config, dtype, attention, products, devices=devices, lora=lora)
    specs: dict[str | None, ModelSpec] = {None: make()}
    if fits(config, np.dtype(np.int8), products.isa):
        specs["int8"] = make(quantized=True)
    packed = {GGUF: make(stored=stored), GGUF_INT8: make(stored=stored, order="fours")}
    if any(leaf.form is not None for leaf in packed[GGUF].leaves.values()):
        specs.update(packed)
    found = [
        FormEstimate(
            quantization=form or "none",
            weights=memory.weights_bytes(each),
            tokens_per_s=_rate(each, form),
            chosen=form == chosen,
        )
        for form, each in specs.items()
    ]
    return sorted(found, key=lambda each: (not each.chosen, -(each.tokens_per_s or 0), each.weights))


def _rate(spec: ModelSpec, form: str | None) -> float | None:
    if spec.config.experts is not None:
        return None
    read = memory.weights_bytes(spec)
    if not spec.config.tie_word_embeddings:  # a row of the embedding is read, not all of it
        read -= tree_bytes([spec.leaves.on_device()[spec.leaves.names.index("embed")]])
    seconds = read / (_SHARES[form] * 1e9 * _bandwidth()) + _LAYER_SECONDS * spec.config.num_hidden_layers
    return 1 / seconds


@functools.cache
def _bandwidth() -> float:
    return read_bandwidth(len(os.sched_getaffinity(0)), megabytes=128, rounds=3)
