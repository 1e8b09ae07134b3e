"""Embeds a file of texts each time that a line arrives: `encoder.py ENGINE MODEL TEXTS ONNX SLOTS`.

It runs in the interpreter of the engine, and imports nothing of this package unless that is the engine.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Embed = Callable[[list[str]], Any]


def engine(name: str, model: str, onnx: str, slots: int) -> Embed:
    """The function that embeds texts with an engine."""
    if name == "sentence-transformers":
        from sentence_transformers import SentenceTransformer

        theirs = SentenceTransformer(model, device="cpu")
        return lambda texts: theirs.encode(texts)
    if name == "fastembed":
        from fastembed import TextEmbedding
        from fastembed.common.model_description import ModelSource, PoolingType

        TextEmbedding.add_custom_model(
            model="measured",
            pooling=PoolingType.MEAN,
            normalization=True,
            sources=ModelSource(hf="measured/measured"),
            dim=int(json.loads((Path(model) / "config.json").read_text())["hidden_size"]),
            model_file="model.onnx",
        )
        fast = TextEmbedding("measured", specific_model_path=onnx)
        return lambda texts: np.array(list(fast.embed(texts)))
    from xla_engine import LLM, PoolingParams

    llm = LLM(model, max_num_seqs=slots)
    cut = PoolingParams(truncate_prompt_tokens=-1)
    return lambda texts: np.array(
        [each.outputs.embedding for each in llm.embed(texts, pooling_params=cut, use_tqdm=False)]
    )


def main(name: str, model: str, file: str, onnx: str, slots: str) -> None:
    texts = Path(file).read_text().splitlines()
    embed = engine(name, model, onnx, int(slots))
    embed(texts[:8])
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        began, cpu = time.perf_counter(), time.process_time()
        vectors = embed(texts)
        found = {
            "texts": len(texts),
            "seconds": time.perf_counter() - began,
            "cpu_seconds": time.process_time() - cpu,
        }
        with tempfile.NamedTemporaryFile(suffix=".npy", delete=False) as to:
            np.save(to, np.asarray(vectors, np.float32))
        print(json.dumps({**found, "vectors": to.name}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
