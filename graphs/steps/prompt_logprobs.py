"""Log-probabilities of prompt tokens, and their logits: programs that run after a prefill call."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_engine.graphs.linear.products import WEIGHT_LEFT
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.row_state.limits import MAX_LOGPROBS
from xla_engine.graphs.sampling.logits import ByRow
from xla_engine.graphs.sampling.logprobs import TopLogprobs, logprobs, unpack_top_logprobs


def prompt_logprobs(
    spec: ModelSpec, head_rows: int, weights: list[jax.Array], hidden: jax.Array, target: jax.Array
) -> jax.Array:
    """Raw log-probability of `target i32 [N]` at every row of the residual stream `hidden [N, D]`, and the top tokens.

    Static: `spec`; `head_rows`, as in `prefill_chunk`. A row with target -1 is skipped. The output head runs over
    `head_rows` positions at a time, so that no more logits exist at once than in a prefill step.
    Returns i32 `[N, 2 + 2 * MAX_LOGPROBS]`: the bits of the log-probability, then the most likely tokens as packed by
    `graphs.sampling.logprobs.logprobs`.
    """
    model = spec.merge(weights)
    count = target.shape[0]
    hidden, target = _in_groups(head_rows, hidden, target)
    nothing = jnp.zeros((head_rows, 2 + 2 * MAX_LOGPROBS), jnp.int32)

    def compute(hidden: jax.Array, target: jax.Array) -> jax.Array:
        asked = target >= 0
        logits = model.logits(hidden, (spec.products or WEIGHT_LEFT).for_rows(asked))
        wanted = jnp.where(asked, MAX_LOGPROBS, -1)
        logprob, top = logprobs(logits, jnp.maximum(target, 0), wanted, native=spec.isa)
        return jnp.concatenate([lax.bitcast_convert_type(logprob, jnp.int32)[None], top]).T

    def group(each: tuple[jax.Array, jax.Array]) -> jax.Array:
        return lax.cond(jnp.any(each[1] >= 0), compute, lambda *_: nothing, *each)

    return lax.map(group, (hidden, target)).reshape(-1, nothing.shape[1])[:count]


def prompt_logits(
    spec: ModelSpec, head_rows: int, weights: list[jax.Array], hidden: jax.Array, target: jax.Array
) -> jax.Array:
    """The logits f32 `[N, V]` from which `prompt_logprobs` is computed; zero if the target is -1."""
    model = spec.merge(weights)
    count = target.shape[0]
    hidden, target = _in_groups(head_rows, hidden, target)
    nothing = jnp.zeros((head_rows, spec.config.vocab_size), jnp.float32)

    def compute(hidden: jax.Array, target: jax.Array) -> jax.Array:
        asked = target >= 0
        logits = model.logits(hidden, (spec.products or WEIGHT_LEFT).for_rows(asked))
        return jnp.where(asked[:, None], logits.values if isinstance(logits, ByRow) else logits.T, 0)

    def group(each: tuple[jax.Array, jax.Array]) -> jax.Array:
        return lax.cond(jnp.any(each[1] >= 0), compute, lambda *_: nothing, *each)

    return lax.map(group, (hidden, target)).reshape(-1, nothing.shape[1])[:count]


def _in_groups(rows: int, hidden: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Pad and reshape both into groups of `rows`: `[G, rows, D]`, `[G, rows]`."""
    missing = -target.shape[0] % rows
    hidden = jnp.pad(hidden, ((0, missing), (0, 0))).reshape(-1, rows, hidden.shape[1])
    return hidden, jnp.pad(target, (0, missing), constant_values=-1).reshape(-1, rows)


def unpack_prompt_logprobs(packed: np.ndarray, wanted: int) -> tuple[float, TopLogprobs]:
    """Unpack one row of `prompt_logprobs` on the host: the target's log-probability, and the `wanted` most likely."""
    return float(packed[:1].view(np.float32)[0]), unpack_top_logprobs(packed[1:], wanted)
