# Frozen: runs at commit 590d0eb.
"""How close is the engine to the memory roofline of an NVIDIA GPU, where does the rest go, and does the law hold?

Two commands for a machine with a GPU and nothing to install, each within 8 minutes; tables come last and the finding
is written. Every part runs in a process of its own, within what is left of the time.

    python3 -m spikes.013_gpu                  # Llama-3.1-8B shapes: roofline, law, parts of a step
    python3 -m spikes.013_gpu --second         # does the host keep up; steps per dispatch, flags, products
    python3 -m spikes.013_gpu --rehearse       # the same code, tiny, kernels interpreted, on any CPU
"""

# %%
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

FIRST = ("device", "roofline", "law", "breakdown", "attention", "bits", "bits", "sampler", "prefill")
SECOND = ("host:8", "host:64", "host:256", "loop", "products")
# Flags that may change the speed of a step: each is the part `loop` in a process of its own.
FLAGS = {
    "without CUDA graphs": "--xla_gpu_enable_command_buffer=",
    "addresses of scratch memory kept": "--xla_gpu_command_buffer_update_mode=SKIP_TEMP",
    "no Triton products": "--xla_gpu_enable_triton_gemm=false",
    "loops in CUDA graphs": "--xla_gpu_enable_command_buffer=+WHILE",
}
MARK = "RESULT "


def run_part(name: str) -> None:
    """In the child: measure, and print the tables as one line of JSON."""
    from spikes.support import gpu_host, gpu_kernels, gpu_steps
    from spikes.support.gpu_scale import REAL, REHEARSAL

    name, *sizes = name.split(":")
    part = next(getattr(owner, name) for owner in (gpu_host, gpu_kernels, gpu_steps) if hasattr(owner, name))
    print(MARK + json.dumps(part(REHEARSAL if arguments.rehearse else REAL, *map(int, sizes))))


def child(
    name: str, limit: float, flags: str = ""
) -> tuple[list[tuple[str, list[str], list[list[str]]]], str]:
    """Tables of a part, or none and the reason."""
    environment = dict(os.environ)
    environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.93"
    if flags:
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flags}"
    command = [sys.executable, "-W", "ignore", "-m", "spikes.013_gpu", "--part", name]
    if arguments.rehearse:
        environment["JAX_PLATFORMS"] = "cpu"
        command.append("--rehearse")
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return [], f"stopped after {limit:.0f} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if lines:
        return json.loads(lines[-1].removeprefix(MARK)), ""
    return [], (done.stderr.strip().splitlines() or ["no message"])[-1][:300]


def table(header: list[str], rows: list[list[str]]) -> str:
    cells = [list(map(str, row)) for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def setting() -> str:
    """Versions and the driver, read without starting the device."""
    from importlib.metadata import version

    names = ("jax", "jaxlib", "flax")
    words = ", ".join(f"{name} {version(name)}" for name in names)
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        gpu = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        gpu = ""
    gpu = gpu or "no NVIDIA GPU: a rehearsal, whose figures mean nothing"
    return f"{gpu}; Python {sys.version.split()[0]}, {words}"


def finding(sections: list[str], seconds: float) -> str:
    """The whole text; the verdict is for a person to write."""
    return "\n".join(
        [
            "# 013 How close is the engine to the roofline of a GPU, and does the law hold there?",
            "",
            "## Question",
            "",
            "Which share of a decode step is the time in which the GPU can read Llama-3.1-8B's weights and keys once;",
            "where the rest goes; whether a request's bits depend on its row, its neighbours or another compilation.",
            "",
            "## Command",
            "",
            " ".join(["    python3 -m spikes.013_gpu", *sys.argv[1:]]),
            "",
            "## Setting",
            "",
            f"{setting()}. Random weights; bf16; medians. {seconds:.0f} s in all.",
            "",
            "## Table",
            "",
            *sections,
        ]
    )


def main() -> None:
    began = time.monotonic()
    sections: dict[str, tuple[list[str], list[list[str]]]] = {}
    missing = []
    flags = {"default": ""} if arguments.rehearse else FLAGS
    names = SECOND if arguments.second else FIRST
    if arguments.only:
        names = tuple(arguments.only.split(","))
    work = [(name, "", "") for name in names]
    if "loop" in names:
        work += [("loop", *item) for item in flags.items()]
    for name, label, flag in work:
        left = arguments.seconds - (time.monotonic() - began)
        what = f"{name} ({label})" if label else name
        tables, reason = child(name, min(left, arguments.each), flag) if left > 15 else ([], "no time left")
        print(f"{time.monotonic() - began:5.0f} s  {what}: {reason or 'done'}", flush=True)
        if reason:
            missing.append([what, reason])
        for title, header, rows in tables:
            if label:
                title, header, rows = "Flags", ["flag", *header], [[label, *row] for row in rows]
            sections.setdefault(title, (header, []))[1].extend(rows)
    if missing:
        sections["Not measured"] = (["part", "why"], missing)
    tables = [f"{title}\n\n{table(*found)}\n" for title, found in sections.items()]
    text = finding(tables, time.monotonic() - began)
    if arguments.output:
        Path(arguments.output).write_text(text)
    print("\n" + text)


# %%
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--rehearse", action="store_true")
parser.add_argument("--second", action="store_true", help="the second half of the parts")
parser.add_argument("--only", help="these parts alone, with commas between them")
parser.add_argument("--part", help="measure one part in this process")
parser.add_argument("--each", type=float, default=150, help="seconds after which a part is stopped")
parser.add_argument("--seconds", type=float, default=465, help="stop starting parts after this long")
parser.add_argument(
    "--output", help="write the finding here (default: findings/013_gpu[_second].md; a rehearsal: nowhere)"
)
arguments = parser.parse_known_args()[0]
if arguments.output is None and not arguments.rehearse:
    arguments.output = f"findings/013_gpu{'_second' if arguments.second else ''}.md"

if __name__ == "__main__":
    if arguments.part:
        run_part(arguments.part)
    else:
        main()
