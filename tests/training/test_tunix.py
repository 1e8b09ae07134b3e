"""The rollout worker for tunix, in tunix's own cluster and learner. Skipped where tunix is not installed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("tunix", reason="needs the extra `tunix`")

from tunix.rl import function_registry, rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig

from xla_engine.errors import ConfigError, InvalidRequestError
from xla_engine.llm import LLM
from xla_engine.sampling_params import SamplingParams
from xla_engine.training import Policy
from xla_engine.training.tunix import Actor, TunixRollout

PROMPTS = ["def area(x):\n    return", "def half(n):", "import"]
CONFIG = RolloutConfig(
    max_tokens_to_generate=8, max_prompt_length=16, temperature=0.8, top_p=0.9, return_logprobs=True
)
GREEDY = SamplingParams(temperature=0, max_tokens=4, logprobs=0)


class Pads:
    """What tunix asks of a tokenizer."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.eos = llm, llm.engine.validator.eos_token_ids[0]

    def encode(self, text: str) -> list[int]:
        return self.llm.get_tokenizer().encode(text)

    def decode(self, ids: list[int]) -> str:
        return self.llm.get_tokenizer().decode(ids)

    def pad_id(self) -> int:
        return self.eos

    def eos_id(self) -> int:
        return self.eos

    def bos_id(self) -> int:
        return self.eos


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_num_seqs=8, max_model_len=64, logprobs_mode="processed_logprobs") as llm:
        yield llm


@pytest.fixture(scope="module")
def actor(llm: LLM) -> Actor:
    return Actor(Policy(llm))


def rollout_of(llm: LLM, actor: Actor, config: RolloutConfig = CONFIG) -> TunixRollout:
    return TunixRollout(rollout_actor=actor, tokenizer=Pads(llm), rollout_config=config, llm=llm)


def test_it_computes_the_sampled_bits_again(llm: LLM, actor: Actor) -> None:
    """From what tunix keeps of an answer: padded prompts and completions."""
    rollout = rollout_of(llm, actor)
    assert isinstance(rollout, BaseRollout) and issubclass(TunixRollout, BaseRollout)
    found = rollout.generate(PROMPTS, CONFIG)
    assert found.logprobs is not None and len(found.text) == len(found.tokens) == len(PROMPTS)
    pad = rollout.pad_id()
    completions = np.full((len(PROMPTS), 8), pad, np.int32)
    sampled = np.zeros((len(PROMPTS), 8), np.float32)
    for row, (tokens, logprobs) in enumerate(zip(found.tokens, found.logprobs, strict=True)):
        completions[row, : len(tokens)] = tokens
        sampled[row, : len(tokens)] = np.where(tokens == pad, 0, logprobs)
    again = rollout.get_per_token_logps(
        jnp.asarray(found.left_padded_prompt_tokens), jnp.asarray(completions)
    )
    assert np.asarray(again).tobytes() == sampled.tobytes() and (sampled < 0).sum() > len(PROMPTS)


def test_what_it_cannot_follow_is_refused(llm: LLM, actor: Actor) -> None:
    rollout = rollout_of(llm, actor)
    with pytest.raises(InvalidRequestError, match="max_prompt_length is 16"):
        rollout.generate(["def " * 20], CONFIG)
    with pytest.raises(ConfigError, match="give RLCluster an"):
        rollout_of(llm, object())  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tunix's
def test_a_learner_of_tunix_trains_with_the_sampled_bits(llm: LLM, actor: Actor) -> None:
    """A registered loss sees no difference in any step, tunix's own forward pass does, and the engine follows."""
    optax = pytest.importorskip("optax")
    seen: list[tuple[float, float]] = []

    @function_registry.register_policy_loss_fn("sampled bits")
    def loss(model: Actor, example: Any, algo_config: Any, pad_id: int, eos_id: int) -> Any:
        rollout = cluster.rollout
        logps = rollout.per_token_logps(model, example.prompt_ids, example.completion_ids)
        ratio = jnp.exp(logps - example.old_per_token_logps)
        logits, _ = model(
            jnp.concatenate([example.prompt_ids, example.completion_ids], axis=1),
            positions=_positions(example, pad_id),
            cache=None,
            attention_mask=None,
        )
        width = example.completion_ids.shape[1]
        by_xla = jax.nn.log_softmax(logits[:, -width - 1 : -1] / algo_config.temperature)
        chosen = jnp.take_along_axis(by_xla, example.completion_ids[..., None], axis=-1)[..., 0]

        def apart(found: jax.Array) -> jax.Array:
            return jnp.abs(jnp.where(example.completion_mask, found - example.old_per_token_logps, 0)).max()

        jax.debug.callback(
            lambda one, other: seen.append((float(one), float(other))), apart(logps), apart(chosen)
        )
        gain = ratio * example.advantages[:, None] * example.completion_mask
        return -gain.sum() / example.completion_mask.sum(), {"kl": 0.0, "pg_clipfrac": 0.0}

    config = RolloutConfig(
        max_tokens_to_generate=8, max_prompt_length=16, temperature=0.8, return_logprobs=True
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    roles = rl_cluster.Role
    cluster = rl_cluster.RLCluster(
        actor=actor,
        tokenizer=Pads(llm),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={roles.ACTOR: mesh, roles.REFERENCE: mesh, roles.ROLLOUT: mesh},
            rollout_engine=functools.partial(TunixRollout, llm=llm),
            offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(1e-4), eval_every_n_steps=100, max_steps=4
            ),
            rollout_config=config,
        ),
    )
    learner = GRPOLearner(
        rl_cluster=cluster,
        algo_config=GRPOConfig(num_generations=4, num_iterations=2, beta=0.0, policy_loss_fn="sampled bits"),
        reward_fns=lambda prompts, completions, **_: [float(len(each)) for each in completions],
    )
    before = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    learner.train([{"prompts": np.array(PROMPTS[:2])} for _ in range(2)])
    first = seen[::2]  # of the two iterations for each rollout
    assert len(first) == 2 and all(ours == 0 < of_xla for ours, of_xla in first), seen
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    policy = actor.policy
    trained = {name: leaf[...] for name, leaf in cluster.actor_trainer.model.leaves.items()}
    batch = policy.batch(outputs, GREEDY)
    assert np.asarray(policy.logps(trained, batch)).tobytes() == batch.sampled.tobytes()
    assert [each.outputs[0].logprobs for each in outputs] != [each.outputs[0].logprobs for each in before]


def _positions(example: Any, pad_id: int) -> jax.Array:
    tokens = jnp.concatenate([example.prompt_ids, example.completion_ids], axis=1)
    return jnp.maximum(jnp.cumsum(tokens != pad_id, axis=1) - 1, 0)
