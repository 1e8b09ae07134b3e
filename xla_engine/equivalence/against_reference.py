"""Compare an engine's greedy tokens and their log-probabilities with the independent reference.

Every generated token is compared: the reference reads a prompt and all tokens before it, and says which token is the
likeliest there and how likely the engine's is. As long as all are the likeliest, greedy decoding by the reference
would give the same text.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from xla_engine.config import AUTO, EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.cases import Case, corpus_of
from xla_engine.equivalence.levels import run_together
from xla_engine.equivalence.reference import Reference
from xla_engine.equivalence.reference_files import Array, ReferenceFiles, open_files
from xla_engine.equivalence.reference_rotary import UnknownArchitectureError
from xla_engine.errors import ConfigError
from xla_engine.model_loader.checkpoint import load_checkpoint
from xla_engine.outputs import CompletionOutput
from xla_engine.sampling_params import SamplingParams
from xla_engine.utils.tables import aligned, figure

REQUESTS = 8
NEW_TOKENS = 32
LONGEST = 512  # tokens of a request
_EXPLAINED = 5
# Differences of log-probabilities, in nats (findings/models.md). In float32 only sums run in another order, so every
# token is held to it. Other precisions also round activations and weights, which moves single tokens of a random model
# by nats, so their mean is.
FLOAT32_TOLERANCE = 1e-3
MEAN_TOLERANCE = 0.5


@dataclass(slots=True, kw_only=True)
class ReferenceResult:
    """How far an engine is from the reference.

    name: of the engine's precision. requests, tokens: compared ones.
    measure: what must be within the tolerance: the "largest" difference, or the "mean". tolerance: in nats.
    differing_tokens: tokens that are not the likeliest by the reference; ties: those among them within the tolerance.
    largest, mean: differences of the tokens' log-probabilities, in nats.
    notes: tokens beyond the tolerance, explained.
    """

    name: str
    measure: Literal["largest", "mean"]
    tolerance: float
    requests: int
    tokens: int = 0
    differing_tokens: int = 0
    ties: int = 0
    largest: float = 0.0
    mean: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the measure is within the tolerance, and with "largest" every token the likeliest or a tie."""
        if self.measure == "mean":
            return self.mean <= self.tolerance
        return self.differing_tokens == self.ties and self.largest <= self.tolerance


def against_reference(
    engine: XlaBatchEngine,
    *,
    requests: int = REQUESTS,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> list[ReferenceResult]:
    """Compare the model in float32, and the engine as it is configured, which is closed.

    progress: called after each layer of the reference, which reads every weight once.

    Raises ConfigError if the reference does not know the model, or if the model does not fit in float32.
    """
    checkpoint, config, tokenizer = engine.checkpoint, engine.config, engine.tokenizer
    try:
        files = open_files(checkpoint.path)
        override(files, config.hf_overrides or {})
        reference = Reference(files, engine.max_model_len)
    except (UnknownArchitectureError, OSError) as error:
        raise ConfigError(f"{checkpoint.path}: {error}") from error
    cases = draw_greedy(engine, requests, seed)
    own = precision(config, checkpoint.dtype)
    answers: dict[str, Mapping[str, CompletionOutput]] = {}
    if own != "float32":
        answers[own] = run_together(engine, cases)
    engine.close()
    exact = load_checkpoint(checkpoint.path, dtype="float32")
    with XlaBatchEngine(exact, tokenizer, in_float32(config, engine.max_model_len)) as other:
        answers = {"float32": run_together(other, cases), **answers}
    runs = [(name, case, found[case.request_id]) for name, found in answers.items() for case in cases]
    results = {
        name: ReferenceResult(
            name=name,
            measure="largest" if name == "float32" else "mean",
            tolerance=FLOAT32_TOLERANCE if name == "float32" else MEAN_TOLERANCE,
            requests=len(cases),
        )
        for name in answers
    }
    logits = reference.logits(
        [(*case.prompt_token_ids, *output.token_ids[:-1]) for _, case, output in runs],
        [len(case.prompt_token_ids) - 1 for _, case, _ in runs],
        lambda: None if progress is None else progress("layer"),
    )
    for (name, case, output), found in zip(runs, logits, strict=True):
        compare_with(results[name], case.request_id, output, found)
    return list(results.values())


def override(files: ReferenceFiles, fields: Mapping[str, Any]) -> None:
    """Replace fields of config.json as `EngineConfig.hf_overrides` does."""
    if fields.keys() & {"rope_parameters", "rope_scaling"}:
        for name in ("rope_parameters", "rope_scaling"):
            files.config.pop(name, None)
    files.config.update(fields)


def draw_greedy(engine: XlaBatchEngine, count: int, seed: int) -> list[Case]:
    """Requests for greedy tokens: half of the prompts from a text, if there is a tokenizer, the others of random ids.

    The first is as long as fits into `LONGEST` tokens, the others are mostly shorter.
    """
    draw, corpus = random.Random(seed), corpus_of(engine)
    vocabulary = engine.checkpoint.config.vocab_size
    new = min(NEW_TOKENS, engine.max_model_len // 2)
    longest = min(engine.max_model_len, LONGEST) - new
    cases = []
    for index in range(count):
        length = longest if index == 0 else 1 + int((longest - 1) * draw.random() ** 3)
        if corpus and index % 2 == 0:
            at = draw.randrange(max(1, len(corpus) - length))
            prompt = corpus[at : at + length]
        else:
            prompt = tuple(draw.randrange(vocabulary) for _ in range(length))
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, logprobs=0)
        cases.append(Case(request_id=f"case-{index}", prompt_token_ids=prompt, params=params))
    return cases


def precision(config: EngineConfig, dtype: str) -> str:
    """The precision of an engine, in words: "bfloat16, gguf-int8"."""
    int8 = "" if config.kv_cache_dtype == AUTO else f", keys and values in {config.kv_cache_dtype}"
    return (f"{dtype}, {config.quantization}" if config.quantization else dtype) + int8


def in_float32(config: EngineConfig, max_model_len: int) -> EngineConfig:
    """The configuration for float32: without what needs another precision or changes no token."""
    return EngineConfig(
        dtype="float32",
        quantization=None,
        max_model_len=max_model_len,  # which some angles depend on
        max_num_seqs=8,
        memory_utilization=config.memory_utilization,
        hf_overrides=config.hf_overrides,
        isa=config.isa,
        tensor_parallel_size=config.tensor_parallel_size,
        compile_cache=config.compile_cache,
        self_check=False,
        image_cache_bytes=0,
        runner="generate",
    )


def compare_with(result: ReferenceResult, request_id: str, output: CompletionOutput, logits: Array) -> None:
    """Add one request. logits: the reference's before each generated token, `[n, V]`."""
    wide = logits.astype(np.float64)
    logprobs = wide - np.log(np.exp(wide - wide.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
    logprobs -= wide.max(axis=1, keepdims=True)
    likeliest = logits.argmax(axis=1)
    for at, (token, logprob) in enumerate(zip(output.token_ids, output.logprobs or (), strict=True)):
        difference = abs(float(logprobs[at, token]) - logprob)
        difference = math.inf if math.isnan(difference) else difference
        gap = float(wide[at, likeliest[at]] - wide[at, token])
        result.mean = (result.mean * result.tokens + difference) / (result.tokens + 1)
        result.largest = max(result.largest, difference)
        result.tokens += 1
        result.differing_tokens += gap > 0
        result.ties += 0 < gap <= result.tolerance
        if max(gap, difference) > result.tolerance and len(result.notes) < _EXPLAINED:
            result.notes.append(
                f"{result.name}: request {request_id}, token {at}: {token} with log-probability {logprob:.6g}; by "
                f"the reference {logprobs[at, token]:.6g}, and the likeliest is {likeliest[at]}, {gap:.3g} above it"
            )


def lines(results: Sequence[ReferenceResult]) -> list[str]:
    """The results as text."""
    rows: list[tuple[str, ...]] = [
        (
            *("engine in", "requests", "tokens", "not the likeliest", "nearly so"),
            *("largest difference", "mean", "tolerance"),
        )
    ]
    for each in results:
        counts = map(str, (each.requests, each.tokens, each.differing_tokens, each.ties))
        tolerance = f"{each.measure} {figure(each.tolerance)}"
        rows.append((each.name, *counts, figure(each.largest), figure(each.mean), tolerance))
    agree = all(each.ok for each in results)
    verdict = "agrees with the reference" if agree else "does NOT agree with the reference"
    return [*aligned(rows), *(f"  {note}" for each in results for note in each.notes), verdict]


def as_json(results: Sequence[ReferenceResult]) -> dict[str, Any]:
    """The results as a JSON object; null stands for differences that are not finite."""
    found = [
        {
            **asdict(each),
            "largest": each.largest if math.isfinite(each.largest) else None,
            "mean": each.mean if math.isfinite(each.mean) else None,
            "ok": each.ok,
        }
        for each in results
    ]
    return {"against": "reference", "ok": all(each.ok for each in results), "results": found}
