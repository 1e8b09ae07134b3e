"""Laws 2 and 3: nothing compiles after warm-up, the cache is updated in place, a step moves O(B) numbers."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_engine.runner.runner as runner_module
from tests.support.device import program_text
from tests.support.models import BOTH_LANES, TINY, TINY_ENGINE
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.cases import draw_cases
from xla_engine.graphs.attention.xla import XlaAttention
from xla_engine.graphs.inventory import Inventory, Program
from xla_engine.graphs.kv_cache.cache import make_cache
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.graphs.row_state.rows import Pool, make_rows, make_tables
from xla_engine.graphs.steps.step import StepState
from xla_engine.runner.compile_cache import compiles_of_this_thread
from xla_engine.runner.programs import decode_name, make_programs
from xla_engine.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams


def mixed_workload(engine: XlaBatchEngine, count: int, seed: int) -> None:
    for case in draw_cases(engine, count, seed):
        engine.submit(case.prompt_token_ids, case.params)
        engine.step()
    engine.drain()


def test_nothing_traces_or_compiles_after_warm_up(tiny: XlaBatchEngine) -> None:
    """Lengths, temperatures, seeds, stop ids and arrivals are data of a program, so none of them compiles a
    new one."""
    before = compiles_of_this_thread()
    with jax.no_tracing(True):
        mixed_workload(tiny, 60, seed=11)
    assert compiles_of_this_thread() == before
    assert tiny.stats().compiles_warmup >= len(tiny.inventory_report())


def test_the_compile_counter_counts(tiny: XlaBatchEngine) -> None:
    before = tiny.stats().compiles_after_warmup
    jax.jit(lambda x: x * 3 + 41)(np.float32(before))
    assert tiny.stats().compiles_after_warmup > before
    tiny.runner.compiles.mark_warm()


def test_every_program_aliases_the_whole_cache_and_needs_little_else(embedded: XlaBatchEngine) -> None:
    """Decode scratch is far below one cache. Prefill gathers the keys of its lanes: one layer's worth."""
    cache = embedded.runner.cache_bytes
    layers = embedded.checkpoint.config.num_hidden_layers
    vocabulary = embedded.checkpoint.config.vocab_size
    logits = embedded.config.device_rows * vocabulary * 4
    for report in embedded.inventory_report():
        if report.name.startswith(("prompt_logprobs", "read_span")):  # changes no state
            assert report.temp_bytes < 6 * logits, report
            continue
        assert report.alias_bytes >= cache, report
        if report.name.startswith("decode"):
            assert report.temp_bytes < cache / 2 + 6 * logits, report
        else:
            assert report.temp_bytes < 4 * cache / layers + 40 * logits, report


def test_decode_makes_no_copy_of_a_cache_buffer(embedded: XlaBatchEngine) -> None:
    """No copy instruction of a whole K or V buffer in the optimised program, nor of a layer of one."""
    whole = embedded.runner.state.cache[0].keys.shape
    for rows in (None, *embedded.runner.sizes.few[:1]):
        text = program_text(embedded.runner, decode_name(embedded.max_model_len, rows))
        assert str(list(whole)).replace(" ", "") in text
        for shape in (whole, whole[1:]):
            size = str(list(shape)).replace(" ", "")
            assert not [
                line for line in text.splitlines() if size in line.split("=")[-1] and " copy(" in line
            ]


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Shapes of every array that crosses between host and device through the runner, also as a program's argument."""
    log: list[tuple[str, tuple[int, ...]]] = []
    real_put, real_asarray, real_call = jax.device_put, np.asarray, Inventory.__call__

    def put(tree: Any, *rest: Any) -> Any:
        log.extend(("up", np.shape(leaf)) for leaf in jax.tree.leaves(tree))
        return real_put(tree, *rest)

    def fetch(value: Any, *rest: Any, **named: Any) -> Any:
        if isinstance(value, jax.Array):
            log.append(("down", value.shape))
        return real_asarray(value, *rest, **named)

    def call(inventory: Inventory, name: str, *arguments: Any) -> Any:
        given = [leaf.shape for leaf in jax.tree.leaves(arguments) if isinstance(leaf, np.ndarray)]
        assert len(given) <= 1, f"{name} was given {given}: only its work may come from the host"
        log.extend(("up", shape) for shape in given)
        return real_call(inventory, name, *arguments)

    monkeypatch.setattr(Inventory, "__call__", call)
    monkeypatch.setattr(runner_module.jax, "device_put", put)
    monkeypatch.setattr(runner_module.np, "asarray", fetch)
    yield log


def test_a_steady_step_moves_numbers_of_order_b(
    tiny: XlaBatchEngine, moved: list[tuple[str, tuple[int, ...]]]
) -> None:
    """Decode: at most B flags up and 2 B numbers down; nothing with a sequence or vocabulary axis, ever."""
    rows = tiny.config.device_rows
    for seed in range(rows):
        params = SamplingParams(max_tokens=40, seed=seed, logprobs=0, ignore_eos=True)
        tiny.submit([seed + 1] * 20, params)
    for _ in range(8):  # all admitted, and the mask of scheduled rows has settled
        tiny.step()
    admission = list(moved)
    with jax.transfer_guard("disallow_explicit"), pytest.raises(Exception, match="isallow"):
        jax.device_put(np.zeros(3)).block_until_ready()  # the guard works on this platform
    moved.clear()
    with jax.transfer_guard_host_to_device("disallow_explicit"):  # implicit or explicit: nothing goes up
        for _ in range(20):
            tiny.step()
    assert {way for way, _ in moved} == {"down"}
    assert all(math.prod(shape) == 2 * rows for _, shape in moved)
    assert len(moved) == 20
    forbidden = {tiny.max_model_len, tiny.checkpoint.config.vocab_size}
    assert not any(forbidden & set(shape) for _, shape in admission)
    lane = TINY_ENGINE.chunk_size + 32  # the prompt's own tokens, and what a row is told
    assert any(way == "up" for way, _ in admission)
    assert max(math.prod(shape) for _, shape in admission) <= lane * BOTH_LANES.prefill_lanes[-1]


def test_implicit_transfers_never_happen(tiny: XlaBatchEngine) -> None:
    with jax.transfer_guard("disallow"):
        mixed_workload(tiny, 20, seed=12)


@pytest.mark.parametrize("num_blocks", [None, 8], ids=["slots", "pages"])
@pytest.mark.parametrize("length", [100, 2048, 8192, 131072])
def test_an_untuned_configuration_has_at_most_14_programs(length: int, num_blocks: int | None) -> None:
    """Start-up compiles them all. Pure JAX has most: it alone has key buckets."""
    config = EngineConfig(num_blocks=num_blocks)
    spec = ModelSpec(TINY, jnp.dtype(jnp.bfloat16), XlaAttention())
    buckets = config.buckets(length)
    block = config.block_size
    pool = None if num_blocks is None else Pool(num_blocks, block, buckets[-1] // block)
    state = StepState(
        weights=[],
        rope=jnp.zeros((1, 1, 2, 8)),
        cache=make_cache(spec, 1, buckets[-1] if pool is None else block, num_blocks=num_blocks),
        rows=make_rows(1, MAX_STOP_TOKEN_IDS, length, pool),
        tables=make_tables(1, TINY.vocab_size, has_blocks=pool is not None),
    )
    programs = make_programs(spec, config, buckets, state=state, saved=[])
    assert len({program.name for program in programs}) == len(programs) <= 14
    assert buckets[-1] >= length


def test_an_unknown_program_or_shape_is_an_error_that_names_it() -> None:
    inventory = Inventory()
    shape = jax.ShapeDtypeStruct((4,), np.float32)
    inventory.compile([Program(name="double", function=lambda x: x * 2, arguments=(shape,))])
    assert np.asarray(inventory("double", np.ones(4, np.float32))).tolist() == [2.0] * 4
    with pytest.raises(RuntimeError, match=r"'triple' is not in the inventory \(double\)"):
        inventory("triple", np.ones(4, np.float32))
    with pytest.raises(RuntimeError, match="'double' was called with shapes it was not compiled for"):
        inventory("double", np.ones(5, np.float32))
    (report,) = inventory
    assert report.name == "double" and report.compile_seconds > 0


def test_close_frees_device_memory(make_engine: Callable[..., XlaBatchEngine]) -> None:
    def live_bytes() -> int:
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    before = live_bytes()
    engine = make_engine()
    held = live_bytes() - before
    assert held > engine.runner.cache_bytes
    engine.submit([1, 2, 3], SamplingParams(max_tokens=4))
    engine.drain()
    engine.close()
    assert live_bytes() - before < held / 20
