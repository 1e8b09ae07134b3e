"""The runner of an encoder: whole texts in, pooled vectors out. There is no cache, and nothing is decoded.

To the engine it is a `Runner`: a text is a prompt of one chunk, which ends with it. With the C++ kernels, texts are
packed one behind the other, because a row's bits depend on its own text alone; a call computes nothing for spare rows,
and one of a few sizes is chosen by the tokens. Without them a product's bits depend on the shapes of a call, so that a
text's length alone must choose these: each text then has a lane as wide as its bucket, and a call a fixed number of
lanes.
"""

import functools
import math
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.config import AUTO, EngineConfig
from xla_engine.environment import compile_cache_directory
from xla_engine.errors import ConfigError
from xla_engine.graphs.attention.backend import LayerCache
from xla_engine.graphs.config import LAST, MEAN, ModelConfig, whole_spans
from xla_engine.graphs.inventory import GraphReport, Inventory, Program, program_name
from xla_engine.graphs.kv_cache.cache import tree_bytes
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.graphs.steps.encode import (
    COUNT,
    ENCODER_ROWS,
    LENGTH,
    NUMBERS,
    SECOND,
    SLOT,
    START,
    EncodeShape,
    encode,
    make_store,
)
from xla_engine.model_loader.weights import stored_kinds
from xla_engine.observability.histogram import Histogram
from xla_engine.pooling_params import PoolingParams
from xla_engine.runner import memory
from xla_engine.runner.backends import platform_words
from xla_engine.runner.call_sizes import Sizes
from xla_engine.runner.compile_cache import CompileCounter, use_compile_cache
from xla_engine.runner.devices import Devices, HeldWeights
from xla_engine.runner.in_flight import EncodedText, EncodedTexts, InFlight, PooledChunk
from xla_engine.runner.inputs import Draft
from xla_engine.runner.jax_settings import check_platform, in_steps, with_own_settings
from xla_engine.runner.memory_plan import check_memory
from xla_engine.runner.program_store import program_store
from xla_engine.runner.row_settings import RowSettings
from xla_engine.runner.sizing import MOST_ROWS, MOST_ROWS_ELSEWHERE
from xla_engine.runner.weight_form import resolve_form
from xla_engine.scheduler import Chunk, Decoded, Plan, Sample, StepResult
from xla_engine.utils.resident import release_free_memory, release_library_pages
from xla_engine.utils.startup import StartupProgress, StartupStep, silent

ENCODE = "encode"
_LANE = 16  # tokens of a packed lane: the queries that attention takes together
_BLOCK = 32  # positions of a block: a tile of values
_PACKED_LANES = (4, 32, ENCODER_ROWS // _LANE)  # of the programs for packed texts
_ROWS = 512  # of a call with one text a lane, at least
_BUCKETS_APART = 1.5  # a bucket's length to the one before
_SHORTEST = 16  # bucket


class _Text(NamedTuple):
    chunk: Chunk
    settings: RowSettings


class EncoderRunner:
    """The device side of an engine whose model is an encoder. Fields and methods are those of `Runner`."""

    form_note: str | None
    features = None
    block_storage = None
    keeps_every_position = False
    kv_bytes_per_token = 0
    parked_bytes = 0

    @with_own_settings
    def __init__(
        self,
        model: ModelConfig,
        weights: Mapping[str, np.ndarray],
        dtype: str,
        config: EngineConfig,
        *,
        progress: StartupProgress = silent,
    ) -> None:
        """Load the weights and compile all programs. Raises ConfigError for options that encoders do not have."""
        check_platform()
        _check(config)
        if config.compile_cache:
            use_compile_cache(compile_cache_directory())
        self.compiles = CompileCounter()
        progress(StartupStep("C++ kernels for this CPU (some 15 s if they are compiled)"))
        form = resolve_form(config, model, dtype, stored_kinds(weights))
        self.form_note, self.spec = form.note, form.spec_of(model)
        kernels = self.spec.attention.name in ("gpu", "tpu")
        if kernels and model.encoder is not None and model.encoder.relative_buckets:
            raise ConfigError('scores by distance need attention_backend "xla" on a GPU or TPU')
        limit = model.max_position_embeddings
        config = replace(form.config, max_model_len=config.max_model_len or limit)
        self.context_length = config.context_length(limit)
        free = memory.available_to_each(jax.devices()[0], 1)
        budget = None if free is None else int(free * config.memory_utilization)
        check_memory(memory.encoder_plan(self.spec, self.context_length, budget))
        platform = jax.default_backend()
        slots = config.max_num_seqs
        slots = MOST_ROWS.get(platform, MOST_ROWS_ELSEWHERE) if slots == AUTO else slots
        self.config = replace(
            config,
            max_num_seqs=slots,
            chunk_size=max(self.context_length, 8),
            prefill_lanes=(slots,),
            max_num_batched_tokens=None,
            enable_prefix_caching=False,
            preemption=False,
            self_check=False,
        )
        self.shapes = _shapes(self.context_length, packs=self.has_one_row_code)
        self.sizes = Sizes(tuple(shape.lanes for shape in self.shapes), (self.shapes[-1].keys,), ())
        self.prefill_calls = 0
        self._padding: Histogram | None = None
        began = time.perf_counter()
        self._devices = devices = Devices(None)
        release_library_pages()
        store = program_store("") if config.compile_cache else None
        self._inventory = Inventory(None, store)
        self.weights = HeldWeights(
            self.spec, devices, self._inventory, devices.load(self.spec, weights, progress)
        )
        self._rope = devices.put(rope_tables(model, self.context_length))
        jax.block_until_ready(self.weights.leaves)
        release_free_memory()
        self.load_seconds = time.perf_counter() - began
        began = time.perf_counter()
        programs = [self._program(shape) for shape in self.shapes]
        self._inventory.compile(
            programs, progress=lambda doing, ready: progress(StartupStep(doing, ready, len(programs)))
        )
        if store is not None and store.has_new:
            store.tidy()
        progress(StartupStep("first calls"))
        self._stores: dict[EncodeShape, LayerCache] = {}
        self.blank()
        for shape in self.shapes:
            jax.block_until_ready(self._run(shape, np.zeros((shape.lanes, shape.columns), np.int32)))
        self.compile_seconds = time.perf_counter() - began
        self.compiles.mark_warm()

    @in_steps
    def start(
        self, plan: Plan, settings: Mapping[str, RowSettings], drafts: Mapping[str, Draft] | None = None
    ) -> InFlight:
        """Dispatch the calls for a plan's texts without blocking."""
        texts = [_Text(chunk, settings[chunk.request_id]) for chunk in plan.chunks]
        calls = [self._call(shape, group) for shape, group in self._grouped(texts)]
        self.prefill_calls += len(calls)
        return InFlight(plan=plan, first=(), decode=None, encoded=tuple(calls))

    @in_steps
    def wait(self, step: InFlight) -> StepResult:
        """Wait for a started step. Each text ends with a token that means nothing."""
        for call in step.encoded:
            jax.block_until_ready(call.hidden)
        ended = [Sample(0) for chunk in step.plan.chunks if chunk.is_last]
        return StepResult(first=ended, decode=Decoded(), verify=(), drafted=())

    def prompt_scores(self, step: InFlight) -> list[PooledChunk]:
        """Fetch what a started step's texts pool."""
        found = []
        for call in step.encoded:
            hidden = np.asarray(call.hidden)
            for row, chunk, settings in call.texts:
                assert isinstance(settings.params, PoolingParams)
                end = row + len(chunk.tokens)
                kind = settings.params.pooling_type
                rows = slice(row, end) if kind == MEAN else slice(end - 1, end) if kind == LAST else row
                vectors = np.array(np.atleast_2d(hidden[rows]))  # a copy: the call's memory is not kept
                found.append(
                    PooledChunk(
                        request_id=chunk.request_id, settings=settings, start=chunk.start, vectors=vectors
                    )
                )
        return found

    def count_padding(self, histogram: Histogram) -> None:
        """Record the share of padding in each call's positions in a histogram."""
        self._padding = histogram

    def discard(self, request_id: str) -> None:
        """Nothing of a request is kept."""

    def reset(self) -> None:
        self.prefill_calls = 0

    @with_own_settings
    def blank(self) -> None:
        """Fill the memory of keys and values with zeros. Nothing may be in flight."""
        self._stores = {shape: make_store(self.spec, shape) for shape in self.shapes}

    def rebuild(self) -> None:
        """Replace the memory of keys and values after a failed step."""
        self.blank()

    @property
    def reports(self) -> list[GraphReport]:
        """One report per executable."""
        return list(self._inventory)

    @property
    def has_one_row_code(self) -> bool:
        """Whether a row's bits do not depend on the shape of its call: with the C++ kernels."""
        products = self.spec.products
        return {self.spec.attention.name, None if products is None else products.name} == {"native"}

    @property
    def platform(self) -> dict[str, str]:
        """Versions, device and backends, on which the bits of a run may depend."""
        return platform_words(self.spec)

    @property
    def made_with(self) -> dict[str, dict[str, str]]:
        """`platform` of the engine's identity."""
        return {"platform": self.platform}

    @property
    def isa(self) -> str | None:
        """The instruction set of the C++ kernels in use; None without them."""
        return self.spec.isa

    @property
    def cache_bytes(self) -> int:
        """Bytes of the memory for keys and values, which no request keeps."""
        return sum(tree_bytes(jax.tree.leaves(store)) for store in self._stores.values())

    def close(self) -> None:
        """Free device memory and executables."""
        for leaf in self.weights.leaves:
            leaf.delete()
        self.weights.leaves.clear()
        self._stores.clear()
        self._inventory.clear()

    def _program(self, shape: EncodeShape) -> Program:
        store = jax.eval_shape(functools.partial(make_store, self.spec, shape))
        work = jax.ShapeDtypeStruct((shape.lanes, shape.columns), jnp.int32)
        leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.weights.leaves]
        return Program(
            name=_name(shape),
            function=functools.partial(encode, self.spec, shape),
            arguments=(leaves, jax.ShapeDtypeStruct(self._rope.shape, jnp.float32), store, work),
            donate=(2,),
            isa=self.spec.isa,
        )

    def _run(self, shape: EncodeShape, work: np.ndarray) -> jax.Array:
        given = work if self._devices.read_host_memory else self._devices.put(work)
        store, hidden = self._inventory(
            _name(shape), self.weights.leaves, self._rope, self._stores[shape], given
        )
        self._stores[shape] = store
        found: jax.Array = hidden
        return found

    def _grouped(self, texts: Sequence[_Text]) -> Iterator[tuple[EncodeShape, list[_Text]]]:
        """The shape and the texts of each call."""
        if self.shapes[0].block is not None:
            most = self.shapes[-1].lanes
            group: list[_Text] = []
            used = 0
            for text in texts:
                lanes = _lanes(text)
                if used + lanes > most:
                    yield self._smallest(used), group
                    group, used = [], 0
                group.append(text)
                used += lanes
            if group:
                yield self._smallest(used), group
            return
        by_shape: dict[EncodeShape, list[_Text]] = {}
        for text in texts:
            at = bisect_left(self.shapes, len(text.chunk.tokens), key=lambda shape: shape.width)
            by_shape.setdefault(self.shapes[at], []).append(text)
        for shape, found in by_shape.items():
            for first in range(0, len(found), shape.lanes):
                yield shape, found[first : first + shape.lanes]

    def _smallest(self, lanes: int) -> EncodeShape:
        return next(shape for shape in self.shapes if shape.lanes >= lanes)

    def _call(self, shape: EncodeShape, texts: Sequence[_Text]) -> EncodedTexts:
        """Start a call for these texts."""
        work, places = call_inputs(shape, texts)
        if self._padding is not None:
            tokens = sum(len(text.chunk.tokens) for text in texts)
            self._padding.add(1 - tokens / (shape.lanes * shape.width))
        placed = (EncodedText(row, *text) for row, text in zip(places, texts, strict=True))
        return EncodedTexts(self._run(shape, work), tuple(placed))


def call_inputs(shape: EncodeShape, texts: Sequence[_Text]) -> tuple[np.ndarray, list[int]]:
    """The work of a call, i32 `[lanes, columns]`, and the first row of each text."""
    width, block = shape.width, shape.block
    work = np.zeros((shape.lanes, shape.columns), np.int32)
    places: list[int] = []
    lane = used = 0
    for number, (chunk, settings) in enumerate(texts):
        length = len(chunk.tokens)
        count = -(-length // width)
        places.append(lane * width)
        own = work[lane : lane + count]
        tokens = np.zeros(count * width, np.int32)
        tokens[:length] = chunk.tokens
        own[:, :width] = tokens.reshape(count, width)
        starts = np.arange(0, length, width)
        second = settings.second_text or length
        sizes = np.minimum(length - starts, width)
        own[:, width + SLOT], own[:, width + START], own[:, width + COUNT] = number, starts, sizes
        own[:, width + LENGTH], own[:, width + SECOND] = length, second
        if block is not None:
            blocks = -(-length // block)
            first = width + NUMBERS
            work[number, first : first + blocks] = np.arange(used, used + blocks)
            used += blocks
        lane += count
    return work, places


def _lanes(text: _Text) -> int:
    return -(-len(text.chunk.tokens) // _LANE)


def _name(shape: EncodeShape) -> str:
    return program_name(ENCODE, lanes=shape.lanes, width=shape.width)


def _shapes(length: int, *, packs: bool) -> tuple[EncodeShape, ...]:
    """The shapes of calls for texts of up to `length` tokens, in ascending order."""
    keys = whole_spans(length)
    if packs:
        most = max(_PACKED_LANES[-1], -(-length // _LANE))
        lanes = sorted({*(each for each in _PACKED_LANES if each < most), most})
        return tuple(EncodeShape(each, _LANE, keys, _BLOCK) for each in lanes)
    widths, width = [], _SHORTEST
    while width < length:
        widths.append(width)
        width = math.ceil(width * _BUCKETS_APART / _SHORTEST) * _SHORTEST
    widths.append(width)
    return tuple(EncodeShape(max(_ROWS // each, 1), each, whole_spans(each)) for each in widths)


def _check(config: EngineConfig) -> None:
    refused = {
        "tensor_parallel_size": config.tensor_parallel_size > 1,
        "num_blocks": config.uses_blocks,
        "prefix_cache_dir": config.prefix_cache_dir is not None,
        "bits 'portable'": config.is_portable,
        "kv_cache_dtype": config.kv_cache_dtype != AUTO,
    }
    for name, given in refused.items():
        if given:
            raise ConfigError(f"encoders do not support {name}: leave it out")
