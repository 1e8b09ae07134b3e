"""Law 1 for other kinds of layers: recurrent state in addition to keys and values, routed experts in place of MLPs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
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
from xla_engine.errors import ConfigError
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.forms import LatentForm, RoutedExperts
from xla_engine.graphs.kv_cache.cache import tree_bytes
from xla_engine.graphs.recurrent.kind import RecurrentState
from xla_engine.graphs.recurrent_forms import ConvolutionForm, DeltaForm, MambaForm
from xla_engine.outputs import CompletionOutput
from xla_engine.runner import dispatch
from xla_engine.runner.kv_moves import StateMoves
from xla_engine.runner.memory import plan_memory
from xla_engine.sampling_params import SamplingParams

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
CONFIG = EngineConfig(
    max_num_seqs=8,
    max_model_len=200,
    prefill_lanes=(4,),
    chunk_size=16,
    block_size=16,
    mamba_cache_mode="align",
    mamba_block_size=32,
    mamba_cache_states=4,
)
BLOCKS = replace(CONFIG, block_size=32, num_blocks=32)
DRAW = random.Random(5)
STEM = [DRAW.randrange(TINY.vocab_size) for _ in range(120)]
PROMPTS = [[*STEM[: 60 + 6 * at], *DRAW.sample(range(TINY.vocab_size), 3)] for at in range(10)]
SAMPLED = SamplingParams(temperature=0.9, max_tokens=6, logprobs=0, seed=5, ignore_eos=True)


CONVOLUTIONS = replace(
    MODEL,
    layer_types=("conv", "full_attention"),
    delta=None,
    convolution=ConvolutionForm(features=64, kernel=3, bias=True),
)


MAMBAS = replace(
    MODEL,
    layer_types=("hybrid", "mlp", "mamba", "full_attention"),
    num_hidden_layers=4,
    one_sublayer=True,
    delta=None,
    experts=None,
    mlp_only_layers=(),
    mamba=MambaForm(value_heads=4, value_dim=32, key_heads=2, key_dim=16, kernel=4, norm_eps=1e-6),
)


assert MODEL.delta is not None
OLMO = replace(  # whose DeltaNet layers have norms before, and attention layers behind
    MODEL,
    attn_output_gate=False,
    qk_norm="all",
    pre_norm=False,
    post_norm=True,
    experts=None,
    mlp_only_layers=(),
    no_rope_layers=(0, 1),
    delta=replace(MODEL.delta, rate_factor=2.0, pre_norm=True),
)


KIMI = replace(  # a decay for each channel beside latent attention
    MODEL,
    attn_output_gate=False,
    qk_norm=None,
    experts=None,
    mlp_only_layers=(),
    num_key_value_heads=1,
    head_dim=64,
    stored_parts=1,
    attention_multiplier=0.125,
    no_rope_layers=(0, 1),
    latent=LatentForm(
        q_lora_rank=0, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32
    ),
    delta=replace(MODEL.delta, key_heads=4, gate_rank=32),
)


OTHERS = {"conv": CONVOLUTIONS, "mamba": MAMBAS, "olmo": OLMO, "kimi": KIMI}
MEMORIES = {"slots": CONFIG, "blocks": BLOCKS}
IN_CI = (
    "conv-native-blocks",
    "mamba-native-slots",
    "olmo-native-blocks",
    "kimi-native-slots",
    "mamba-xla-blocks",
)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "attention", "memory"),
    [
        pytest.param(OTHERS[name], attention, MEMORIES[memory], id=case, marks=marks)
        for name in OTHERS
        for attention in ("native", "xla")
        for memory in MEMORIES
        for case in [f"{name}-{attention}-{memory}"]
        for marks in [() if case in IN_CI else pytest.mark.release]
    ],
)
def test_other_recurrent_layers_keep_the_law(
    model: ModelConfig, attention: str, memory: EngineConfig
) -> None:
    """Among peers, after preemption, behind a prefix with a saved state, and with drafts."""
    speculative = {"method": "ngram", "num_speculative_tokens": 3} if attention == "native" else None
    config = replace(memory, attention_backend=attention, speculative_config=speculative)
    with XlaBatchEngine(tiny_checkpoint(model=model), None, config) as engine:
        assert engine.self_check is not None and engine.self_check.ok, engine.self_check
        report = verify(engine, requests=60, schedules=2, seed=1, lags=(0, 1))
        assert report.ok and report.preempted > 0, "\n".join(report.lines())
        expected = cold(engine)
        for _ in range(2):
            assert answers(engine, PROMPTS) == expected
        assert engine.stats().cached_tokens > 9 * 32


@pytest.fixture(scope="module")
def hybrid() -> Iterator[XlaBatchEngine]:
    with XlaBatchEngine(tiny_checkpoint(model=MODEL), None, CONFIG) as engine:
        yield engine


@pytest.fixture(scope="module")
def in_blocks() -> Iterator[XlaBatchEngine]:
    """Fewer than the slots could use."""
    with XlaBatchEngine(tiny_checkpoint(model=MODEL), None, BLOCKS) as engine:
        yield engine


@pytest.fixture(params=["hybrid", "in_blocks"])
def either(request: pytest.FixtureRequest) -> XlaBatchEngine:
    engine: XlaBatchEngine = request.getfixturevalue(request.param)
    return engine


def test_a_request_alone_is_that_among_peers(either: XlaBatchEngine) -> None:
    hybrid = either
    assert hybrid.self_check is not None and hybrid.self_check.ok, hybrid.self_check
    report = verify(hybrid, requests=120, schedules=3, seed=1, lags=(0, 1, 3))
    assert report.ok, "\n".join(report.lines())
    assert report.admitted_mid_stream > 60 and report.compiles_after_warmup == 0
    assert report.preempted > 0, "state must come back as it was taken away"


def test_nothing_of_a_former_owner_reaches_the_next(hybrid: XlaBatchEngine) -> None:
    """Before every turn, free slots get NaN in state, keys and values, which must not affect the next request."""
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

        hybrid.reset_prefix_cache()
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
    kinds = [isinstance(store, RecurrentState) for store in hybrid.runner.state.cache]
    assert kinds == [True, False]
    inputs, memory = read_cache(hybrid.runner)[0]
    assert inputs.shape == (8, 3, 192) and memory.shape == (8, 4, 16, 32)


def answers(engine: XlaBatchEngine, prompts: list[list[int]], **fields: Any) -> dict[str, CompletionOutput]:
    for at, prompt in enumerate(prompts):
        engine.submit(prompt, SAMPLED, request_id=f"p{at}", **fields)
    return {output.request_id: output.outputs[0] for output in engine.drain()}


def cold(engine: XlaBatchEngine) -> dict[str, CompletionOutput]:
    """The results of each prompt alone, with an empty cache."""
    found = {}
    for at, prompt in enumerate(PROMPTS):
        engine.reset_prefix_cache()
        engine.submit(prompt, SAMPLED, request_id=f"p{at}")
        (output,) = engine.drain()
        assert output.num_cached_tokens == 0
        found[output.request_id] = output.outputs[0]
    engine.reset_prefix_cache()
    return found


def test_a_prompt_that_begins_with_a_saved_state_has_the_bits_of_one_computed_whole(
    either: XlaBatchEngine,
) -> None:
    """All prompts run at once, more than slots, so that states are saved between the chunks of a step; then again."""
    hybrid = either
    expected = cold(hybrid)
    for _ in range(2):
        before = hybrid.stats().cached_tokens
        assert answers(hybrid, PROMPTS) == expected
        assert hybrid.stats().cached_tokens - before >= 9 * 32
    again = hybrid.stats().cached_tokens
    assert answers(hybrid, PROMPTS) == expected
    shared = [(min(60 + 6 * at, len(prompt) - 1) // 32) * 32 for at, prompt in enumerate(PROMPTS)]
    assert hybrid.stats().cached_tokens - again >= sum(shared), "every whole interval that is shared"


def test_preempted_prompts_and_other_salts_change_no_bit_either(either: XlaBatchEngine) -> None:
    hybrid = either
    expected, compiles = cold(hybrid), hybrid.stats().compiles_after_warmup  # of the process
    for at, prompt in enumerate(PROMPTS):
        hybrid.submit(prompt, SAMPLED, request_id=f"p{at}", cache_salt="other" if at % 2 else "")
    found: dict[str, Any] = {}
    for turn in range(400):
        running = [view.request.request_id for view in hybrid.snapshot().slots if view.request is not None]
        if running and turn % 3 == 0:
            hybrid.scheduler.preempt(running[turn % len(running)])
        found |= {output.request_id: output.outputs[0] for output in hybrid.step() if output.finished}
        if len(found) == len(PROMPTS):
            break
    assert found == expected and hybrid.scheduler.counters().preemptions > 0
    assert hybrid.stats().compiles_after_warmup == compiles


def test_saved_states_are_counted_in_the_memory_plan(hybrid: XlaBatchEngine) -> None:
    runner = hybrid.runner
    plan = plan_memory(runner.spec, runner.config, 200, None)
    assert plan.states == 4 and plan.states * plan.state == tree_bytes(runner.state.saved)
    assert "4 saved states x " in plan.arithmetic()
    none = replace(runner.config, mamba_cache_mode="none", mamba_block_size=None, mamba_cache_states=None)
    without = plan_memory(runner.spec, none, 200, None)
    assert plan.needed - without.needed == plan.states * plan.state


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (TINY, {}, "has none"),
        (
            replace(MODEL, layer_types=("linear_attention", "sliding_attention"), sliding_window=32),
            {},
            "windows",
        ),
        (MODEL, {"mamba_cache_states": 1 << 40}, "fewer mamba_cache_states"),
    ],
)
def test_what_saved_states_cannot_serve_is_refused(model: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        XlaBatchEngine(tiny_checkpoint(model=model), None, replace(CONFIG, **options))


def states_are_not_saved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StateMoves, "save", lambda self, slot, place: None)


def states_are_not_restored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StateMoves, "restore", lambda self, slot, place: None)


def states_are_saved_a_chunk_late(patch: pytest.MonkeyPatch) -> None:
    """The planted fault: the state is saved after the call with the next chunk of the prompt."""

    def calls(chunks: Any, most: int, saves: Any, _: Any) -> Iterator[Any]:
        for at in range(0, len(chunks), most):
            call = chunks[at : at + most]
            ends = {(chunk.slot.index, chunk.start + len(chunk.tokens)) for chunk in call}
            yield call, [each for each in saves if (each.slot.index, each.length) in ends]

    patch.setattr(dispatch, "prefill_calls", calls)


FAULTS = [states_are_not_saved, states_are_not_restored, states_are_saved_a_chunk_late]


@pytest.mark.parametrize("plant", FAULTS)
def test_a_stale_or_later_state_is_found(
    either: XlaBatchEngine, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hybrid = either
    expected = cold(hybrid)
    hybrid.runner.blank()
    plant(monkeypatch)
    assert answers(hybrid, PROMPTS) != expected
    hybrid.reset_prefix_cache()
