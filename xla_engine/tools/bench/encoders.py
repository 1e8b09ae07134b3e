"""Compare the rate of embeddings with sentence-transformers and fastembed, on one encoder and one set of texts.

    python -m xla_engine.tools.bench.encoders MODEL TEXTS [--turns 3] [--peer NAME=PYTHON[:ONNX]] ...

MODEL: a directory of sentence-transformers. TEXTS: a file with a text on each line. Peers are "sentence-transformers"
and "fastembed", each with the interpreter that it is installed in; fastembed also needs the model as ONNX, in a
directory with its tokenizer files. Engines run one after the other, in turns, each in a process of its own that stays
open. Prints for each the texts per second of its best turn, the processor seconds for a thousand texts (which other
processes disturb less), and the least cosine with the first engine's vectors.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np

OURS = "xla-engine"
_WORKER = str(Path(__file__).parent / "workers" / "encoder.py")


class Worker:
    """An engine in a process of its own, which embeds all texts each time it is asked."""

    def __init__(self, name: str, python: str, model: str, texts: Path, onnx: str, slots: int) -> None:
        self.name = name
        self.rates: list[float] = []
        self.seconds: list[float] = []
        self.vectors: np.ndarray[Any, Any] | None = None
        command = [python, _WORKER, name, model, str(texts), onnx, str(slots)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise click.ClickException(f"{self.name} ended with status {self._process.wait()}")

    def turn(self) -> None:
        """Embed all texts once."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        found = self._read()
        self.rates.append(found["texts"] / found["seconds"])
        self.seconds.append(found["cpu_seconds"] / found["texts"] * 1000)
        self.vectors = np.load(found["vectors"])
        Path(found["vectors"]).unlink()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False))
@click.argument("texts", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--turns", default=3, show_default=True, help="How often each engine embeds all texts.")
@click.option("--slots", default=64, show_default=True, help="Our max_num_seqs.")
@click.option("--peer", "peers", multiple=True, help="NAME=PYTHON, or NAME=PYTHON:ONNX.")
def main(model: str, texts: Path, turns: int, slots: int, peers: tuple[str, ...]) -> None:
    """Compare the rate of embeddings."""
    named = [each.partition("=")[::2] for each in peers]
    split = [(name, *place.partition(":")[::2]) for name, place in named]
    workers = [
        Worker(name, python, model, texts, onnx, slots)
        for name, python, onnx in ((OURS, sys.executable, ""), *split)
    ]
    for _ in range(turns):
        for worker in workers:
            worker.turn()
            told = f"{worker.rates[-1]:.1f} texts/s, {worker.seconds[-1]:.2f} CPU s per 1000 texts"
            click.echo(f"{worker.name}: {told}", err=True)
    reference = workers[0].vectors
    assert reference is not None
    for worker in workers:
        worker.close()
        assert worker.vectors is not None
        unit = worker.vectors / np.linalg.norm(worker.vectors, axis=1, keepdims=True)
        least = float((unit * reference).sum(1).min())
        rate, seconds = max(worker.rates), min(worker.seconds)
        click.echo(
            f"{worker.name:<24} {rate:8.1f} texts/s  {seconds:8.2f} CPU s per 1000 texts  cosine >= {least:.6f}"
        )


if __name__ == "__main__":
    main()
