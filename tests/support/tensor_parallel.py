"""Engines over several devices of a CPU, in a process of their own: a job comes in as JSON, results go out so.

`run(job, ...)` starts the process; `python -m tests.support.tensor_parallel` is it.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.models import TINY
from xla_engine.graphs.alternating_form import AlternatingForm
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.forms import LatentForm, RoutedExperts
from xla_engine.graphs.recurrent_forms import ConvolutionForm, DeltaForm, MambaForm

GOLDEN = Path(__file__).parents[1] / "golden" / "families"


def _models(
    base: ModelConfig, experts: RoutedExperts, clamped: int, delta: DeltaForm
) -> dict[str, ModelConfig]:
    """Kinds of layers. clamped: features of the experts that have biases."""
    biases = {"qkv_bias": True, "output_bias": True}
    with_bias = RoutedExperts(
        num_experts=4, num_experts_per_tok=3, moe_intermediate_size=clamped, bias=True, swiglu_limit=7.0
    )
    mixers = ("linear_attention", "full_attention")
    return {
        "routed": replace(base, experts=experts, mlp_only_layers=(1,)),
        "clamped": replace(base, experts=with_bias, attention_sinks=True, **biases),
        "recurrent": replace(base, layer_types=mixers, delta=delta, attn_output_gate=True, qk_norm="head"),
        "normed": replace(
            base, qk_norm="all", pre_norm=False, post_norm=True, mlp_bias=True, num_key_value_heads=4
        ),
    }


_HYBRID = replace(TINY, hidden_size=64, num_attention_heads=8, num_key_value_heads=2)
_SHARING = ("sliding_attention", "full_attention") * 2 + ("full_attention",)  # the last two have no keys
_OF_GEMMA: dict[str, Any] = {
    "global_head_dim": 32, "sliding_window": 24, "qk_norm": "head", "value_norm": True, "post_norm": True,
    "layer_scalar": True, "hidden_act": "gelu_tanh", "attention_multiplier": 1.0, "embedding_multiplier": 8.0,
    "rope_local_base_freq": 1000.0, "final_logit_softcapping": 30.0,
}  # fmt: skip
_OF_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 5, "layer_types": _SHARING, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 150,
}  # fmt: skip
_STREAMS = _OF_GEMMA | {
    "global_head_dim": None,
    "layer_scalar": False,
    "alternating": AlternatingForm(streams=4, laurel_rank=64, cutoffs=(0.8416, 0.2533, None, None, None)),
}
_KEYS_AS_VALUES = _OF_GEMMA | {
    "num_hidden_layers": 3,
    "layer_types": ("sliding_attention", "sliding_attention", "full_attention"),
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "experts": RoutedExperts(
        num_experts=6, num_experts_per_tok=2, moe_intermediate_size=96, beside_mlp=True, gelu=True
    ),
}
_LATENT = LatentForm(q_lora_rank=64, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32)
_MAMBA = MambaForm(
    value_heads=6, value_dim=32, key_heads=2, key_dim=16, kernel=4, norm_eps=1e-6, output_multiplier=0.75
)
# Whose layers are C++ operations; what devices share comes out even, or not.
MODELS = {
    "tiny": TINY,
    "convolution": replace(
        _HYBRID,
        layer_types=("conv", "full_attention"),
        convolution=ConvolutionForm(features=64, kernel=3, bias=True),
    ),
    "latent": replace(
        _HYBRID,
        num_attention_heads=6,
        num_key_value_heads=1,
        head_dim=64,
        stored_parts=1,
        attention_multiplier=0.125,
        latent=_LATENT,
    ),
    "shared_keys": replace(
        _HYBRID, **_OF_GEMMA, **_OF_LAYERS, use_double_wide_mlp=True, intermediate_size=64
    ),
    "keys_as_values": replace(_HYBRID, **_KEYS_AS_VALUES),
    "streams": replace(_HYBRID, **_STREAMS, **_OF_LAYERS),
    "mamba": replace(
        _HYBRID,
        num_hidden_layers=5,
        layer_types=("hybrid", "mlp", "mamba", "full_attention", "mlp"),
        mlp_only_layers=(0, 1, 2, 3),
        experts=RoutedExperts(
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=96,
            shared_expert_intermediate_size=64,
            shared_expert_gate=False,
            scoring_func="sigmoid",
            n_group=3,
            topk_group=2,
            plain=True,
            moe_latent_size=128,
        ),
        one_sublayer=True,
        attention_output_multiplier=1.5,
        mlp_multipliers=(0.5, 0.75),
        mamba=_MAMBA,
    ),
    **_models(
        _HYBRID,
        RoutedExperts(
            num_experts=5, num_experts_per_tok=2, moe_intermediate_size=96, shared_expert_intermediate_size=64
        ),
        64,
        DeltaForm(key_heads=2, value_heads=6, key_dim=16, value_dim=32, kernel=4, norm_eps=1e-6),
    ),
}
# Of which each of four devices has 192 features of every product: where XLA's serve, smaller weights are not cut.
WIDE = replace(
    TINY, hidden_size=768, num_attention_heads=8, num_key_value_heads=4, head_dim=64, intermediate_size=768,
    vocab_size=800, max_position_embeddings=256,
)  # fmt: skip
_OF_WIDE = _models(
    WIDE,
    RoutedExperts(
        num_experts=5, num_experts_per_tok=2, moe_intermediate_size=90, shared_expert_intermediate_size=768
    ),
    96,
    DeltaForm(key_heads=4, value_heads=8, key_dim=16, value_dim=48, kernel=4, norm_eps=1e-6),
)
_OF_WIDE |= {
    "latent": replace(
        WIDE,
        num_key_value_heads=1,
        head_dim=64,
        stored_parts=1,
        latent=replace(_LATENT, kv_lora_rank=48, qk_rope_head_dim=16, v_head_dim=96),
    ),
    "shared_keys": replace(WIDE, **_OF_GEMMA, **_OF_LAYERS, use_double_wide_mlp=True),
    "keys_as_values": replace(WIDE, **_KEYS_AS_VALUES),
    "streams": replace(WIDE, **_STREAMS, **_OF_LAYERS),
}
_OF_WIDE["normed"] = replace(_OF_WIDE["normed"], qkv_bias=True, output_bias=True)
WIDE_MODELS = {
    "wide": WIDE,
    **{f"wide_{name}": model for name, model in _OF_WIDE.items()},
    "wide_scaled": replace(
        WIDE,
        layer_norm=True,
        use_parallel_residual=True,
        hidden_act="gelu_tanh",
        embedding_multiplier=27.7,
        residual_multiplier=0.22,
        final_logit_softcapping=30.0,
        attn_logit_softcapping=50.0,
        tie_word_embeddings=True,
    ),
}
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 8, "max_model_len": 160, "chunk_size": 16, "prefill_lanes": (2,), "self_check": False,
    "block_size": 32,
}  # fmt: skip
_COLLECTIVES = ("all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "all-gather")


def run(
    *jobs: dict[str, Any], sizes: tuple[int, ...] = (1, 2, 4), module: str = __name__
) -> list[dict[int, dict[str, Any]]]:
    """What each job gives at each `tensor_parallel_size`, in a process of its own that runs `module`."""
    devices = f"--xla_force_host_platform_device_count={max(sizes)}"
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(jobs), *map(str, sizes)],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
        env=os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {devices}"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    every = json.loads(done.stdout.splitlines()[-1])
    return [{int(size): result for size, result in found.items()} for found in every]


def result(job: dict[str, Any], size: int, hosts: Any = None) -> dict[str, Any]:
    """What one engine gives for requests of every kind that arrive while others run. hosts: `Hosts` that share it.

    model: a golden family, the path of a model, or one of `MODELS` and `WIDE_MODELS`. dtype. engine: options.
    tokens: of each request.
    preempts: requests lose their slots in every fourth of the first 60 turns. verifies: so many requests of `verify`,
    before. least: features of one of XLA's products that a device has at least, in place of what the engine asks for.
    """
    import numpy as np

    from tests.support.models import tiny_checkpoint
    from xla_engine.config import EngineConfig
    from xla_engine.engine.batch_engine import XlaBatchEngine
    from xla_engine.equivalence.verify import verify
    from xla_engine.graphs.model import spec
    from xla_engine.model_loader.checkpoint import load_checkpoint
    from xla_engine.runner.follower import follow

    dtype = job.get("dtype", "bfloat16")
    if (model := (MODELS | WIDE_MODELS).get(job["model"])) is not None:
        checkpoint = tiny_checkpoint(dtype, model=model)
    else:
        checkpoint = load_checkpoint(GOLDEN / job["model"], dtype=dtype)  # an absolute path is taken as it is
    config = EngineConfig(**OPTIONS | job.get("engine", {}), tensor_parallel_size=size)
    generator = np.random.default_rng(5)
    beginning = generator.integers(1, 198, 48).tolist()
    least = mock.patch.object(spec, "LEAST", job.get("least", spec.LEAST))
    with least, XlaBatchEngine(checkpoint, None, config, hosts=hosts) as engine:
        if hosts is not None and not hosts.is_first:
            follow(engine.runner, hosts)
            return {}
        report = verify(engine, requests=asked, schedules=1) if (asked := job.get("verifies")) else None
        outputs: dict[str, Any] = {}
        submitted: list[str] = []
        turns = itertools.count()

        def turn() -> None:
            outputs.update((output.request_id, output) for output in engine.step() if output.finished)
            live = [name for name in submitted if name not in outputs]
            if job.get("preempts") and (now := next(turns)) % 4 == 3 and now < 60 and live:
                engine.preempt(live[now % len(live)], how=("park", "replay")[now // 4 % 2])

        for index in range(6):
            prompt = beginning + generator.integers(1, 198, 5 + 9 * index).tolist()
            submitted.append(
                engine.submit(prompt, _params(index, job.get("tokens", 16)), request_id=str(index))
            )
            for _ in range(3 * (index % 3)):
                turn()
        while engine.has_unfinished:
            turn()
        stats = engine.stats()
        inventory = engine.runner.inventory
        texts = {report.name: inventory.text(report.name) for report in engine.inventory_report()}
        return {
            "outputs": {name: _bits(outputs[name]) for name in sorted(outputs)},
            "verified": report is None or report.ok,
            "products": engine.runner.platform["linear"],
            "preemptions": stats.preemptions,
            "cached": stats.cached_tokens,
            "drafted": stats.drafted_tokens,
            "accepted": stats.accepted_tokens,
            "compiles": stats.compiles_after_warmup,
            "collectives": {name: _collectives(text) for name, text in texts.items()},
            "weights": engine.runner.weights.nbytes,
            "cache": engine.runner.cache_bytes,
        }


def _params(index: int, tokens: int) -> Any:
    from xla_engine.sampling_params import SamplingParams

    greedy: dict[str, Any] = {"temperature": 0, "logprobs": 3}
    drawn = (
        greedy,
        {"temperature": 0.9, "top_p": 0.9, "seed": index, "logprobs": 0},
        {"temperature": 1.3, "top_k": 20, "min_p": 0.01, "seed": index, "prompt_logprobs": 2},
        {**greedy, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {7: 2.0, 8: -2.0}},
    )
    return SamplingParams(max_tokens=tokens, ignore_eos=True, **{"logprobs": 0, **drawn[index % 4]})


def _bits(output: Any) -> list[Any]:
    """Tokens and every log-probability in full, of prompt and completion."""
    (one,) = output.outputs
    top = [
        None if each is None else [(token, value.logprob.hex()) for token, value in each.items()]
        for each in (*(output.prompt_logprobs or ()), *(one.top_logprobs or ()))
    ]
    return [list(one.token_ids), [value.hex() for value in one.logprobs], top]


def _collectives(text: str) -> dict[str, list[str]]:
    """The element types that each kind of collective of a compiled program works on."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        match = re.search(r"= (\(?[a-z0-9]+\[.*?) (" + "|".join(_COLLECTIVES) + r")(-start)?\(", line)
        if match:
            kinds = re.findall(r"([a-z]+[0-9]+)\[", match[1])
            found[match[2]] = sorted({*found.get(match[2], []), *kinds})
    return found


if __name__ == "__main__":
    sizes = sys.argv[2:]
    print(json.dumps([{size: result(job, int(size)) for size in sizes} for job in json.loads(sys.argv[1])]))
