"""The differentiable log-probability: forward through the engine's kernels, backward through XLA.

Forward, the parameters are rounded and packed as the engine holds them, and every layer, the head and the
log-probability are the kernels that sample. Backward, each layer is derived as plain XLA in float32 at the input that
the kernels gave it; roundings pass gradients on as they are (straight-through).
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from xla_engine.graphs.attention.backend import AttentionWeights
from xla_engine.graphs.attention.dense import attend_densely
from xla_engine.graphs.config import ModelConfig, whole_spans
from xla_engine.graphs.kv_cache.cache import make_cache
from xla_engine.graphs.linear.native import NativeProducts
from xla_engine.graphs.linear.products import ROWS_LEFT
from xla_engine.graphs.model.call import Call
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.graphs.recurrent.kind import RecurrentWeights
from xla_engine.graphs.row_state.rows import Extents
from xla_engine.graphs.row_state.sampling_fields import SamplingRows
from xla_engine.graphs.sampling.logits import ByRow
from xla_engine.graphs.sampling.logits_processors import SamplingContext, adjust
from xla_engine.graphs.sampling.native import native_logprobs, native_processed
from xla_engine.graphs.sampling.sampler import restricted
from xla_engine.graphs.steps.prefill import Fed, through_layers
from xla_engine.graphs.steps.step import StepForm
from xla_engine.training.batch import Batch, Processing

Params = Mapping[str, jax.Array]  # float32, by leaf
Logps = Callable[[dict[str, jax.Array], Batch], jax.Array]

_HEAD_ROWS = 256  # rows of logits that exist at once


def native_logps(
    spec: ModelSpec, rope: jax.Array, params: Params, batch: Batch
) -> tuple[jax.Array, list[jax.Array]]:
    """Log-probabilities f32 `[B, T]` of the response's tokens, 0 elsewhere, and the stream before each layer and after
    the last, f32 `[B T, D]`.

    Static: `spec`, of kernels whose caches keep all positions.
    """
    isa = spec.isa
    assert isa is not None
    rows, width = batch.tokens.shape
    model = spec.merge([_held(spec, name, params[name]) for name in spec.leaves])
    length = whole_spans(width)
    lanes = Extents(
        jnp.arange(rows, dtype=jnp.int32), jnp.zeros(rows, jnp.int32), jnp.asarray(batch.length, jnp.int32)
    )
    target = _targets(batch)
    fed = Fed(jnp.asarray(batch.tokens, jnp.int32), lanes, read=target >= 0)
    cache = make_cache(spec, rows, length)
    _, streams = through_layers(StepForm(spec, length), model.hidden, rope, cache, fed)

    def group(each: tuple[jax.Array, ...]) -> jax.Array:
        x, target, index = each
        asked = target >= 0
        logits = _native_logits(spec, model, batch, x, target, index)
        return native_logprobs(logits, jnp.maximum(target, 0), jnp.where(asked, 0, -1), isa)[0]

    found = lax.map(group, _grouped(streams[-1], target, jnp.arange(len(target))))
    return _placed(found.reshape(-1), rows, width), streams


def _native_logits(
    spec: ModelSpec, model: Any, batch: Batch, x: jax.Array, target: jax.Array, index: jax.Array
) -> ByRow:
    """The logits `[N, V]` whose log-probabilities are those of sampling, of the streams `x [N, D]` of positions
    `index [N]`; arbitrary where nothing is predicted."""
    products, asked = spec.products, target >= 0
    assert isinstance(products, NativeProducts) and spec.isa is not None
    found = model.logits(x, products.for_rows(asked))
    if batch.processing is not None:
        found = native_processed(found, *_sampling(batch, batch.processing, target, index), spec.isa)
    assert isinstance(found, ByRow)
    return found


def differentiable_logps(spec: ModelSpec, rope: jax.Array) -> Logps:
    """`native_logps` as a function of parameters and batch, with a gradient for the parameters."""

    @jax.custom_vjp
    def logps(params: dict[str, jax.Array], batch: Batch) -> jax.Array:
        return native_logps(spec, rope, params, batch)[0]

    def forward(params: dict[str, jax.Array], batch: Batch) -> tuple[jax.Array, Any]:
        found, streams = native_logps(spec, rope, params, batch)
        return found, (params, batch, streams)

    def backward(kept: Any, given: jax.Array) -> tuple[dict[str, jax.Array], None]:
        params, batch, streams = kept
        return _gradient(spec, rope, params, batch, streams, given), None

    logps.defvjp(forward, backward)
    return logps


def xla_logps(
    config: ModelConfig,
    rope: jax.Array,
    params: Params,
    batch: Batch,
    *,
    dtype: DTypeLike = jnp.bfloat16,
) -> jax.Array:
    """The same log-probabilities by XLA alone, with products of `dtype` and sums in float32.

    What a trainer has that does not share the sampler's kernels: close, and not the same.
    """
    model, x = _by_xla(config, rope, params, batch.tokens, dtype)
    target = _targets(batch)

    def group(each: tuple[jax.Array, ...]) -> jax.Array:
        x, target, index = each
        logits = cast("jax.Array", model.logits(x, ROWS_LEFT))
        return _chosen(_processed(logits, batch, target, index), target)

    found = lax.map(group, _grouped(x, target, jnp.arange(len(target))))
    return _placed(found.reshape(-1), *batch.tokens.shape)


def xla_logits(
    config: ModelConfig, rope: jax.Array, params: Params, tokens: jax.Array, dtype: DTypeLike = jnp.bfloat16
) -> jax.Array:
    """The logits of `tokens [B, T]` by XLA alone, f32 `[B, T, V]`."""
    model, x = _by_xla(config, rope, params, tokens, dtype)
    return cast("jax.Array", model.logits(x, ROWS_LEFT)).T.reshape(*tokens.shape, -1)


def _by_xla(
    config: ModelConfig, rope: jax.Array, params: Params, tokens: jax.Array, dtype: DTypeLike
) -> tuple[Any, jax.Array]:
    """The model with products of `dtype`, and its last stream, f32 `[B T, D]`."""
    spec = ModelSpec(config, jnp.dtype(dtype))
    model = spec.merge([params[name].astype(leaf.dtype) for name, leaf in spec.leaves.items()])
    call = _dense_call(config, rope, *tokens.shape)
    *_, x = model.hidden(jnp.asarray(tokens, jnp.int32).reshape(-1), call)
    return model, x


def _gradient(
    native: ModelSpec,
    rope: jax.Array,
    params: Params,
    batch: Batch,
    streams: list[jax.Array],
    given: jax.Array,
) -> dict[str, jax.Array]:
    """The gradient for the parameters of cotangents `given [B, T]` of the log-probabilities."""
    spec = ModelSpec(native.config, jnp.dtype(jnp.float32))
    rows, width = batch.tokens.shape
    tokens, target = jnp.asarray(batch.tokens, jnp.int32).reshape(-1), _targets(batch)
    used = (jnp.arange(width) < jnp.asarray(batch.length)[:, None]).reshape(-1)
    weights = {
        name: params[name] if spec.leaves[name].shape[1:] == () else lax.reduce_precision(params[name], 8, 7)
        for name in spec.leaves
    }
    call = _dense_call(spec.config, rope, rows, width)
    total: dict[str, jax.Array] = {name: jnp.zeros_like(leaf) for name, leaf in weights.items()}

    def model(some: Mapping[str, jax.Array]) -> Any:
        return spec.merge([(weights | dict(some))[name] for name in spec.leaves])

    # Of log-probability t come the cotangents at position t - 1.
    shifted = jnp.pad(jnp.asarray(given)[:, 1:], ((0, 0), (0, 1))).reshape(-1)
    cotangent = jnp.where(target >= 0, shifted, 0.0)
    outer = [name for name in spec.leaves if not name.startswith("layers.")]
    own = {name: weights[name] for name in outer}
    sampler = None  # the model whose head says which tokens could be sampled
    if batch.processing is not None:
        sampler = native.merge([_held(native, name, params[name]) for name in native.leaves])

    def group(
        total: dict[str, jax.Array], each: tuple[jax.Array, ...]
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        x, target, index, cotangent = each
        possible = None
        if sampler is not None:
            found = _native_logits(native, sampler, batch, x, target, index)
            possible = ~jnp.isneginf(found.values.T)

        def of_head(own: dict[str, jax.Array], x: jax.Array) -> jax.Array:
            logits = cast("jax.Array", model(own).logits(x, ROWS_LEFT))
            return _chosen(_processed(logits, batch, target, index, possible), target)

        _, derive = jax.vjp(of_head, own, x)
        leaves, dx = derive(cotangent)
        return jax.tree.map(jnp.add, total, leaves), dx

    last = jnp.where((target >= 0)[:, None], streams[-1], 0.0)  # arbitrary where nothing is read
    outside, dx = lax.scan(
        group,
        {name: total[name] for name in outer},
        _grouped(last, target, jnp.arange(len(target)), cotangent),
    )
    dx = dx.reshape(-1, dx.shape[-1])[: len(target)]
    for index in reversed(range(spec.config.num_hidden_layers)):
        own = {name: leaf for name, leaf in weights.items() if name.startswith(f"layers.{index}.")}

        def of_layer(own: dict[str, jax.Array], x: jax.Array, index: int = index) -> jax.Array:
            return cast("jax.Array", model(own).layers[index](x, call))

        _, derive = jax.vjp(of_layer, own, jnp.where(used[:, None], streams[index], 0.0))
        leaves, dx = derive(dx)
        total |= leaves
    own = {name: weights[name] for name in outer}
    _, derive = jax.vjp(lambda own: model(own).embedded(tokens, ROWS_LEFT), own)
    (leaves,) = derive(dx)
    return total | jax.tree.map(jnp.add, outside, leaves)


def _held(spec: ModelSpec, name: str, values: jax.Array) -> jax.Array:
    """A leaf as the engine holds it."""
    leaf = spec.leaves[name]
    if leaf.dtype == jnp.float32:
        return values
    rounded = values.astype(leaf.dtype)
    if leaf.role != "plain":
        assert isinstance(spec.products, NativeProducts)
        rounded = spec.products.pack_traced(rounded, leaf.role)
    return lax.optimization_barrier(rounded)  # XLA may drop a rounding that is widened again


def _dense_call(config: ModelConfig, rope: jax.Array, rows: int, width: int) -> Call:
    """Attention of `rows` sequences of `width` tokens over themselves, and XLA's products."""

    def attend(index: int, qkv: jax.Array, own: AttentionWeights | RecurrentWeights) -> jax.Array:
        assert isinstance(own, AttentionWeights)
        found = jax.vmap(lambda each: attend_densely(config, index, own, each, rope[:, :width], {}))(
            qkv.reshape(rows, width, -1)
        )
        return found.reshape(rows * width, -1)

    return Call(attend, ROWS_LEFT)


def _sampling(
    batch: Batch, processing: Processing, target: jax.Array, index: jax.Array
) -> tuple[SamplingRows, SamplingContext]:
    """What the sampler knew at positions `index [N]` of the batch, with sequences in place of slots."""
    rows, width = batch.tokens.shape
    slot, length = jnp.minimum(index // width, rows - 1), index % width + 1
    prompt = jnp.asarray(processing.prompt_length)[slot]
    sampled = jnp.maximum(length - prompt, 0)
    return jax.tree.map(lambda each: jnp.asarray(each)[slot], processing.sampling), SamplingContext(
        live=target >= 0,
        slot=slot,
        length=length,
        prompt_length=prompt,
        min_remaining=jnp.maximum(jnp.asarray(processing.min_tokens)[slot] - sampled, 0),
        stop_ids=jnp.asarray(processing.stop_ids)[slot],
        history=jnp.asarray(batch.tokens, jnp.int32),
        tables=jax.tree.map(jnp.asarray, processing.tables),
        draft=None if processing.tables.draft_masks is None else sampled,
    )


def _processed(
    logits: jax.Array, batch: Batch, target: jax.Array, index: jax.Array, possible: jax.Array | None = None
) -> jax.Array:
    """`logits [V, N]` of positions `index [N]` as the sampler processes them, by XLA.

    possible: bool `[V, N]`, the tokens that could be sampled; None: as XLA's sampler has them.
    """
    if batch.processing is None:
        return logits
    rows, context = _sampling(batch, batch.processing, target, index)
    random = context.live & (rows.temperature > 0)
    adjusted = adjust(logits, rows, context)
    if possible is None:
        possible = ~jnp.isneginf(restricted(lax.stop_gradient(adjusted), rows, random))
    return jnp.where(possible, adjusted / jnp.where(random, rows.temperature, 1.0), -jnp.inf)


def _chosen(logits: jax.Array, target: jax.Array) -> jax.Array:
    """Log-probabilities `[N]` of `target [N]` under `logits [V, N]`; 0 where the target is -1."""
    found = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=0), jnp.maximum(target, 0)[None], axis=0)[0]
    return jnp.where(target >= 0, found, 0.0)


def _targets(batch: Batch) -> jax.Array:
    """The token that each position predicts, i32 `[B T]`; -1 where it is not of the response."""
    wanted = jnp.where(jnp.asarray(batch.response_mask), jnp.asarray(batch.tokens, jnp.int32), -1)
    return jnp.pad(wanted[:, 1:], ((0, 0), (0, 1)), constant_values=-1).reshape(-1)


def _grouped(x: jax.Array, target: jax.Array, *more: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays with a leading axis of positions, in groups of rows of logits: targets are padded with -1, the rest with
    ones."""
    size = min(_HEAD_ROWS, len(target))

    def cut(each: jax.Array, filling: float) -> jax.Array:
        missing = ((0, -len(each) % size), *((0, 0),) * (each.ndim - 1))
        return jnp.pad(each, missing, constant_values=filling).reshape(-1, size, *each.shape[1:])

    return cut(x, 1), cut(target, -1), *(cut(each, 1) for each in more)


def _placed(found: jax.Array, rows: int, width: int) -> jax.Array:
    """Of what each position predicts, what was predicted of each: `[B, T]`."""
    return jnp.pad(found[: rows * width].reshape(rows, width)[:, :-1], ((0, 0), (1, 0)))
