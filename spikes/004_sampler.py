# Frozen: runs at commit a8802fc.
"""Which forms of argmax, draw, thresholds and log-probability should the sampler use?

Logits are vocabulary-major, float32 `[49152, B]`, as the weight-left head yields them.

    python -m spikes.004_sampler
"""

# %%
from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spikes.support.timing import Times, describe_machine, interleave, markdown_table, token_logprob
from xla_engine.graphs.ops.reductions import argmax
from xla_engine.graphs.row_state.rows import SamplingRows, make_sampling_rows, make_tables
from xla_engine.graphs.sampling import sampler as sampling
from xla_engine.graphs.sampling import truncation as thresholds
from xla_engine.graphs.sampling.logits_processors import SamplingContext

VOCABULARY = 49152
Form = Callable[[jax.Array, SamplingRows, SamplingContext], Any]


# %%
def rows_of(batch: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> SamplingRows:
    """The same parameters for every row, its own seed for each."""
    return dataclasses.replace(
        jax.tree.map(jnp.asarray, make_sampling_rows(batch)),
        temperature=jnp.full(batch, temperature, jnp.float32),
        top_k=jnp.full(batch, top_k, jnp.int32),
        top_p=jnp.full(batch, top_p, jnp.float32),
        seed=jnp.stack([jnp.zeros(batch, jnp.uint32), jnp.arange(batch, dtype=jnp.uint32)], axis=1),
    )


def flat_argmax(logits: jax.Array, rows: SamplingRows, context: SamplingContext) -> jax.Array:
    return jnp.argmax(logits, axis=0)


def two_level_argmax(logits: jax.Array, rows: SamplingRows, context: SamplingContext) -> jax.Array:
    return argmax(logits)


def gumbel_draw(logits: jax.Array, rows: SamplingRows, context: SamplingContext) -> jax.Array:
    """The Gumbel-max trick: noise for every entry, keyed as the engine keys its one number per row."""

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (VOCABULARY,), jnp.float32)

    scaled = logits / rows.temperature
    return argmax(scaled + jax.vmap(noise, out_axes=1)(rows.seed, context.length))


def inverse_draw(logits: jax.Array, rows: SamplingRows, context: SamplingContext) -> jax.Array:
    return sampling._draw(logits, rows, rows.temperature > 0, context.length)


def inverse_draw_by_cumsum(logits: jax.Array, rows: SamplingRows, context: SamplingContext) -> jax.Array:
    """The same draw by one flat `jnp.cumsum` over the vocabulary."""
    scaled = logits / rows.temperature
    cumulative = jnp.cumsum(jnp.exp(scaled - jnp.max(scaled, axis=0)), axis=0)
    target = sampling._uniform(rows.seed, context.length) * cumulative[-1]
    return jnp.argmax(cumulative > target, axis=0)


def threshold_by_candidates(logits: jax.Array, rows: SamplingRows, context: SamplingContext) -> jax.Array:
    return thresholds.threshold(logits, jnp.max(logits, axis=0), rows.temperature, rows, rows.temperature > 0)


def threshold_by_bisection(logits: jax.Array, rows: SamplingRows, context: SamplingContext) -> jax.Array:
    wanted = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, VOCABULARY), VOCABULARY)
    return thresholds.bisect(
        logits, jnp.max(logits, axis=0), rows.temperature, wanted, rows.top_p, rows.min_p
    )


def threshold_by_sort(logits: jax.Array, rows: SamplingRows, context: SamplingContext) -> jax.Array:
    """Top-k, then top-p over what is left, by a full sort of the vocabulary."""
    ordered = jnp.sort(logits.T, axis=1, descending=True)  # [B, V]
    wanted = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, VOCABULARY), VOCABULARY)[:, None]
    kept = jnp.arange(VOCABULARY) < wanted
    weight = jnp.where(kept, jnp.exp(ordered - ordered[:, :1]), 0.0)
    cumulative = jnp.cumsum(weight, axis=1)
    reached = cumulative >= rows.top_p[:, None] * cumulative[:, -1:]
    nucleus = jnp.where(rows.top_p[:, None] < 1, jnp.argmax(reached, axis=1)[:, None], wanted - 1)
    return jnp.take_along_axis(ordered, jnp.minimum(nucleus, wanted - 1), axis=1)[:, 0]


def logprob_in_blocks(logits: jax.Array, rows: SamplingRows, context: SamplingContext) -> jax.Array:
    return token_logprob(logits, context.length)


def logprob_by_log_softmax(logits: jax.Array, rows: SamplingRows, context: SamplingContext) -> jax.Array:
    return jnp.take_along_axis(jax.nn.log_softmax(logits, axis=0), context.length[None], axis=0)[0]


def whole_sampler(logits: jax.Array, rows: SamplingRows, context: SamplingContext) -> Any:
    return sampling.sample(logits, rows, context.length, context)


def context_of(batch: int) -> SamplingContext:
    """As in a decode step: every row live, with a history of some 300 tokens, nothing forbidden or biased."""
    return jax.tree.map(
        jnp.asarray,
        SamplingContext(
            live=np.ones(batch, bool),
            slot=np.arange(batch, dtype=np.int32),
            length=np.arange(300, 300 + batch, dtype=np.int32),
            prompt_length=np.full(batch, 200, np.int32),
            min_remaining=np.zeros(batch, np.int32),
            stop_ids=np.full((batch, 8), -1, np.int32),
            history=np.random.default_rng(0).integers(0, VOCABULARY, (batch, 2048), np.int32),
            tables=make_tables(batch, VOCABULARY),
        ),
    )


# %%
def cases(batch: int) -> dict[str, tuple[Form, SamplingRows]]:
    """Line of the table: form and what its rows ask for."""
    plain, narrow = rows_of(batch), rows_of(batch, top_k=40, top_p=0.9)
    wide = rows_of(batch, top_p=0.9)
    greedy = rows_of(batch, temperature=0.0)
    one = dataclasses.replace(plain, top_p=jnp.where(jnp.arange(batch) == 5, 0.9, 1.0))
    penalised = dataclasses.replace(greedy, repetition_penalty=jnp.full(batch, 1.1))
    biased = dataclasses.replace(greedy, has_bias=jnp.ones(batch, bool))
    masked = dataclasses.replace(greedy, has_mask=jnp.ones(batch, bool))
    most_likely = dataclasses.replace(greedy, num_logprobs=jnp.full(batch, 20))
    with_logprob = dataclasses.replace(greedy, num_logprobs=jnp.zeros(batch, jnp.int32))
    return {
        "argmax: jnp.argmax": (flat_argmax, greedy),
        "argmax: two levels *": (two_level_argmax, greedy),
        "draw: Gumbel noise over V, threefry": (gumbel_draw, plain),
        "draw: inverse CDF, flat cumsum": (inverse_draw_by_cumsum, plain),
        "draw: inverse CDF, blocks *": (inverse_draw, plain),
        "top-k 40, top-p 0.9: full sort": (threshold_by_sort, narrow),
        "top-k 40, top-p 0.9: bisection": (threshold_by_bisection, narrow),
        "top-k 40, top-p 0.9: 128 candidates *": (threshold_by_candidates, narrow),
        "top-p 0.9, flat logits: full sort": (threshold_by_sort, wide),
        "top-p 0.9, flat logits: bisection": (threshold_by_bisection, wide),
        "top-p 0.9, flat logits: candidates, then bisection *": (threshold_by_candidates, wide),
        "logprob: log_softmax": (logprob_by_log_softmax, greedy),
        "logprob: blocks *": (logprob_in_blocks, greedy),
        "sample(): greedy": (whole_sampler, greedy),
        "sample(): greedy, logprob": (whole_sampler, with_logprob),
        "sample(): temperature 1": (whole_sampler, plain),
        "sample(): temperature 1, top-k 40, top-p 0.9": (whole_sampler, narrow),
        "sample(): temperature 1, one row's nucleus wide": (whole_sampler, one),
        "sample(): temperature 1, every row's nucleus wide": (whole_sampler, wide),
        "sample(): greedy, repetition penalty": (whole_sampler, penalised),
        "sample(): greedy, bias": (whole_sampler, biased),
        "sample(): greedy, mask": (whole_sampler, masked),
        "sample(): greedy, 20 most likely tokens": (whole_sampler, most_likely),
    }


def measure(batch: int, rounds: int) -> tuple[dict[str, Times], dict[str, float]]:
    """Times per call, and seconds to compile each form."""
    logits = 2.0 * jax.random.normal(jax.random.key(batch), (VOCABULARY, batch), jnp.float32)
    context = context_of(batch)
    calls: dict[str, Callable[[], Any]] = {}
    compile_ms: dict[str, float] = {}
    results: dict[str, np.ndarray] = {}
    for name, (form, rows) in cases(batch).items():
        lowered = jax.jit(form).lower(logits, rows, context)
        began = time.perf_counter()
        compiled = lowered.compile()
        compile_ms[name] = 1e3 * (time.perf_counter() - began)
        calls[name] = functools.partial(_run, compiled, logits, rows, context)
        results[name] = np.asarray(jax.tree.leaves(calls[name]())[0])
    _check(results)
    return interleave(calls, rounds, warm_up=2), compile_ms


def _run(compiled: Any, *arguments: Any) -> Any:
    return jax.block_until_ready(compiled(*arguments))


def _check(results: dict[str, np.ndarray]) -> None:
    """Forms of one thing agree: exactly, or in sums up to their order."""
    for left, right in (("argmax: jnp.argmax", "argmax: two levels *"),):
        assert np.array_equal(results[left], results[right])
    for case in ("top-k 40, top-p 0.9", "top-p 0.9, flat logits"):
        forms = [found for name, found in results.items() if name.startswith(case)]
        assert all(np.allclose(forms[0], form, rtol=0, atol=1e-3) for form in forms), case
    assert np.allclose(results["logprob: log_softmax"], results["logprob: blocks *"], atol=1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32])
    arguments = parser.parse_args()
    found = [measure(batch, arguments.rounds) for batch in arguments.batches]
    print(describe_machine())
    print("\nms per call, median (least-most); * is what graphs/sampling/sampler.py does:\n")
    header = ["form", *(f"B = {batch}" for batch in arguments.batches), "compile, ms"]
    names = list(found[0][0])
    compile_ms = found[-1][1]
    rows = [
        [
            name,
            *(times[name].milliseconds(2) for times, _ in found),
            f"{compile_ms[name]:.0f}" if compile_ms[name] >= 1 else "same program",
        ]
        for name in names
    ]
    print(markdown_table(header, rows))


if __name__ == "__main__":
    main()
