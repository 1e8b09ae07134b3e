# Measured at commit b656c5b0; runs at HEAD.
"""What does the TPU compiler expect of an 8B model's programs, by topology, form and number of slots?

    PYTHONPATH=LIBTPU python -m spikes.118_tpu_shapes [--topology v5e:2x2 v6e:2x2] [--quantization none int8]
        [--slots 64 256] [--devices 4] [--layers 2] [--prefill]

LIBTPU: a folder with the package `libtpu`, which `xla-engine graphs --topology` needs. Llama-3.1-8B's shape is
compiled with --layers and with one layer more, and what that one adds stands for each further layer up to 32: all of
them take ten times as long, and no single chip holds them. Prints rows of a table, in milliseconds: greedy rows, the
least time that the chip's peak rates allow, their ratio, and how much more a step takes if rows need all of the
sampler. The dearest source lines go to stderr.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

LAYERS = 32
KEYS, LANES, CHUNK = 4096, 8, 512
CONFIG = {  # of meta-llama/Llama-3.1-8B
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


class Case(NamedTuple):
    """A program to compile."""

    topology: str
    quantization: str
    slots: int
    devices: int
    prefill: bool
    layers: int  # that are compiled, then one more


class Seconds(NamedTuple):
    """Estimates of a call: greedy, with every stage of the sampler, and at the chip's peak rates."""

    greedy: float
    sampled: float
    roofline: float


def compiled(case: Case, layers: int) -> dict[str, Any]:
    """What `xla-engine graphs` says of the program with so many layers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
        options = ["--topology", case.topology, "--model", str(path), "--json", "--memory-utilization", "1"]
        options += ["--quantization", case.quantization, "--max-num-seqs", str(case.slots)]
        options += ["--max-model-len", str(KEYS), "--tensor-parallel-size", str(case.devices)]
        options += ["--attention-backend", "tpu", "--program", "prefill" if case.prefill else "decode"]
        if case.prefill:
            options += ["--chunk-size", str(CHUNK), "--prefill-lanes", str(LANES)]
        run = subprocess.run(
            [sys.executable, "-m", "xla_engine", "graphs", *options],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    (program,) = json.loads(run.stdout)["programs"]
    if "error" in program:
        raise SystemExit(f"{case}: {program['error']}")
    found: dict[str, Any] = program
    return found


def whole(case: Case) -> tuple[Seconds, list[tuple[str, float]]]:
    """Estimates for all layers, and the dearest source lines in milliseconds."""
    few, more = (compiled(case, case.layers + one) for one in (0, 1))
    names = ("estimated_seconds", "most_seconds", "roofline_seconds")
    layers = LAYERS - case.layers
    grown = Seconds(*(few[name] + layers * (more[name] - few[name]) for name in names))
    before = dict(few["lines"])
    lines = {line: at + layers * (at - before.get(line, 0.0)) for line, at in more["lines"]}
    return grown, sorted(((line, 1e3 * at) for line, at in lines.items()), key=lambda each: -each[1])[:5]


def main() -> None:
    """Compile each case, and print its row when it is known."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topology", nargs="+", default=["v5e:2x2"])
    parser.add_argument("--quantization", nargs="+", default=["none"])
    parser.add_argument("--slots", nargs="+", type=int, default=[64])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--prefill", action="store_true", help=f"{LANES} lanes of {CHUNK} tokens, not decode")
    given = parser.parse_args()
    print("| chip | weights | slots | devices | greedy | roofline | ratio | sampling |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for topology in given.topology:
        for quantization in given.quantization:
            for slots in [LANES] if given.prefill else given.slots:
                found, lines = whole(
                    Case(topology, quantization, slots, given.devices, given.prefill, given.layers)
                )
                print(
                    f"| {topology} | {quantization} | {slots} | {given.devices} | {1e3 * found.greedy:.1f} |"
                    f" {1e3 * found.roofline:.1f} | {found.greedy / found.roofline:.2f} |"
                    f" {found.sampled / found.greedy - 1:.1%} |",
                    flush=True,
                )
                print(*(f"{line} {ms:.1f} ms" for line, ms in lines), sep="; ", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
