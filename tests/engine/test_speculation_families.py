"""Speculation changes no bit of models of other kinds: recurrent layers, rings, experts, eight bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_engine.graphs.steps.verify as verify_module
from tests.engine.test_speculation import known, run, seen
from tests.graphs.test_hybrid import MODEL as HYBRID
from tests.support.device import edit_cache
from tests.support.models import TINY, tiny_checkpoint
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.speculation.proposer import Proposer, Recorded
from xla_engine.engine.speculation.suffix import SuffixProposer
from xla_engine.equivalence.cases import Case, draw_cases
from xla_engine.graphs.config import FULL, SLIDING
from xla_engine.graphs.row_state.rows import unpack_rows
from xla_engine.outputs import RequestOutput
from xla_engine.sampling_params import SamplingParams

WIDTH = 4
CONFIG = EngineConfig(
    max_num_seqs=8, max_model_len=200, prefill_lanes=(2,), chunk_size=16, enable_prefix_caching=False
)
SPECULATING = {"method": "suffix", "num_speculative_tokens": WIDTH - 1}
DENSE = replace(HYBRID, layer_types=(), delta=None, experts=None, mlp_only_layers=(), attn_output_gate=False)
MODELS = {
    "hybrid": HYBRID,
    "hybrid without experts": replace(HYBRID, experts=None, mlp_only_layers=()),
    "experts": replace(DENSE, experts=HYBRID.experts),
    "ring": replace(TINY, layer_types=(SLIDING, FULL), sliding_window=20, max_position_embeddings=1024),
}
RING = replace(CONFIG, max_model_len=700)  # rings of 256 positions come round


def engines(name: str) -> tuple[XlaBatchEngine, XlaBatchEngine]:
    """Without and with speculation."""
    config = RING if name == "ring" else CONFIG
    checkpoint = tiny_checkpoint(model=MODELS[name])
    return (
        XlaBatchEngine(checkpoint, None, config),
        XlaBatchEngine(checkpoint, None, replace(config, speculative_config=SPECULATING)),
    )


def cases_of(engine: XlaBatchEngine, seed: int) -> list[Case]:
    cases = draw_cases(engine, 16, seed=seed, max_new_tokens=40, every_field=True)
    return [replace(case, params=replace(case.params, n=1)) for case in cases]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("hybrid", marks=pytest.mark.full),
        *(pytest.param(each, marks=pytest.mark.release) for each in MODELS if each != "hybrid"),
    ],
)
def test_no_family_s_bits_change(name: str) -> None:
    """With right, wrong, half right and looked-up drafts, all lags, and preempted requests."""
    plain, other = engines(name)
    with plain, other:
        if not other.runner.has_one_row_code:
            pytest.skip("speculation needs the C++ operations")
        assert name != "ring" or not other.runner.keeps_every_position
        for lag, preempts in ((0, False), (1, True), (2, True)):
            cases = cases_of(plain, lag)
            if name == "ring":  # far behind the first round of a ring
                cases[0] = replace(
                    cases[0],
                    prompt_token_ids=tuple(at % 150 for at in range(240)),
                    params=SamplingParams(
                        temperature=1.0, max_tokens=60, seed=3, logprobs=0, ignore_eos=True
                    ),
                )
            expected = run(plain, cases, 1)
            outputs = known(expected)
            proposers: list[Proposer] = [Recorded(outputs), Recorded(outputs, 0.0), Recorded(outputs, 0.6)]
            other.lag = lag
            for proposer in (*proposers, SuffixProposer()):
                other.draft_with(proposer)
                assert seen(run(other, cases, 2, preempts=preempts)) == seen(expected)
        assert 0 < other.stats().accepted_tokens < other.stats().drafted_tokens
        assert other.stats().compiles_after_warmup == 0


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["hybrid", *(pytest.param(each, marks=pytest.mark.release) for each in ("experts", "ring"))]
)
def test_what_wrong_drafts_wrote_is_never_read(name: str) -> None:
    """Before each step, garbage is written beyond every row's length: keys, values, tokens."""
    plain, other = engines(name)
    with plain, other:
        if not other.runner.has_one_row_code:
            pytest.skip("speculation needs the C++ operations")
        params = SamplingParams(temperature=1.0, max_tokens=24, repetition_penalty=1.2, logprobs=0)
        cases = [
            Case(request_id=str(at), prompt_token_ids=(at, 6, 7) * 5, params=replace(params, seed=at))
            for at in range(6)
        ]
        expected = run(plain, cases, 1)
        other.lag = 0
        other.draft_with(Recorded(known(expected), 0.5))
        for case in cases:
            other.submit(case.prompt_token_ids, case.params, request_id=case.request_id)
        found: dict[str, RequestOutput] = {}
        while len(found) < len(cases):
            poison_behind_rows(other)
            found.update({output.request_id: output for output in other.step() if output.finished})
        assert seen(found) == seen(expected)
        assert other.stats().accepted_tokens > 0


def poison_behind_rows(engine: XlaBatchEngine) -> None:
    """Overwrite, in the rows that run, every cell that a draft may have written."""
    state = engine.runner.state
    rows = unpack_rows(state.rows, jax.eval_shape(state.make_rows))
    running = np.flatnonzero(np.asarray(rows.remaining))
    behind = np.asarray(rows.length)[running, None] + np.arange(WIDTH)

    def edit(_: int, name: str, array: np.ndarray) -> np.ndarray:
        if name in ("keys", "values"):
            array[running[:, None], :, behind % array.shape[2]] = 1e4
        return array

    edit_cache(engine.runner, edit)
    history = np.array(rows.history)
    history[running[:, None], behind] = 7
    state.rows = replace(state.rows, history=jax.device_put(history))


def _forgets_to_roll_back(commit: Callable[..., Any], form: Any, state: Any, pending: Any, **at: Any) -> Any:
    return commit(form, state, pending, **{**at, "count": jnp.where(at["count"] > 0, WIDTH, 0)})


def _forgets_the_window(commit: Callable[..., Any], form: Any, state: Any, pending: Any, **at: Any) -> Any:
    return commit(form, state, pending, **at)._replace(inputs=state.inputs)


def _forgets_the_memory(commit: Callable[..., Any], form: Any, state: Any, pending: Any, **at: Any) -> Any:
    return commit(form, state, pending, **at)._replace(memory=state.memory)


@pytest.mark.full
@pytest.mark.parametrize(
    "fault",
    [
        _forgets_to_roll_back,
        *(
            pytest.param(each, marks=pytest.mark.release)
            for each in (_forgets_the_window, _forgets_the_memory)
        ),
    ],
)
def test_recurrent_state_that_is_wrong_is_found(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = verify_module.recurrent_commit
    monkeypatch.setattr(
        verify_module, "recurrent_commit", lambda *given, **named: fault(commit, *given, **named)
    )
    checkpoint = tiny_checkpoint(model=HYBRID)
    config = replace(CONFIG, compile_cache=False, speculative_config=SPECULATING)
    with XlaBatchEngine(checkpoint, None, config) as other:
        monkeypatch.undo()
        with XlaBatchEngine(checkpoint, None, CONFIG) as plain:
            cases = cases_of(plain, 5)
            expected = run(plain, cases, 1)
            other.draft_with(Recorded(known(expected), 0.5))
            assert seen(run(other, cases, 1)) != seen(expected)
