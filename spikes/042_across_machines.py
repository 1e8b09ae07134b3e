# Frozen: runs at commit 84bfb74.
"""How far are instruction sets from each other's bits, and what would one order of summation cost?

    python -m spikes.042_across_machines
    python -m spikes.038_isa --isa avx512_bf16 avx512 avx2 --live 1 8 32     # what each costs

XLA, too, compiles for the processor: `--xla_cpu_max_isa` lets it compile as for another one. Compared are tokens and
bits of log-probabilities of the same requests of the embedded model.
"""

# %%
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from spikes.support.timing import describe_machine, markdown_table
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.across_configurations import run_together
from xla_engine.equivalence.cases import draw_cases
from xla_engine.runner.native_library.instruction_sets import available

XLA_FOR = ("", "AVX2")  # as for this processor, and for one with AVX2 alone


def answers(requests: int, quantization: str | None) -> dict[str, list[list[float]]]:
    """Tokens and log-probabilities by request."""
    with XlaBatchEngine.from_pretrained(config=EngineConfig(quantization=quantization)) as engine:
        cases = draw_cases(engine, requests, seed=1)
        found = run_together(engine, cases)
    return {name: [list(each.token_ids), list(each.logprobs or ())] for name, each in found.items()}  # type: ignore[arg-type]


def in_a_process(
    isa: str, xla_for: str, options: argparse.Namespace, directory: str
) -> dict[str, list[list[float]]]:
    flags = f"--xla_cpu_max_isa={xla_for}" if xla_for else ""
    environment = os.environ | {
        "XLA_ENGINE_ISA": isa,
        "XLA_FLAGS": flags,
        "XLA_ENGINE_CACHE": str(Path(directory) / (xla_for or "here")),
    }
    command = [
        sys.executable,
        "-m",
        "spikes.042_across_machines",
        "--worker",
        "--requests",
        str(options.requests),
    ]
    command += [] if options.quantization is None else ["--quantization", options.quantization]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, list[list[float]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def bits(options: argparse.Namespace) -> None:
    kinds = [(isa, xla) for isa in (*(each.name for each in available()), "none") for xla in XLA_FOR]
    table, first = [], None
    with tempfile.TemporaryDirectory() as directory:
        for isa, xla in kinds:
            found = in_a_process(isa, xla, options, directory)
            first = first or found
            streams = sum(found[name][0] != first[name][0] for name in first)
            alike = [name for name in first if found[name][0] == first[name][0]]
            numbers = sum(len(first[name][1]) for name in alike)
            differ = sum(
                a != b for name in alike for a, b in zip(found[name][1], first[name][1], strict=True)
            )
            table.append(
                [isa, xla or "this processor", f"{streams} of {len(first)}", f"{differ} of {numbers}"]
            )
            print(table[-1], file=sys.stderr, flush=True)
    head = [
        "C++ operations",
        "XLA compiles for",
        "requests with other tokens",
        "other logprob bits in the rest",
    ]
    print(markdown_table(head, table))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--quantization", choices=["int8"])
    parser.add_argument("--worker", action="store_true")
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(answers(options.requests, options.quantization)))
        return
    print(describe_machine(), "\n")
    bits(options)


if __name__ == "__main__":
    main()
