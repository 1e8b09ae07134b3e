"""A policy's log-probabilities are the sampler's bits, its gradient the model's; what it publishes is sampled from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.support.engine_faults import bits
from tests.support.instruction_sets import HAS_KERNELS
from tests.support.models import TINY, TINY_ENGINE, tiny_checkpoint
from tests.support.tiers import default
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import CheckpointError, ConfigError, InvalidRequestError
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.linear.native import NativeProducts
from xla_engine.graphs.linear.products import Role
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.llm import LLM
from xla_engine.model_loader.checkpoint import random_checkpoint
from xla_engine.runner.backends import make_spec
from xla_engine.sampling_params import SamplingParams
from xla_engine.structured_outputs import StructuredOutputsParams
from xla_engine.text.tokenizer import Tokenizer
from xla_engine.training import Batch, Policy
from xla_engine.training.batch import make_processing
from xla_engine.training.logps import xla_logps
from xla_engine.training.policy import trained_spec

pytestmark = pytest.mark.skipif(not HAS_KERNELS, reason="a policy needs the C++ kernels")
CONFIG = replace(TINY_ENGINE, max_model_len=128)
BF16, WHOLE = jnp.dtype(jnp.bfloat16), replace(TINY, hidden_size=64, intermediate_size=128)
PARAMS = SamplingParams(temperature=0.7, max_tokens=12, n=2, logprobs=0, seed=5, ignore_eos=True)
PROMPTS = [list(range(length)) for length in (1, 17, 40, 40, 3)]
ONE_LAYER = replace(TINY, num_hidden_layers=1)  # where logits only have to be processed
LOOKUP = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with XlaBatchEngine(tiny_checkpoint(), None, CONFIG) as engine:
        yield LLM.from_engine(engine)


@pytest.fixture(scope="module")
def policy(llm: LLM) -> Policy:
    return Policy(llm)


def letters() -> Tokenizer:
    """A stop token, token c - 32 for character c, a space, and pairs of letters that no text is encoded with."""
    pairs = [one + two for one in "abcdefgh" for two in "abcdefghijklm"]
    tokens = ["<end>", *map(chr, range(33, 127)), "Ġ", *pairs][: TINY.vocab_size]
    backend = tokenizers.Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend)


@pytest.fixture(scope="module")
def processing_llm() -> Iterator[LLM]:
    config = replace(CONFIG, logprobs_mode="processed_logprobs", enable_dry=True)
    with XlaBatchEngine(tiny_checkpoint(model=ONE_LAYER), letters(), config) as engine:
        yield LLM.from_engine(engine)


@pytest.fixture(scope="module")
def processing_policy(processing_llm: LLM) -> Policy:
    return Policy(processing_llm)


def rolled_out(llm: LLM, params: SamplingParams = PARAMS) -> list[Any]:
    return list(llm.generate(PROMPTS, params, use_tqdm=False))


def mismatch(policy: Policy, params: Any, batch: Batch) -> float:
    return float(np.abs(np.asarray(policy.logps(params, batch)) - batch.sampled).max())


def same_bits(found: Any, expected: Any) -> bool:
    return np.asarray(found, np.float32).tobytes() == np.asarray(expected, np.float32).tobytes()


@pytest.mark.parametrize(
    ("model", "config"),
    [
        pytest.param(TINY, CONFIG, id="raw"),
        pytest.param(
            ONE_LAYER,
            replace(
                CONFIG,
                max_num_seqs=4,
                num_blocks=32,
                block_size=32,
                speculative_config=LOOKUP,
                logprobs_mode="processed_logprobs",
            ),
            id="processed with speculation in blocks",
            marks=pytest.mark.full,
        ),
    ],
)
def test_log_probabilities_are_the_sampled_bits(model: ModelConfig, config: EngineConfig) -> None:
    """Sampled twice, so that the second time prompts come from the cache; and the batch has another width, and half
    the rows."""
    with XlaBatchEngine(tiny_checkpoint(model=model), None, config) as engine:
        llm = LLM.from_engine(engine)
        policy = Policy(llm)
        weights = policy.params()
        for _ in range(2):
            outputs = rolled_out(llm)
            batch = policy.batch(outputs, PARAMS)
            assert batch.response_mask.sum() == len(outputs) * 2 * 12
            assert same_bits(policy.logps(weights, batch), batch.sampled)
        assert sum(output.num_cached_tokens for output in outputs) > 0
        half = policy.batch(outputs[:2], PARAMS, width=96)
        assert same_bits(policy.logps(weights, half), half.sampled)


def test_raw_ones_do_not_depend_on_how_tokens_are_chosen(llm: LLM, policy: Policy) -> None:
    params = replace(PARAMS, top_k=20, top_p=0.9, repetition_penalty=1.3, min_tokens=4)
    batch = policy.batch(rolled_out(llm, params), params)
    assert same_bits(policy.logps(policy.state(), batch), batch.sampled)


@pytest.mark.full
def test_the_gradient_is_that_of_the_model(llm: LLM, policy: Policy) -> None:
    """Of every leaf, beside XLA's own in float32; a weight that nothing reads changes no gradient.

    With weights a third as large, logits are as flat as a trained model's, and roundings do not add up.
    """
    batch = policy.batch(rolled_out(llm), PARAMS)
    params = {name: leaf / 3 if leaf.ndim > 1 else leaf for name, leaf in policy.params().items()}
    weight = np.random.default_rng(3).standard_normal(batch.tokens.shape).astype(np.float32)
    rope = jnp.asarray(rope_tables(TINY, 128))

    def of_policy(params: Any, weight: Any) -> jax.Array:
        return jnp.sum(policy.logps(params, batch) * weight)

    def of_xla(params: Any) -> jax.Array:
        found = xla_logps(TINY, rope, params, batch, dtype=jnp.float32)
        return jnp.sum(found * weight)

    gradient = jax.jit(jax.grad(of_policy))
    found, expected = gradient(params, weight), jax.jit(jax.grad(of_xla))(params)
    for name, leaf in expected.items():
        one, other = np.asarray(found[name], np.float64).ravel(), np.asarray(leaf, np.float64).ravel()
        size = np.sqrt((one @ one) * (other @ other))
        assert size > 0 and one @ other > 0.9999 * size, name
        assert 0.99 < np.sqrt((one @ one) / (other @ other)) < 1.01, name
    elsewhere = np.where(batch.response_mask, weight, 7.0)
    again = gradient(params, elsewhere)
    assert all(same_bits(again[name], found[name]) for name in found)


def test_what_is_published_is_what_a_fresh_engine_computes(llm: LLM, policy: Policy) -> None:
    """The bytes of the weights, and of what is sampled, though prompts were cached; and nothing else is left over."""
    before = policy.params()
    noise = np.random.default_rng(1)
    other = {
        name: leaf * (1 + noise.standard_normal(leaf.shape).astype(np.float32) / 64)
        for name, leaf in before.items()
    }
    old = rolled_out(llm)
    try:
        policy.publish(other)
        new = rolled_out(llm)
        batch = policy.batch(new, PARAMS)
        assert same_bits(policy.logps(other, batch), batch.sampled)
        assert mismatch(policy, before, batch) > 0
        rounded = {
            name: np.asarray(leaf).astype(jnp.bfloat16 if leaf.ndim > 1 else np.float32)
            for name, leaf in other.items()
        }
        fresh_checkpoint = random_checkpoint(TINY, weights=rounded, eos_token_ids=(0,))
        with XlaBatchEngine(fresh_checkpoint, None, CONFIG) as fresh:
            held = zip(policy._engine.runner.weights.leaves, fresh.runner.weights.leaves, strict=True)
            assert all(np.asarray(one).tobytes() == np.asarray(two).tobytes() for one, two in held)
            expected = rolled_out(LLM.from_engine(fresh))
        assert [bits(each) for one in new for each in one.outputs] == [
            bits(each) for one in expected for each in one.outputs
        ]
        for name, leaf in policy.params().items():
            assert np.asarray(leaf).tobytes() == rounded[name].astype(np.float32).tobytes()
    finally:
        policy.publish(before)
    assert [bits(each) for one in rolled_out(llm) for each in one.outputs] == [
        bits(each) for one in old for each in one.outputs
    ]


def test_parameters_may_be_published_behind_an_answer_that_stopped(llm: LLM, policy: Policy) -> None:
    """A stop is seen one step late, so a step without requests is still under way."""
    before, behind = policy.params(), 0
    for seed in range(6):
        rolled_out(llm, replace(PARAMS, stop_token_ids=list(range(0, 199, 2)), ignore_eos=False, seed=seed))
        behind += policy._engine.has_work
        policy.publish(before)
    assert behind > 0


def test_planted_faults_are_seen(llm: LLM, policy: Policy) -> None:
    """What trainers get wrong, and a comparison of bits shows: one leaf not published, and a shifted mask."""
    before = policy.params()
    batch = policy.batch(rolled_out(llm), PARAMS)
    for name in before:
        trained = before | {name: before[name] * 1.01}
        assert mismatch(policy, trained, batch) > 0, f"{name} was not published"
    shifted = replace(batch, response_mask=np.roll(batch.response_mask, 1, axis=1))
    assert mismatch(policy, before, shifted) > 0


@pytest.mark.full
def test_a_forgotten_temperature_is_seen(processing_llm: LLM, processing_policy: Policy) -> None:
    policy, params = processing_policy, processing_policy.params()
    outputs = rolled_out(processing_llm)
    assert mismatch(policy, params, policy.batch(outputs, PARAMS)) == 0
    assert mismatch(policy, params, policy.batch(outputs, replace(PARAMS, temperature=1.0))) > 0.1


PROCESSED = {
    "truncation": {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "a nucleus of one token": {"top_p": 1e-6},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.3},
    "penalties of the last tokens": {"repetition_penalty": 0.8, "penalty_last_n": 6, "top_p": 0.8},
    "DRY": {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": (7,)},
    "bias and allowed tokens": {
        "logit_bias": {3: 4.0, 150: -2.0},
        "allowed_token_ids": list(range(0, 190, 3)),
    },
    "stop ids that are held back": {"min_tokens": 9, "stop_token_ids": list(range(0, 199, 25)), "top_k": 50},
    "greedy": {"n": 1, "temperature": 0.0, "frequency_penalty": 1.5, "min_p": 0.5},
}


@pytest.mark.parametrize("changed", default(PROCESSED.values(), 3), ids=PROCESSED)
def test_processed_ones_are_the_sampled_bits(
    processing_llm: LLM, processing_policy: Policy, changed: dict[str, Any]
) -> None:
    """Whatever made the distribution from the model's logits; without it, they would be others."""
    policy, params = processing_policy, replace(PARAMS, **changed)
    outputs, weights = rolled_out(processing_llm, params), policy.params()
    batch = policy.batch(outputs, params)
    assert same_bits(policy.logps(weights, batch), batch.sampled)
    plain = policy.batch(outputs, SamplingParams(temperature=params.temperature))
    assert mismatch(policy, weights, plain) > 1e-3


BY_HOST = {
    "structured_outputs": {"structured_outputs": StructuredOutputsParams(regex="[a-h]{3,9}[x-z]*")},
    "bad_words of more than one token": {
        "bad_words": [one + two for one in "abcdefgh" for two in "abcd"],
        "allowed_token_ids": range(ord("a") - 32, ord("i") - 32),
    },
}


@pytest.mark.parametrize("name", default(BY_HOST))
def test_masks_that_the_host_made_are_made_again(
    processing_llm: LLM, processing_policy: Policy, name: str
) -> None:
    policy, params = processing_policy, replace(PARAMS, ignore_eos=False, min_p=0.001, **BY_HOST[name])
    outputs, weights = rolled_out(processing_llm, params), policy.params()
    batch = policy.batch(outputs, params)
    assert batch.response_mask.sum() > 3 * len(outputs)
    assert same_bits(policy.logps(weights, batch), batch.sampled)
    tables = batch.processing.tables
    first = np.broadcast_to(tables.mask[:, None], tables.draft_masks.shape)
    tables = replace(tables, draft_masks=first)
    without = replace(batch, processing=replace(batch.processing, tables=tables))
    assert mismatch(policy, weights, without) > 1e-3
    gradient = jax.grad(lambda weights: policy.logps(weights, batch).sum())(weights)
    assert all(np.isfinite(leaf).all() for leaf in gradient.values())


def test_answers_that_were_sampled_with_other_constraints_are_refused(
    processing_llm: LLM, processing_policy: Policy
) -> None:
    outputs = rolled_out(processing_llm, replace(PARAMS, allowed_token_ids=[40, 41]))
    with pytest.raises(InvalidRequestError, match="answer 0 of the batch was sampled with other structured"):
        processing_policy.batch(outputs, replace(PARAMS, ignore_eos=False, **BY_HOST["structured_outputs"]))


@pytest.mark.parametrize("name", BY_HOST)
def test_without_answers_the_masks_of_the_host_are_refused(processing_llm: LLM, name: str) -> None:
    """A trainer of tunix traces its tokens."""
    validator = processing_llm.engine.validator
    with pytest.raises(InvalidRequestError, match=f"does not support {name}"):
        make_processing(SamplingParams(**BY_HOST[name]), [3], validator)


@pytest.mark.full
def test_the_gradient_of_processed_ones_is_that_of_the_model(
    processing_llm: LLM, processing_policy: Policy
) -> None:
    """Beside XLA's own in float32. The tokens that could be sampled are constants of both."""
    policy, params = processing_policy, replace(PARAMS, **PROCESSED["penalties"], **PROCESSED["truncation"])
    batch = policy.batch(rolled_out(processing_llm, params), params)
    rope, weights = jnp.asarray(rope_tables(ONE_LAYER, 128)), policy.params()

    def of_xla(params: Any) -> jax.Array:
        return jnp.sum(xla_logps(ONE_LAYER, rope, params, batch, dtype=jnp.float32))

    found = jax.jit(jax.grad(lambda params: policy.logps(params, batch).sum()))(weights)
    for name, leaf in jax.jit(jax.grad(of_xla))(weights).items():
        one, other = np.asarray(found[name], np.float64).ravel(), np.asarray(leaf, np.float64).ravel()
        assert np.isfinite(one).all() and one @ other > 0.99 * np.sqrt((one @ one) * (other @ other)), name


def test_bad_parameters_and_outputs_are_refused(llm: LLM, policy: Policy) -> None:
    params = policy.params()
    name = next(name for name, leaf in params.items() if leaf.ndim > 1)
    with pytest.raises(InvalidRequestError, match="do not fit the model"):
        policy.publish({})
    with pytest.raises(InvalidRequestError, match="give float32"):
        policy.publish(params | {name: params[name][:1]})
    with pytest.raises(CheckpointError, match=f"{name} holds values that are not finite"):
        policy.publish(params | {name: params[name] * np.float32(np.nan)})
    with pytest.raises(InvalidRequestError, match="no log-probabilities"):
        policy.batch(rolled_out(llm, replace(PARAMS, logprobs=None)), PARAMS)
    with pytest.raises(InvalidRequestError, match="does not fit into width 16"):
        policy.batch(rolled_out(llm), PARAMS, width=16)
    batch = policy.batch(rolled_out(llm), PARAMS)
    assert same_bits(policy.logps(params, batch), batch.sampled), "something was changed"


@pytest.mark.parametrize(
    ("options", "model", "named"),
    [
        ({"quantization": "int8"}, WHOLE, "quantization 'int8'"),
        ({"kv_cache_dtype": "int8"}, WHOLE, "kv_cache_dtype 'int8'"),
        ({"enable_lora": True}, WHOLE, "enable_lora"),
        ({"attention_backend": "xla"}, WHOLE, "needs the C.. kernels"),
        ({}, replace(WHOLE, post_norm=True), "of which XLA computes a part"),
    ],
    ids=["int8", "int8-kv", "lora", "xla", "arithmetic"],
)
def test_what_is_not_supported_is_refused_by_name(
    options: dict[str, Any], model: ModelConfig, named: str
) -> None:
    config = replace(CONFIG, **options)
    with pytest.raises(ConfigError, match=f"a Policy .*{named}"):
        trained_spec(config, make_spec(config, model, BF16))
    assert trained_spec(CONFIG, make_spec(CONFIG, WHOLE, BF16)).dtype == BF16


@pytest.mark.parametrize("isa", ["amx", "avx2"])
@pytest.mark.parametrize("rows", [16, 32, 80, 199])
@pytest.mark.parametrize("role", ["linear", "head"])
def test_weights_are_packed_in_a_graph_as_at_load(isa: str, rows: int, role: Role) -> None:
    products = NativeProducts(isa)
    values = np.arange(rows * 48, dtype=np.uint16).view(jnp.bfloat16).reshape(rows, 48)
    packed = products.pack(values, role)
    assert np.asarray(products.pack_traced(values, role)).tobytes() == packed.tobytes()
    assert products.unpack(packed, role).tobytes() == values.tobytes()
