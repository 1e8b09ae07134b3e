# Frozen: runs at commit 6a06d4a.
"""How much host memory does a file of a million lines take?

Three runs, each in a process of its own, with the resident memory after every tenth of the file:
1. an engine that answers at once, so that only the way from file to file is measured;
2. the same file again with --resume, nearly all of it done;
3. the real engine with a small random model and one token per request, on fewer lines.

    python -m spikes.014_million_lines
"""

# %%
from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spikes.support.timing import markdown_table
from xla_engine.batch.lines import read_lines
from xla_engine.batch.output_file import Mode, OutputFile
from xla_engine.batch.results import ResultHeader
from xla_engine.batch.resume import FinishedLines
from xla_engine.batch.run import BatchRun
from xla_engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from xla_engine.sampling_params import SamplingParams

PAGE = os.sysconf("SC_PAGE_SIZE")
HEADER = ResultHeader(created=0, model="m", system_fingerprint="0" * 16)


# %%
class InstantEngine:
    """Every request ends in the next step with one token."""

    max_num_seqs = 64

    def __init__(self) -> None:
        self._live: dict[str, tuple[int, ...]] = {}

    @property
    def has_unfinished(self) -> bool:
        return bool(self._live)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        raise NotImplementedError

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
        priority: int = 0,
        deadline_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> str:
        assert request_id is not None and not isinstance(prompt, str)
        self._live[request_id] = tuple(prompt)
        return request_id

    def abort(self, request_id: str) -> bool:
        return self._live.pop(request_id, None) is not None

    def step(self, *, only_finished: bool = False) -> list[RequestOutput]:
        live, self._live = self._live, {}
        choice = CompletionOutput(index=0, text="x", token_ids=(1,), finish_reason="length")
        metrics = RequestMetrics(arrival_time=0.0, first_token_time=1.0, token_times=(1.0,))
        return [
            RequestOutput(
                request_id=name,
                prompt=None,
                prompt_token_ids=ids,
                outputs=(choice,),
                finished=True,
                metrics=metrics,
            )
            for name, ids in live.items()
        ]


# %%
def tiny_engine() -> Any:

    from xla_engine.config import EngineConfig
    from xla_engine.engine.batch_engine import XlaBatchEngine
    from xla_engine.graphs.config import ModelConfig
    from xla_engine.model_loader.checkpoint import random_checkpoint

    model = ModelConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
    )
    checkpoint = random_checkpoint(model, eos_token_ids=(0,))
    return XlaBatchEngine(checkpoint, None, EngineConfig(max_num_seqs=64, chunk_size=8, prefill_lanes=(64,)))


def write_input(path: Path, count: int) -> None:
    with open(path, "wb") as file:
        for number in range(count):
            ids = [number % 251, number // 251 % 251, 7, 7]
            file.write(
                b'{"custom_id": "request-%d", "prompt": %s, "max_tokens": 1}\n' % (number, str(ids).encode())
            )


def resident() -> float:
    """MiB of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 2**20


def run(kind: str, source: Path, target: Path, count: int, answers: Any) -> None:
    engine = tiny_engine() if kind == "real" else InstantEngine()
    marks: list[float] = []
    done = FinishedLines()

    def on_turn() -> None:
        if batch.totals.ok * 10 >= count * (len(marks) + 1):
            marks.append(resident())

    before = resident()
    with OutputFile(str(target), Mode.RESUME) as output, open(source, "rb") as file:
        began = time.monotonic()
        output.claim(done)
        claimed = time.monotonic() - began
        lines = read_lines(file)
        batch = BatchRun(engine, lines, output.begin(), header=HEADER, done=done, on_turn=on_turn)
        tally = batch.run()
        seconds = time.monotonic() - began
    assert tally.failure is None and tally.ok + tally.resumed == count, tally
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    answers.put((before, marks, resident(), peak, claimed, seconds))


# %%
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--real-lines", type=int, default=100_000)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, count in (
            ("instant", arguments.lines),
            ("resume", arguments.lines),
            ("real", arguments.real_lines),
        ):
            source, target = (
                folder / f"{count}.jsonl",
                folder / f"{'real' if kind == 'real' else 'out'}.jsonl",
            )
            if not source.exists():
                write_input(source, count)
            if kind == "resume":
                os.truncate(target, target.stat().st_size * 99 // 100)
            answers = context.Queue()
            process = context.Process(target=run, args=(kind, source, target, count, answers))
            process.start()
            before, marks, after, peak, claimed, seconds = answers.get()
            process.join()
            shown = [f"{marks[n]:.0f}" if n < len(marks) else "-" for n in (0, 4, 9)]
            rate = f"{count / seconds:.0f}"
            row = [
                kind,
                f"{count}",
                f"{before:.0f}",
                *shown,
                f"{after:.0f}",
                f"{peak:.0f}",
                f"{claimed:.1f}",
                rate,
            ]
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
            sizes = source.stat().st_size / 2**20, target.stat().st_size / 2**20
            print(f"input {sizes[0]:.0f} MiB, output {sizes[1]:.0f} MiB", file=sys.stderr, flush=True)
    head = [
        "run",
        "lines",
        "MiB before",
        "at 10 %",
        "at 50 %",
        "at 100 %",
        "after",
        "peak",
        "reading the output, s",
    ]
    print(markdown_table([*head, "lines/s"], rows))


if __name__ == "__main__":
    main()
