"""Decode programs of few rows: which there are, when they run, and that they change no bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.graphs.test_hybrid import MODEL as HYBRID
from tests.support.models import TINY, TINY_ENGINE
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.cases import draw_cases
from xla_engine.graphs.attention.gpu import GpuAttention
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.forms import RoutedExperts
from xla_engine.graphs.linear.gpu import GpuProducts
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.graphs.steps.decode import decode_few_rows
from xla_engine.runner.compile_cache import compiles_of_this_thread
from xla_engine.runner.runner import Runner
from xla_engine.runner.sizing import few_rows

MakeEngine = Callable[..., XlaBatchEngine]
FEW = (1, 4)
SLOTS = replace(TINY_ENGINE, max_num_seqs=16)
BLOCKS = replace(SLOTS, num_blocks=100, block_size=32)
DRAFTS = replace(SLOTS, speculative_config={"method": "suffix", "num_speculative_tokens": 3})


def exact(make_engine: MakeEngine, config: EngineConfig, model: ModelConfig = TINY) -> XlaBatchEngine:
    engine = make_engine(config, model=model)
    if not engine.runner.has_one_row_code:
        pytest.skip("no C++ products for this model on this CPU")
    return engine


def ending_one_by_one(engine: XlaBatchEngine, seed: int, lag: int) -> list[Any]:
    """Tokens and logprob bits of eight requests that end after 4, 8, ... 32 tokens; some are preempted."""
    cases = draw_cases(engine, 8, seed, every_field=True)
    engine.lag = lag
    ids = [
        engine.submit(
            case.prompt_token_ids[:40],
            replace(
                case.params,
                n=1,
                max_tokens=4 * turn,
                seed=turn,
                min_tokens=0,
                stop_token_ids=(),
                ignore_eos=True,
            ),
        )
        for turn, case in enumerate(cases, 1)
    ]
    done = {}
    while len(done) < len(ids):
        done.update({output.request_id: output.outputs[0] for output in engine.step() if output.finished})
        if engine.stats().steps % 7 == 0 and engine.ways_to_preempt:
            engine.preempt(ids[-1])
    engine.scheduler.check()
    return [(done[each].token_ids, done[each].logprobs, done[each].finish_reason) for each in ids]


@pytest.mark.parametrize(
    ("config", "model"),
    [
        pytest.param(SLOTS, TINY, id="slots"),
        pytest.param(BLOCKS, TINY, id="blocks", marks=pytest.mark.release),
        pytest.param(DRAFTS, TINY, id="speculation", marks=pytest.mark.release),
        pytest.param(replace(SLOTS, quantization="int8"), TINY, id="int8", marks=pytest.mark.release),
        pytest.param(SLOTS, HYBRID, id="recurrent layers and experts", marks=pytest.mark.release),
    ],
)
def test_the_switch_between_programs_changes_no_bit(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, config: EngineConfig, model: ModelConfig
) -> None:
    engine = exact(make_engine, config, model)
    assert engine.runner.sizes.few == FEW
    before = compiles_of_this_thread()
    ran: Counter[str] = Counter()
    run = engine.runner.dispatch.run
    monkeypatch.setattr(
        engine.runner.dispatch,
        "run",
        lambda name, work: ran.update([name.split("keys")[0]]) or run(name, work),
    )
    for lag in (0, 1, 2):
        engine.runner.sizes = engine.runner.sizes._replace(few=FEW)
        ran.clear()
        found = ending_one_by_one(engine, lag, lag)
        # else every step may check drafts, on as few lanes as there are rows
        if config.speculative_config is None:
            assert all(ran[f"decode[rows={rows},"] > 0 for rows in FEW), ran
        engine.runner.sizes = engine.runner.sizes._replace(few=())
        ran.clear()
        assert ending_one_by_one(engine, lag, lag) == found
        assert not [name for name in ran if "rows=" in name]
    assert compiles_of_this_thread() == before


def test_there_are_as_many_as_pay_off() -> None:
    for slots, few in ((1, (1,)), (8, (1,)), (15, (1,)), (16, FEW), (64, FEW)):
        assert few_rows(replace(TINY_ENGINE, max_num_seqs=slots)) == few


@pytest.mark.full
def test_there_are_none_where_bits_may_depend_on_the_number_of_rows(make_engine: MakeEngine) -> None:
    engine = make_engine(replace(TINY_ENGINE, attention_backend="xla"))
    assert engine.runner.sizes.few == ()
    assert not [report for report in engine.inventory_report() if "rows=" in report.name]


@pytest.mark.full
def test_the_self_check_takes_them_away_where_they_change_bits(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def other_bits(*arguments: Any, **options: Any) -> Any:
        cache, rows, samples, top = decode_few_rows(*arguments, **options)
        return cache, rows, samples.at[1].add(1), top

    monkeypatch.setattr("xla_engine.runner.programs.decode_few_rows", other_bits)
    engine = exact(make_engine, TINY_ENGINE)
    assert engine.runner.sizes.few == ()
    check = engine.self_check
    assert check is not None and check.row_invariant and not check.few_invariant and not check.ok
    assert "every decode step runs all rows" in caplog.text


def test_a_gpu_has_one_row_code_for_dense_models_in_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def has_one(model: ModelConfig, products: GpuProducts | None = GpuProducts()) -> bool:  # noqa: B008
        runner: Any = SimpleNamespace(
            spec=ModelSpec(model, jnp.dtype(jnp.bfloat16), GpuAttention(), products)
        )
        return bool(vars(Runner)["has_one_row_code"].fget(runner))

    assert not has_one(TINY), "interpreted on a CPU"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    experts = RoutedExperts(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    assert has_one(TINY) and not has_one(replace(TINY, experts=experts))
    assert not has_one(HYBRID) and not has_one(TINY, None)
