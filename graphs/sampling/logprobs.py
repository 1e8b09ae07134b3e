"""Log-probabilities of the sampled token and of the most likely ones, from raw or processed logits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_engine.graphs.ops.reductions import largest, relative, total
from xla_engine.graphs.row_state.limits import MAX_LOGPROBS
from xla_engine.graphs.sampling.logits import ByRow, Logits
from xla_engine.graphs.sampling.native import native_logprobs


def logprobs(
    logits: Logits, token: jax.Array, wanted: jax.Array, *, native: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities under `logits [V, N]` of the sampled `token [N]` and of the most likely tokens.

    wanted i32 `[N]`: -1 for none, 0 for the sampled token's, n > 0 also for those of the n most likely tokens. What no
    row needs is skipped and zero. native: as in `graphs.sampling.sampler.sample`.
    Returns f32 `[N]`, and packed i32 `[1 + 2 * MAX_LOGPROBS, N]`: the rank of the sampled token (1 is the most
    likely), the ids of the most likely tokens, and the bits of their log-probabilities. If the vocabulary is smaller
    than MAX_LOGPROBS, the ids are padded with -1.
    """
    if native is not None:
        return native_logprobs(logits, token, wanted, native)
    assert not isinstance(logits, ByRow)
    count = token.shape[0]

    def compute() -> tuple[jax.Array, jax.Array]:
        normaliser = _normaliser(logits)
        top = lax.cond(
            jnp.any(wanted > 0),
            lambda: _top(logits, token, normaliser),
            lambda: jnp.zeros((1 + 2 * MAX_LOGPROBS, count), jnp.int32),
        )
        return _chosen(logits, token) - normaliser[0] - normaliser[1], top

    return lax.cond(
        jnp.any(wanted >= 0),
        compute,
        lambda: (jnp.zeros(count, jnp.float32), jnp.zeros((1 + 2 * MAX_LOGPROBS, count), jnp.int32)),
    )


def _normaliser(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest logit per column, and the log of the sum of exponentials relative to it; f32 `[N]` each."""
    peak = jnp.max(logits, axis=0)
    return peak, jnp.log(total(relative(logits, peak)))


def _chosen(logits: jax.Array, token: jax.Array) -> jax.Array:
    return jnp.take_along_axis(logits, token[None, :], axis=0)[0]


def _top(logits: jax.Array, token: jax.Array, normaliser: tuple[jax.Array, jax.Array]) -> jax.Array:
    peak, rest = normaliser
    rank = 1 + jnp.sum(logits > _chosen(logits, token), axis=0, dtype=jnp.int32)
    count = min(MAX_LOGPROBS, logits.shape[0])
    best, index = largest(logits, count)
    bits = lax.bitcast_convert_type(best - peak - rest, jnp.int32)
    missing = ((0, MAX_LOGPROBS - count), (0, 0))
    return jnp.concatenate(
        [rank[None], jnp.pad(index, missing, constant_values=-1), jnp.pad(bits, missing)], axis=0
    )


class TopLogprobs(NamedTuple):
    """The most likely tokens at one position. rank: of the sampled token; 1 is the most likely."""

    rank: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def unpack_top_logprobs(packed: np.ndarray, wanted: int) -> TopLogprobs:
    """Unpack one column `[1 + 2 * MAX_LOGPROBS]` of `logprobs` on the host, with the `wanted` most likely tokens."""
    ids = packed[1 : 1 + wanted].tolist()
    values = packed[1 + MAX_LOGPROBS : 1 + MAX_LOGPROBS + wanted].view(np.float32).tolist()
    known = [place for place, token_id in enumerate(ids) if token_id >= 0]
    return TopLogprobs(
        int(packed[0]), tuple(ids[place] for place in known), tuple(values[place] for place in known)
    )
