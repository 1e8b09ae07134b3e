"""The shadow parity probe: it reports broken laws, nothing else, and delays no request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

import xla_engine.graphs.steps.decode as decode_module
import xla_engine.graphs.steps.verify as verify_module
from tests.engine.test_speculation import known, run, seen
from tests.graphs.test_hybrid import MODEL as HYBRID
from tests.support.models import TINY, TINY_ENGINE, tiny_checkpoint
from xla_engine.async_llm import AsyncLLM
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.speculation.proposer import Recorded
from xla_engine.equivalence.cases import Case, draw_cases
from xla_engine.errors import ConfigError
from xla_engine.graphs.sampling import sampler as sampling
from xla_engine.sampling_params import SamplingParams

SHADOWED = replace(TINY_ENGINE, prefill_lanes=(2,), shadow_rate=1.0)
SPECULATING = {"method": "suffix", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(SHADOWED, marks=pytest.mark.release),
        pytest.param(replace(SHADOWED, block_size=32, num_blocks=40), marks=pytest.mark.release),
        pytest.param(
            replace(SHADOWED, block_size=32, num_blocks=40, speculative_config=SPECULATING),
            marks=pytest.mark.full,
        ),
    ],
    ids=["slots", "blocks", "speculation in blocks"],
)
def test_it_is_quiet_where_the_law_holds(tiny: XlaBatchEngine, config: Any) -> None:
    """Finished requests run again between the steps of others and get the same bits; so do the others."""
    cases = [
        replace(case, params=replace(case.params, n=1))
        for case in draw_cases(tiny, 24, seed=2, every_field=True)
    ]
    expected = run(tiny, cases, 1)
    with XlaBatchEngine(tiny_checkpoint(), None, config) as engine:
        compiled = engine.stats().compiles_after_warmup
        assert seen(run(engine, cases, 2, preempts=True)) == seen(expected)
        assert engine.stats().shadow_requests > 0, "none ran while the engine served"
        engine.finish_shadow()
        stats = engine.stats()
        assert 10 < stats.shadow_requests <= len(cases)
        assert stats.shadow_mismatches == 0
        assert stats.compiles_after_warmup == compiled
        ended = {reason: count for reason, count in stats.finished.items() if count}
        assert ended == reasons_of(expected), "a shadow is nobody's request"


def reasons_of(outputs: Any) -> dict[str, int]:
    reasons = [str(output.outputs[0].finish_reason) for output in outputs.values()]
    return {reason: reasons.count(reason) for reason in reasons}


def _keyed_by_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise depends on the row."""

    def sample(logits: Any, rows: Any, position: Any, *rest: Any, **named: Any) -> Any:
        seed = rows.seed.at[:, 1].add(jnp.arange(len(rows.seed), dtype=rows.seed.dtype))
        return sampling.sample(logits, replace(rows, seed=seed), position, *rest, **named)

    monkeypatch.setattr(decode_module, "sample", sample)


def _accepts_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags of drafts that are right are flipped."""
    cumprod = jnp.cumprod

    class Flipped:
        cumprod = staticmethod(
            lambda values, axis: jnp.ones_like(values) if values.ndim == 2 else cumprod(values, axis=axis)
        )

        def __getattr__(self, name: str) -> Any:
            return getattr(jnp, name)

    monkeypatch.setattr(verify_module, "jnp", Flipped())


def _forgets_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """The convolution's window stays where it was before a verify step."""
    commit = verify_module.recurrent_commit
    monkeypatch.setattr(
        verify_module,
        "recurrent_commit",
        lambda form, state, *rest, **named: commit(form, state, *rest, **named)._replace(inputs=state.inputs),
    )


@pytest.mark.parametrize(
    ("plant", "model", "options"),
    [
        (_keyed_by_slot, TINY, None),
        pytest.param(_accepts_too_much, TINY, SPECULATING, marks=pytest.mark.release),
        pytest.param(_forgets_the_window, HYBRID, SPECULATING, marks=pytest.mark.release),
    ],
)
def test_it_finds_planted_faults(
    plant: Callable[[pytest.MonkeyPatch], None],
    model: Any,
    options: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoint = tiny_checkpoint(model=model)
    base = replace(SHADOWED, max_model_len=200, max_num_seqs=4, enable_prefix_caching=False)
    params = SamplingParams(temperature=1.0, max_tokens=24, logprobs=0, ignore_eos=True)
    cases = [
        Case(request_id=str(seed), prompt_token_ids=(5, 6, 7), params=replace(params, seed=seed))
        for seed in range(4)
    ]
    with XlaBatchEngine(checkpoint, None, replace(base, shadow_rate=0.0)) as sound:
        outputs = known(run(sound, cases, 1))
    plant(monkeypatch)
    config = replace(base, compile_cache=False, self_check=options is not None, speculative_config=options)
    with XlaBatchEngine(checkpoint, None, config) as engine:
        monkeypatch.undo()
        if options is not None:
            engine.draft_with(Recorded(outputs, 0.5))
        with caplog.at_level(logging.ERROR, logger="xla_engine.shadow"):
            run(engine, cases, 1)
            engine.finish_shadow()
        assert engine.stats().shadow_mismatches > 0
        assert "differs from its repetition" in caplog.text


@pytest.mark.full
def test_a_probe_that_fails_harms_nobody(
    tiny: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure of the probe ends the probe; after a fault of the engine, its request starts again."""
    cases = [replace(case, params=replace(case.params, n=1)) for case in draw_cases(tiny, 10, seed=4)]
    expected = run(tiny, cases, 1)
    with XlaBatchEngine(tiny_checkpoint(), None, SHADOWED) as engine:
        engine.submit(cases[0].prompt_token_ids, cases[0].params, request_id="first")
        engine.drain()
        start, failed = engine.runner.start, []

        def fails_once(plan: Any, *rest: Any) -> Any:
            if not failed and plan.step:
                failed.append(plan.step)
                raise RuntimeError("planted")
            return start(plan, *rest)

        monkeypatch.setattr(engine.runner, "start", fails_once)
        for case in cases:
            engine.submit(case.prompt_token_ids, case.params, request_id=case.request_id)
        found = {output.request_id: output for output in engine.drain()}
        assert failed and seen(found) == seen(expected)
        engine.finish_shadow()
        assert engine.stats().shadow_requests == len(cases) + 1 and not engine.stats().shadow_mismatches
        monkeypatch.setattr(engine.runner, "start", start)

        def fails_for_the_probe(plan: Any, *rest: Any) -> Any:
            if any(row.request_id == "shadow" for row in plan.decode):
                raise RuntimeError("planted")
            return start(plan, *rest)

        monkeypatch.setattr(engine.runner, "start", fails_for_the_probe)
        recoveries = engine.stats().recoveries
        with caplog.at_level(logging.WARNING, logger="xla_engine.shadow"):
            assert seen(run(engine, cases, 3)) == seen(expected)
            engine.finish_shadow()
        assert "is now off" in caplog.text
        assert engine.stats().recoveries == recoveries


def test_a_rate_is_a_share() -> None:
    for wrong in (-0.1, 1.5, True, "1"):
        with pytest.raises(ConfigError, match="shadow_rate must be a number from 0 to 1"):
            replace(TINY_ENGINE, shadow_rate=wrong)


def test_without_it_nothing_changes(tiny: XlaBatchEngine) -> None:
    assert tiny.state.shadow is None
    assert tiny.config.device_rows == tiny.config.num_slots
    assert "shadow_rate" not in tiny.config.options()


def test_it_works_while_nobody_asks_for_anything() -> None:
    """On an idle server the probe works; a request that arrives meanwhile gets the usual bits."""

    async def main() -> None:
        engine = XlaBatchEngine(tiny_checkpoint(), None, SHADOWED)
        llm, params = (
            AsyncLLM.from_engine(engine),
            SamplingParams(max_tokens=12, temperature=0, ignore_eos=True),
        )
        tokens = [[output async for output in llm.generate([5, 7, 9], params)][-1].outputs[0].token_ids]
        until = time.monotonic() + 600
        while engine.stats().shadow_requests < 1:
            assert time.monotonic() < until, "the probe stands still"
            await asyncio.sleep(0.01)
        for _ in range(3):
            tokens.append(
                [output async for output in llm.generate([5, 7, 9], params)][-1].outputs[0].token_ids
            )
        assert len(set(tokens)) == 1
        await asyncio.wait_for(llm.close(), 300)
        assert engine.stats().shadow_mismatches == 0

    asyncio.run(main())
