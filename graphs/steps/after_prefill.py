"""Programs that run after a prefill call: pooling, log-probabilities of prompt tokens, and their logits."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_engine.graphs.config import LAST
from xla_engine.graphs.linear.products import WEIGHT_LEFT
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.graphs.ops.fixed_order_sums import sum_middle
from xla_engine.graphs.row_state.limits import MAX_LOGPROBS
from xla_engine.graphs.sampling.logits import ByRow
from xla_engine.graphs.sampling.logprobs import TopLogprobs, logprobs, unpack_top_logprobs

_GROUP = 16  # positions that the device sums; the host adds the groups, in order


def pool_chunk(
    spec: ModelSpec, kind: str, width: int, weights: list[jax.Array], hidden: jax.Array, count: jax.Array
) -> jax.Array:
    """Apply the final norm to the residual stream `hidden f32 [P * width, D]` and pool each lane's `count i32 [P]`
    tokens.

    Static: `spec`; `kind`, one of POOLING_TYPES; `width`, positions of a lane. A lane of count 0 is skipped.
    Returns f32 `[P, G, D]`: for LAST the vector of the last token, G = 1; for MEAN the sums of each `gcd(width, 16)`
    positions. Prompts are cut at multiples of `width`, so these sums are the same for any `width` that is a multiple
    of 16.
    """
    model = spec.merge(weights)
    lanes = hidden.reshape(count.shape[0], width, -1)
    size = math.gcd(width, _GROUP)

    def last(lane: jax.Array, count: jax.Array) -> jax.Array:
        return model.normed(lax.dynamic_slice_in_dim(lane, count - 1, 1))

    def sums(lane: jax.Array, count: jax.Array) -> jax.Array:
        used = jnp.arange(width, dtype=jnp.int32) < count
        normed = jnp.where(used[:, None], model.normed(lane), 0)  # unused positions may be NaN
        return sum_middle(normed.reshape(-1, size, normed.shape[1]))

    groups = 1 if kind == LAST else width // size
    nothing = jnp.zeros((groups, lanes.shape[2]), jnp.float32)

    def one(each: tuple[jax.Array, jax.Array]) -> jax.Array:
        return lax.cond(each[1] > 0, last if kind == LAST else sums, lambda *_: nothing, *each)

    return lax.map(one, (lanes, count))  # one shape for any number of lanes, so that no bit depends on it


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

    def compute(hidden: jax.Array, target: jax.Array) -> jax.Array:
        asked = target >= 0
        logits = model.logits(hidden, (spec.products or WEIGHT_LEFT).for_rows(asked))
        wanted = jnp.where(asked, MAX_LOGPROBS, -1)
        logprob, top = logprobs(logits, jnp.maximum(target, 0), wanted, native=spec.isa)
        return jnp.concatenate([lax.bitcast_convert_type(logprob, jnp.int32)[None], top]).T

    found = jax.ShapeDtypeStruct((head_rows, 2 + 2 * MAX_LOGPROBS), jnp.int32)
    return _in_groups(compute, found, hidden, target)


def prompt_logits(
    spec: ModelSpec, head_rows: int, weights: list[jax.Array], hidden: jax.Array, target: jax.Array
) -> jax.Array:
    """The logits f32 `[N, V]` from which `prompt_logprobs` is computed; zero if the target is -1."""
    model = spec.merge(weights)

    def compute(hidden: jax.Array, target: jax.Array) -> jax.Array:
        asked = target >= 0
        logits = model.logits(hidden, (spec.products or WEIGHT_LEFT).for_rows(asked))
        return jnp.where(asked[:, None], logits.values if isinstance(logits, ByRow) else logits.T, 0)

    found = jax.ShapeDtypeStruct((head_rows, spec.config.vocab_size), jnp.float32)
    return _in_groups(compute, found, hidden, target)


def _in_groups(
    compute: Callable[[jax.Array, jax.Array], jax.Array],
    found: jax.ShapeDtypeStruct,
    hidden: jax.Array,
    target: jax.Array,
) -> jax.Array:
    """`compute` for a group of rows at a time, with the result `found`; zeros for a group without a target."""
    count, rows = target.shape[0], found.shape[0]
    missing = -count % rows
    hidden = jnp.pad(hidden, ((0, missing), (0, 0))).reshape(-1, rows, hidden.shape[1])
    target = jnp.pad(target, (0, missing), constant_values=-1).reshape(-1, rows)
    nothing = jnp.zeros(found.shape, found.dtype)

    def group(each: tuple[jax.Array, jax.Array]) -> jax.Array:
        return lax.cond(jnp.any(each[1] >= 0), compute, lambda *_: nothing, *each)

    return lax.map(group, (hidden, target)).reshape(-1, nothing.shape[1])[:count]


def unpack_prompt_logprobs(packed: np.ndarray, wanted: int) -> tuple[float, TopLogprobs]:
    """Unpack one row of `prompt_logprobs` on the host: the target's log-probability, and the `wanted` most likely."""
    return float(packed[:1].view(np.float32)[0]), unpack_top_logprobs(packed[1:], wanted)
