"""Which attention serves: the one a configuration names, or the fastest of this platform."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp

from graphs.attention import Attention
from graphs.attention_native import NativeAttention
from graphs.attention_xla import XlaAttention
from xla_engine.errors import ConfigError
from xla_engine.native import NativeBuildError, register

_log = logging.getLogger("xla_engine")


def choose_attention(name: str) -> Attention:
    """The attention backend that `EngineConfig.attention_backend` names on this platform. Raises ConfigError."""
    platform = jax.default_backend()
    if name == "gpu" or (name == "auto" and "NVIDIA" in jax.devices()[0].device_kind):
        from graphs.attention_gpu import GpuAttention  # Pallas takes a while to import

        return GpuAttention(interpret=platform != "gpu")
    if name == "native" and platform != "cpu":
        raise ConfigError(f"attention_backend 'native' is for the CPU, not {platform}; use 'auto'")
    if name == "native" or (name == "auto" and platform == "cpu"):
        try:
            register()
        except NativeBuildError as error:
            if name == "native":
                raise ConfigError(
                    f"attention_backend 'native' cannot be built: {error}; use 'xla'"
                ) from error
            _log.warning("pure-JAX attention serves, the faster C++ one cannot be built: %s", error)
        else:
            return NativeAttention()
    # Older XLA:CPU copies a bf16 cache at every write.
    old = tuple(int(part) for part in jax.__version__.split(".")[:2]) < (0, 11)
    return XlaAttention(cache_dtype=jnp.dtype(jnp.float32) if old and platform == "cpu" else None)
