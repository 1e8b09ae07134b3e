"""Engines with adapters over several devices of a CPU, in a process of their own.

`run(job, ...)` starts the process; `python -m tests.support.tensor_parallel_adapters` is it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.support import tensor_parallel
from tests.support.models import TINY
from tests.support.tensor_parallel import OPTIONS, WIDE
from xla_engine.graphs.forms import RoutedExperts
from xla_engine.model_loader.families import FAMILIES
from xla_engine.model_loader.families.dense import LLAMA
from xla_engine.model_loader.families.gemma3n import GEMMA3N
from xla_engine.model_loader.families.gemma4 import GEMMA4

_EXPERTS = RoutedExperts(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=96)
MODELS = {
    "tiny": (TINY, LLAMA),
    "wide": (WIDE, LLAMA),
    "biased": (replace(WIDE, qkv_bias=True, output_bias=True, mlp_bias=True), LLAMA),
    "routed": (replace(tensor_parallel.MODELS["routed"], experts=_EXPERTS), FAMILIES["Qwen3MoeForCausalLM"]),
    "shared_keys": (tensor_parallel.MODELS["shared_keys"], GEMMA4),
    "streams": (tensor_parallel.MODELS["streams"], GEMMA3N),
}


run = partial(tensor_parallel.run, module=__name__)


def _result(job: dict[str, Any], size: int, directory: Path) -> dict[str, Any]:
    """What one engine gives for requests of three adapters, and of none, that share steps in two slots for adapters.

    Every prompt comes twice, with another adapter the second time.

    model: one of `MODELS`. dtype. engine: options.
    """
    import numpy as np

    from tests.support.adapters import adapters, llama_checkpoint
    from xla_engine.config import EngineConfig
    from xla_engine.engine.batch_engine import XlaBatchEngine
    from xla_engine.sampling_params import SamplingParams

    checkpoint = llama_checkpoint(job.get("dtype", "bfloat16"), *MODELS[job["model"]])
    loras = adapters(directory, checkpoint, 3)
    config = EngineConfig(
        **OPTIONS | job.get("engine", {}), tensor_parallel_size=size, enable_lora=True, max_loras=2
    )
    generator = np.random.default_rng(7)
    prompts = [generator.integers(1, 198, 3 + 8 * index).tolist() for index in range(6)]
    outputs: dict[str, Any] = {}
    with XlaBatchEngine(checkpoint, None, config) as engine:
        for both in ((None, loras[0], loras[1]), (loras[2], None, loras[0])):  # one makes room for the third
            for index in range(6):
                params = SamplingParams(
                    temperature=0.8 * (index % 2), max_tokens=12, logprobs=3, seed=index, ignore_eos=True,
                    prompt_logprobs=1 if index == 4 else None,
                )  # fmt: skip
                adapter = both[index % 3]
                name = f"{len(outputs) // 6}/{index}"
                engine.submit(prompts[index], params, request_id=name, lora_request=adapter)
                engine.step(only_finished=True)
            outputs |= {output.request_id: output for output in engine.drain()}
        inventory = engine.runner.inventory
        texts = {report.name: inventory.text(report.name) for report in engine.inventory_report()}
        check = engine.self_check
        return {
            "outputs": {name: tensor_parallel._bits(outputs[name]) for name in sorted(outputs)},
            "products": engine.runner.platform["linear"],
            "compiles": engine.stats().compiles_after_warmup,
            "collectives": {name: tensor_parallel._collectives(text) for name, text in texts.items()},
            "weights": engine.runner.weights.nbytes,
            "checked": check is None or check.row_invariant,
        }


if __name__ == "__main__":
    found = []
    for job in json.loads(sys.argv[1]):
        with tempfile.TemporaryDirectory() as path:
            found.append({size: _result(job, int(size), Path(path) / size) for size in sys.argv[2:]})
    print(json.dumps(found))
