"""The harness can fail: each fault planted here is caught, and its test says by which check.

Some faults do not depend on the batch at all. Alone and batched agree on the same wrong numbers, so `verify` is blind
to them, and the comparison with `xla_engine.equivalence.forward_pass` must see them. More faults stand beside the
checks they belong
to: in `test_equivalence`, `test_self_check` and `test_scheduler_faults`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.device import poison_free_slots
from tests.support.fake_loop import Loop
from tests.support.faults import FAULTY, attend_decode, attend_prefill, credit_goes_to_the_slot
from tests.support.models import TINY_ENGINE
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.cases import draw_cases
from xla_engine.equivalence.forward_pass import ForwardPass
from xla_engine.equivalence.schedule import run_alone
from xla_engine.equivalence.verify import verify
from xla_engine.errors import EngineClosedError
from xla_engine.graphs.ops.fixed_order_sums import sum_last
from xla_engine.graphs.row_state.rows import Extents
from xla_engine.graphs.row_state.sampling_fields import SamplingRows
from xla_engine.graphs.sampling import sampler as sampling
from xla_engine.graphs.steps import decode, prefill
from xla_engine.graphs.steps.step import StepState
from xla_engine.scheduler import Chunk, Request, SchedulerConfig
from xla_engine.scheduler.request_state import RequestState
from xla_engine.scheduler.steps.prefill import Prefilling

MakeEngine = Callable[..., XlaBatchEngine]
UNCHECKED = replace(FAULTY, self_check=False)

# -- caught by the reference only -------------------------------------------------------------------------------


def gap_to_reference(engine: XlaBatchEngine, count: int = 12) -> float:
    """Largest distance of a logprob from that of a full forward pass over the same tokens."""
    reference = ForwardPass(engine.checkpoint)
    largest = 0.0
    for case in draw_cases(engine, count, seed=10):
        found = run_alone(engine, case)
        assert found.logprobs is not None
        logits = reference.logits(case.prompt_token_ids + found.token_ids)[
            len(case.prompt_token_ids) - 1 : -1
        ]
        expected = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(found.token_ids)), found.token_ids]
        largest = max(largest, float(np.max(np.abs(expected - found.logprobs))))
    return largest


def own_key_unseen(self: Any, layer: Any, qkv: Any, call: Any, *, length: Any, live: Any) -> Any:
    """The decode mask ends one key early: the row's own key is written but not attended to."""
    layer, _ = attend_decode(self, layer, qkv, call, length=length, live=live)
    no_row = jnp.zeros_like(live)
    return layer, attend_decode(self, layer, qkv, call, length=length - 1, live=no_row)[1]


def rotates_one_further_after_a_chunk(form: Any, state: StepState, *rest: Any) -> Any:
    """RoPE positions after the first chunk are one too large."""
    chunk = FAULTY.chunk_size
    late = jnp.concatenate([state.rope[:, :chunk], state.rope[:, chunk + 1 :], state.rope[:, -1:]], axis=1)
    return prefill.prefill_chunk(form, state._replace(rope=late), *rest)


@pytest.mark.full
def test_an_honest_engine_is_close_to_the_reference(make_engine: MakeEngine) -> None:
    assert gap_to_reference(make_engine(UNCHECKED, dtype="float32")) < 1e-4


@pytest.mark.full
@pytest.mark.parametrize(
    ("target", "fault"),
    [
        ("xla_engine.graphs.attention.xla.XlaAttention.attend_decode", own_key_unseen),
        ("xla_engine.runner.programs.prefill_chunk", rotates_one_further_after_a_chunk),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_wrong_alone_as_well_is_caught_by_the_reference(
    monkeypatch: pytest.MonkeyPatch, make_engine: MakeEngine, target: str, fault: Any
) -> None:
    monkeypatch.setattr(target, fault)
    engine = make_engine(FAULTY, dtype="float32")
    assert engine.self_check is not None and engine.self_check.ok, "the self-check is blind to it"
    assert verify(engine, requests=20, schedules=1, seed=11).ok, "verify is blind to it"
    assert gap_to_reference(engine) > 1e-2


def writes_one_further_after_a_chunk(self: Any, layer: Any, qkv: Any, call: Any, lanes: Extents) -> Any:
    """Every chunk after the first is written one position too far, and attends from there."""
    start = lanes.start + (lanes.start > 0)
    return attend_prefill(self, layer, qkv, call, lanes._replace(start=start))


@pytest.mark.full
def test_a_write_one_further_after_a_chunk_is_caught_by_the_reference_and_by_verify(
    monkeypatch: pytest.MonkeyPatch, make_engine: MakeEngine
) -> None:
    """`verify` finds it as well, because the skipped position holds the key of the slot's previous owner."""
    monkeypatch.setattr(
        "xla_engine.graphs.attention.xla.XlaAttention.attend_prefill", writes_one_further_after_a_chunk
    )
    engine = make_engine(UNCHECKED, dtype="float32")
    assert gap_to_reference(engine) > 1e-2
    assert not verify(engine, requests=20, schedules=1, seed=11).ok


# -- caught by verify -------------------------------------------------------------------------------------------


def decode_counts_steps(*arguments: Any, **named: Any) -> Any:
    """A decode step that counts how often it ran, in the state of the last row, which must have no owner."""
    cache, rows, *samples = decode.decode_step(*arguments, **named)
    counted = rows.sampling.top_k.at[-1].add(1)
    return cache, replace(rows, sampling=replace(rows.sampling, top_k=counted)), *samples


def noise_keyed_by_step(logits: Any, rows: SamplingRows, position: Any, *rest: Any, **named: Any) -> Any:
    return sampling.sample(logits, rows, jnp.broadcast_to(rows.top_k[-1], position.shape), *rest, **named)


@pytest.mark.full
def test_noise_keyed_by_the_step_is_caught_by_verify(
    monkeypatch: pytest.MonkeyPatch, make_engine: MakeEngine
) -> None:
    monkeypatch.setattr("xla_engine.runner.programs.decode_step", decode_counts_steps)
    monkeypatch.setattr("xla_engine.graphs.steps.decode.sample", noise_keyed_by_step)
    report = verify(make_engine(replace(UNCHECKED, max_num_seqs=4)), requests=40, schedules=1, seed=12)
    assert report.compared.differing_tokens > 0


def in_sixteen_parts(weights: jax.Array) -> jax.Array:
    """`sum_last` over all keys at once, always in sixteen parts, so that the grouping depends on the bucket's
    length."""
    blocks, *rows, _ = weights.shape  # [J, N, KV, R, block]
    parts = jnp.moveaxis(weights, 0, 3).reshape(*rows, 16, -1)
    total = sum_last(sum_last(parts)[..., 0])[None]  # [1, N, KV, R, 1]
    return jnp.pad(total, ((0, blocks - 1), *((0, 0),) * 4))


@pytest.mark.full
def test_a_bucket_that_changes_the_order_of_sums_is_caught_by_verify_and_at_start_up(
    monkeypatch: pytest.MonkeyPatch, make_engine: MakeEngine
) -> None:
    """A fixed number of parts instead of parts of a fixed size, as in some split-KV kernels."""
    monkeypatch.setattr("xla_engine.graphs.attention.xla.sum_last", in_sixteen_parts)
    engine = make_engine(replace(TINY_ENGINE, attention_backend="xla", prefill_lanes=(2,)), dtype="float32")
    check = engine.self_check
    assert check is not None and check.row_invariant and not check.bucket_invariant
    assert verify(engine, requests=40, schedules=1, seed=13).ok, "the largest bucket alone keeps the law"
    engine.runner.sizes = engine.runner.sizes._replace(keys=engine.config.buckets(engine.max_model_len))
    report = verify(engine, requests=40, schedules=1, seed=13)
    assert report.compared.differing_bits > 0


def chunk_length_shows(self: Any, layer: Any, qkv: Any, call: Any, lanes: Extents) -> Any:
    """A machine on which the bits of a position depend on the length of its chunk."""
    layer, out = attend_prefill(self, layer, qkv, call, lanes)
    return layer, out * (1 + jnp.repeat(lanes.size, len(out) // len(lanes.slot))[:, None] * 1e-3)


def cut_shorter_under_load(original: Callable[..., Iterator[Chunk]]) -> Callable[..., Iterator[Chunk]]:
    """Chunks are halved while another prompt waits for lanes."""

    def cut(self: Prefilling, state: RequestState, count: int) -> Iterator[Chunk]:
        for chunk in original(self, state, count):
            half = self._chunk_size // 2
            if len(self) == 1 or len(chunk.tokens) <= half:
                yield chunk
            else:
                yield chunk._replace(tokens=chunk.tokens[:half], is_last=False)
                yield chunk._replace(start=chunk.start + half, tokens=chunk.tokens[half:])

    return cut


@pytest.mark.full
def test_a_cut_that_depends_on_the_load_is_caught_by_verify(
    monkeypatch: pytest.MonkeyPatch, make_engine: MakeEngine
) -> None:
    """On a machine whose bits depend on the cut. Cuts that depend on the prompt alone keep the law even there."""
    monkeypatch.setattr("xla_engine.graphs.attention.xla.XlaAttention.attend_prefill", chunk_length_shows)
    engine = make_engine(UNCHECKED)
    assert verify(engine, requests=40, schedules=1, seed=14).ok
    monkeypatch.setattr(Prefilling, "_cut", cut_shorter_under_load(Prefilling._cut))
    assert not verify(engine, requests=40, schedules=1, seed=14).ok


def test_a_cut_that_depends_on_the_load_is_caught_by_the_law_of_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a machine whose bits do not depend on the cut: the stand-in device refuses chunks that are off the grid."""
    monkeypatch.setattr(Prefilling, "_cut", cut_shorter_under_load(Prefilling._cut))
    loop = Loop(SchedulerConfig(max_num_seqs=2, chunk_size=4, max_num_batched_tokens=64))
    for name in ("a", "b"):
        loop.submit(Request(request_id=name, prompt_token_ids=(1,) * 7, max_tokens=2))
    with pytest.raises(AssertionError, match="is short"):
        loop.drain()


@pytest.mark.full
def test_credit_to_the_wrong_request_is_caught_by_verify(
    monkeypatch: pytest.MonkeyPatch, make_engine: MakeEngine
) -> None:
    """Tokens that are read late go to the row's owner at that time, which is the right one only with lag 0."""
    credit_goes_to_the_slot(monkeypatch)
    engine = make_engine(UNCHECKED)
    assert verify(engine, requests=30, schedules=1, seed=15, lags=(0,)).ok
    try:
        report = verify(engine, requests=30, schedules=1, seed=15, lags=(3,))
    except EngineClosedError as error:
        assert "ResultMismatchError" in str(error)
    else:
        assert not report.ok


# -- caught by the law of stale values --------------------------------------------------------------------------


def test_values_left_in_a_slot_are_caught_by_stale_nan(
    monkeypatch: pytest.MonkeyPatch, make_engine: MakeEngine
) -> None:
    """Without clearing V at the handover, NaN of the previous owner survives the mask: 0 * NaN."""

    def notices() -> bool:
        engine = make_engine(UNCHECKED)
        cases = draw_cases(engine, 5, seed=16)
        expected = [run_alone(engine, case) for case in cases]
        poison_free_slots(engine)
        return [run_alone(engine, case) for case in cases] != expected

    assert not notices()
    monkeypatch.setattr(
        "xla_engine.graphs.attention.xla.XlaAttention.clear_values", lambda self, layer, slot, fresh: layer
    )
    assert notices()
