"""A rollout worker for tunix's `RLCluster`: samples in the engine, and computes the same bits again.

tunix's own losses take the log-softmax of the actor's logits, which XLA computes: close to what was sampled, and not
the same. A loss registered with tunix that calls `TunixRollout.per_token_logps` sees the sampled bits. See
docs/training.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from xla_engine.errors import ConfigError, InvalidRequestError
from xla_engine.llm import LLM
from xla_engine.sampling_params import SamplingParams
from xla_engine.training.batch import Batch, make_processing
from xla_engine.training.policy import Policy


class Actor(nnx.Module):
    """A policy's parameters as a model that tunix trains. Its logits are XLA's, with products in bfloat16."""

    def __init__(self, policy: Policy) -> None:
        self.leaves = nnx.Dict({name: nnx.Param(leaf) for name, leaf in policy.params().items()})
        self.policy = policy

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, cache: None, attention_mask: jax.Array, **_: Any
    ) -> tuple[jax.Array, None]:
        """Logits f32 `[B, T, V]` of `tokens [B, T]`, which may be padded at both ends: `positions` tells where."""
        start = jnp.maximum(jnp.argmax(positions > 0, axis=1) - 1, 0)
        found = self.policy.xla_logits(_leaves(self), _moved(tokens, start))
        return _moved(found, -start), None


class TunixRollout:
    """A rollout worker of tunix (its `BaseRollout`).

    Arguments:
        rollout_actor, tokenizer, mesh, rollout_config: as `RLCluster` gives them. The actor must be an `Actor`.
        llm: the engine of the actor's policy; give it by `rollout_engine=functools.partial(TunixRollout, llm=llm)`.

    Raises ConfigError if the sampling of `rollout_config` needs an engine with processed log-probabilities.
    """

    mesh = None  # tunix's own

    def __init__(
        self,
        *,
        rollout_actor: Actor,
        tokenizer: Any,
        rollout_config: RolloutConfig,
        llm: LLM,
        mesh: object = None,
    ) -> None:
        if not isinstance(rollout_actor, Actor):
            raise ConfigError(
                f"the actor is a {type(rollout_actor).__name__}; give RLCluster an xla_engine.training.tunix.Actor"
            )
        self._policy, self._tokenizer, self._llm = rollout_actor.policy, tokenizer, llm
        self._sampled_from = Actor(self._policy)
        self._params = _sampling(rollout_config)
        if not self._policy.is_processed and self._params != replace(
            self._params, temperature=1.0, top_k=0, top_p=1.0
        ):
            raise ConfigError(
                "tunix trains on the distribution that was sampled from: start the engine with logprobs_mode "
                "'processed_logprobs', or sample at temperature 1 without top_k and top_p"
            )

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **_: Any) -> RolloutOutput:
        """One answer to each prompt, with the log-probability of each token."""
        params, pad = _sampling(rollout_config), self.pad_id()
        wanted = [
            params if params.seed is None else params.clone(seed=params.seed + row)
            for row in range(len(prompts))
        ]
        texts = [str(prompt) for prompt in prompts]  # NumPy's strings
        outputs = self._llm.generate(texts, wanted, use_tqdm=False)
        width = rollout_config.max_prompt_length
        padded = np.full((len(outputs), width), pad, np.int32)
        for row, output in enumerate(outputs):
            ids = output.prompt_token_ids
            if len(ids) > width or ids[0] == pad:
                raise InvalidRequestError(
                    f"prompt {row} has {len(ids)} tokens and begins with {ids[0]}: max_prompt_length is {width}, and "
                    f"tunix finds where a prompt begins by its padding, {pad}"
                )
            padded[row, width - len(ids) :] = ids
        answers = [output.outputs[0] for output in outputs]
        return RolloutOutput(
            text=[answer.text for answer in answers],
            logits=None,
            tokens=[np.asarray(answer.token_ids, np.int32) for answer in answers],
            left_padded_prompt_tokens=padded,
            logprobs=[np.asarray(answer.logprobs, np.float32) for answer in answers],
        )

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """Log-probabilities f32 `[B, C]` of the completions, as the engine's parameters give them: the sampled
        bits."""
        return jax.lax.stop_gradient(
            self.per_token_logps(self._sampled_from, prompt_tokens, completion_tokens)
        )

    def per_token_logps(
        self, model: Actor, prompt_tokens: ArrayLike, completion_tokens: ArrayLike
    ) -> jax.Array:
        """Log-probabilities f32 `[B, C]`, 0 for padding, with a gradient for the parameters of `model`.

        prompt_tokens `[B, P]`: padded on the left. completion_tokens `[B, C]`: padded on the right.
        """
        prompt, completion = jnp.asarray(prompt_tokens), jnp.asarray(completion_tokens)
        rows, width = prompt.shape
        start = jnp.argmax(prompt != self.pad_id(), axis=1)
        mask = jnp.pad(completion != self.pad_id(), ((0, 0), (width, 0)))
        last = mask.shape[1] - jnp.argmax(mask[:, ::-1], axis=1)
        processing = None
        if self._policy.is_processed:
            processing = replace(
                make_processing(self._params, [0] * rows, self._llm.engine.validator),
                prompt_length=width - start,
            )
        batch = Batch(
            tokens=_moved(jnp.concatenate([prompt, completion], axis=1), start),
            length=jnp.where(mask.any(axis=1), last, width) - start,
            response_mask=_moved(mask, start),
            sampled=jnp.zeros(mask.shape, jnp.float32),
            processing=processing,
        )
        return _moved(self._policy.logps(_leaves(model), batch), -start)[:, width:]

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Publish the parameters of an `Actor`, as `nnx.state` gives them."""
        with jax.transfer_guard("allow"):  # `sync_weights` forbids what packing weights needs
            self._policy.publish({str(path[-1]): leaf[...] for path, leaf in nnx.to_flat_state(params)})
            self._sampled_from = Actor(self._policy)

    def pad_id(self) -> int:
        """The tokenizer's."""
        return int(self._tokenizer.pad_id())

    def eos_id(self) -> int:
        """The tokenizer's."""
        return int(self._tokenizer.eos_id())

    def model(self) -> Actor:
        """The engine's parameters. Not the model that tunix trains: it publishes none that are the same arrays."""
        return self._sampled_from


BaseRollout.register(TunixRollout)


def _sampling(config: RolloutConfig) -> SamplingParams:
    seed = None
    if config.seed is not None:
        is_key = jnp.issubdtype(config.seed.dtype, jax.dtypes.prng_key)
        data = jax.random.key_data(config.seed) if is_key else config.seed
        seed = int(np.asarray(data).astype(np.uint32).ravel()[-1])
    return SamplingParams(
        temperature=config.temperature,
        top_p=1.0 if config.top_p is None else config.top_p,
        top_k=config.top_k or 0,
        max_tokens=config.max_tokens_to_generate,
        stop_token_ids=tuple(config.eos_tokens or ()),
        seed=seed,
        logprobs=0,
    )


def _leaves(model: Actor) -> dict[str, jax.Array]:
    return {name: leaf[...] for name, leaf in model.leaves.items()}


def _moved(values: jax.Array, by: jax.Array) -> jax.Array:
    """Each row of `values [B, T, ...]` moved `by [B]` places to the left, cyclically."""
    return jax.vmap(lambda row, places: jnp.roll(row, -places, axis=0))(values, by)
