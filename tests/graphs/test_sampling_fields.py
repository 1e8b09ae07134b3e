"""The sampling table: the code generated from it, and that stages agree in C++ and JAX and run in the same order."""

from __future__ import annotations

import functools
import itertools
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.instruction_sets import NATIVE_ISAS, registered
from xla_engine import graphs
from xla_engine.graphs.row_state.rows import make_tables
from xla_engine.graphs.row_state.sampling_fields import (
    REPETITION_FIELDS,
    SAMPLING_FIELDS,
    STAGES,
    Repetition,
    RowField,
    SamplingRows,
    make_sampling_rows,
)
from xla_engine.graphs.sampling import sampler
from xla_engine.graphs.sampling.logits_processors import SamplingContext
from xla_engine.graphs.sampling.native import row_fields_header
from xla_engine.runner.row_settings import RowSettings, sampling_rows
from xla_engine.sampling_params import SamplingParams

# What makes a row want each stage; a new stage belongs here.
PLANTED: dict[str, dict[str, Any]] = {
    "bias": {"has_bias": True},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "frequency_penalty": {"frequency_penalty": 0.4},
    "presence_penalty": {"presence_penalty": 1.1},
    "dry": {"dry_multiplier": 3, "dry_base": 1.75, "dry_allowed_length": 1},
    "min_tokens": {"min_remaining": 1},
    "mask": {"has_mask": True},
    "temperature": {"temperature": 2},
    "min_p": {"temperature": 1, "min_p": 0.05},
    "top_k_top_p": {"temperature": 1, "top_k": 40, "top_p": 0.8},
    "draw": {"temperature": 1},
}
VOCABULARY, POSITIONS = 150, 40


def test_the_header_of_cpp_is_that_of_the_table() -> None:
    """`python -m xla_engine.graphs.sampling.native` prints it."""
    committed = Path(graphs.__file__).parent / "native" / "row_fields.h"
    assert committed.read_text() == row_fields_header()


@pytest.mark.parametrize(
    ("record", "lines"),
    [(SamplingRows, SAMPLING_FIELDS), (Repetition, REPETITION_FIELDS)],
    ids=["all", "dry"],
)
def test_every_field_of_a_row_is_filled_from_one_that_exists(record: Any, lines: dict[str, RowField]) -> None:
    known = {field.name for field in fields(SamplingParams)}, {field.name for field in fields(RowSettings)}
    assert {field.name for field in fields(record)} - {"repetition"} == set(lines)
    for line in lines.values():
        assert line.param in known[0] if line.settled is None else line.settled in known[1]
        for value in line.tried:
            assert (
                line.param is not None and getattr(SamplingParams(**{line.param: value}), line.param) == value
            )


def test_a_request_with_defaults_leaves_a_neutral_row() -> None:
    """Only the noise key is set, so sampling features that no request uses cost a step nothing."""
    plain = RowSettings(max_tokens=1, stop_token_ids=(), params=SamplingParams(temperature=0), seed=0)
    found = sampling_rows(2, {1: plain})
    for given, neutral in zip(jax.tree.leaves(found), jax.tree.leaves(make_sampling_rows(2)), strict=True):
        np.testing.assert_array_equal(given, neutral)


def planted(stages: list[tuple[str, ...]]) -> tuple[jax.Array, SamplingRows, SamplingContext]:
    """Equal logits for all rows, and rows of one text with these stages enabled."""
    draw, count = np.random.default_rng(7), len(stages)
    logits = np.repeat(draw.standard_normal((VOCABULARY, 1)).astype(np.float32) * 3, count, axis=1)
    rows: Any = make_sampling_rows(count, dry=True)
    rows.num_logprobs[:] = 20
    places = {"min_remaining": np.zeros(count, np.int32)}
    for row, wanted in enumerate(stages):
        for name, value in {k: v for stage in wanted for k, v in PLANTED[stage].items()}.items():
            record = rows.repetition if hasattr(rows.repetition, name) else rows
            (places[name] if name in places else getattr(record, name))[row] = value
    tables: Any = make_tables(1, VOCABULARY)
    likely = np.argsort(-logits[:, 0])[:20]
    tables.bias_ids[0, :10], tables.bias[0, :10] = likely[:10], draw.standard_normal(10)
    tables.mask[:] = draw.integers(1, 2**32, tables.mask.shape, np.uint32)
    context = SamplingContext(
        live=jnp.ones(count, bool),
        slot=jnp.zeros(count, jnp.int32),
        length=jnp.full(count, POSITIONS, jnp.int32),
        prompt_length=jnp.full(count, POSITIONS // 2, jnp.int32),
        min_remaining=jnp.asarray(places["min_remaining"]),
        stop_ids=jnp.tile(jnp.asarray(likely[:3], jnp.int32), (count, 1)),
        history=jnp.asarray(np.resize(likely[2:9], POSITIONS)[None], jnp.int32),
        tables=jax.tree.map(jnp.asarray, tables),
    )
    return jnp.asarray(logits), jax.tree.map(jnp.asarray, rows), context


@pytest.mark.parametrize("isa", NATIVE_ISAS)
def test_each_stage_and_each_pair_of_stages_is_the_same_in_cpp_and_in_jax(isa: str) -> None:
    """A pair shows the order: most stages do not commute."""
    assert set(PLANTED) == set(STAGES)
    stages = [(), *((stage,) for stage in STAGES), *itertools.combinations(STAGES, 2)]
    logits, rows, context = planted(stages)
    in_jax, in_cpp = (
        jax.jit(functools.partial(sampler.sample, processed_logprobs=True, native=native))(
            logits, rows, context.length, context
        )
        for native in (None, registered(isa, "sampler"))
    )
    np.testing.assert_array_equal(in_cpp.token, in_jax.token)
    np.testing.assert_allclose(in_cpp.logprob, in_jax.logprob, rtol=1e-5, atol=1e-5)
    ours, theirs = (np.asarray(each.top)[21:].view(np.float32) for each in (in_cpp, in_jax))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    for row, stage in enumerate(STAGES[:-1], 1):
        assert not np.array_equal(ours[:, row], ours[:, 0]), f"{stage} changes nothing here"
