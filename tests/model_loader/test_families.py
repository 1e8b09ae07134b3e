"""Every model family compared with transformers, from committed files (make_golden_families.py), through the compiled
programs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.forward_pass import ForwardPass
from xla_engine.equivalence.verify import verify
from xla_engine.model_loader.checkpoint import Checkpoint, load_checkpoint
from xla_engine.model_loader.families import FAMILIES
from xla_engine.sampling_params import SamplingParams

GOLDEN = Path(__file__).parents[1] / "golden" / "families"
CASES = sorted(path.name for path in GOLDEN.iterdir())
QUICK = ("llama_yarn", "gemma2")
# Every form that a layer can have is in one of these; the others are for releases.
IN_CI = (
    *QUICK,
    "hunyuan_alpha",
    *("smollm3", "ministral", "qwen2", "qwen3", "gemma3_vision"),
    *("phi3_long", "olmo2", "granite", "cohere2", "gpt_oss_mxfp4", "qwen3_next"),
    *(
        "gemma3n",
        "gemma4",
        "gemma4_moe",
        "deepseek_v2",
        "deepseek_v2_groups",
        "deepseek_v3_groups",
        "qwen3_vl_moe",
        "exaone4",
        "glm4",
        "glm4_moe",
        "ministral3",
        "stablelm",
        "starcoder2",
        "phi",
    ),
    *(
        "lfm2",
        "lfm2_moe",
        "granite_hybrid",
        "falcon_h1",
        "nemotron_h",
        "nemotron_3_latent",
        "mamba2",
        "olmo_hybrid",
    ),
    *("kimi_linear", "kimi_linear_shared"),
)
LENGTH = 160  # of the golden files' sequences: what rope scalings look at
LOGIT_BOUND = 1e-4
# One prefill and one decode graph; chunks of 16 tokens, windows end inside them.
CONFIG = EngineConfig(
    max_num_seqs=8, max_model_len=LENGTH, chunk_size=16, prefill_lanes=(8,), self_check=False
)


@pytest.fixture(
    params=[
        pytest.param(
            name, marks=() if name in QUICK else pytest.mark.full if name in IN_CI else pytest.mark.release
        )
        for name in CASES
    ]
)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def checkpoint(name: str) -> Checkpoint:
    return load_checkpoint(GOLDEN / name, dtype="float32")


@pytest.fixture
def engine(checkpoint: Checkpoint) -> Iterator[XlaBatchEngine]:
    with XlaBatchEngine(checkpoint, None, CONFIG) as engine:
        yield engine


def test_greedy_tokens_and_logits_are_those_of_transformers(
    name: str, checkpoint: Checkpoint, engine: XlaBatchEngine
) -> None:
    """48 tokens of each prompt, all in one batch; last-position logits; and some requests alone and among peers."""
    golden = np.load(GOLDEN / name / "golden.npz")
    prompts = [row[row >= 0].tolist() for row in golden["prompts"]]
    assert len(prompts) >= 8 and golden["tokens"].shape[1] >= 48
    window = checkpoint.config.sliding_window
    assert max(map(len, prompts)) > max(window or 0, CONFIG.chunk_size)
    for index, prompt in enumerate(prompts):
        cap = golden["tokens"].shape[1]
        params = SamplingParams(temperature=0, max_tokens=cap, ignore_eos=True, logprobs=0)
        engine.submit(prompt, params, request_id=str(index))
    outputs = {output.request_id: output.outputs[0] for output in engine.drain()}
    for index, (expected, logits) in enumerate(zip(golden["tokens"].tolist(), golden["logits"], strict=True)):
        output, gaps = outputs[str(index)], golden["gaps"][index]
        assert list(output.token_ids) == expected, f"prompt {index}; smallest logit gap {gaps.min():.2g}"
        logprob = logits.max() - np.log(np.exp(logits.astype(np.float64)).sum())
        assert abs(output.logprobs[0] - logprob) < LOGIT_BOUND
    reference = ForwardPass(checkpoint, LENGTH)
    for index in (-2, -1):  # of one padded length
        found = reference.logits(prompts[index])[-1]
        if np.abs(found - golden["logits"][index]).max() >= LOGIT_BOUND:
            noise = rounding_noise(checkpoint, prompts[index], found)
            np.testing.assert_allclose(found, golden["logits"][index], rtol=0, atol=2 * noise)
    report = verify(engine, requests=10, schedules=1, seed=3, lags=(1,))
    assert report.ok, "\n".join(report.lines())


def rounding_noise(checkpoint: Checkpoint, prompt: list[int], logits: np.ndarray) -> float:
    """The largest change of logits in three draws that move each float32 weight by half of its last bit.

    Two implementations that round in another order differ by about as much. A random smollm3 amplifies rounding a
    hundredfold within 112 positions, so that its logits are only known to 1e-4.
    """
    draw, most = np.random.default_rng(0), 0.0
    for _ in range(3):
        moved = {
            name: (leaf * (1 + draw.choice((-1, 1), leaf.shape) * 2.0**-24)).astype(leaf.dtype)
            for name, leaf in ((name, np.asarray(leaf)) for name, leaf in checkpoint.weights.items())
        }
        found = ForwardPass(replace(checkpoint, weights=moved), LENGTH).logits(prompt)[-1]
        most = max(most, float(np.abs(found - logits).max()))
    return most


@pytest.mark.release
@pytest.mark.parametrize("attention", ["native", "xla"])
@pytest.mark.parametrize("name", IN_CI)
def test_every_backend_keeps_the_law_in_bfloat16(name: str, attention: str) -> None:
    """Level A holds under random schedules, after the start-up check."""
    config = replace(CONFIG, attention_backend=attention, prefill_lanes=(2, 8), self_check=True)
    with XlaBatchEngine(load_checkpoint(GOLDEN / name), None, config) as engine:
        report = verify(engine, requests=40, schedules=2, seed=4, lags=(0, 1))
        assert report.ok, "\n".join(report.lines())
        assert report.compiles_after_warmup == 0


@pytest.mark.release
def test_pure_jax_attention_gives_the_tokens_of_transformers(name: str) -> None:
    golden = np.load(GOLDEN / name / "golden.npz")
    config = replace(CONFIG, attention_backend="xla")
    with XlaBatchEngine(load_checkpoint(GOLDEN / name, dtype="float32"), None, config) as engine:
        for prompt, expected in zip(golden["prompts"], golden["tokens"].tolist(), strict=True):
            params = SamplingParams(temperature=0, max_tokens=len(expected), ignore_eos=True)
            engine.submit(prompt[prompt >= 0].tolist(), params)
            (output,) = engine.drain()
            assert list(output.outputs[0].token_ids) == expected


@pytest.mark.release
def test_the_command_line_runs_it(name: str, tmp_path: Path) -> None:
    """`run` in a separate process, with prompts of token ids; the stop ids of the files end a text."""
    golden = np.load(GOLDEN / name / "golden.npz")
    lines = [{"prompt": row[row >= 0].tolist(), "max_tokens": 48} for row in golden["prompts"]]
    asked = tmp_path / "in.jsonl"
    asked.write_text("\n".join(json.dumps(line | {"temperature": 0}) for line in lines))
    command = [sys.executable, "-m", "xla_engine", "run", str(asked), "-o", str(tmp_path / "out.jsonl")]
    options = [
        "--model",
        str(GOLDEN / name),
        "--dtype",
        "float32",
        "--max-model-len",
        str(LENGTH),
        "--ordered",
    ]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    eos = load_checkpoint(GOLDEN / name).eos_token_ids
    for line, expected in zip(
        (tmp_path / "out.jsonl").read_text().splitlines(), golden["tokens"], strict=True
    ):
        ends = [at for at, token in enumerate(expected) if token in eos]
        body = json.loads(line)["response"]["body"]
        assert body["usage"]["completion_tokens"] == (ends[0] + 1 if ends else 48)
        assert body["choices"][0]["finish_reason"] == ("stop" if ends else "length")


def test_every_architecture_has_a_golden_file() -> None:
    found = {json.loads((GOLDEN / name / "config.json").read_text())["architectures"][0] for name in CASES}
    # tests/golden/encoders has the first; the second is DeepSeek-OCR-2 by the hub (test_architectures.py)
    elsewhere = {"Gemma3TextModel", "DeepseekOCR2ForCausalLM"}
    assert found | elsewhere == FAMILIES.keys()
