"""Attention's kernel for TPUs, run by Pallas' interpreter of TPU kernels, and compiled for TPUs that are not here."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tests.graphs.test_tpu_rows import races_found
from tests.support.attention_cases import FEATURES, POSITIONS, Case, Features, assert_as_numpy, bits
from xla_engine.graphs.attention.tpu import TpuAttention
from xla_engine.runner.backends import choose_attention

TPU = TpuAttention(interpret=pltpu.InterpretParams(detect_races=True))
FULL, RELEASE = pytest.mark.full, pytest.mark.release
SMALL = (4, 2, 64)


@pytest.mark.parametrize(
    ("heads", "dtype", "features", "block_size"),
    [
        pytest.param(*case, marks=[FULL if index == 1 else RELEASE], id=str(index))
        for index, case in enumerate(FEATURES)
    ],
)
def test_windows_caps_sinks_and_blocks(
    heads: tuple[int, int, int], dtype: Any, features: Features, block_size: int
) -> None:
    """Slots agree with NumPy; with blocks among NaN, results and cache have the same bits. There are no races."""
    case = Case(heads, dtype, features=features)
    assert_as_numpy(case, TPU)
    pooled = case.in_blocks(block_size)
    for run in (case.decode, case.prefill):
        (kept, wanted), (pool, found) = run(TPU), run(TPU, **pooled)
        used = np.arange(wanted.shape[1]) < case.count[:, None] if wanted.ndim == 3 else slice(None)
        assert bits(found[used]) == bits(wanted[used])
        for slots, blocks in zip(kept, pool, strict=True):
            rows, kv_heads = slots.shape[:2]
            placed = slots.reshape(rows, kv_heads, -1, block_size, slots.shape[3]).swapaxes(1, 2)
            assert bits(blocks[pooled["tables"]]) == bits(placed)
    assert not races_found()


@FULL
def test_a_row_is_alone() -> None:
    """Its bits stay the same if the others are not live, which then write nothing, and in front of stale NaN."""
    case = Case(SMALL, jnp.bfloat16)
    (keys, values), expected = case.decode(TPU)
    alone = np.array([False, True, False, False])
    stale = tuple(np.array(each) for each in case.cache)
    for each in stale:
        each[1, :, 256:] = np.nan
    (own_keys, own_values), found = case.decode(TPU, live=alone, cache=stale)
    assert bits(found[1]) == bits(expected[1])
    assert bits(own_keys[1, :, :256]) == bits(keys[1, :, :256])
    assert bits(own_values[1, :, :256]) == bits(values[1, :, :256])
    for row in (0, 2, 3):
        assert bits(own_keys[row]) == bits(np.asarray(case.cache[0])[row]) and not found[row].any()
    assert not races_found()


@FULL
def test_a_lane_in_parts_has_the_bits_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long chunks are several lanes of the kernel, whose queries may also see later keys of the chunk."""
    case = Case(SMALL, jnp.float32)
    reach = case.start[:, None] + np.arange(24)[None] + 1
    reach[0, 4:9], reach[1, :6] = 249, 270  # pictures see themselves
    reach = reach.astype(np.int32)
    _, whole = case.prefill(TPU, reach=reach)
    for lane, token in ((0, 4), (0, 8), (1, 0), (1, 18)):
        (cache, _) = case.prefill(TPU)
        expected = case.expected(
            cache,
            case.chunks[lane, token],
            case.slot[lane],
            case.start[lane] + token,
            int(reach[lane, token]),
        )
        np.testing.assert_allclose(whole[lane, token], expected, atol=2e-5)
    monkeypatch.setattr("xla_engine.graphs.attention.tpu._RESULT_BYTES", 4 * 4 * 128 * 10)
    other = Case(SMALL, jnp.float32)
    _, parts = other.prefill(TpuAttention(interpret=pltpu.InterpretParams()), reach=reach)
    used = np.arange(24) < case.count[:, None]
    assert bits(parts[used]) == bits(whole[used])


def test_it_is_chosen_by_name_here() -> None:
    backend = choose_attention("tpu")
    assert isinstance(backend, TpuAttention) and backend.interpret and backend.bounded_by_length
    assert POSITIONS % 256 == 0


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, the compiler for TPUs")
@FULL
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_the_kernel_compiles(topology: str) -> None:
    """In place, for shapes of published models; on v5e for all of them."""
    command = [
        sys.executable,
        "-m",
        "tests.support.tpu_kernels",
        topology,
        "all" if "v5e" in topology else "some",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
