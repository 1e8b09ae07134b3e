"""GPU kernels can be lowered for CUDA on a machine without a GPU."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.attention_cases import FEATURES, POSITIONS, SHAPES, Case, Features, _decode, _prefill
from xla_engine.graphs.attention.backend import LayerCache
from xla_engine.graphs.attention.gpu import GpuAttention


@contextlib.contextmanager
def hopper() -> Any:
    """Lower for an H200 on a machine without one. Some jax versions need no description of the device for this."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if not hasattr(jax.sharding, "AbstractDevice"):
            yield
            return
        device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
            yield


CASES = [*((heads, dtype, None, None) for heads, dtype in [*SHAPES, ((32, 8, 128), jnp.bfloat16)]), *FEATURES]
QUICK = (CASES[0], CASES[-1])  # without features and with them


@pytest.mark.parametrize(
    ("heads", "dtype", "features", "block_size"),
    [pytest.param(*each, marks=[pytest.mark.full] * (each not in QUICK)) for each in CASES],
    ids=str,
)
def test_the_kernels_lower_for_cuda(
    heads: tuple[int, int, int], dtype: Any, features: Features | None, block_size: int | None
) -> None:
    """They lower through Triton, and the write kernel's outputs alias both cache buffers."""
    case, backend = Case(heads, dtype, features=features), GpuAttention()
    stored = case.in_blocks(block_size) if block_size else {"cache": case.cache, "tables": None}
    layer = LayerCache(*(jax.ShapeDtypeStruct(x.shape, case.dtype) for x in stored["cache"]))
    rest = case.rope, case.weights
    decode = (case.form, layer, case.qkv, *rest, case.length, case.live, stored["tables"], POSITIONS)
    place = case.slot, case.start, case.count, stored["tables"], POSITIONS
    prefill = (case.form, layer, case.chunks, *rest, *place)
    reach = case.start[:, None] + np.arange(1, case.chunks.shape[1] + 1, dtype=np.int32)
    with hopper():
        programs = (_decode, decode, 3), (_prefill, (*prefill, None), 2), (_prefill, (*prefill, reach), 2)
        for function, arguments, kernels in programs:
            lowered = function.trace(backend, case.dtype, *arguments).lower(lowering_platforms=("cuda",))
            text = lowered.as_text()
            calls = [line for line in text.splitlines() if "@__gpu$xla.gpu.triton" in line]
            assert len(calls) == kernels
            assert sum(line.count("output_operand_alias<") for line in calls) == 2
