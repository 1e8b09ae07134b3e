"""Device state of the rows: everything a decode step needs to know about a request, one entry per slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graphs.widths import MAX_LOGIT_BIAS

NO_CHOICE = -2  # in place of a sampled token: the row's logits were no numbers, or excluded every token


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """Sampling parameters, one entry per row; N is B for the decode state and P for prefill lanes.

    temperature: f32 `[N]`, 0 is greedy.
    top_k: i32 `[N]`, 0 keeps all.   top_p: f32 `[N]`, 1 keeps all.   min_p: f32 `[N]`, 0 keeps all.
    repetition_penalty: f32 `[N]`, 1 changes nothing.
    frequency_penalty, presence_penalty: f32 `[N]`, 0 changes nothing.
    has_bias, has_mask: bool `[N]`, the slot's entries in the `Tables` apply.
    seed: u32 `[N, 2]`, the 64-bit seed as (high, low).
    num_logprobs: i32 `[N]`, -1 none, 0 the chosen token's, n > 0 also those of the n most likely tokens.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    frequency_penalty: jax.Array
    presence_penalty: jax.Array
    has_bias: jax.Array
    has_mask: jax.Array
    seed: jax.Array
    num_logprobs: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Wide data that few requests bring, one entry per slot. The host replaces the record when a slot's entry changes.

    A graph reads it only in steps where a live row has it, so the entries of other slots may be stale.

    bias_ids: i32 `[B, MAX_LOGIT_BIAS]`, padded with the vocabulary's size.   bias: f32, the same shape.
    block_tables: i32 `[B, max_blocks]`, the pages of each slot; None where slots are contiguous.
    mask: u32 `[B, ceil(V / 32)]`, bit `t % 32` of word `t // 32` is set where token t is allowed.
    """

    bias_ids: jax.Array
    bias: jax.Array
    mask: jax.Array
    block_tables: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The engine's device state besides the cache.

    token: i32 `[B]`, the last sampled token, input of the next step.
    length: i32 `[B]`, valid KV entries; also the index at which `token`'s KV will be written.
    remaining: i32 `[B]`, tokens the row may still sample; 0 means the row is done.
    min_remaining: i32 `[B]`, tokens the row must still sample before it may sample a stop id.
    stop_ids: i32 `[B, E]`, ids that end the row, padded with -1.
    prompt_length: i32 `[B]`, tokens of the prompt.
    history: i32 `[B, S]`, the tokens themselves by position, written as their KV is: valid up to `length`.
    sampling: the request's sampling parameters.

    A row is active while `remaining > 0`; sampling a stop id sets it to 0 on the device, so that a step
    dispatched before the host has seen the token is already right.
    """

    token: jax.Array
    length: jax.Array
    remaining: jax.Array
    min_remaining: jax.Array
    stop_ids: jax.Array
    prompt_length: jax.Array
    history: jax.Array
    sampling: SamplingRows


def make_sampling_rows(count: int) -> SamplingRows:
    """Greedy rows that want nothing else, as host arrays."""
    host: Any = np  # the records are declared for the arrays a graph sees
    return SamplingRows(
        temperature=host.zeros(count, np.float32),
        top_k=host.zeros(count, np.int32),
        top_p=host.ones(count, np.float32),
        min_p=host.zeros(count, np.float32),
        repetition_penalty=host.ones(count, np.float32),
        frequency_penalty=host.zeros(count, np.float32),
        presence_penalty=host.zeros(count, np.float32),
        has_bias=host.zeros(count, np.bool_),
        has_mask=host.zeros(count, np.bool_),
        seed=host.zeros((count, 2), np.uint32),
        num_logprobs=host.full(count, -1, np.int32),
    )


def make_tables(count: int, vocabulary: int, max_blocks: int | None = None) -> Tables:
    """No bias, everything allowed, no pages, as host arrays."""
    host: Any = np
    return Tables(
        bias_ids=host.full((count, MAX_LOGIT_BIAS), vocabulary, np.int32),
        bias=host.zeros((count, MAX_LOGIT_BIAS), np.float32),
        mask=host.full((count, -(-vocabulary // 32)), 0xFFFFFFFF, np.uint32),
        block_tables=None if max_blocks is None else host.zeros((count, max_blocks), np.int32),
    )


def make_rows(count: int, stop_width: int, positions: int) -> Rows:
    """All rows inactive. positions: S, as in the cache."""
    return Rows(
        token=jnp.zeros(count, jnp.int32),
        length=jnp.zeros(count, jnp.int32),
        remaining=jnp.zeros(count, jnp.int32),
        min_remaining=jnp.zeros(count, jnp.int32),
        stop_ids=jnp.full((count, stop_width), -1, jnp.int32),
        prompt_length=jnp.zeros(count, jnp.int32),
        history=jnp.zeros((count, positions), jnp.int32),
        sampling=jax.tree.map(jnp.asarray, make_sampling_rows(count)),
    )


def remaining_after(token: jax.Array, remaining: jax.Array, stop_ids: jax.Array) -> jax.Array:
    """Tokens left after sampling `token [N]`: one fewer, or none after a stop id or NO_CHOICE."""
    stopped = jnp.any(token[:, None] == stop_ids, axis=1) | (token == NO_CHOICE)
    return jnp.where(stopped, 0, remaining - 1)


def pack_samples(token: jax.Array, logprob: jax.Array) -> jax.Array:
    """Tokens and logprobs as one i32 `[2, N]`: one small copy to the host instead of two."""
    return jnp.stack([token, jax.lax.bitcast_convert_type(logprob, jnp.int32)])


def unpack_samples(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Host side of `pack_samples`: token ids i32 `[N]` (-1: it did not run; or NO_CHOICE), logprobs f32 `[N]`."""
    return packed[0], packed[1].view(np.float32)
