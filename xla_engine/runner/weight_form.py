"""Which form a model's weights take if the options leave it to the engine (`EngineConfig.quantization` "auto")."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp

from xla_engine.config import AUTO, GGUF, GGUF_INT8, KEPT, EngineConfig
from xla_engine.errors import ConfigError
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.graphs.ops.coded import KINDS, StoredKinds
from xla_engine.model_loader.tensor_files import TensorFiles
from xla_engine.runner.backends import PACKED_NEEDS, make_spec
from xla_engine.runner.native_library.needed import packed_form

_EXACT = {
    GGUF: "quantization none has the same results in bfloat16",
    GGUF_INT8: "for exact activations use quantization gguf (packed, slower) or none (bfloat16)",
}
_WORDS = {GGUF: "activations stay in bfloat16", GGUF_INT8: "activations have eight bits"}


class WeightForm(NamedTuple):
    """The form of an engine's weights.

    config: the options with a resolved `quantization`.
    note: what the engine chose, and how to get the exact form; None if there was nothing to choose.
    spec_of: `make_spec` of these options, for a model's shape; keeps what it has made.
    """

    config: EngineConfig
    note: str | None
    spec_of: Callable[[ModelConfig], ModelSpec]


def resolve_form(config: EngineConfig, model: ModelConfig, dtype: str, stored: StoredKinds) -> WeightForm:
    """Choose `quantization` if it is "auto": quantised weights stay packed if the C++ products serve them, and are
    dequantised otherwise. Raises ConfigError for options that this machine or model does not have.

    dtype: of the engine. stored: as in `make_spec`.
    """
    if config.quantization not in (AUTO, None):
        return _form(config, None, dtype, stored)
    plain = _form(replace(config, quantization=None), None, dtype, stored)
    kinds = {kind for parts in stored.values() for kind, _ in parts if kind not in TensorFiles.dtypes}
    if not kinds:
        return plain
    if config.quantization is None:
        return plain._replace(note=f"weights are dequantised to {dtype} (quantization none)")
    why = f"{', '.join(sorted(kinds))} cannot stay packed"
    if config.is_portable:
        why = "bits 'portable' has no packed weights"
    elif config.speculation is not None and config.speculation.method == "mtp":
        why = "the layer of method 'mtp' shares weights with the model"
    elif not kinds.isdisjoint(KINDS):
        chosen = packed_form(config, model)
        form = _form(replace(config, quantization=chosen), note_of(chosen), dtype, stored)
        try:
            form.spec_of(model)
        except ConfigError:
            why = f"packed weights need {PACKED_NEEDS}"
        else:
            return form
    return plain._replace(note=f"weights are dequantised to {dtype}: {why}")


def note_of(form: str | None) -> str | None:
    """A resolved `quantization` in one line; None for weights that do not stay packed."""
    if form not in KEPT:
        return None
    return f"weights stay packed and {_WORDS[form]} (quantization {form}); {_EXACT[form]}"


def _form(config: EngineConfig, note: str | None, dtype: str, stored: StoredKinds) -> WeightForm:
    made = functools.cache(lambda model: make_spec(config, model, jnp.dtype(dtype), stored))
    return WeightForm(config, note, made)
