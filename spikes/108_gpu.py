# Measured at commit cece9129; runs at HEAD.
# ruff: noqa: B008, E402, E501, PT008
"""Does an NVIDIA GPU give prefill the bits of decode, and what is the engine's rate when kernels start early?

For a machine with a GPU; gguf and llguidance have to be installed. Parts that compare bits run beside each other, and
those that measure compile meanwhile and then run one after the other. Each line of the output is one finding in JSON.

    python3 -m spikes.108_gpu --output DIRECTORY                 # all parts
    python3 -m spikes.108_gpu --output DIRECTORY --only steps    # these alone
    python3 -m spikes.108_gpu --output DIRECTORY --rehearse      # the same code, tiny, kernels interpreted, on any CPU
"""

# %%
from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

BITS = ("kernels", "law", "features", "forms", "sizes")
TIMES = ("steps", "engine", "prefill", "few", "few_long", "profile")
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--rehearse", action="store_true")
parser.add_argument("--only", help="these parts alone, with commas between them")
parser.add_argument("--part", help="run one part in this process")
parser.add_argument("--seconds", type=float, default=480, help="stop after this long")
parser.add_argument("--bits-seconds", type=float, default=230, help="stop comparing after this long")
parser.add_argument("--output", required=True)
arguments = parser.parse_known_args()[0]
OUT = Path(arguments.output)


def main() -> None:
    began = time.monotonic()
    names = arguments.only.split(",") if arguments.only else [*BITS, *TIMES]
    fraction = {"steps": "0.5", "engine": "0.4", "prefill": "0.4", "few": "0.3", "few_long": "0.5"}
    running = {}
    for name in names:
        environment = {
            **os.environ,
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": fraction.get(name, "0.2"),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        if arguments.rehearse:
            environment["JAX_PLATFORMS"] = "cpu"
        if name == "profile":  # so that each kernel is seen
            environment["XLA_FLAGS"] = environment.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="
        command = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], "--part", name]
        log = (OUT / f"{name}.log").open("w")
        running[name] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def ended(name: str, limit: float) -> None:
        try:
            code = str(running[name].wait(max(1, began + limit - time.monotonic())))
        except subprocess.TimeoutExpired:
            running[name].kill()
            code = "stopped"
        print(f"{time.monotonic() - began:5.0f} s  {name}: {code}", flush=True)
        log = (OUT / f"{name}.log").read_text().splitlines()
        found = [line for line in log if line.startswith("{")]
        print("\n".join(found if code == "0" else [*found, *log[-12:]]), flush=True)

    for name in [each for each in names if each in BITS]:
        ended(name, arguments.bits_seconds)
    for name in [each for each in names if each in TIMES]:
        (OUT / f"{name}.go").touch()
        ended(name, arguments.seconds)


if __name__ == "__main__" and not arguments.part:
    main()
    sys.exit()

# %% in the child
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.cases import draw_cases
from xla_engine.equivalence.levels import across_speculation
from xla_engine.equivalence.schedule import run_alone
from xla_engine.equivalence.verify import verify
from xla_engine.errors import ConfigError
from xla_engine.graphs.attention.backend import AttentionCall, AttentionWeights, LayerCache
from xla_engine.graphs.attention.gpu import GpuAttention
from xla_engine.graphs.config import AttentionForm, ModelConfig
from xla_engine.graphs.inventory import Inventory, Program
from xla_engine.graphs.kv_cache.cache import make_cache
from xla_engine.graphs.linear.gpu import GpuProducts
from xla_engine.graphs.linear.products import Norm
from xla_engine.graphs.model.spec import ModelSpec, parameter_shapes
from xla_engine.graphs.ops import gpu_call
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.graphs.row_state.rows import Extents, make_rows, make_tables
from xla_engine.graphs.steps.decode import decode_few_rows, decode_step
from xla_engine.graphs.steps.prefill import Lanes, PrefillForm, prefill_chunk
from xla_engine.graphs.steps.step import StepForm, StepState
from xla_engine.model_loader.checkpoint import random_checkpoint
from xla_engine.runner.runner import Runner
from xla_engine.sampling_params import SamplingParams

REHEARSAL = arguments.rehearse
BEGAN = time.monotonic()
LLAMA_3_1_8B = ModelConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, rope_theta=500000.0,
)  # fmt: skip
TINY = ModelConfig(
    vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
)  # fmt: skip
MODEL = TINY if REHEARSAL else LLAMA_3_1_8B
FEW = dataclasses.replace(MODEL, num_hidden_layers=1 if REHEARSAL else 4)
ATTENTION, PRODUCTS = GpuAttention(interpret=REHEARSAL), GpuProducts(interpret=REHEARSAL)
CONTEXT, POSITIONS = (100, 256) if REHEARSAL else (1000, 2048)
CALLS, ROUNDS = (2, 1) if REHEARSAL else (20, 5)
GPU = {"attention_backend": "gpu", "linear_backend": "gpu", "compile_cache": False}


def tell(**found: Any) -> None:
    print(json.dumps({"part": arguments.part, "at": round(time.monotonic() - BEGAN), **found}), flush=True)


def go() -> None:
    """Wait until the device is free."""
    while not (OUT / f"{arguments.part}.go").exists():
        time.sleep(0.2)


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Go on after an error, which is told."""
    try:
        yield
    except Exception as error:
        tell(what=what, failed=f"{type(error).__name__}: {error}"[:700])


def one_code(self: Runner) -> bool:
    spec = self.spec
    on_gpu = spec.products is not None and spec.products.name == spec.attention.name == "gpu"
    return on_gpu and spec.config.delta is None and spec.config.experts is None


def allowed() -> Any:
    """Everything that needs the bits of decode in prefill is allowed in dense models."""
    return mock.patch.object(Runner, "has_one_row_code", property(one_code))


# %% bits
def same_rows(found: Mapping[Any, np.ndarray]) -> list[Any]:
    """Keys whose first rows differ from those of the first."""
    first = next(iter(found.values()))
    return [key for key, value in found.items() if value.tobytes() != first[: len(value)].tobytes()]


def kernels() -> None:
    """Decode and prefill over the same keys, and products of any number of rows."""
    shapes = ((4, 2, 32),) if REHEARSAL else ((32, 8, 128), (9, 3, 64), (16, 8, 256), (14, 2, 64), (8, 8, 96), (24, 8, 128))  # fmt: skip
    long = 256 if REHEARSAL else 2048
    for heads, kv_heads, head_dim in shapes:
        for window, softcap in ((None, None), (300, 30.0)) if heads in (32, 16) else ((None, None),):
            with step(f"{heads} {kv_heads} {head_dim}"):
                form = AttentionForm(scale=head_dim**-0.5, window=window, softcap=softcap, norm_eps=1e-6)
                one_form(form, heads, kv_heads, head_dim, long)
    dtype = jnp.dtype(jnp.bfloat16)
    sizes = ((200, 192),) if REHEARSAL else ((6144, 4096), (4096, 14336), (960, 576), (576, 1536), (2048, 200))
    counts = (1, 2, 16, 80) if REHEARSAL else (1, 2, 4, 8, 17, 33, 64, 65, 128, 320, 2048)
    for features, width in sizes:
        keys = jax.random.split(jax.random.key(features), 4)
        weight = (jax.random.normal(keys[0], (features, width)) * 0.05).astype(dtype)
        x = jax.random.normal(keys[1], (counts[-1], width))
        residual = jax.random.normal(keys[2], (counts[-1], features))
        norm = Norm(jnp.ones(width), 1e-5)
        forms: dict[str, Callable[..., jax.Array]] = {
            "linear": lambda x, r: PRODUCTS.linear(weight, x, norm=norm, residual=r),  # noqa: B023
            "gated": lambda x, r: PRODUCTS.gated(weight, x, norm=norm),  # noqa: B023
            "head": lambda x, r: PRODUCTS.head(weight, norm, x).T,  # noqa: B023
        }
        for name, form_of in forms.items():
            with step(f"{name} {features} {width}"):
                run = jax.jit(form_of)
                found = {n: np.asarray(run(x[:n], residual[:n]).astype(jnp.float32)) for n in counts[::-1]}
                tell(what=f"{name} {features} x {width}", rows=counts, other_bits=same_rows(found))


def one_form(form: AttentionForm, heads: int, kv_heads: int, head_dim: int, long: int) -> None:
    dtype, rows, queries = jnp.dtype(jnp.bfloat16), 8, 32 if REHEARSAL else 256
    keys = jax.random.split(jax.random.key(heads * head_dim), 8)
    store = [jax.random.normal(key, (rows, kv_heads, long, head_dim), dtype) for key in keys[:2]]
    norms = (jax.random.normal(key, (head_dim,)) * 0.1 + 1 for key in keys[2:4])
    weights = AttentionWeights(*norms) if form.window else AttentionWeights()
    table = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (long, 2, head_dim // 2)), jnp.float32)
    features = (heads + 2 * kv_heads) * head_dim
    qkv = jax.random.normal(keys[4], (rows, queries, features))
    draw = np.random.default_rng(heads)
    start = np.sort(draw.integers(0, long - queries, rows)).astype(np.int32)

    def call(angles: jax.Array) -> AttentionCall:
        return AttentionCall(form, weights, angles, long, dtype)

    @functools.partial(jax.jit, static_argnums=3)
    def prefilled(cache: LayerCache, qkv: jax.Array, start: jax.Array, width: int) -> Any:
        at = start[:, None] + jnp.arange(width)
        slots = jnp.arange(rows, dtype=jnp.int32)
        extents = Extents(slots, start, jnp.full(rows, width, jnp.int32))
        return ATTENTION.attend_prefill(cache, qkv.reshape(rows * width, -1), call(table[at]), extents)

    @jax.jit
    def decoded(cache: LayerCache, qkv: jax.Array, length: jax.Array) -> Any:
        live = jnp.ones(rows, bool)
        return ATTENTION.attend_decode(cache, qkv, call(table[length]), length=length, live=live)

    def kept(cache: LayerCache) -> tuple[bytes, ...]:
        return tuple(np.asarray(leaf.astype(jnp.float32)).tobytes() for leaf in cache)

    cache, outs = LayerCache(*store), []
    for index in range(queries):
        cache, out = decoded(cache, qkv[:, index], jnp.asarray(start + index))
        outs.append(np.asarray(out.astype(jnp.float32)))
    expected, written = np.stack(outs, 1), kept(cache)
    for width in (1, 4, 32) if REHEARSAL else (1, 2, 5, 16, 64, 128, 256):
        cache, found = LayerCache(*store), []
        for first in range(0, queries - queries % width, width):
            part = qkv[:, first : first + width]
            cache, out = prefilled(cache, part, jnp.asarray(start + first), width)
            found.append(np.asarray(out.astype(jnp.float32)).reshape(rows, width, -1))
        whole = np.concatenate(found, 1)
        other = (whole != expected[:, : whole.shape[1]]).any(axis=-1)
        tell(
            what=f"decode against prefill of {width}: {heads} {kv_heads} {head_dim}, window {form.window}",
            keys=f"{start.min()} to {start.max() + queries}",
            positions=int(other.size),
            other_bits=int(other.sum()),
            cache_differs=kept(cache) != written if queries % width == 0 else None,
        )


def told(engine: XlaBatchEngine) -> str:
    check = engine.self_check
    return "no self-check" if check is None else "; ".join((check.promise, *check.differences))


def scored_as_sampled(engine: XlaBatchEngine, sampled: Mapping[str, Any], prompts: Mapping[str, Any]) -> dict[str, int]:  # fmt: skip
    """Answers, sampled by decode, as prompts: positions, and those whose log-probability has other bits."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    for name, output in sampled.items():
        engine.submit([*prompts[name], *output.token_ids], params, request_id=name)
    count = differ = 0
    for output in engine.drain():
        own, start = sampled[output.request_id], len(prompts[output.request_id])
        scores = (output.prompt_logprobs or ())[start:]
        for token, expected, score in zip(own.token_ids, own.logprobs, scores, strict=True):
            count += 1
            differ += score is None or np.float32(score[token].logprob).tobytes() != np.float32(expected).tobytes()
    return {"positions": count, "other_bits": differ}


def drawn(engine: XlaBatchEngine, count: int, longest: int, answer: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run requests together; their prompts and outputs."""
    draw, prompts = np.random.default_rng(1), {}
    for index in range(count):
        prompt = draw.integers(0, engine.checkpoint.config.vocab_size, int(draw.integers(3, longest))).tolist()
        kind = {"temperature": 0.0} if index % 2 else {"temperature": 0.8, "top_p": 0.9, "seed": index}
        params = SamplingParams(**kind, ignore_eos=True, max_tokens=answer, logprobs=0)
        prompts[str(index)] = prompt
        engine.submit(prompt, params, request_id=str(index))
    return prompts, {output.request_id: output.outputs[0] for output in engine.drain()}


def embedded(**options: Any) -> XlaBatchEngine:
    from xla_engine.llm import LLM

    return LLM(**{**GPU, "compile_cache": True}, max_num_seqs=16, max_model_len=512, **options).engine


def law() -> None:
    """The embedded model: requests alone and among others; a text as it was sampled; speculation."""
    count = 12 if REHEARSAL else 220
    with step("as it is"):
        began = time.monotonic()
        engine = embedded()
        tell(what="started", seconds=round(time.monotonic() - began, 1), check=told(engine), allowed=False)
        report = verify(engine, requests=count, schedules=2, seed=0, lags=(0, 1))
        tell(what="alone and among others", ok=report.ok, tokens=report.compared.tokens, requests=count,
             lines=[*map(str, report.divergences[:4])], cached=report.cached_tokens, compiled=report.compiled,
             reasons=dict(report.finish_reasons))  # fmt: skip
        engine.close()
    with step("refused"):
        try:
            embedded(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
        except ConfigError as error:
            tell(what="speculation is refused", message=str(error)[:200])
    with allowed(), step("allowed"):
        began = time.monotonic()
        engine = embedded(chunk_size=64)
        tell(what="started", seconds=round(time.monotonic() - began, 1), check=told(engine), allowed=True)
        report = verify(engine, requests=count, schedules=2, seed=1, lags=(0, 1))
        tell(what="alone and among others, answers reused, few rows", ok=report.ok, tokens=report.compared.tokens,
             lines=[*map(str, report.divergences[:4])], cached=report.cached_tokens, compiled=report.compiled)  # fmt: skip
        cases = [each for each in draw_cases(engine, count, 7, every_field=True) if len(each.prompt_token_ids) < 400]
        sampled = {each.request_id: run_alone(engine, each) for each in cases}
        prompts = {each.request_id: each.prompt_token_ids for each in cases}
        tell(what="scored as sampled", requests=len(cases), **scored_as_sampled(engine, sampled, prompts))
        results = across_speculation(engine, requests=8 if REHEARSAL else 60, seed=3)
        for result in results:
            tell(what="speculation", text=str(result)[:300])
        engine.close()


def features() -> None:
    """Adapters, blocks, prefixes in files, structured outputs."""
    from tests.support.adapters import adapters, llama_checkpoint
    from xla_engine.structured_outputs import StructuredOutputsParams

    with step("structured outputs"):
        engine = embedded()
        ways = ({"json_object": True}, {"regex": "[a-z_ ]{3,30}"}, {"choice": ["yes", "no"]})
        texts = []
        for way in ways:
            constraint = StructuredOutputsParams.from_mapping(way)
            params = SamplingParams(temperature=0.8, seed=1, max_tokens=40, structured_outputs=constraint)
            engine.submit(engine.tokenizer.encode("def f(x):"), params)
        texts = [output.outputs[0].text for output in engine.drain()]
        tell(what="structured outputs", texts=texts)
        engine.close()
    with step("adapters"):
        folder = Path(tempfile.mkdtemp())
        checkpoint = llama_checkpoint()
        loras = adapters(folder, checkpoint, 3)
        config = EngineConfig(
            max_num_seqs=8, max_model_len=300, prefill_lanes=(2, 8), chunk_size=16, attention_backend="gpu",
            linear_backend="xla", enable_lora=True, max_loras=3, max_lora_rank=16, compile_cache=False,
        )  # fmt: skip
        with XlaBatchEngine(checkpoint, None, config) as engine:
            tell(what="adapters: started", check=told(engine), lanes=engine.runner.sizes.lanes)
            prompts = [[5 * n + k for k in range(1 + 7 * n)] for n in range(5)]
            params = SamplingParams(temperature=0.8, max_tokens=12, logprobs=0, seed=7, ignore_eos=True)
            alone: dict[str, Any] = {}
            every = [(f"{n}/{m}", p, x) for n, p in enumerate(prompts) for m, x in enumerate((None, *loras))]
            for name, prompt, lora in every:
                engine.blank()
                engine.submit(prompt, params, request_id=name, lora_request=lora)
                alone |= {output.request_id: output.outputs[0] for output in engine.drain()}
            for name, prompt, lora in every:
                engine.submit(prompt, params, request_id=name, lora_request=lora)
            among = {output.request_id: output.outputs[0] for output in engine.drain()}
            tell(what="adapters: alone and among others", requests=len(every), other_bits=sum(
                (among[n].token_ids, among[n].logprobs) != (alone[n].token_ids, alone[n].logprobs) for n in alone
            ), different=len({each.token_ids for each in alone.values()}))  # fmt: skip
    for allow in (False, True):
        with step(f"blocks {allow}"), allowed() if allow else contextlib.nullcontext():
            engine = embedded(num_blocks=150, block_size=32, chunk_size=64)
            report = verify(engine, requests=10 if REHEARSAL else 100, schedules=2, seed=4)
            tell(what="blocks", allowed=allow, ok=report.ok, tokens=report.compared.tokens, cached=report.cached_tokens,
                 lines=[*map(str, report.divergences[:4])], check=told(engine))  # fmt: skip
            engine.close()
    with step("prefixes in files"), allowed():
        folder = tempfile.mkdtemp()
        answers = []
        for again in range(2):
            engine = embedded(num_blocks=150, block_size=32, chunk_size=64, prefix_cache_dir=folder)
            draw = np.random.default_rng(5)
            prefix = draw.integers(0, 4000, 200).tolist()
            params = SamplingParams(temperature=0.8, max_tokens=24, logprobs=0, seed=7, ignore_eos=True)
            found = []
            for index in range(12):
                engine.submit([*prefix, *range(20 + index)], params, request_id=str(index))
                found += [(o.request_id, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in engine.drain()]
            answers.append(sorted(found))
            stats = engine.stats()
            tell(what="prefixes in files", start=again, cached=stats.cached_tokens, same=answers[0] == answers[-1],
                 stats={k: v for k, v in vars(stats).items() if "prefix" in k} if hasattr(stats, "__dict__") else "")  # fmt: skip
            engine.close()


def checkpoint_of(model: ModelConfig) -> Any:
    block = (np.random.default_rng(0).standard_normal(1 << 22) * 0.02).astype(ml_dtypes.bfloat16)
    weights: dict[str, Any] = {
        name: np.resize(block, shape) if len(shape) > 1 else np.ones(shape, np.float32)
        for name, shape in parameter_shapes(model).items()
    }
    return random_checkpoint(model, weights=weights)


def forms() -> None:
    """Small dense models of other forms: texts as they were sampled, and speculation."""
    base = dataclasses.replace(TINY, vocab_size=4096, hidden_size=256, intermediate_size=512)
    models = {
        "head 64, 3 groups": dataclasses.replace(base, num_attention_heads=9, num_key_value_heads=3, head_dim=64),
        "head 128, norms": dataclasses.replace(
            base, num_attention_heads=8, num_key_value_heads=2, head_dim=128, qk_norm="head"
        ),
        "head 256, window, caps, gelu": dataclasses.replace(
            base, num_attention_heads=4, num_key_value_heads=2, head_dim=256, attn_logit_softcapping=50.0,
            sliding_window=200, hidden_act="gelu_tanh", post_norm=True, final_logit_softcapping=30.0,
        ),
        "head 80, bias": dataclasses.replace(
            base, num_attention_heads=4, num_key_value_heads=4, head_dim=80, qkv_bias=True
        ),
    }  # fmt: skip
    for name, model in list(models.items())[: 1 if REHEARSAL else None]:
        with step(name), allowed():
            checkpoint = random_checkpoint(model, seed=1, scale=0.08)
            config = EngineConfig(**GPU, max_num_seqs=16, max_model_len=512, prefill_lanes=(1, 4), chunk_size=64)
            with XlaBatchEngine(checkpoint, None, config) as engine:
                prompts, sampled = drawn(engine, 8 if REHEARSAL else 48, 40 if REHEARSAL else 400, 60)
                tell(what=name, check=told(engine), **scored_as_sampled(engine, sampled, prompts))


def sizes() -> None:
    """Four layers of Llama-3.1-8B in engines of other sizes, and texts as they were sampled."""
    checkpoint, first = checkpoint_of(FEW), None
    for rows, lanes, chunk, spec in ((8, (1, 2), 64, 0), (64, (8,), 128, 0), (32, (4,), 64, 4)):
        with step(f"{rows} {lanes}"), allowed():
            config = EngineConfig(
                **GPU, max_num_seqs=rows, max_model_len=256 if REHEARSAL else 1024, prefill_lanes=lanes,
                chunk_size=16 if REHEARSAL else chunk, speculative_config={"method": "suffix", "num_speculative_tokens": spec} if spec else None,
            )  # fmt: skip
            began = time.monotonic()
            with XlaBatchEngine(checkpoint, None, config) as engine:
                started = time.monotonic() - began
                prompts, sampled = drawn(engine, 8 if REHEARSAL else 64, 60 if REHEARSAL else 700, 64)
                found = {name: (each.token_ids, each.logprobs) for name, each in sampled.items()}
                first = first or found
                stats = engine.stats()
                tell(what=f"engine of {rows} rows, lanes {lanes}, chunk {chunk}, drafts {spec}", seconds=round(started, 1),
                     other_bits=sum(found[name] != first[name] for name in first), requests=len(found),
                     accepted=f"{stats.accepted_tokens} of {stats.drafted_tokens}", check=told(engine),
                     scored=scored_as_sampled(engine, sampled, prompts))  # fmt: skip


# %% times
def spec_of(config: ModelConfig) -> ModelSpec:
    return ModelSpec(config, jnp.dtype(jnp.bfloat16), ATTENTION, PRODUCTS)


def device_weights(spec: ModelSpec) -> list[jax.Array]:
    """Norms 1, matrices normal with standard deviation 0.02, made on the device."""

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jax.random.normal(key, shape, dtype) * jnp.asarray(0.02, dtype)

    keys = jax.random.split(jax.random.key(0), len(spec.leaves))
    return [
        jnp.ones(leaf.shape, leaf.dtype) if len(leaf.shape) == 1 else normal(key, leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, spec.leaves.values(), strict=True)
    ]


def abstract_weights(spec: ModelSpec) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in spec.leaves.values()]


class Steps:
    """Decode programs over one cache and one set of weights. Rows are given anew, so every call is the same work."""

    def __init__(self, spec: ModelSpec, forms: Mapping[str, Callable[..., Any]], rows: int) -> None:
        self.spec, self.count = spec, rows
        self.rope = jax.device_put(rope_tables(spec.config, POSITIONS))
        own = make_rows(rows, 4, POSITIONS)
        draw = np.random.default_rng(0)
        self.rows = dataclasses.replace(
            own,
            token=jnp.asarray(draw.integers(0, spec.config.vocab_size, rows), jnp.int32),
            length=jnp.full(rows, CONTEXT, jnp.int32),
            remaining=jnp.full(rows, 1 << 20, jnp.int32),
            sampling=dataclasses.replace(own.sampling, num_logprobs=jnp.zeros(rows, jnp.int32)),
        )
        self.tables = jax.device_put(make_tables(rows, spec.config.vocab_size))
        self.live(rows)
        self.inventory = Inventory()
        weights, cache = abstract_weights(spec), jax.eval_shape(lambda: make_cache(spec, rows, POSITIONS))
        given = (weights, self.rope, cache, self.rows, self.scheduled, self.tables)
        self.inventory.compile(
            [Program(name=name, function=form, arguments=given, donate=(2,)) for name, form in forms.items()],
            threads=8,
        )

    def open(self, weights: list[jax.Array]) -> None:
        self.weights, self.cache = weights, make_cache(self.spec, self.count, POSITIONS)

    def close(self) -> None:
        for leaf in jax.tree.leaves(self.cache):
            leaf.delete()

    def live(self, count: int) -> None:
        """So many rows, evenly spread, are live from now on."""
        self.scheduled = jnp.asarray(np.arange(self.count) % (self.count // count) == 0)

    def run(self, name: str) -> Any:
        """Dispatch once; what the program returns behind the cache."""
        self.cache, *rest = self.inventory(
            name, self.weights, self.rope, self.cache, self.rows, self.scheduled, self.tables
        )
        return rest


def milliseconds(run: Callable[[], Any], *, each: bool = False) -> float:
    """Per call: calls dispatched one after the other and waited for once, or `each` waited for; median of rounds."""
    jax.block_until_ready(run())
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(CALLS):
            last = run()
            if each:
                jax.block_until_ready(last)
        jax.block_until_ready(last)
        found.append((time.perf_counter() - began) / CALLS)
    return 1e3 * statistics.median(found)


def read_rate() -> float:
    """GB/s of what only reads, as a decode step does: the largest of a big array."""
    values = jax.random.normal(jax.random.key(3), (1 << (20 if REHEARSAL else 31),), jnp.bfloat16)
    largest = jax.jit(jnp.max).lower(values).compile()
    found = values.nbytes / milliseconds(lambda: largest(values)) / 1e6
    values.delete()
    return found


def least_bytes(config: ModelConfig, live: int) -> int:
    """What a decode step reads at least: weights but the embedding table, and keys and values of live rows."""
    c = config
    layer = c.hidden_size * (c.qkv_features + c.num_attention_heads * c.head_dim + 3 * c.intermediate_size)
    weights = 2 * (c.num_hidden_layers * layer + c.vocab_size * c.hidden_size)
    return weights + 4 * c.num_hidden_layers * live * CONTEXT * c.num_key_value_heads * c.head_dim


def started_late(function: Callable[..., Any]) -> Callable[..., Any]:
    """With kernels that start when the one before has ended."""

    def changed(*given: Any) -> Any:
        gpu_call.kernel_call.cache_clear()
        try:
            with mock.patch.object(gpu_call, "starts_early", lambda: False):
                return function(*given)
        finally:
            gpu_call.kernel_call.cache_clear()

    return changed


def on_state(step: Any, form: Any) -> Any:
    """A step as a function of the parts of its state."""

    def run(weights: Any, rope: Any, cache: Any, rows: Any, work: Any, tables: Any) -> Any:
        return step(form, StepState(weights, rope, cache, rows, tables), work)

    return run


def steps() -> None:
    """The whole decode step against reading weights and keys once."""
    spec = spec_of(MODEL)
    plain = on_state(decode_step, StepForm(spec, POSITIONS))
    forms = {"early": plain, "late": started_late(plain)}
    sizes = ((8, (1, 8)),) if REHEARSAL else ((8, (1, 8)), (32, (32,)), (64, (64,)))
    made = {}
    for count, _ in sizes:
        with step(f"compile {count}"):
            began = time.monotonic()
            made[count] = Steps(spec, forms, count)
            reports = {each.name: f"{each.lower_seconds:.1f} + {each.compile_seconds:.1f}" for each in made[count].inventory}  # fmt: skip
            tell(what=f"compiled {count}", seconds=round(time.monotonic() - began, 1), each=reports)
    go()
    rate, weights = read_rate(), device_weights(spec)
    tell(what="rate of reading, GB/s", found=round(rate), device=jax.devices()[0].device_kind)
    for count, lives in sizes:
        if (here := made.get(count)) is None:
            continue
        here.open(weights)
        for live in lives:
            here.live(live)
            cells, bits = {}, {}
            for name in ("early", "late", "early", "late"):
                before = here.cache[0].keys.unsafe_buffer_pointer()
                bits[name] = np.asarray(here.run(name)[1]).tobytes()
                ms = milliseconds(functools.partial(here.run, name))
                cells.setdefault(name, []).append(round(ms, 3))
                in_place = here.cache[0].keys.unsafe_buffer_pointer() == before
            floor = least_bytes(MODEL, live) / rate / 1e6
            tell(what=f"step, {live} of {count} rows", ms=cells, floor=round(floor, 3), in_place=in_place,
                 share={name: f"{floor / min(found):.1%}" for name, found in cells.items()},
                 waited_for=round(milliseconds(functools.partial(here.run, "early"), each=True), 2),
                 same_bits=len(set(bits.values())) == 1)  # fmt: skip
        here.close()


def engine() -> None:
    """The whole engine: start, one request alone and among others to the bit, and rates."""
    count, prompt, answer = (8, 16, 24) if REHEARSAL else (64, 128, 256)
    checkpoint = checkpoint_of(MODEL)
    config = EngineConfig(
        **GPU, max_num_seqs=count, max_model_len=256 if REHEARSAL else 1024, chunk_size=16 if REHEARSAL else 128,
        prefill_lanes=(8,), enable_prefix_caching=False, preemption=False,
    )  # fmt: skip
    began = time.perf_counter()
    with allowed(), XlaBatchEngine(checkpoint, None, config) as running:
        tell(what="start", seconds=round(time.perf_counter() - began, 1), check=told(running), programs={
            each.name: f"{each.lower_seconds:.1f} + {each.compile_seconds:.1f}" for each in running.runner.reports
            if each.lower_seconds > 0.5})  # fmt: skip
        go()
        draw = np.random.default_rng(0)
        prompts = [draw.integers(0, MODEL.vocab_size, prompt).tolist() for _ in range(count)]

        def run(some: Sequence[int], temperature: float = 0.0) -> tuple[dict[int, Any], float]:
            ids = {}
            began = time.perf_counter()
            for index in some:
                params = SamplingParams(
                    temperature=temperature, seed=index, ignore_eos=True, max_tokens=answer, logprobs=0
                )
                ids[running.submit(prompts[index], params)] = index
            results = {}
            while len(results) < len(ids):
                for output in running.step(only_finished=True):
                    one = output.outputs[0]
                    results[ids[output.request_id]] = (tuple(one.token_ids), tuple(one.logprobs or ()))
            return results, time.perf_counter() - began

        run(range(count))
        for temperature in (0.0, 0.9):
            rates, singles, differing = [], [], 0
            for _ in range(2):
                together, seconds = run(range(count), temperature)
                rates.append(round(count * answer / seconds))
            for index in (0, count // 2, count - 1):
                alone, single = run([index], temperature)
                differing += alone[index] != together[index]
                singles.append(round(answer / single, 1))
            tell(what=f"{count} requests of {prompt} + {answer}, temperature {temperature}", rates=rates,
                 alone=singles, differ=f"{differing} of 3")  # fmt: skip


def prefill() -> None:
    """One prefill call."""
    made, shapes = {}, ((1, 16),) if REHEARSAL else ((1, 256), (8, 128), (4, 512))

    def work_of(c: ModelConfig, lanes: int, tokens: int, start: int) -> Any:
        rows = make_rows(lanes, 4, POSITIONS)
        work = Lanes(
            tokens=jax.random.randint(jax.random.key(1), (lanes, tokens), 0, c.vocab_size, jnp.int32),
            slot=jnp.arange(lanes, dtype=jnp.int32),
            start=jnp.full(lanes, start, jnp.int32),
            count=jnp.full(lanes, tokens, jnp.int32),
            is_last=jnp.ones(lanes, bool),
            prompt_length=jnp.full(lanes, start + tokens, jnp.int32),
            max_tokens=jnp.ones(lanes, jnp.int32),
            min_tokens=jnp.zeros(lanes, jnp.int32),
            stop_ids=rows.stop_ids,
            sampling=rows.sampling,
        )
        return rows, work, jax.device_put(make_tables(lanes, c.vocab_size))

    for model in (FEW, MODEL):
        spec = spec_of(model)
        rope = jax.device_put(rope_tables(model, POSITIONS))
        for lanes, tokens in shapes:
            cache = jax.eval_shape(functools.partial(make_cache, spec, lanes, POSITIONS))
            function = on_state(prefill_chunk, PrefillForm(StepForm(spec, POSITIONS), max(8, lanes)))
            given = (abstract_weights(spec), rope, cache, *work_of(model, lanes, tokens, 0))
            lowered = jax.jit(function, donate_argnums=(2,)).lower(*given)
            made[model, lanes, tokens] = lowered.compile()
    tell(what="compiled")
    go()
    for model in (FEW, MODEL):
        spec, c = spec_of(model), model
        weights = device_weights(spec)
        layer = c.hidden_size * (c.qkv_features + c.num_attention_heads * c.head_dim + 3 * c.intermediate_size)
        for (lanes, tokens), start in ((shape, s) for shape in shapes for s in (0, POSITIONS - shape[1])):
            call, state = made[model, lanes, tokens], [make_cache(spec, lanes, POSITIONS)]

            def run(call: Any = call, state: list[Any] = state, rest: Any = work_of(c, lanes, tokens, start)) -> Any:
                state[0], *out = call(weights, rope, state[0], *rest)  # noqa: B023
                return out

            ms = milliseconds(run)
            jax.tree.map(lambda leaf: leaf.delete(), state)
            flops = 2 * c.num_hidden_layers * layer * lanes * tokens / ms / 1e9
            tell(what=f"prefill, {c.num_hidden_layers} layers, {lanes} x {tokens}, {start} keys before",
                 ms=round(ms, 2), tokens_a_second=round(1e3 * lanes * tokens / ms), tflops=round(flops))  # fmt: skip
        for leaf in weights:
            leaf.delete()


def few() -> None:
    """One row alone, in a program of one row and in the program of all rows."""
    few_of(2048, 1000)


def few_long() -> None:
    few_of(16384, 16000)


def few_of(positions: int, context: int) -> None:
    globals().update(POSITIONS=positions, CONTEXT=context)
    spec = spec_of(MODEL)

    def one(weights: Any, rope: Any, cache: Any, rows: Any, scheduled: Any, tables: Any) -> Any:
        state = StepState(weights, rope, cache, rows, tables)
        return decode_few_rows(StepForm(spec, positions), state, jnp.zeros(1, jnp.int32))

    forms = {"few": one, "step": on_state(decode_step, StepForm(spec, positions))}
    here = Steps(spec, forms, 8)
    go()
    rate, weights = read_rate(), device_weights(spec)
    here.open(weights)
    here.live(1)
    floor, cells = least_bytes(MODEL, 1) / rate / 1e6, {}
    for name in (*forms, *forms):
        cells.setdefault(name, []).append(round(milliseconds(functools.partial(here.run, name)), 3))
    tell(what=f"1 row of 8, {context} keys", floor=round(floor, 3), ms=cells)


def profile() -> None:
    """The time of each kernel of a step of four layers, outside of a CUDA graph."""
    spec = spec_of(FEW)
    plain = on_state(decode_step, StepForm(spec, POSITIONS))
    made = {count: Steps(spec, {"late": started_late(plain)}, count) for count in (8, 64)}
    go()
    weights = device_weights(spec)
    for count, here in made.items():
        here.open(weights)
        for _ in range(3):
            jax.block_until_ready(here.run("late"))
        folder = tempfile.mkdtemp()
        with jax.profiler.trace(folder):
            for _ in range(10):
                last = here.run("late")
            jax.block_until_ready(last)
        (path,) = Path(folder).rglob("*.xplane.pb")
        found: dict[str, list[float]] = {}
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if "GPU" not in plane.name:
                continue
            for line in plane.lines:
                if "Stream" in line.name:
                    for event in line.events:
                        found.setdefault(event.name, []).append(event.duration_ns / 1e3)
        total = {name: sum(each) / 10 for name, each in found.items()}
        top = sorted(total, key=lambda name: -total[name])[:24]
        tell(what=f"kernels of a step of 4 layers, {count} rows, us", sum=round(sum(total.values()), 1),
             kernels=sum(map(len, found.values())) / 10,
             each={name[:60]: [len(found[name]) / 10, round(statistics.median(found[name]), 2)] for name in top})  # fmt: skip


if __name__ == "__main__":
    globals()[arguments.part]()
