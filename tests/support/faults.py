"""Planted faults: each breaks a law, and a check must say so."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import pytest

from tests.support.models import TINY_ENGINE
from xla_engine.graphs.attention.xla import XlaAttention
from xla_engine.graphs.row_state.sampling_fields import SamplingRows
from xla_engine.graphs.sampling import sampler as sampling
from xla_engine.scheduler import Chunk, Events, Plan, Scheduler, StepResult

# Without a prefix cache slots are used again at once, and so what their owners before left in them matters most.
FAULTY = replace(
    TINY_ENGINE,
    attention_backend="xla",
    max_model_len=64,
    prefill_lanes=(2,),
    key_buckets=(256,),
    enable_prefix_caching=False,
)


attend_decode, attend_prefill = XlaAttention.attend_decode, XlaAttention.attend_prefill  # without faults


def attend_one_key_too_far(self: Any, layer: Any, qkv: Any, call: Any, *, length: Any, live: Any) -> Any:
    """The mask shows the position after the row's own: what the previous occupant left there."""
    layer, _ = attend_decode(self, layer, qkv, call, length=length, live=live)
    no_row = jnp.zeros_like(live)
    return layer, attend_decode(self, layer, qkv, call, length=length + 1, live=no_row)[1]


def noise_keyed_by_slot(logits: Any, rows: SamplingRows, position: Any, *rest: Any, **named: Any) -> Any:
    slot = jnp.arange(position.shape[0], dtype=jnp.uint32)
    return sampling.sample(logits, replace(rows, seed=rows.seed + slot[:, None]), position, *rest, **named)


def top_k_of_the_batch(logits: Any, rows: SamplingRows, position: Any, *rest: Any, **named: Any) -> Any:
    widest = jnp.broadcast_to(jnp.max(rows.top_k), rows.top_k.shape)
    return sampling.sample(logits, replace(rows, top_k=widest), position, *rest, **named)


def attend_everything_writes(self: Any, layer: Any, qkv: Any, call: Any, *, live: Any, **rest: Any) -> Any:
    """Inactive rows write too: a row that is between chunks of its prompt loses a key."""
    return attend_decode(self, layer, qkv, call, live=jnp.ones_like(live), **rest)


def credit_goes_to_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a token went to the request that holds the row now."""
    commit = Scheduler.commit

    def careless(self: Scheduler, plan: Plan, result: StepResult) -> Events:
        holders = {state.slot.index: state for state in self.states.values() if state.holds_slot}

        def today(part):  # type: ignore[no-untyped-def]
            state = holders.get(part.slot.index)
            change = part._replace if isinstance(part, Chunk) else partial(replace, part)
            return change(slot=state.slot, request_id=state.request_id) if state else part

        plan = replace(plan, chunks=tuple(map(today, plan.chunks)), decode=tuple(map(today, plan.decode)))
        return commit(self, plan, result)

    monkeypatch.setattr(Scheduler, "commit", careless)
