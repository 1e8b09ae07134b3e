"""The external oracle, from committed files: transformers' greedy tokens and logits in float32 (make_golden.py)."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.environment import embedded_model_directory, requested_isa
from xla_engine.equivalence.forward_pass import ForwardPass
from xla_engine.model_loader.checkpoint import load_checkpoint
from xla_engine.outputs import CompletionOutput
from xla_engine.sampling_params import SamplingParams

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = {
    "gqa_tied": GOLDEN / "gqa_tied",
    "untied_odd_heads": GOLDEN / "untied_odd_heads",
    "llama3_rope": GOLDEN / "llama3_rope",
    "embedded": embedded_model_directory(),
}

NEAR_TIE = 0.05  # between the two best logits: twice what bfloat16 moves them by
QUICK = ("llama3_rope",)


def generate(engine: XlaBatchEngine, prompts: list[list[int]], cap: int) -> list[CompletionOutput]:
    """Greedy completions of `cap` tokens, all prompts in one batch."""
    for index, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=cap, ignore_eos=True, logprobs=0)
        engine.submit(prompt, params, request_id=str(index))
    outputs = {output.request_id: output.outputs[0] for output in engine.drain()}
    return [outputs[str(index)] for index in range(len(prompts))]


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.full] * (each not in QUICK)) for each in MODELS]
)
def test_greedy_tokens_and_logits_are_transformers(name: str) -> None:
    """At least 8 prompts of 48 greedy tokens each, all in one batch; last-position logits within 2e-4."""
    golden = np.load(GOLDEN / name / "golden.npz")
    checkpoint = load_checkpoint(MODELS[name], dtype="float32")
    prompts = [row[row >= 0].tolist() for row in golden["prompts"]]
    assert len(prompts) >= 8 and golden["tokens"].shape[1] >= 48
    cap = golden["tokens"].shape[1]
    # One prefill and one decode graph: `verify` and the self-check see to it that others give the same.
    config = EngineConfig(
        max_num_seqs=16,
        max_model_len=min(256, checkpoint.config.max_position_embeddings),
        prefill_lanes=(8,),
        self_check=False,
    )
    with XlaBatchEngine(checkpoint, None, config) as engine:
        outputs = generate(engine, prompts, cap)
    for index, expected in enumerate(golden["tokens"].tolist()):
        gaps = golden["gaps"][index]
        assert list(outputs[index].token_ids) == expected, (
            f"prompt {index}; smallest logit gap {gaps.min():.2g}"
        )

    reference = ForwardPass(checkpoint)
    for prompt, expected in zip(prompts, golden["logits"], strict=False):
        np.testing.assert_allclose(reference.logits(prompt)[-1], expected, atol=2e-4, rtol=2e-4)


def test_in_bfloat16_the_tokens_are_transformers_where_its_choice_is_clear(embedded: XlaBatchEngine) -> None:
    """The embedded model's weights are in bfloat16, so the C++ products of the instruction set run, or those of a GPU.
    Their tokens are those of float32 up to the first near tie, and the first log-probabilities differ only by
    rounding."""
    golden = np.load(GOLDEN / "embedded" / "golden.npz")
    prompts = [row[row >= 0].tolist() for row in golden["prompts"]]
    outputs = generate(embedded, prompts, golden["tokens"].shape[1])
    assert embedded.checkpoint.dtype == "bfloat16"
    on_cpu = "xla" if requested_isa() == "none" else "native"
    linear = {"cpu": on_cpu, "gpu": "gpu"}.get(jax.default_backend(), "xla")
    assert embedded.runner.platform["linear"] == linear
    compared = 0
    for output, expected, gaps in zip(outputs, golden["tokens"].tolist(), golden["gaps"], strict=True):
        clear = int(np.argmax(gaps < NEAR_TIE)) if (gaps < NEAR_TIE).any() else len(expected)
        assert list(output.token_ids[:clear]) == expected[:clear]
        compared += clear
    assert compared > golden["tokens"].size // 2
    for output, logits in zip(outputs, golden["logits"].astype(np.float64), strict=False):
        assert output.logprobs is not None
        assert abs(output.logprobs[0] - (logits.max() - np.log(np.exp(logits).sum()))) < 0.03
