"""Law 1 for other kinds of layers: recurrent state in addition to keys and values, routed experts in place of MLPs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.device import edit_cache, read_cache
from tests.support.models import TINY, tiny_checkpoint
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.cases import draw_cases
from xla_engine.equivalence.schedule import run_alone
from xla_engine.equivalence.verify import verify
from xla_engine.graphs.config import DeltaForm, RoutedExperts
from xla_engine.graphs.delta_net.layer import DeltaState

MODEL = replace(  # whole tiles throughout, so that every C++ operation serves where it can
    TINY,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=2,
    layer_types=("linear_attention", "full_attention"),
    attn_output_gate=True,
    qk_norm="head",
    delta=DeltaForm(key_heads=2, value_heads=4, key_dim=16, value_dim=32, kernel=4, norm_eps=1e-6),
    experts=RoutedExperts(
        num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=64
    ),
    mlp_only_layers=(1,),
)
CONFIG = EngineConfig(max_num_seqs=8, max_model_len=200, prefill_lanes=(2,), chunk_size=16)


@pytest.fixture(scope="module")
def hybrid() -> Iterator[XlaBatchEngine]:
    with XlaBatchEngine(tiny_checkpoint(model=MODEL), None, CONFIG) as engine:
        yield engine


def test_a_request_alone_is_that_among_peers(hybrid: XlaBatchEngine) -> None:
    assert hybrid.self_check is not None and hybrid.self_check.ok, hybrid.self_check
    report = verify(hybrid, requests=120, schedules=3, seed=1, lags=(0, 1, 3))
    assert report.ok, "\n".join(report.lines())
    assert report.admitted_mid_stream > 60 and report.compiles_after_warmup == 0
    assert report.preempted > 0, "state must come back as it was taken away"


def test_nothing_of_a_former_owner_reaches_the_next(hybrid: XlaBatchEngine) -> None:
    """Free slots hold NaN in state, keys and values before every turn; the next request there must not notice."""
    cases = draw_cases(hybrid, 30, seed=3)
    expected = {case.request_id: run_alone(hybrid, case) for case in cases}
    found: dict[str, Any] = {}
    pending = list(cases)
    hybrid.lag = 0
    while len(found) < len(cases):
        busy = [view.slot.index for view in hybrid.snapshot().slots if view.request is not None]
        free = [index for index in range(hybrid.config.device_rows) if index not in busy]

        def poison(_: int, __: str, array: np.ndarray, free: list[int] = free) -> np.ndarray:
            array[free] = np.nan
            return array

        edit_cache(hybrid.runner, poison)
        for _ in range(3):
            if pending:
                case = pending.pop()
                hybrid.submit(case.prompt_token_ids, case.params, request_id=case.request_id)
        for output in hybrid.step():
            if output.finished:
                found[output.request_id] = output.outputs[0]
    hybrid.lag = hybrid.config.lag
    assert found == expected


def test_kinds_of_layers_lie_side_by_side(hybrid: XlaBatchEngine) -> None:
    """Linear layers keep state of a fixed size and no keys."""
    kinds = [isinstance(store, DeltaState) for store in hybrid.runner._state.cache]
    assert kinds == [True, False]
    inputs, memory = read_cache(hybrid.runner)[0]
    assert inputs.shape == (8, 3, 192) and memory.shape == (8, 4, 16, 32)
