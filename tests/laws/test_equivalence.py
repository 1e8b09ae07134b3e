"""Law 1: tokens and logprob bits of a request are those of the same request run alone. And the test can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import jax
import numpy as np
import pytest

from tests.support.device import edit_cache, poison_free_slots, read_cache
from tests.support.faults import (
    FAULTY,
    attend_everything_writes,
    attend_one_key_too_far,
    noise_keyed_by_slot,
    top_k_of_the_batch,
)
from tests.support.models import BOTH_LANES, TINY
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.cases import draw_cases
from xla_engine.equivalence.schedule import run_alone
from xla_engine.equivalence.verify import verify
from xla_engine.observability.observer import Observer
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import Events, Plan


def test_embedded_model_alone_equals_batched(embedded: XlaBatchEngine) -> None:
    """At least 200 distinct random requests, B_max 16, random arrivals, lag 0 and 1: no bit differs."""
    assert embedded.max_num_seqs == 16
    cases = draw_cases(embedded, 220, seed=0, every_field=True)
    assert len({(case.prompt_token_ids, str(case.params)) for case in cases}) == 220
    report = verify(embedded, requests=220, schedules=2, seed=0, lags=(0, 1))
    assert report.lines() and report.ok, "\n".join(report.lines())
    assert report.compared.tokens > 1500
    assert report.admitted_mid_stream > 150
    assert report.aborted_neighbours > 0
    assert report.finish_reasons["stop"] > 0, "some requests must end by a stop id"
    assert set(report.finish_reasons) == {"length", "stop"}
    assert any(case.params.max_tokens == 1 for case in cases)
    assert report.compiles_after_warmup == 0


def test_what_is_verified_has_every_field_that_changes_a_bit(embedded: XlaBatchEngine) -> None:
    """Exceptions: `n` makes several requests with their own seeds; `test_sampling_features` and
    `test_scoring` compare prompt_logprobs; `test_truncation` compares truncated prompts."""
    pytest.importorskip("llguidance")
    drawn = [case.params for case in draw_cases(embedded, 220, seed=0, every_field=True)]
    plain = SamplingParams()
    known = {field.name for field in fields(SamplingParams)}
    never = {name for name in known if all(getattr(each, name) == getattr(plain, name) for each in drawn)}
    text_only = {"include_stop_str_in_output", "skip_special_tokens", "detokenize"}
    dry = {name for name in known if name.startswith("dry_")} | {"penalty_last_n"}  # `tests.graphs.test_dry`
    of_prompts = {"prompt_logprobs", "logprobs_start", "truncate_prompt_tokens"}
    assert never == {"n"} | of_prompts | text_only | dry


@pytest.mark.parametrize(
    ("attention", "dtype"),
    [
        ("auto", "bfloat16"),
        pytest.param("xla", "bfloat16", marks=pytest.mark.full),
        pytest.param("auto", "float32", marks=pytest.mark.full),
        pytest.param("xla", "float32", marks=pytest.mark.release),
    ],
)
def test_tiny_model_alone_equals_batched(
    make_engine: Callable[..., XlaBatchEngine], dtype: str, attention: str
) -> None:
    config = replace(BOTH_LANES, attention_backend=attention)
    if (attention, dtype) == ("xla", "bfloat16"):
        config = replace(config, prefill_lanes=(8,))  # the others see to the number of lanes
    engine = make_engine(config, dtype=dtype)
    requests = 80 if attention == "xla" else 200  # pure JAX takes four times as long
    report = verify(engine, requests=requests, schedules=4, seed=1, lags=(0, 1, 3, 1))
    assert report.ok, "\n".join(report.lines())


@pytest.mark.full
def test_other_configurations_give_the_same_bits(make_engine: Callable[..., XlaBatchEngine]) -> None:
    """Level B in bfloat16: batch width, lane counts, key buckets and chunk size change no bit.

    Sizes are those of real models in one respect: whole vectors of vocabulary and heads of at least 32.
    """
    model = replace(TINY, vocab_size=256, head_dim=32)
    config = replace(BOTH_LANES, max_num_seqs=16)
    base = make_engine(config, model=model)
    if jax.default_backend() != "cpu" and not base.runner.has_one_row_code:
        pytest.skip("level B is promised on CPUs and NVIDIA GPUs")
    other_sizes = replace(config, max_num_seqs=8, prefill_lanes=(4,), chunk_size=32, key_buckets=(512,))
    others = [
        make_engine(replace(config, max_num_seqs=32), model=model),
        make_engine(other_sizes, model=model),
    ]
    for case in draw_cases(base, 60, seed=2):
        expected = run_alone(base, case)
        for engine in others:
            found = run_alone(engine, case)
            assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)


def test_stale_nan_in_free_slots_changes_nothing(make_engine: Callable[..., XlaBatchEngine]) -> None:
    """Every free slot is filled with NaN before every turn; the next request must not notice."""
    engine = make_engine()
    cases = draw_cases(engine, 40, seed=3)
    expected = {case.request_id: run_alone(engine, case) for case in cases}
    found: dict[str, Any] = {}
    pending = list(cases)
    engine.lag = 0
    while len(found) < len(cases):
        poison_free_slots(engine)
        for _ in range(3):
            if pending:
                case = pending.pop()
                engine.submit(case.prompt_token_ids, case.params, request_id=case.request_id)
        for output in engine.step():
            if output.finished:
                found[output.request_id] = output.outputs[0]
    assert found == expected


def test_slots_not_named_by_a_step_keep_their_bytes(make_engine: Callable[..., XlaBatchEngine]) -> None:
    """Prefill and decode write the rows and positions of the plan, and no other byte."""
    engine = make_engine()
    engine.lag = 0
    rng = np.random.default_rng(5)
    edit_cache(
        engine.runner, lambda _, __, b: rng.standard_normal(b.shape).astype(np.float32).astype(b.dtype)
    )
    engine.submit([5] * 20, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), request_id="long")
    engine.step()
    engine.submit([7] * 9, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), request_id="short")
    while engine.has_unfinished:
        before = read_cache(engine.runner)
        plan = engine.scheduler.snapshot()
        lengths = {view.slot.index: view.position for view in plan.slots if view.request is not None}
        engine.step()
        named = {*lengths, *(view.slot.index for view in engine.snapshot().slots if view.request is not None)}
        # A request admitted and handed over within the step was in the lowest free slot.
        named.add(min(set(range(8)) - set(lengths), default=0))
        untouched = [index for index in range(8) if index not in named]
        for (old_k, old_v), (new_k, new_v) in zip(before, read_cache(engine.runner), strict=True):
            for old, new in ((old_k, new_k), (old_v, new_v)):
                assert bits(old[untouched]) == bits(new[untouched])
                for index in lengths:  # a decoding row: everything before its new position
                    done = lengths[index]
                    assert bits(old[index, :, : done - 1]) == bits(new[index, :, : done - 1])
                    assert bits(old[index, :, done + 2 :]) == bits(new[index, :, done + 2 :])


def test_an_inactive_slot_survives_a_thousand_steps(tiny: XlaBatchEngine) -> None:
    """No request, short or long, writes a byte into a slot that the step's plan does not name."""
    named: set[int] = set()

    def others() -> dict[int, list[bytes]]:
        """The bytes of all slots that no plan has named."""
        layers = read_cache(tiny.runner)
        free = set(range(tiny.config.device_rows)) - named
        return {slot: [bits(k[slot]) + bits(v[slot]) for k, v in layers] for slot in free}

    run_alone(tiny, draw_cases(tiny, 1, seed=6)[0])

    def see(plan: Plan) -> None:
        named.update(part.slot.index for part in (*plan.chunks, *plan.decode))

    tiny.observers.add(observer := Observer(started=see))
    for _ in range(16):  # 16 x 64 steps of one live row
        named.clear()
        before = others()
        tiny.submit([9] * 8, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        tiny.drain()
        after = others()
        assert len(named) == 1 and after == {slot: before[slot] for slot in after}
        named.clear()
        tiny.submit([3, 4], SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
        tiny.step()
        middle = others()
        tiny.drain()
        assert len(named) == 1 and middle == others()
    tiny.observers.remove(observer)


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize(
    ("target", "fault"),
    [
        ("xla_engine.graphs.attention.xla.XlaAttention.attend_decode", attend_one_key_too_far),
        ("xla_engine.graphs.steps.decode.sample", noise_keyed_by_slot),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in (
                ("xla_engine.graphs.steps.decode.sample", top_k_of_the_batch),
                ("xla_engine.graphs.attention.xla.XlaAttention.attend_decode", attend_everything_writes),
            )
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_fault_is_caught(
    monkeypatch: pytest.MonkeyPatch, make_engine: Callable[..., XlaBatchEngine], target: str, fault: Any
) -> None:
    monkeypatch.setattr(target, fault)
    report = verify(make_engine(FAULTY), requests=80, schedules=2, seed=4)
    assert not report.ok
    assert report.divergences and "alone" in str(report.divergences[0])


def test_credit_to_the_wrong_epoch_is_caught(
    monkeypatch: pytest.MonkeyPatch, make_engine: Callable[..., XlaBatchEngine]
) -> None:
    """Without the epochs of slots, the late tokens of a request would go to the next of its name and slot."""
    engine = make_engine(FAULTY)
    peers = engine.max_num_seqs - 1  # so that the slot is the same
    prompt, params = [3, 1, 4, 1, 5], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def tokens_after_resubmission() -> tuple[int, ...]:
        engine.lag = 3
        for peer in range(peers):
            engine.submit([peer], replace(params, max_tokens=40), request_id=f"peer {peer}")
        engine.submit([9, 9, 9], replace(params, max_tokens=20), request_id="twice")
        for _ in range(4):
            engine.step()
        engine.abort("twice")
        engine.submit(prompt, params, request_id="twice")
        ended = [output for output in engine.drain() if output.request_id == "twice"]
        return ended[-1].outputs[0].token_ids

    engine.submit(prompt, params)
    (alone,) = engine.drain()
    assert tokens_after_resubmission() == alone.outputs[0].token_ids
    monkeypatch.setattr(Events, "rows", property(lambda events: events._rows))
    assert tokens_after_resubmission() != alone.outputs[0].token_ids


def test_the_oracle_shares_nothing_but_the_model() -> None:
    """The reference imports neither cache, sampler nor scheduler, so it cannot repeat their faults."""
    import ast
    import inspect

    import xla_engine.equivalence.forward_pass as reference

    names = {
        node.module
        for node in ast.walk(ast.parse(inspect.getsource(reference)))
        if isinstance(node, ast.ImportFrom)
    }
    assert not names & {
        "xla_engine.graphs.attention.gpu",
        "xla_engine.graphs.attention.native",
        "xla_engine.graphs.attention.xla",
        "xla_engine.graphs.sampling.sampler",
        "xla_engine.graphs.sampling.threshold",
        "xla_engine.graphs.steps.decode",
        "xla_engine.graphs.steps.prefill",
        "scheduler",
    }
