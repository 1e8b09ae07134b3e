# Frozen: runs at commit 60b1f13.
"""What does a sampler in C++ save, in a step and at a start?

python -m spikes.061_sampler_in_cpp            # compile and run the sampler alone
python -m spikes.061_sampler_in_cpp --start    # start the embedded model, with and without compiled programs
"""

# %%
from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from spikes.support.timing import Times, describe_machine, interleave, markdown_table
from xla_engine.graphs.row_state.rows import SamplingRows, make_sampling_rows
from xla_engine.graphs.sampling.sampler import sample
from xla_engine.runner.native_library.build import register

FORMS = ("JAX", "C++")


# %%
def rows_of(batch: int, **fields: Any) -> SamplingRows:
    """The same parameters for every row, its own seed for each."""
    rows = jax.tree.map(jnp.asarray, make_sampling_rows(batch))
    given = {name: jnp.full(batch, value, getattr(rows, name).dtype) for name, value in fields.items()}
    seeds = jnp.stack([jnp.zeros(batch, jnp.uint32), jnp.arange(batch, dtype=jnp.uint32)], axis=1)
    return dataclasses.replace(rows, seed=seeds, **given)


CASES: dict[str, tuple[float, dict[str, Any]]] = {  # spread of the logits, parameters
    "greedy": (3, {}),
    "greedy, log-probability": (3, {"num_logprobs": 0}),
    "greedy, 20 most likely tokens": (3, {"num_logprobs": 20}),
    "temperature 1": (3, {"temperature": 1}),
    "temperature 1, top-k 40, top-p 0.9": (3, {"temperature": 1, "top_k": 40, "top_p": 0.9}),
    "temperature 1, top-p 0.9": (3, {"temperature": 1, "top_p": 0.9}),
    "temperature 1, top-p 0.9, a wide nucleus": (1, {"temperature": 1, "top_p": 0.9}),
}


def measure(batch: int, vocabulary: int, rounds: int) -> tuple[dict[str, dict[str, Times]], dict[str, float]]:
    """Times of a call by case and form, and seconds to compile each form."""
    position = jnp.arange(batch, dtype=jnp.int32)
    shape = jax.ShapeDtypeStruct((vocabulary, batch), jnp.float32)
    compiled, seconds = {}, {}
    for form, native in zip(FORMS, (None, register()), strict=True):
        began = time.perf_counter()
        lowered = jax.jit(functools.partial(sample, native=native)).lower(shape, rows_of(batch), position)
        compiled[form] = lowered.compile()
        seconds[form] = time.perf_counter() - began
    found = {}
    for name, (spread, fields) in CASES.items():
        logits = spread * jax.random.normal(jax.random.key(batch), shape.shape, jnp.float32)
        rows = rows_of(batch, **fields)
        tokens = [each(logits, rows, position).token.tolist() for each in compiled.values()]
        assert tokens[0] == tokens[1], name
        calls: dict[str, Callable[[], Any]] = {
            form: functools.partial(
                lambda each, *given: jax.block_until_ready(each(*given)), each, logits, rows, position
            )
            for form, each in compiled.items()
        }
        found[name] = interleave(calls, rounds)
    return found, seconds


# %%
def start(form: str) -> float:
    """Seconds of `LLM()` in this process."""
    import xla_engine
    from xla_engine.graphs.steps import prompt_logprobs, sample_rows

    if form == "JAX":
        mock.patch.object(sample_rows, "sample", _without(sample_rows.sample)).start()
        mock.patch.object(prompt_logprobs, "logprobs", _without(prompt_logprobs.logprobs)).start()
    began = time.perf_counter()
    xla_engine.LLM()
    return time.perf_counter() - began


def _without(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, native, **options: function(*arguments, **options)


def starts(rounds: int) -> Iterable[list[str]]:
    """Rows of a table: first start with the library there, and one with programs there as well."""
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory, "library")
        _seconds("C++", library)
        kept = [each for each in library.iterdir() if each.name.startswith("native")]
        found: dict[tuple[str, str], list[float]] = {}
        for turn in range(rounds):
            for form in FORMS if turn % 2 else reversed(FORMS):
                cache = Path(directory, f"{form}-{turn}")
                cache.mkdir(mode=0o700)
                for each in kept:
                    shutil.copytree(each, cache / each.name) if each.is_dir() else shutil.copy2(each, cache)
                for kind in ("programs compiled", "programs read"):
                    found.setdefault((kind, form), []).append(_seconds(form, cache))
        for kind in ("programs compiled", "programs read"):
            times = [Times(tuple(found[kind, form])) for form in FORMS]
            ratio = times[0].median / times[1].median
            yield [
                kind,
                *(f"{each.median:.1f} ({each.least:.1f}-{each.most:.1f})" for each in times),
                f"{ratio:.2f}",
            ]


def _seconds(form: str, cache: Path) -> float:
    done = subprocess.run(
        [sys.executable, "-m", "spikes.061_sampler_in_cpp", "--child", form],
        env={**os.environ, "XLA_ENGINE_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.split()[-1])


# %%
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--start", action="store_true")
    parser.add_argument("--child", choices=FORMS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(start(given.child))
        return
    print(describe_machine())
    if given.start:
        print("\ns of LLM(), median (least-most):\n")
        print(markdown_table(["start", *FORMS, "times as fast"], list(starts(given.rounds))))
        return
    table, compiles = [], []
    for batch in given.batches:
        found, seconds = measure(batch, given.vocabulary, given.rounds)
        compiles.append([str(batch), *(f"{seconds[form]:.2f}" for form in FORMS)])
        for name, times in found.items():
            ratio = times["JAX"].median / times["C++"].median
            table.append([str(batch), name, *(times[form].milliseconds(2) for form in FORMS), f"{ratio:.2f}"])
    print(f"\nms of a call, median (least-most), vocabulary {given.vocabulary}:\n")
    print(markdown_table(["rows", "every row wants", *FORMS, "times as fast"], table))
    print("\ns to trace and compile it:\n")
    print(markdown_table(["rows", *FORMS], compiles))


if __name__ == "__main__":
    main()
