"""This engine: what a user gets from `XlaBatchEngine`, with a clock on each verb; and its bare step."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from xla_engine import __version__
from xla_engine.config import GGUF, GGUF_INT8, EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.forward_pass import ForwardPass
from xla_engine.equivalence.verify import verify
from xla_engine.errors import ConfigError
from xla_engine.graphs.config import whole_spans
from xla_engine.model_loader.checkpoint import load_checkpoint, load_weights
from xla_engine.model_loader.describe import describe
from xla_engine.model_loader.model_files import open_model
from xla_engine.observability.observer import Observer
from xla_engine.runner.row_settings import RowSettings
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import Events, Plan, Request, Scheduler
from xla_engine.tools.bench.workers.judge import Judge, Logits

Ids = list[list[int]]
_AHEAD = 4  # bare steps started before one is waited for: each holds its scratch memory from its start


class OwnEngine:
    """Our side of the protocol in `worker.py`."""

    engine: XlaBatchEngine

    def __init__(self, threads: int) -> None:
        """It uses the cores that this process may use."""

    def load(
        self, wanted: Any, *, quantization: str | None = None, slots_of_pages: int = 0
    ) -> dict[str, Any]:
        """quantization: as in `EngineConfig`; with "gguf" and "gguf-int8" the weights are those of the GGUF file.

        slots_of_pages: how many slots there are for one in the same memory, with KV blocks; 0 without blocks.
        """
        model, weight_bytes = wanted.model, None
        if quantization in (GGUF, GGUF_INT8):
            if wanted.file is None:
                raise ConfigError("--model is not a GGUF file")
            model, weight_bytes = wanted.file, Path(wanted.file).stat().st_size
        config = EngineConfig(
            max_num_seqs=wanted.max_num_seqs,
            max_model_len=wanted.max_model_len,
            dtype=wanted.dtype,
            quantization=quantization,
            enable_prefix_caching=False,  # prompts come again in the next round, and are to be computed again
        )
        if slots_of_pages:
            blocks = config.device_rows * whole_spans(wanted.max_model_len) // config.block_size
            config = replace(config, num_blocks=blocks, max_num_seqs=slots_of_pages * config.num_slots)
        described = describe(open_model(model), config, None)
        self.engine = engine = XlaBatchEngine(load_weights(described), None, described.options)
        stats = engine.stats()
        return {
            "versions": f"xla-engine {__version__}, jax {jax.__version__}, {jax.devices()[0].device_kind}",
            "notes": "" if engine.self_check is None else engine.self_check.promise,
            "arrivals": True,
            "weight_bytes": weight_bytes,
            "isa": engine.runner.isa or "none",
            "compile_seconds": stats.compile_seconds,
            "programs": len(engine.inventory_report()),
        }

    def run(
        self, prompts: Ids, max_tokens: list[int], arrivals: list[float], stop_token_ids: Ids | None = None
    ) -> dict[str, Any]:
        """The protocol's `run`. Prompts end early at `stop_token_ids`, one list per request."""
        engine, stats = self.engine, self.engine.stats()
        queued_busy = queued_total = 0  # row-steps while requests waited: scheduled, and possible
        stale = 0  # row-steps that gave no token: the row had stopped and the host did not know yet

        def started(plan: Plan) -> None:
            nonlocal queued_busy, queued_total
            if engine.num_waiting:
                queued_busy += len(plan.decode)
                queued_total += engine.max_num_seqs

        def read(plan: Plan, events: Events) -> None:
            nonlocal stale
            stale += len(plan.decode) + len(plan.first_rows) - len(events)

        engine.observers.add(observer := Observer(started=started, read=read))
        order = sorted(range(len(prompts)), key=lambda index: arrivals[index])
        finished = {}
        submitted = 0
        began, cpu = time.monotonic(), time.thread_time()
        while submitted < len(order) or engine.has_unfinished:
            now = time.monotonic() - began
            while submitted < len(order) and arrivals[order[submitted]] <= now:
                index = order[submitted]
                stops = stop_token_ids[index] if stop_token_ids else ()
                params = SamplingParams(
                    temperature=0.0, max_tokens=max_tokens[index], ignore_eos=True, stop_token_ids=stops
                )
                engine.submit(prompts[index], params, request_id=str(index))
                submitted += 1
            if engine.has_unfinished:
                for output in engine.step(only_finished=True):
                    finished[int(output.request_id)] = output
            else:
                time.sleep(arrivals[order[submitted]] - now)
        seconds, cpu = time.monotonic() - began, time.thread_time() - cpu
        engine.observers.remove(observer)
        outputs = [finished[index] for index in range(len(prompts))]
        compiles = engine.stats().compiles_after_warmup - stats.compiles_after_warmup
        if compiles:
            raise RuntimeError(f"{compiles} compilations inside the measured window")
        if failed := [output.error for output in outputs if output.error]:
            raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
        after = engine.stats()
        steps = after.steps - stats.steps
        busy = after.slot_steps_busy - stats.slot_steps_busy
        slots = after.slot_steps_total - stats.slot_steps_total
        return {
            "seconds": seconds,
            "times": [
                [t - began for t in output.metrics.token_times] for output in outputs if output.metrics
            ],
            "streams": [list(output.outputs[0].token_ids) for output in outputs],
            "compiles": compiles,
            "host_ms_per_step": 1e3 * cpu / max(steps, 1),  # of this thread's CPU
            "occupancy": busy / slots if slots else None,
            "occupancy_queued": queued_busy / queued_total if queued_total else None,
            "stale_share": stale / busy if busy else 0.0,
        }

    def bare(self, prompts: Ids, max_tokens: list[int]) -> dict[str, Any]:
        """The decode steps of the same job alone: planned beforehand, started back to back.

        Only the steps in which every request decodes are timed.
        """
        engine = self.engine
        scheduler = Scheduler(engine.scheduler.config)
        settings = {}
        for index, (prompt, count) in enumerate(zip(prompts, max_tokens, strict=True)):
            scheduler.submit(Request(request_id=str(index), prompt_token_ids=tuple(prompt), max_tokens=count))
            params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            settings[str(index)] = RowSettings(
                max_tokens=count, stop_token_ids=(), params=params, seed=engine.seed_of(str(index), params)
            )
        plans: list[Plan] = []
        while not (plan := scheduler.plan()).is_empty:
            plans.append(plan)
        timed = [plan for plan in plans if not plan.chunks and len(plan.decode) == len(prompts)]
        if not timed:
            raise ValueError("no step decodes every request: give fewer requests or more tokens")
        for plan in plans[: plans.index(timed[0])]:
            engine.runner.wait(engine.runner.start(plan, settings))
        began = time.perf_counter()
        steps = []
        for plan in timed:
            steps.append(engine.runner.start(plan, settings))
            if len(steps) > _AHEAD:
                engine.runner.wait(steps[-1 - _AHEAD])
        engine.runner.wait(steps[-1])
        seconds = time.perf_counter() - began
        engine.runner.reset()
        return {"decode_tok_s": len(prompts) * len(timed) / seconds, "step_ms": 1e3 * seconds / len(timed)}

    def verify(self, requests: int) -> dict[str, Any]:
        """Law 1 on this very engine: differences between alone and batched."""
        report = verify(self.engine, requests=requests, schedules=2)
        return {
            "requests": report.compared.requests,
            "tokens": report.compared.tokens,
            "differing_tokens": report.compared.differing_tokens,
            "differing_bits": report.compared.differing_bits,
            "compiles": report.compiles_after_warmup,
            "ok": report.ok,
        }

    def limits(self, dtype: str) -> dict[str, Any]:
        """GFLOP/s of a large square product in `dtype`, and on an accelerator GB/s of reading its memory."""
        device = jax.devices()[0].platform != "cpu"
        size = 8192 if device else 2048
        square = jnp.ones((size, size), jnp.dtype(dtype))
        product = jax.jit(lambda a, b: jnp.einsum("ik,jk->ij", a, b, preferred_element_type=jnp.float32))
        found = {"gflops": 2e-9 * size**3 / _best(lambda: product(square, square).block_until_ready())}
        if device:
            line = jnp.ones(2**30, jnp.bfloat16)
            total = jax.jit(lambda x: x.astype(jnp.float32).sum())
            found["gbps"] = 1e-9 * line.nbytes / _best(lambda: total(line).block_until_ready())
        return found

    def close(self) -> None:
        self.engine.close()


def judge(threads: int) -> Judge:
    """A judge by our own forward pass without a cache."""
    return Judge("own forward pass, float32", _logits_of)


def _logits_of(directory: str, dtype: str, in_eight_bits: bool) -> Logits:
    return ForwardPass(load_checkpoint(directory, dtype=dtype), quantized=in_eight_bits).logits


def _best(call: Any, rounds: int = 7) -> float:
    """Seconds of the fastest of `rounds` calls."""
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
