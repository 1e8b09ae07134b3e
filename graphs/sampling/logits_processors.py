"""The adjustments of logits before a token is sampled: bias, penalties, DRY, forbidden tokens.

They run in the order of `STAGES`. Each is skipped in steps in which no live row needs it, and does not change the
logits of other rows.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xla_engine.graphs.row_state.rows import Tables
from xla_engine.graphs.row_state.sampling_fields import STAGES, Repetition, SamplingRows


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingContext:
    """What the sampler needs to know about N rows apart from their sampling parameters.

    live: bool `[N]`, the sample will be used.
    slot: i32 `[N]`, the row's index in `history` and `tables`.
    length: i32 `[N]`, valid tokens in `history`.
    prompt_length: i32 `[N]`, as in `Rows`.
    min_remaining: i32 `[N]`, as in `Rows`.
    stop_ids: i32 `[N, E]`, as in `Rows`.
    history: that of `Rows`, for all slots.
    tables: bias and masks of all slots.
    block_tables: those of `Rows`, for all slots.
    draft: i32 `[N]`, how many drafts precede the row, which selects its mask; 0: none. None: no row has drafts.
    """

    live: jax.Array
    slot: jax.Array
    length: jax.Array
    prompt_length: jax.Array
    min_remaining: jax.Array
    stop_ids: jax.Array
    history: jax.Array
    tables: Tables
    block_tables: jax.Array | None = None
    draft: jax.Array | None = None

    @property
    def tokens(self) -> jax.Array:
        """The rows' tokens by position, i32 `[N, S]`; arbitrary from `length` on."""
        if self.block_tables is None:
            return self.history[self.slot]
        blocks = self.history.at[self.block_tables[self.slot]].get(mode="clip")
        return blocks.reshape(len(self.slot), -1)

    @property
    def mask(self) -> jax.Array:
        """The rows' masks, u32 `[N, ceil(V / 32)]`."""
        own = self.tables.mask[self.slot]
        if self.draft is None or self.tables.draft_masks is None:
            return own
        behind = self.tables.draft_masks[self.slot, jnp.maximum(self.draft - 1, 0)]
        return jnp.where((self.draft > 0)[:, None], behind, own)


def wants_adjustment(rows: SamplingRows, context: SamplingContext) -> jax.Array:
    """Whether `adjust` would change the row, bool `[N]`."""
    return context.live & functools.reduce(jnp.logical_or, (wanted for wanted, _ in _wanted(rows, context)))


def adjust(logits: jax.Array, rows: SamplingRows, context: SamplingContext) -> jax.Array:
    """Logits `[V, N]` with all adjustments of each row; forbidden tokens get -inf."""
    for wanted, change in _wanted(rows, context):
        logits = lax.cond(
            jnp.any(context.live & wanted),
            lambda x, wanted=wanted, change=change: change(x, rows, context, wanted),
            lambda x: x,
            logits,
        )
    return logits


# (logits [V, N], rows, context, rows that need it [N]) -> logits
Change = Callable[[jax.Array, SamplingRows, SamplingContext, jax.Array], jax.Array]


class Adjustment(NamedTuple):
    """One or several stages. wanted: the rows that need it, bool `[N]`; None if the engine does not support it."""

    wanted: Callable[[SamplingRows, SamplingContext], jax.Array | None]
    change: Change


def _wanted(rows: SamplingRows, context: SamplingContext) -> list[tuple[jax.Array, Change]]:
    """The adjustments that this engine supports, in order, each with the rows that need it."""
    # The stages of one adjustment are consecutive.
    in_order = dict.fromkeys(_ADJUSTMENTS[stage] for stage in STAGES if stage in _ADJUSTMENTS)
    found = ((each.wanted(rows, context), each.change) for each in in_order)
    return [(wanted, change) for wanted, change in found if wanted is not None]


def _is_penalised(rows: SamplingRows, context: SamplingContext) -> jax.Array:
    return (rows.repetition_penalty != 1) | (rows.frequency_penalty != 0) | (rows.presence_penalty != 0)


def _wants_dry(rows: SamplingRows, context: SamplingContext) -> jax.Array | None:
    return None if rows.repetition is None else rows.repetition.dry_multiplier > 0


def _apply_dry(
    logits: jax.Array, rows: SamplingRows, context: SamplingContext, wanted: jax.Array
) -> jax.Array:
    assert rows.repetition is not None
    lost = dry_penalties(context.tokens, context.length, rows.repetition, logits.shape[0])
    return jnp.where(wanted, logits - lost, logits)


def _add_bias(
    logits: jax.Array, rows: SamplingRows, context: SamplingContext, wanted: jax.Array
) -> jax.Array:
    """The ids of a row are distinct, so the order of additions does not matter."""
    vocabulary, columns = logits.shape
    ids = jnp.where(wanted[:, None], context.tables.bias_ids[context.slot], vocabulary)  # [N, K]
    column = jnp.arange(columns)[:, None]
    return logits.at[ids, column].add(context.tables.bias[context.slot], mode="drop")


def _penalise(
    logits: jax.Array, rows: SamplingRows, context: SamplingContext, wanted: jax.Array
) -> jax.Array:
    """Repetition penalty (Keskar et al. 2019, section 4.1) for prompt and output, the others for output alone."""
    last_n = None if rows.repetition is None else rows.repetition.penalty_last_n
    output, seen = count_tokens(context, logits.shape[0], last_n)
    repeated = jnp.where(logits > 0, logits / rows.repetition_penalty, logits * rows.repetition_penalty)
    penalised = jnp.where(seen, repeated, logits)
    penalised = penalised - rows.frequency_penalty * output.astype(jnp.float32)
    penalised = penalised - jnp.where(output > 0, rows.presence_penalty, 0.0)
    return jnp.where(wanted, penalised, logits)


def count_tokens(
    context: SamplingContext, vocabulary: int, last_n: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """How often each token was generated, i32 `[V, N]`, and whether it is in prompt or output, bool `[V, N]`.

    last_n: i32 `[N]`, count only the last `last_n` tokens; all if negative. None: all tokens of every row.
    """
    tokens = context.tokens
    position = jnp.arange(tokens.shape[1])
    valid = position < context.length[:, None]
    if last_n is not None:
        first = jnp.where(last_n < 0, 0, context.length - last_n)
        valid &= position >= first[:, None]
    is_output = position >= context.prompt_length[:, None]
    column = jnp.arange(tokens.shape[0])[:, None]

    def count(which: jax.Array) -> jax.Array:
        zeros = jnp.zeros((vocabulary, tokens.shape[0]), jnp.int32)
        return zeros.at[jnp.where(which, tokens, vocabulary), column].add(1, mode="drop")

    output = count(valid & is_output)
    return output, (count(valid & ~is_output) + output) > 0


def _forbid_stops(
    logits: jax.Array, rows: SamplingRows, context: SamplingContext, wanted: jax.Array
) -> jax.Array:
    vocabulary, columns = logits.shape
    forbidden = wanted[:, None] & (context.stop_ids >= 0)
    ids = jnp.where(forbidden, context.stop_ids, vocabulary)  # [N, E]
    return logits.at[ids, jnp.arange(columns)[:, None]].set(-jnp.inf, mode="drop")


def _forbid_masked(
    logits: jax.Array, rows: SamplingRows, context: SamplingContext, wanted: jax.Array
) -> jax.Array:
    words = context.mask.T  # [ceil(V / 32), N]
    bits = (words[:, None] >> jnp.arange(32, dtype=jnp.uint32)[None, :, None]) & 1
    allowed = bits.reshape(-1, logits.shape[1])[: logits.shape[0]] != 0
    return jnp.where(allowed | ~wanted, logits, -jnp.inf)


_PENALTIES = Adjustment(_is_penalised, _penalise)  # one count of tokens for all three
_ADJUSTMENTS = {
    "bias": Adjustment(lambda rows, _: rows.has_bias != 0, _add_bias),
    "repetition_penalty": _PENALTIES,
    "frequency_penalty": _PENALTIES,
    "presence_penalty": _PENALTIES,
    "dry": Adjustment(_wants_dry, _apply_dry),
    "min_tokens": Adjustment(lambda _, context: context.min_remaining > 0, _forbid_stops),
    "mask": Adjustment(lambda rows, _: rows.has_mask != 0, _forbid_masked),
}


LONGEST = 64  # the longest match that is measured


def dry_penalties(tokens: jax.Array, length: jax.Array, rows: Repetition, vocabulary: int) -> jax.Array:
    """The penalty of each token by DRY, f32 `[V, N]`, zero for most (p-e-w, text-generation-webui #5677).

    It penalises tokens that would extend a repetition, the more the longer it is. If the last L tokens occurred
    before, followed by token t, and L is at least `allowed_length`, the logit of t is reduced by
    `multiplier * base ** (L - allowed_length)`. Of several occurrences the longest match counts. A match contains no
    sequence breaker, t is none either, and matches are counted up to `LONGEST` tokens.

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
