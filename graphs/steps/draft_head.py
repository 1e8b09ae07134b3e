"""The verify step with a draft head: one layer that drafts from the model's hidden states.

From the model's hidden state at position p and the token at p + 1, the layer predicts the token at p + 2; for further
drafts it uses its own output as hidden state. It has its own KV cache, by slot. Prefill and verify steps pass the
model's hidden states on to it. A plain decode step does not, so these positions are missing from the layer's cache,
and it cannot draft before the next verify step. The layers are `MtpWeights` and `Eagle3Weights`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from xla_engine.graphs.attention.backend import AttentionWeights
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.kv_cache.cache import KVCache, make_cache
from xla_engine.graphs.linear.products import ROWS_LEFT, Norm, Products, looked_up
from xla_engine.graphs.model.call import Call
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.graphs.ops.norms import rms_norm
from xla_engine.graphs.row_state.rows import Extents, Rows, put, targets
from xla_engine.graphs.sampling.logits import ByRow, Logits
from xla_engine.graphs.steps.draft_sampling import asks, draw, proposed
from xla_engine.graphs.steps.prefill import Fed, Lanes, behind_last, through_layers
from xla_engine.graphs.steps.step import StepForm, StepState
from xla_engine.graphs.steps.verify import Drafts, known_tokens, members, verify_rows

if TYPE_CHECKING:
    from xla_engine.graphs.model.decoder import Decoder


class Head(Protocol):
    """A draft head inside a graph, bound to its weights and to the model for which it drafts."""

    def made(self, seen: jax.Array, used: jax.Array) -> jax.Array:
        """The head's input hidden state f32 `[N, D]` of positions.

        seen: the model's residual stream there, f32 `[N, ...]`, as `HeadForm.taps` says. used: which positions are
        read, bool `[N]`.
        """
        ...

    def over(self, before: jax.Array, tokens: jax.Array, call: Call) -> Iterator[jax.Array]:
        """Run the layer on hidden states `before f32 [N, D]` and the tokens `[N]` that follow; as `Decoder.hidden`."""
        ...

    def onward(self, x: jax.Array) -> jax.Array:
        """The hidden state for the next draft, f32 `[N, D]`, from the layer's output `x [N, D]`."""
        ...

    def logits(self, x: jax.Array, products: Products) -> Logits:
        """Logits, float32, over the model's token ids, from the layer's output `x [N, D]`."""
        ...


class HeadForm(NamedTuple):
    """The static part of a draft head.

    layer: the spec of a model of its one layer, which defines its cache and attention.
    bind: makes the head from its weights, the model's spec and the model's decoder.
    taps: the layers of the model before which the residual stream is taken and concatenated; empty: after the last.
    """

    layer: ModelSpec
    bind: Callable[[Any, ModelSpec, Decoder], Head]
    taps: tuple[int, ...] = ()


class HeadState(NamedTuple):
    """The state of a draft head.

    cache: the layer's KV cache, for every slot.
    hidden: f32 `[B, W, D]`, the model's hidden states from position `begin [B]` on that the layer has not processed.
        The first `length - begin` are valid.
    """

    cache: KVCache
    hidden: jax.Array
    begin: jax.Array


def make_head_state(layer: ModelSpec, rows: int, length: int, width: int) -> HeadState:
    """The state for `rows` slots of `length` positions, a multiple of the span, and verify steps of `width` tokens."""
    hidden = jnp.zeros((rows, width, layer.config.hidden_size), jnp.float32)
    return HeadState(make_cache(layer, rows, length), hidden, jnp.full(rows, -1, jnp.int32))


def draft_by_head_and_verify(
    draft: HeadForm,
    form: StepForm,
    width: int,
    state: StepState,
    drafts: Drafts,
    weights: Any,
    rope: jax.Array,
    own: HeadState,
) -> tuple[KVCache, Rows, jax.Array, jax.Array, HeadState]:
    """`verify_step`, but for rows that may look up drafts, a head of the form `draft` (static) drafts instead.

    weights, rope, own: the head's, and its state. Also returns the head's state.
    """
    spec, rows = form.spec, state.rows.with_tables(state.tables)
    at = members(rows, drafts, width)
    slot, end = at.slot, rows.length[at.slot]
    lanes, most = len(slot), own.hidden.shape[1]
    head, products = draft.bind(weights, spec, spec.merge(state.weights)), draft.layer.products or ROWS_LEFT
    layer = StepForm(draft.layer, form.key_length)

    begin = jnp.maximum(own.begin[slot], 0)
    count = end - own.begin[slot]  # positions that the layer has not processed
    ready = at.live & (own.begin[slot] >= 0) & (count >= 1) & (count <= most)
    wanted = ready & asks(rows, drafts, at, width - 1)
    known = known_tokens(rows, slot)
    there = begin[:, None] + 1 + jnp.arange(most, dtype=jnp.int32)
    tokens = jnp.take_along_axis(known, jnp.minimum(there, known.shape[1] - 1), axis=1)

    def feed(
        cache: KVCache, hidden: jax.Array, tokens: jax.Array, start: jax.Array, count: jax.Array
    ) -> tuple[KVCache, jax.Array]:
        """Feed lanes `[P, T]` with `hidden f32 [P T, D]`; also returns the output at their last tokens `[P, D]`."""
        fed = Fed(tokens, Extents(slot, start, count))  # the layer's cache has no block pool
        cache, streams = through_layers(layer, functools.partial(head.over, hidden), rope, cache, fed)
        return cache, behind_last(streams[-1], count)

    def one(
        before: tuple[KVCache, jax.Array], token: jax.Array, position: jax.Array, going: jax.Array
    ) -> tuple[tuple[KVCache, jax.Array], Logits]:
        own_cache, x = before
        fed = going.astype(jnp.int32)
        own_cache, x = feed(own_cache, head.onward(x), token[:, None], position - 1, fed)
        return (own_cache, x), head.logits(x, products.for_rows(going))

    flat = own.hidden[slot].reshape(lanes * most, -1)
    own_cache, x = feed(own.cache, flat, tokens, begin, jnp.where(ready, count, 0))
    logits = head.logits(x, products.for_rows(wanted))
    (own_cache, _), drafted = draw(
        rows, state.tables, at, wanted, width - 1, (own_cache, x), logits, one, native=spec.isa
    )
    drafts = proposed(rows, drafts, at, wanted, drafted)
    cache, rows, packed, top, seen = verify_rows(
        form, width, state._replace(rows=rows), drafts, taps=draft.taps
    )
    made = head.made(seen, jnp.repeat(at.live, width)).reshape(lanes, width, -1)
    target = targets(slot, at.live, len(own.begin))
    kept = own.hidden.at[target, :width].set(made, mode="drop", unique_indices=True)
    return cache, rows, packed, top, HeadState(own_cache, kept, put(own.begin, target, end))


def read_prompts(
    draft: HeadForm,
    form: StepForm,
    model: list[jax.Array],
    seen: jax.Array,
    lanes: Lanes,
    weights: Any,
    rope: jax.Array,
    own: HeadState,
) -> HeadState:
    """Feed the layer the hidden states of a prefill call, `seen f32 [P * T, ...]`, as `HeadForm.taps` says.

    model: its weights. The others are as of `draft_by_head_and_verify`.
    """
    slot, start, count = lanes.slot, lanes.start, lanes.count
    number, width = lanes.tokens.shape
    head = draft.bind(weights, form.spec, form.spec.merge(model))
    used = jnp.arange(width, dtype=jnp.int32) < count[:, None]
    made = head.made(seen, used.reshape(-1)).reshape(number, width, -1)
    final = made[jnp.arange(number), jnp.maximum(count - 1, 0)]  # [P, D]
    # A lane may continue the lane before it; otherwise the hidden state before it is stored with the slot.
    follows = (jnp.roll(slot, 1) == slot) & (jnp.roll(start + count, 1) == start) & (jnp.arange(number) > 0)
    before = jnp.where(follows[:, None], jnp.roll(final, 1, axis=0), own.hidden[slot, 0])
    fresh = start == 0
    shifted = jnp.concatenate([before[:, None], made[:, :-1]], axis=1)
    given = jnp.where(fresh[:, None, None], made, shifted)
    tokens = jnp.where(fresh[:, None], jnp.roll(lanes.tokens, -1, axis=1), lanes.tokens)
    fed = jnp.maximum(count - fresh, 0)
    at = Extents(slot, jnp.maximum(start - 1, 0), fed)
    over = functools.partial(head.over, given.reshape(number * width, -1))
    layer = StepForm(draft.layer, form.key_length)
    cache, _ = through_layers(layer, over, rope, own.cache, Fed(tokens, at))
    goes_on = jnp.concatenate([follows[1:], jnp.zeros(1, bool)])
    target = targets(slot, (count > 0) & ~goes_on, len(own.begin))
    return HeadState(
        cache,
        own.hidden.at[target, 0].set(final, mode="drop", unique_indices=True),
        put(own.begin, target, start + count - 1),
    )


class MtpWeights(NamedTuple):
    """A layer for multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2; Qwen3-Next).

    Its input is the model's output after the final norm. It shares the model's embedding and output head.

    join: `[D, 2 D]`, applied to the concatenation of token embedding and hidden state; packed as products read it.
    token_norm, hidden_norm: `[D]`. decoder: the leaves of a decoder of one layer with the model's embedding and head.
    """

    join: jax.Array
    token_norm: jax.Array
    hidden_norm: jax.Array
    decoder: list[jax.Array]


def mtp_form(layer: ModelSpec) -> HeadForm:
    """The form of an MTP head. layer: the spec of a model of the one layer."""

    def bind(own: MtpWeights, spec: ModelSpec, model: Decoder) -> _MtpHead:
        return _MtpHead(layer.merge(own.decoder), own, model)

    return HeadForm(layer, bind)


@dataclass(frozen=True, slots=True)
class _MtpHead:
    layer: Decoder
    weights: MtpWeights
    model: Decoder

    def made(self, seen: jax.Array, used: jax.Array) -> jax.Array:
        del used
        return self.model.normed(seen)

    def over(self, before: jax.Array, tokens: jax.Array, call: Call) -> Iterator[jax.Array]:
        eps = self.layer.config.rms_norm_eps
        token = rms_norm(self.layer.embedded(tokens, call.products), self.weights.token_norm, eps)
        before = rms_norm(before, self.weights.hidden_norm, eps)
        x = call.products.linear(self.weights.join, jnp.concatenate([token, before], axis=1))
        return self.layer.through(x, call)

    def onward(self, x: jax.Array) -> jax.Array:
        return self.layer.normed(x)

    def logits(self, x: jax.Array, products: Products) -> Logits:
        return self.layer.logits(x, products)


class Eagle3Weights(NamedTuple):
    """An EAGLE-3 head (Li et al., arXiv 2503.01840, section 3); drafts are chains, not trees.

    One product projects the model's residual stream before a low, a middle and a high layer to the head's hidden size.
    The queries, keys and values of its one layer are computed from the concatenation of the token's embedding and this
    hidden state, each normalised on its own. Further drafts use the layer's output before the final norm as hidden
    state. The output head covers only the frequent token ids of the model. Tensor names and structure follow vLLM's
    `llama_eagle3.py` and SafeAILab/EAGLE's `cnets.py`.

    Vectors are float32; matrices are packed as the products read them.

    fuse: `[D, taps * D of the model]`. token_norm, hidden_norm, mlp_norm, final_norm: `[D]`.
    qkv: `[(H + 2 KV) Dh, 2 D]`. output: `[D, H Dh]`. gate_up: `[2 F, D]`. down: `[D, F]`. head: `[V', D]`.
    ids: i32 `[V']`, the model's token id for each of the head's, all distinct; None: the ids are the same.
    embed: `[V, D]`, as in the checkpoint; None: the model's.
    """

    fuse: jax.Array
    token_norm: jax.Array
    hidden_norm: jax.Array
    qkv: jax.Array
    output: jax.Array
    mlp_norm: jax.Array
    gate_up: jax.Array
    down: jax.Array
    final_norm: jax.Array
    head: jax.Array
    ids: jax.Array | None
    embed: jax.Array | None


def eagle3_form(layer: ModelSpec, taps: tuple[int, ...], *, norm_before_residual: bool) -> HeadForm:
    """The form of an EAGLE-3 head.

    layer: the spec of a model of the one layer. norm_before_residual: the residual stream starts with the normalised
    hidden state instead of the hidden state itself.
    """
    bind = functools.partial(_Eagle3Head, layer, norm_before_residual)
    return HeadForm(layer, bind, taps)


@dataclass(frozen=True, slots=True)
class _Eagle3Head:
    layer: ModelSpec
    norm_before_residual: bool
    weights: Eagle3Weights
    spec: ModelSpec
    model: Decoder

    @property
    def config(self) -> ModelConfig:
        return self.layer.config

    def made(self, seen: jax.Array, used: jax.Array) -> jax.Array:
        products = self.layer.products or ROWS_LEFT
        return products.for_rows(used).linear(self.weights.fuse, seen)

    def over(self, before: jax.Array, tokens: jax.Array, call: Call) -> Iterator[jax.Array]:
        weights, config, products = self.weights, self.config, call.products
        token = rms_norm(self.embedded(tokens), weights.token_norm, config.rms_norm_eps)
        normed = rms_norm(before, weights.hidden_norm, config.rms_norm_eps)
        residual = normed if self.norm_before_residual else before
        qkv = products.linear(weights.qkv, jnp.concatenate([token, normed], axis=1))
        x = products.linear(weights.output, call.attend(0, qkv, AttentionWeights()), residual=residual)
        norm = Norm(weights.mlp_norm, config.rms_norm_eps)
        inner = products.gated(weights.gate_up, x, norm=norm, activation=config.hidden_act)
        yield products.linear(weights.down, inner, residual=x)

    def onward(self, x: jax.Array) -> jax.Array:
        return x

    def embedded(self, tokens: jax.Array) -> jax.Array:
        """float32 `[N, D]` of `tokens [N]`."""
        if self.weights.embed is not None:
            return looked_up(self.weights.embed, tokens)
        return self.model.embedded(tokens, self.spec.products or ROWS_LEFT)

    def logits(self, x: jax.Array, products: Products) -> Logits:
        norm = Norm(self.weights.final_norm, self.config.rms_norm_eps)
        known, ids = products.head(self.weights.head, norm, x), self.weights.ids  # logits of V' tokens
        if ids is None:
            return known
        by_row = isinstance(known, ByRow)
        some = known.values if isinstance(known, ByRow) else known
        count, size = len(x), self.spec.config.vocab_size
        every = jnp.full((count, size) if by_row else (size, count), -jnp.inf, some.dtype)
        at = every.at[:, ids] if by_row else every.at[ids]
        whole = at.set(some, unique_indices=True, mode="promise_in_bounds")
        return ByRow(whole) if by_row else whole
