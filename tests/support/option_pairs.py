"""Start a tiny engine with each pair of engine options: `python -m tests.support.option_pairs I N` takes part I of N.

Prints one line of JSON for each pair that neither runs a request nor is refused with one sentence.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from dataclasses import fields
from typing import Any

from tests.support.models import TINY_ENGINE, tiny_checkpoint
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import ConfigError
from xla_engine.sampling_params import SamplingParams

# Values that differ from the tests' usual ones. Options that only say where files or pictures are have none.
VALUES: dict[str, tuple[Any, ...]] = {
    "max_num_seqs": (1, "auto"),
    "memory_utilization": (0.5,),
    "max_model_len": (64,),
    "dtype": ("float32",),
    "lag": (0, 2),
    "chunk_size": (32,),
    "prefill_lanes": ((1,), (2, 8)),
    "max_num_batched_tokens": (16, 1),
    "key_buckets": (None,),
    "logprobs_mode": ("processed_logprobs",),
    "attention_backend": ("xla", "native", "gpu"),
    "linear_backend": ("xla", "native", "gpu"),
    "quantization": ("int8", "gguf", None),
    "kv_cache_dtype": ("int8",),
    "max_waiting": (1,),
    "scheduling_policy": ("round_robin", "shortest_prompt"),
    "enable_prefix_caching": (False,),
    "mamba_cache_mode": ("align",),
    "block_size": (64,),
    "num_blocks": (40, 2),
    "kv_cache_memory_bytes": (1 << 20, "auto"),
    "prefix_cache_dir": ("here",),
    "preemption": (False,),
    "swap_space": (0.0,),
    "compile_cache": (False,),
    "self_check": (True,),
    "bits": ("portable",),
    "isa": ("none", "avx2"),
    "speculative_config": ({"method": "ngram", "num_speculative_tokens": 2}, {"method": "suffix"}),
    "step_timeout_s": (60.0,),
    "phase_timers": (True,),
    "tensor_parallel_size": (2,),
    "keep_finished": (1,),
    "enable_dry": (True,),
    "shadow_rate": (1.0,),
    "enable_lora": (True,),
    "runner": ("pooling",),
}
WITHOUT = {
    *("seed", "generation_config", "priority_aging", "quantum", "mamba_block_size", "mamba_cache_states"),
    *("prefix_cache_bytes", "max_loras", "max_lora_rank", "image_cache_bytes", "allowed_local_media_path"),
    *("allowed_media_domains", "pooler_config", "hf_overrides", "mm_processor_kwargs"),
}
BASE = {each.name: getattr(TINY_ENGINE, each.name) for each in fields(EngineConfig)} | {"self_check": False}


def pairs() -> list[dict[str, Any]]:
    """Each option with each of its values, and all pairs of options with the first of theirs."""
    alone = [{name: value} for name, values in VALUES.items() for value in values]
    firsts = [{name: values[0]} for name, values in VALUES.items()]
    return [*alone, *(one | other for one, other in itertools.combinations(firsts, 2))]


def problem(options: dict[str, Any]) -> str | None:
    """What is wrong with an engine of these options; None if it runs, or if one sentence says that it cannot."""
    with tempfile.TemporaryDirectory() as folder:
        if "prefix_cache_dir" in options:
            options = options | {"prefix_cache_dir": folder}
        try:
            with XlaBatchEngine(tiny_checkpoint(), None, EngineConfig(**(BASE | options))) as engine:
                if engine.config.pools:
                    return None
                engine.submit([3, 1, 4, 1, 5], SamplingParams(max_tokens=3, temperature=0))
                (done,) = [output for output in engine.drain() if output.finished]
                ended = done.outputs[0]
                return None if len(ended.token_ids) == 3 else f"{ended.finish_reason}: {done.error}"
        except ConfigError as error:
            message = str(error)
            return f"several lines: {message}" if "\n" in message or not message else None
        except Exception as error:
            return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    part, of = map(int, sys.argv[1:])
    for chosen in pairs()[part::of]:
        wrong = problem(chosen)
        print(chosen, wrong or "", file=sys.stderr, flush=True)
        if wrong is not None:
            print(json.dumps({"options": repr(chosen), "problem": wrong[:500]}), flush=True)
