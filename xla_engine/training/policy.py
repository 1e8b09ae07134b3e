"""`Policy`: the parameters of a running engine's model as a trainer sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from xla_engine.config import AUTO, KEPT, EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import ConfigError, InvalidRequestError
from xla_engine.graphs.attention.native import NativeAttention
from xla_engine.graphs.linear.native import NativeProducts
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.graphs.portable import ISAS, refusals
from xla_engine.llm import LLM
from xla_engine.outputs import RequestOutput
from xla_engine.sampling_params import SamplingParams
from xla_engine.training.batch import Batch, make_batch
from xla_engine.training.logps import differentiable_logps, native_logps, xla_logits, xla_logps

State = nnx.State[Any, Any]
Trained = Mapping[str, jax.Array] | State


class Policy:
    """The model of an engine as a differentiable function of its parameters.

    Arguments:
        llm: an `LLM` or `XlaBatchEngine` with the C++ kernels, in bfloat16, of a dense model. Raises ConfigError,
            naming what is not supported, for any other.

    Runnable example::

        with LLM() as llm:
            policy, params = Policy(llm), SamplingParams(temperature=1, max_tokens=8, logprobs=0)
            batch = policy.batch(llm.generate(["def add(a, b):"], params, use_tqdm=False), params)
            assert (policy.logps(policy.params(), batch) == batch.sampled).all()

    `logps` may be called in other functions that jax transforms, but for `vmap` and forward mode.
    """

    def __init__(self, llm: LLM | XlaBatchEngine) -> None:
        engine = llm.engine if isinstance(llm, LLM) else llm
        if not isinstance(engine, XlaBatchEngine):
            raise ConfigError("a Policy needs an engine in this process: leave out data_parallel_size")
        self._engine = engine
        self._spec = spec = trained_spec(engine.config, engine.runner.spec)
        processed = engine.config.logprobs_mode == "processed_logprobs"
        self._validator = engine.validator if processed else None
        self._rope = jnp.asarray(rope_tables(spec.config, engine.runner.context_length))
        self._logps = jax.jit(differentiable_logps(spec, self._rope))
        self._xla_logps = jax.jit(lambda params, batch: xla_logps(spec.config, self._rope, params, batch))

    def params(self) -> dict[str, jax.Array]:
        """What the engine computes with at present, in float32: `{leaf: array}`.

        Leaves are those of `XlaBatchEngine.checkpoint.weights`: queries, keys and values are one, gates and ups too.
        """
        found, products = {}, self._spec.products
        assert isinstance(products, NativeProducts)
        for (name, leaf), held in zip(
            self._spec.leaves.items(), self._engine.runner.weights.leaves, strict=True
        ):
            values = np.asarray(held)
            if leaf.role != "plain":
                values = products.unpack(values, leaf.role)
            found[name] = jnp.array(values, jnp.float32)
        return found

    def state(self) -> State:
        """The same as a flax state; `logps`, `publish` and optimizers take either."""
        params = self.params()
        leaves = self._spec.leaves
        return nnx.from_flat_state(
            [(path, params[name]) for path, name in zip(leaves.paths, leaves.names, strict=True)]
        )

    def batch(
        self, outputs: Sequence[RequestOutput], params: SamplingParams, *, width: int | None = None
    ) -> Batch:
        """The answers of `outputs` in order, all of them if a request has several.

        Arguments:
            outputs: sampled with `logprobs=0` or more.
            params: that they were sampled with. Processed log-probabilities refer to what these make of the model's
                logits.
            width: tokens of a row; None: the longest sequence, rounded up to a multiple of 32. Each width compiles.

        Raises InvalidRequestError.
        """
        return make_batch(outputs, params, self._validator, width)

    def logps(self, params: Trained, batch: Batch) -> jax.Array:
        """Log-probabilities of the response's tokens, f32 `[B, T]`; 0 elsewhere. The gradient is for `params`.

        Equal to `batch.sampled`, bit for bit, if the engine sampled with these parameters.
        """
        self._check(batch)
        return self._logps(self._by_name(params), batch)

    def xla_logps(self, params: Trained, batch: Batch) -> jax.Array:
        """The same by XLA alone, in bfloat16: what a trainer without the sampler's kernels has, for comparison."""
        self._check(batch)
        return self._xla_logps(self._by_name(params), batch)

    def xla_logits(self, params: Trained, tokens: jax.Array) -> jax.Array:
        """The logits of `tokens [B, T]` by XLA alone, in bfloat16: f32 `[B, T, V]`."""
        return xla_logits(self._spec.config, self._rope, self._by_name(params), tokens)

    @property
    def is_processed(self) -> bool:
        """Whether log-probabilities are those of the distribution that was sampled from."""
        return self._validator is not None

    def publish(self, params: Trained) -> None:
        """Let the engine compute with `params`, rounded as `logps` rounds them; it forgets all cached prefixes.

        Raises InvalidRequestError while requests run, and CheckpointError for values that are not finite: then nothing
        changes.
        """
        leaves, engine = self._spec.leaves, self._engine
        given = jax.device_get(self._by_name(params))
        engine.update_leaves(
            {name: np.asarray(given[name]).astype(leaves[name].dtype) for name in leaves.names}
        )

    def _by_name(self, params: Trained) -> dict[str, jax.Array]:
        leaves = self._spec.leaves
        given: dict[str, Any] = dict(params)  # a State is a mapping, too, by attributes
        if isinstance(params, nnx.State):
            known: dict[Any, str] = dict(zip(leaves.paths, leaves.names, strict=True))
            given = {known.get(path, str(path)): array for path, array in nnx.to_flat_state(params)}
        if missing := sorted(set(given) ^ set(leaves.names)):
            raise InvalidRequestError(
                f"parameters do not fit the model: {missing[0]!r}. Use those of params()"
            )
        for name in leaves.names:
            if given[name].shape != leaves[name].shape or given[name].dtype != jnp.float32:
                raise InvalidRequestError(
                    f"{name} is {given[name].dtype}{list(given[name].shape)}; give float32 "
                    f"{list(leaves[name].shape)}"
                )
        return {name: given[name] for name in leaves.names}

    def _check(self, batch: Batch) -> None:
        if batch.tokens.shape[1] > self._rope.shape[1]:
            raise InvalidRequestError(
                f"a batch of width {batch.tokens.shape[1]} exceeds max_model_len {self._rope.shape[1]}: give a "
                "smaller width"
            )


def trained_spec(config: EngineConfig, spec: ModelSpec) -> ModelSpec:
    """The spec of an engine's model with caches that keep all positions. Raises ConfigError."""
    found = {
        "runner 'pooling'": config.pools,
        f"quantization {config.quantization!r}": config.quantization not in (AUTO, None),
        "enable_lora": config.enable_lora,
        "tensor_parallel_size": spec.sharding.devices is not None,
        "prefix_cache_dir": config.prefix_cache_dir is not None,
        f"dtype {spec.dtype}": spec.dtype != jnp.bfloat16,
        "a model with routed experts": spec.config.experts is not None,
        "a model with recurrent layers": spec.config.recurrent is not None,
        "a model whose layers share keys and values": spec.config.num_kv_shared_layers > 0,
    }
    if unsupported := [name for name, is_so in found.items() if is_so]:
        remedy = "without this option"
        if config.quantization in KEPT:
            remedy = "which quantization 'none' makes of a quantised file"
        raise ConfigError(
            f"a Policy does not support {unsupported[0]}: use a dense model in bfloat16, {remedy}"
        )
    attention, products = spec.attention, spec.products
    if not isinstance(attention, NativeAttention) or not isinstance(products, NativeProducts):
        raise ConfigError(
            "a Policy needs the C++ kernels for attention and products: run on a CPU, with isa 'auto' and widths of "
            "layers in multiples of 32"
        )
    if attention.cache_dtype is not None:
        raise ConfigError("a Policy does not support kv_cache_dtype 'int8': leave it out")
    attention = replace(attention, call_positions=None)
    _refuse_other_arithmetic(
        ModelSpec(spec.config, spec.dtype, replace(attention, isa=ISAS[0]), replace(products, isa=ISAS[0]))
    )
    return ModelSpec(spec.config, spec.dtype, attention, products)


def _refuse_other_arithmetic(spec: ModelSpec) -> None:
    """Raise ConfigError if XLA computes anything that it may compute otherwise in another program.

    This is what portable bits need, too; which instruction set `spec` names does not matter.
    """
    rope = jax.ShapeDtypeStruct(
        (len(rope_tables(spec.config, 1)), 32, 2, spec.config.rotary_dim // 2), jnp.float32
    )
    params = {name: jax.ShapeDtypeStruct(leaf.shape, jnp.float32) for name, leaf in spec.leaves.items()}
    whole, row = jax.ShapeDtypeStruct((2, 32), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    batch = Batch(
        tokens=whole,
        length=row,
        response_mask=jax.ShapeDtypeStruct((2, 32), jnp.bool_),
        sampled=jax.ShapeDtypeStruct((2, 32), jnp.float32),
        processing=None,
    )
    program = jax.make_jaxpr(lambda rope, params, batch: native_logps(spec, rope, params, batch)[0])(
        rope, params, batch
    )
    if found := refusals(program.jaxpr):
        raise ConfigError(
            f"a Policy does not support this model, of which XLA computes a part ({found[0]}): its bits in a trainer "
            "need not be those of sampling. Use a Llama, Mistral, Qwen 2 or 3, or Phi 3 model"
        )
