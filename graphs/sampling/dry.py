"""DRY: penalises tokens that would extend a repetition, the more the longer it is (p-e-w, text-generation-webui
#5677).

If the last L tokens occurred before, followed by token t, and L is at least `allowed_length`, the logit of t is
reduced by `multiplier * base ** (L - allowed_length)`. Of several occurrences the longest match counts. A match
contains no sequence breaker, t is none either, and matches are counted up to `LONGEST` tokens.
"""

import jax
import jax.numpy as jnp
from jax import lax

from xla_engine.graphs.row_state.sampling_fields import Repetition

LONGEST = 64  # the longest match that is measured


def dry_penalties(tokens: jax.Array, length: jax.Array, rows: Repetition, vocabulary: int) -> jax.Array:
    """The penalty of each token, f32 `[V, N]`, zero for most.

    tokens: i32 `[N, S]`, of which `length [N]` are valid, at least 1. Rows with multiplier 0 get zeros.
    """
    matched = _matches(tokens, length, rows)  # [N, S]
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    following = jnp.roll(tokens, -1, axis=1)
    counts = (place < length[:, None] - 1) & ~_breaks(following, rows) & (matched > 0)
    column = jnp.arange(tokens.shape[0])[:, None]
    longest = jnp.zeros((vocabulary, tokens.shape[0]), jnp.int32)
    longest = longest.at[jnp.where(counts, following, vocabulary), column].max(matched, mode="drop")
    penalised = (longest > 0) & (longest >= rows.dry_allowed_length)
    return jnp.where(penalised, jnp.take_along_axis(_by_length(rows), longest, axis=0), 0.0)


def _by_length(rows: Repetition) -> jax.Array:
    """The penalty by length of the match, f32 `[LONGEST + 1, N]`, at most 1e30.

    Computed by repeated multiplication, so that a row's bits do not depend on other rows.
    """

    def step(penalty: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
        grown = jnp.where(
            length > rows.dry_allowed_length, jnp.minimum(penalty * rows.dry_base, 1e30), penalty
        )
        return grown, grown

    lengths = jnp.arange(LONGEST + 1, dtype=jnp.int32)
    return lax.scan(step, rows.dry_multiplier, lengths)[1]


def _matches(tokens: jax.Array, length: jax.Array, rows: Repetition) -> jax.Array:
    """How many tokens before and at each place equal the last tokens, i32 `[N, S]`; 0 from the last token on."""
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    end = length - 1

    def goes_on(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        back, alike, _ = state
        return (back < LONGEST) & jnp.any(alike)

    def look(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        back, alike, matched = state
        own = jnp.take_along_axis(tokens, jnp.maximum(end - back, 0)[:, None], axis=1)  # [N, 1]
        alike &= (jnp.roll(tokens, back, axis=1) == own) & (place >= back) & ~_breaks(own, rows)
        return back + 1, alike, matched + alike

    alike = (place < end[:, None]) & (rows.dry_multiplier > 0)[:, None]
    return lax.while_loop(goes_on, look, (jnp.int32(0), alike, jnp.zeros(tokens.shape, jnp.int32)))[2]


def _breaks(tokens: jax.Array, rows: Repetition) -> jax.Array:
    """Whether each of `tokens [N, K]` is a sequence breaker."""
    return jnp.any(tokens[:, :, None] == rows.dry_breakers[:, None], axis=2)
