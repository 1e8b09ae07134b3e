# Frozen: runs at commit d11223f.
"""Does a model give the same bits on 1, 2 and 4 devices, and what does a step under shard_map cost on one?

    python -m spikes.050_tensor_parallel bits
    python -m spikes.050_tensor_parallel step

`bits`: every golden family through the engine on forced host devices, each in a process of its own: tokens,
log-probabilities and the most likely tokens held against one device's; and random models, of which the C++ products or
XLA's serve. "every weight cut": also those that the engine leaves whole, as a device would have few of their features.
`step`: the decode step of SmolLM2-135M's shape on one device, with its programs under `jax.shard_map` on a mesh of one
device and without, in turns; and what the collectives of two forced host devices on the same cores take.
"""

# %%
from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import numpy as np

from spikes.support.timing import SMOLLM2_135M, describe_machine, interleave, markdown_table

FORMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "f32": {"dtype": "float32"},
    "int8": {"engine": {"quantization": "int8"}},
    "bf16, pure JAX": {"engine": {"isa": "none"}},
    "f32, pure JAX": {"dtype": "float32", "engine": {"isa": "none"}},
    "int8, pure JAX": {"engine": {"quantization": "int8", "isa": "none"}},
    "bf16, blocks": {"engine": {"num_blocks": 80}},
    "f32, blocks": {"dtype": "float32", "engine": {"num_blocks": 80}},
    "f32, every weight cut": {"dtype": "float32", "least": 1},
}

arguments = argparse.ArgumentParser()
arguments.add_argument("part", nargs="?", default="step", choices=["bits", "step"])
arguments.add_argument("--rounds", type=int, default=60)
arguments.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
arguments.add_argument("--only", nargs="*", help="families")
arguments.add_argument("--forms", nargs="*", choices=FORMS)
options = arguments.parse_known_args()[0]


# %%
def differing(results: dict[int, dict[str, Any]]) -> tuple[int, int]:
    """Requests of 2 and of 4 devices that are not those of one."""
    one = results[1]["outputs"]
    found = [sum(results[size]["outputs"][name] != one[name] for name in one) for size in (2, 4)]
    return found[0], found[1]


def bits() -> None:
    from tests.support.tensor_parallel import GOLDEN, MODELS, WIDE_MODELS, run

    golden = sorted(path.name for path in GOLDEN.iterdir())
    forms = [*FORMS] if options.forms is None else options.forms
    rows = []
    for name in options.only or [*MODELS, *WIDE_MODELS, *golden]:
        cells = [name]
        recurrent = any(word in name for word in ("next", "qwen3_5", "recurrent"))
        routed = recurrent or any(word in name for word in ("moe", "mixtral", "gpt_oss", "routed", "clamped"))
        for form in forms:
            if (routed and "int8" in form) or (recurrent and "blocks" in form):
                cells.append("")
                continue
            (results,) = run({"model": name, **FORMS[form]})
            float_sums = [
                program
                for size in (2, 4)
                for program, kinds in results[size]["collectives"].items()
                if set(kinds.get("all-reduce", ())) - {"s32"} or "reduce-scatter" in kinds
            ]
            two, four = differing(results)
            cells.append(f"{two} / {four}{'' if not float_sums else ' SUMS'}")
        rows.append(cells)
        print(cells, flush=True)
    print(markdown_table(["family", *forms], rows))


# %%
def step() -> None:
    from xla_engine.config import EngineConfig
    from xla_engine.graphs.row_state.rows import pack_rows
    from xla_engine.model_loader.checkpoint import random_weights as weights_of
    from xla_engine.runner import backends
    from xla_engine.runner.dispatch import decode_work
    from xla_engine.runner.programs import decode_name
    from xla_engine.runner.runner import Runner

    weights = weights_of(SMOLLM2_135M, dtype="bfloat16")
    config = EngineConfig(
        max_num_seqs=max(options.rows), max_model_len=512, prefill_lanes=(2,), enable_prefix_caching=False,
        preemption=False,
    )  # fmt: skip
    runners = {}
    for name, mesh in (("without", None), ("shard_map, 1 device", 1), ("2 devices, the same cores", 2)):
        with mock.patch.object(backends, "mesh_size", lambda config, mesh=mesh: mesh):
            runners[name] = Runner(SMOLLM2_135M, weights, "bfloat16", config)

    def variant(runner: Runner, live: int) -> Any:
        dispatch, state = runner._dispatch, runner._state
        host: Any = jax.tree.map(np.asarray, state.make_rows())
        count = len(host.token)
        busy = replace(
            host, length=np.full(count, 160, np.int32), remaining=np.full(count, 1 << 20, np.int32)
        )
        state.rows = dispatch.put(pack_rows(busy))
        scheduled = dispatch.put(decode_work(np.arange(live), count, None))
        name = decode_name(runner.buckets[-1])
        return lambda: np.asarray(dispatch.run(name, scheduled)[0])

    rows = []
    for live in options.rows:
        variants = {name: variant(runner, live) for name, runner in runners.items()}
        times = interleave(variants, min(options.rounds, 300), warm_up=3)
        base = times["without"].seconds
        for name, found in times.items():
            ratios = [mine / other for mine, other in zip(found.seconds, base, strict=True)]
            low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
            rows.append([str(live), name, found.milliseconds(2), f"{middle:.3f} ({low:.3f}-{high:.3f})"])
            rows[-1].append(f"{statistics.median(found.seconds) / statistics.median(base):.3f}")
    head = ["live rows", "form", "ms", "ratio of a round, median (quartiles)", "ratio of medians"]
    print(markdown_table(head, rows))


if __name__ == "__main__":
    if options.part == "bits":
        bits()
    else:
        jax.config.update("jax_num_cpu_devices", 2)
        print(describe_machine())
        step()
