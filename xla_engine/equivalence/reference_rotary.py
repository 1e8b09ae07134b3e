"""The frequencies of rotary embedding in the independent reference, with the scalings for longer contexts."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from xla_engine.equivalence.reference_arrays import Array

Config = Mapping[str, Any]


class UnknownArchitectureError(ValueError):
    """The reference does not know the model's architecture."""


def frequencies(c: Config, rope: Config, theta: float, dims: int, context: int) -> tuple[Array, float]:
    """Angles per position of `dims / 2` pairs with the scaling of `rope`, as transformers' `modeling_rope_utils`."""
    scaling = rope.get("rope_type") or rope.get("type") or "default"
    longest = c.get("max_position_embeddings") or 2048
    original = (
        rope.get("original_max_position_embeddings") or c.get("original_max_position_embeddings") or longest
    )
    factor = float(rope.get("factor") or 1)
    exponents = np.arange(0, dims, 2) / dims
    if scaling == "dynamic" and rope.get("alpha"):  # Hunyuan's base is larger by a fixed factor
        theta *= rope["alpha"] ** (dims / (dims - 2))
    elif scaling == "dynamic":  # a larger base, so that the longest request fits (NTK)
        reach = max(context / original, 1.0)
        theta *= (factor * reach - (factor - 1)) ** (dims / (dims - 2))
    plain = theta**-exponents
    attention = 1.0
    if scaling == "linear":
        plain = plain / factor
    elif scaling == "llama3":  # divide low frequencies (Llama 3.1)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = original * plain / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
        plain = kept * plain + (1 - kept) * plain / factor
    elif scaling == "yarn":  # Peng et al. 2023
        bounds = [
            dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (rope.get("beta_fast") or 32, rope.get("beta_slow") or 1)
        ]
        if rope.get("truncate", True):
            bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
        first, last = max(bounds[0], 0), min(bounds[1], dims - 1)
        ramp = np.clip((np.arange(dims // 2) - first) / max(last - first, 0.001), 0, 1)
        plain = (1 - ramp) * plain + ramp * plain / factor
        attention = rope.get("attention_factor") or yarn_temperature(rope, factor)
    elif scaling in ("longrope", "su", "divisors"):  # a divisor for each pair
        long = scaling != "divisors" and context > original
        plain = plain / np.asarray(rope["long_factor" if long else "short_factor"])
        extended = float(rope.get("factor") or longest / original)
        attention = 1.0 if extended <= 1 else math.sqrt(1 + math.log(extended) / math.log(original))
        attention = 1.0 if scaling == "divisors" else rope.get("attention_factor") or attention
    elif scaling not in ("default", "dynamic"):
        raise UnknownArchitectureError(f"the reference does not know the rope type {scaling!r}")
    return plain.astype(np.float32), float(attention)


def yarn_temperature(rope: Config, factor: float) -> float:
    def of(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    return of(above) / of(below) if above and below else of(1)
