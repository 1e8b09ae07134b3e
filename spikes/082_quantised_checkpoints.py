# Measured at commit 939263a6; runs at HEAD.
"""How fast are quantised safetensors converted at load?

    python -m spikes.082_quantised_checkpoints [--rounds 5]

Prints millions of weights per second of processor time, for a matrix of 4096 x 4096 in 4 bits with groups of 128: to
float32, and to the blocks that stay packed. The best of some rounds; the file is in the system's page cache.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from xla_engine.model_loader.json_fields import Fields
from xla_engine.model_loader.quantised.methods import dequantised
from xla_engine.model_loader.safetensors_files import open_weight_files

SIZE, GROUPS, INDEX = 4096, 32, np.arange(1024)


def words(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(rows).integers(-(2**31), 2**31, (rows, columns)).astype(np.int32)


def checkpoints() -> dict[str, tuple[dict, dict[str, np.ndarray]]]:
    scales = np.full((GROUPS, SIZE), 0.01, np.float16)
    zeros = words(GROUPS, SIZE // 8)
    packed = {"bits": 4, "group_size": SIZE // GROUPS}
    return {
        "AWQ": (
            {"quant_method": "awq", **packed},
            {"m.qweight": words(SIZE, SIZE // 8), "m.qzeros": zeros, "m.scales": scales},
        ),
        "GPTQ": (
            {"quant_method": "gptq", **packed},
            {
                "m.qweight": words(SIZE // 8, SIZE),
                "m.qzeros": np.full_like(zeros, 0x77777777),
                "m.scales": scales,
            },
        ),
        "compressed-tensors": (
            {"quant_method": "compressed-tensors"},
            {
                "m.weight_packed": words(SIZE, SIZE // 8),
                "m.weight_shape": np.array([SIZE, SIZE]),
                "m.weight_scale": scales.T.copy(),
            },
        ),
    }


def best(rounds: int, run: Callable[[], int]) -> float:
    rates = []
    for _ in range(rounds):
        began = time.process_time()
        rates.append(run() / (time.process_time() - began) / 1e6)
    return max(rates)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    for name, (fields, tensors) in checkpoints().items():
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "model.safetensors"
            save_file(tensors, file)
            files = dequantised(open_weight_files(file.parent), Fields(file, fields), {"m.weight"})
            whole = best(rounds, lambda files=files: sum(each.size for each in files.blocks("m.weight")))
            blocks = best(rounds, lambda files=files: len(files.raw_rows("m.weight", INDEX)) * SIZE)
        print(f"{name:20} float32 {whole:6.0f}  blocks {blocks:6.0f}")


if __name__ == "__main__":
    main()
