"""The only module that touches devices: owns weights, cache, row state and executables.

`start(plan)` dispatches and returns at once; `wait(in_flight)` fetches O(B) numbers. Between the two the host
is free, and steps execute in the order they were started.
"""

from __future__ import annotations

import functools
import importlib.metadata
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from graphs.attention import Attention, KVCache
from graphs.attention_xla import XlaAttention
from graphs.config import ModelConfig
from graphs.decode import decode_step
from graphs.inventory import GraphReport, Inventory, Program
from graphs.layers import rope_table
from graphs.model import ModelSpec
from graphs.prefill import Lanes, prefill_chunk
from graphs.rows import SamplingRows, make_rows, unpack_samples
from scheduler import Chunk, Plan, Row, Sample, StepResult
from xla_engine.compiles import CompileCounter, use_compile_cache
from xla_engine.config import EngineConfig, compile_cache_directory
from xla_engine.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSettings:
    """What the device is told about a request when its prompt is complete. `seed` is 64-bit unsigned."""

    max_tokens: int
    stop_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """A started step: its plan and device results not yet fetched. `first` holds (samples, lanes) per prefill call."""

    plan: Plan
    first: tuple[tuple[jax.Array, tuple[int, ...]], ...]
    decode: jax.Array | None


class Runner:
    """Device side of an engine for one model and one configuration."""

    def __init__(
        self,
        model: ModelConfig,
        weights: Mapping[str, np.ndarray],
        dtype: str,
        config: EngineConfig,
        *,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        if config.compile_cache:
            use_compile_cache(compile_cache_directory())
        self.config = config
        self.compiles = CompileCounter()
        self.context_length = config.context_length(model.max_position_embeddings)
        self.prefill_calls = 0
        attention = choose_attention(config.attention_backend)
        buckets = config.buckets(self.context_length)
        self._buckets = buckets[-1:] if attention.bounded_by_length else buckets
        # Sizes in use, ascending. The self-check leaves only the largest where the choice would change bits.
        self.lane_choices = config.prefill_lanes
        self.bucket_choices = self._buckets
        self._spec = ModelSpec(model, jnp.dtype(dtype), attention)
        began = time.perf_counter()
        self._weights: list[jax.Array] = jax.device_put(self._spec.flatten(weights))
        self._rope = jax.device_put(rope_table(model, self.context_length))
        self._cache = self._empty_cache()
        self._rows = make_rows(config.device_rows, MAX_STOP_TOKEN_IDS)
        jax.block_until_ready((self._weights, self._cache, self._rows))
        self.load_seconds = time.perf_counter() - began
        # Upper bounds of the rows' lengths, advanced at plan time, to choose the key bucket without a fetch.
        self._lengths = np.zeros(config.device_rows, np.int64)
        self._scheduled: tuple[tuple[Row, ...], np.ndarray, jax.Array] | None = None
        self._inventory = Inventory()
        began = time.perf_counter()
        self._inventory.compile(self._programs(), progress=progress)
        self._warm_up()
        self.compile_seconds = time.perf_counter() - began
        self.compiles.mark_warm()

    # -- the two verbs of the loop ----------------------------------------------------------------------------

    def start(self, plan: Plan, settings: Mapping[str, RowSettings]) -> InFlight:
        """Dispatch a plan: its prefill calls in order, then one decode step. Blocks on nothing.

        `settings` is read for requests whose prompt completes in this plan.
        """
        first = tuple(self._start_prefill(chunks, settings) for chunks in self._calls(plan.chunks))
        decode = self._start_decode(plan.decode) if plan.decode else None
        for samples in (*(samples for samples, _ in first), *([] if decode is None else [decode])):
            samples.copy_to_host_async()
        return InFlight(plan=plan, first=first, decode=decode)

    def wait(self, step: InFlight) -> StepResult:
        """Fetch the samples of a started step."""
        first: list[Sample] = []
        for samples, lanes in step.first:
            token, logprob = unpack_samples(np.asarray(samples))
            first.extend(Sample(int(token[lane]), float(logprob[lane])) for lane in lanes)
        decode: list[Sequence[Sample]] = []
        if step.decode is not None:
            tokens, logprobs = (values.tolist() for values in unpack_samples(np.asarray(step.decode)))
            for row in step.plan.decode:
                token_id = tokens[row.slot.index]
                decode.append((Sample(token_id, logprobs[row.slot.index]),) if token_id >= 0 else ())
        return StepResult(first=first, decode=decode)

    def reset(self) -> None:
        """Make every row inactive and every count zero, as at start-up; the cache keeps what it holds."""
        self._rows = make_rows(self.config.device_rows, MAX_STOP_TOKEN_IDS)
        self._lengths[:] = 0
        self._scheduled = None
        self.prefill_calls = 0

    def rebuild(self) -> None:
        """Make cache and row state anew, whatever became of the old ones in a step that failed."""
        calls = self.prefill_calls
        self.blank()
        self.prefill_calls = calls

    # -- for tests and reports --------------------------------------------------------------------------------

    @property
    def reports(self) -> list[GraphReport]:
        """One line per executable."""
        return list(self._inventory)

    def program_text(self, name: str) -> str:
        """Optimised HLO of a program. For tests."""
        return self._inventory.text(name)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache on the device."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._cache))

    @property
    def platform(self) -> dict[str, str]:
        """Versions and device words that the bits of a run may depend on."""
        return {
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
            "backend": jax.default_backend(),
            "device": jax.devices()[0].device_kind,
        }

    def blank(self) -> None:
        """`reset`, and a cache of zeros as well: what runs next repeats to the bit. Nothing may be in flight."""
        self.reset()
        for leaf in jax.tree.leaves(self._cache):
            leaf.delete()
        self._cache = self._empty_cache()

    def read_cache(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Copy the cache to the host, per layer K and V `[B, KV, S, Dh]`. For tests."""
        return [self._spec.attention.to_host(layer) for layer in self._cache]

    def edit_cache(self, edit: Callable[[int, str, np.ndarray], np.ndarray]) -> None:
        """Replace keys and values by `edit(layer index, "keys" | "values", array [B, KV, S, Dh])`. For tests."""
        self._cache = [
            self._spec.attention.from_host(
                edit(index, "keys", np.array(keys)), edit(index, "values", np.array(values))
            )
            for index, (keys, values) in enumerate(self.read_cache())
        ]

    def close(self) -> None:
        """Free device memory and executables."""
        for leaf in jax.tree.leaves((self._weights, self._rope, self._cache, self._rows)):
            leaf.delete()
        self._weights, self._cache = [], []
        self._scheduled = None
        self._inventory.clear()

    # -- programs ---------------------------------------------------------------------------------------------

    def _programs(self) -> list[Program]:
        def abstract(tree: Any) -> Any:
            return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)

        state = abstract((self._weights, self._rope, self._cache, self._rows))
        scheduled = jax.ShapeDtypeStruct((self.config.device_rows,), jnp.bool_)
        programs = []
        for bucket in self._buckets:
            programs.append(
                Program(
                    name=_decode_name(bucket),
                    function=functools.partial(decode_step, self._spec, bucket),
                    arguments=(*state, scheduled),
                    donate=(2, 3),
                )
            )
            programs.extend(
                Program(
                    name=_prefill_name(lanes, bucket),
                    function=functools.partial(prefill_chunk, self._spec, bucket, self.config.head_rows),
                    arguments=(*state, abstract(self._lanes([], {}, lanes))),
                    donate=(2, 3),
                )
                for lanes in self.config.prefill_lanes
            )
        return programs

    def _warm_up(self) -> None:
        """Run every program once with nothing to do: nothing is live, so no state changes."""
        for bucket in self._buckets:
            for lanes in self.config.prefill_lanes:
                self._run(_prefill_name(lanes, bucket), jax.device_put(self._lanes([], {}, lanes)))
            nobody = jax.device_put(np.zeros(self.config.device_rows, np.bool_))
            jax.block_until_ready(self._run(_decode_name(bucket), nobody))

    def _run(self, name: str, work: Any) -> jax.Array:
        """Run a program on the donated state; returns its packed samples `[2, N]`."""
        self._cache, self._rows, samples = self._inventory(
            name, self._weights, self._rope, self._cache, self._rows, work
        )
        return samples

    def _empty_cache(self) -> KVCache:
        spec = self._spec
        return spec.attention.make_cache(spec.config, self.config.device_rows, self._buckets[-1], spec.dtype)

    # -- prefill ----------------------------------------------------------------------------------------------

    def _calls(self, chunks: Sequence[Chunk]) -> list[Sequence[Chunk]]:
        """Split a plan's chunks over prefill calls, the largest graph first."""
        largest = self.lane_choices[-1]
        return [chunks[at : at + largest] for at in range(0, len(chunks), largest)]

    def _start_prefill(
        self, chunks: Sequence[Chunk], settings: Mapping[str, RowSettings]
    ) -> tuple[jax.Array, tuple[int, ...]]:
        lanes = _smallest(self.lane_choices, len(chunks))
        ends = [chunk.start + len(chunk.tokens) for chunk in chunks]
        name = _prefill_name(lanes, _smallest(self.bucket_choices, max(ends)))
        samples = self._run(name, jax.device_put(self._lanes(chunks, settings, lanes)))
        self.prefill_calls += 1
        for chunk, end in zip(chunks, ends, strict=True):
            self._lengths[chunk.slot.index] = end
        return samples, tuple(lane for lane, chunk in enumerate(chunks) if chunk.is_last)

    def _lanes(self, chunks: Sequence[Chunk], settings: Mapping[str, RowSettings], lanes: int) -> Lanes:
        """Host arrays of one prefill call."""
        # Any: the records are declared for the arrays a graph sees.
        tokens: Any = np.zeros((lanes, self.config.chunk_size), np.int32)
        slot, start, count, max_tokens = cast(Any, np.zeros((4, lanes), np.int32))
        is_last, wants_logprob = cast(Any, np.zeros((2, lanes), np.bool_))
        stop_ids: Any = np.full((lanes, MAX_STOP_TOKEN_IDS), -1, np.int32)
        temperature, min_p = cast(Any, np.zeros((2, lanes), np.float32))
        top_p: Any = np.ones(lanes, np.float32)
        top_k: Any = np.zeros(lanes, np.int32)
        seed: Any = np.zeros((lanes, 2), np.uint32)
        for lane, chunk in enumerate(chunks):
            tokens[lane, : len(chunk.tokens)] = chunk.tokens
            slot[lane], start[lane], count[lane] = chunk.slot.index, chunk.start, len(chunk.tokens)
            if not chunk.is_last:
                continue
            row = settings[chunk.request_id]
            is_last[lane], max_tokens[lane] = True, row.max_tokens
            stop_ids[lane, : len(row.stop_token_ids)] = row.stop_token_ids
            temperature[lane], min_p[lane] = row.params.temperature, row.params.min_p
            top_p[lane], top_k[lane] = row.params.top_p, max(row.params.top_k, 0)
            seed[lane] = row.seed >> 32, row.seed & 0xFFFFFFFF
            wants_logprob[lane] = row.params.logprobs is not None
        sampling = SamplingRows(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            wants_logprob=wants_logprob,
        )
        return Lanes(
            tokens=tokens,
            slot=slot,
            start=start,
            count=count,
            is_last=is_last,
            max_tokens=max_tokens,
            stop_ids=stop_ids,
            sampling=sampling,
        )

    # -- decode -----------------------------------------------------------------------------------------------

    def _start_decode(self, rows: tuple[Row, ...]) -> jax.Array:
        if self._scheduled is None or self._scheduled[0] is not rows:
            index = np.array([row.slot.index for row in rows], np.int64)
            scheduled = np.zeros(self.config.device_rows, np.bool_)
            scheduled[index] = True
            self._scheduled = (rows, index, jax.device_put(scheduled))
        _, index, mask = self._scheduled
        self._lengths[index] += 1
        longest = max(self._lengths[index].tolist())
        keys = _smallest(self.bucket_choices, min(longest, self.context_length))
        return self._run(_decode_name(keys), mask)


def choose_attention(name: str) -> Attention:
    """The attention backend that `EngineConfig.attention_backend` names on this platform."""
    platform = jax.default_backend()
    if name == "gpu" or (name == "auto" and "NVIDIA" in jax.devices()[0].device_kind):
        from graphs.attention_gpu import GpuAttention  # Pallas takes a while to import

        return GpuAttention(interpret=platform != "gpu")
    assert name in ("auto", "xla"), name
    # Older XLA:CPU copies a bf16 cache at every write.
    old = tuple(int(part) for part in jax.__version__.split(".")[:2]) < (0, 11)
    copies = old and platform == "cpu"
    return XlaAttention(cache_dtype=jnp.dtype(jnp.float32) if copies else None)


def _decode_name(key_length: int) -> str:
    return f"decode[keys={key_length}]"


def _prefill_name(lanes: int, key_length: int) -> str:
    return f"prefill[lanes={lanes},keys={key_length}]"


def _smallest(sizes: Sequence[int], needed: int) -> int:
    """The first of ascending `sizes` that holds `needed`."""
    return next(size for size in sizes if size >= needed)
