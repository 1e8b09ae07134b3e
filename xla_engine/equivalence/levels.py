"""Levels B and C of the equivalence promise; A, alone equals batched, is `xla_engine.equivalence.verify`.

B: different configurations of the engine, and speculation with any drafts, give the same bits. Compared are batch
widths, lane counts, chunk sizes and key buckets, prefill instead of decode, and right and wrong drafts. On CPUs in
bfloat16 no bit differs (findings/same_bits.md). The level is reported, not promised; each request's first difference
is reported with the gap between the two largest logits at that token.

C: Hugging Face transformers chooses the same greedy tokens.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.speculation.proposer import NoProposer, Proposer, Recorded
from xla_engine.engine.speculation.suffix import SuffixProposer
from xla_engine.equivalence.cases import Case, draw_cases
from xla_engine.equivalence.forward_pass import ForwardPass, logit_gap
from xla_engine.equivalence.verify import compare, counts, samples_of, words
from xla_engine.errors import ConfigError
from xla_engine.model_loader.checkpoint import load_checkpoint
from xla_engine.outputs import CompletionOutput
from xla_engine.sampling_params import SamplingParams
from xla_engine.speculative_config import ON_DEVICE, SpeculativeConfig
from xla_engine.utils.comparison import ComparedAnswers, TokenSample
from xla_engine.utils.extras import install
from xla_engine.utils.tables import aligned

_EXPLAINED = 5  # first differences explained per comparison
ORACLE_TOKENS = 48  # greedy tokens compared per prompt


@dataclass(slots=True, kw_only=True)
class LevelResult:
    """How often the results of one configuration, or of another engine, differ from this engine's.

    level: "B" or "C". name: what this engine was compared with.
    compared: how much was compared and differs.
    notes: first differences, explained.
    """

    level: str
    name: str
    compared: ComparedAnswers = field(default_factory=ComparedAnswers)
    notes: list[str] = field(default_factory=list)


def across_configurations(engine: XlaBatchEngine, *, requests: int, seed: int) -> Iterator[LevelResult]:
    """Run the same requests in engines of other configurations, and each decoded token also as a prefill."""
    configs = [config for _, config in _variants(engine.config)]
    positions = engine.checkpoint.config.max_position_embeddings
    longest = min(config.context_length(positions) for config in (engine.config, *configs))
    cases = [
        case
        for case in draw_cases(engine, requests, seed)
        if len(case.prompt_token_ids) + case.params.token_limit <= longest
    ]
    expected = run_together(engine, cases)
    reference = ForwardPass(engine.checkpoint)
    for name, config in _variants(engine.config):
        with XlaBatchEngine(engine.checkpoint, None, config) as other:
            found = run_together(other, cases)
        yield _compared(name, cases, expected, found, reference)
    yield _decode_against_prefill(engine, cases, expected)


def run_together(engine: XlaBatchEngine, cases: Sequence[Case]) -> dict[str, CompletionOutput]:
    """Run all cases at once. By level A, each result equals that of the request alone."""
    for case in cases:
        engine.submit(case.prompt, case.params, request_id=case.request_id)
    return {output.request_id: output.outputs[0] for output in engine.drain()}


def _variants(config: EngineConfig) -> Iterator[tuple[str, EngineConfig]]:
    """Named configurations that differ from `config` in one respect each."""
    for width in (1, 8, 16, 32):
        if width != config.max_num_seqs:
            yield f"max_num_seqs {width}", replace(config, max_num_seqs=width)
    for lanes in ((1,), (4,), (16,)):
        yield f"prefill_lanes {lanes[0]}", replace(config, prefill_lanes=lanes)
    for chunk in (16, 64, 128):
        if chunk != config.chunk_size:
            yield f"chunk_size {chunk}", replace(config, chunk_size=chunk)
    yield "one key bucket", replace(config, key_buckets=(2**30,))
    yield "lag 0", replace(config, lag=0)


def _compared(
    name: str,
    cases: Sequence[Case],
    expected: Mapping[str, CompletionOutput],
    found: Mapping[str, CompletionOutput],
    reference: ForwardPass | None = None,
) -> LevelResult:
    """Compare two runs of the same requests. reference: gives the logits at first differences."""
    result = LevelResult(level="B", name=name)
    for case in cases:
        compare(case.request_id, expected[case.request_id], found[case.request_id], result.compared)
    prompts = {case.request_id: case.prompt_token_ids for case in cases}
    for request_id, difference in islice(result.compared.differences.items(), _EXPLAINED):
        note, known = f"{name}: {words(request_id, difference)}", expected[request_id].token_ids
        if reference is not None:
            prefix = (*prompts[request_id], *known[: difference.position])
            note += f"; logit gap {logit_gap(reference, prefix).size:.3g}"
        result.notes.append(note)
    return result


def _decode_against_prefill(
    engine: XlaBatchEngine, cases: Sequence[Case], expected: dict[str, CompletionOutput]
) -> LevelResult:
    """Compare each generated token with the first token after a prompt of all tokens before it."""
    places = [
        (case, position) for case in cases for position in range(1, len(expected[case.request_id].token_ids))
    ]
    forced = [
        Case(
            request_id=f"{case.request_id}/{position}",
            prompt_token_ids=(*case.prompt_token_ids, *expected[case.request_id].token_ids[:position]),
            params=replace(case.params, max_tokens=1, seed=engine.seed_of(case.request_id, case.params)),
        )
        for case, position in places
    ]
    found = run_together(engine, forced)
    result = LevelResult(level="B", name="prefill for decode")
    for (case, position), alone in zip(places, forced, strict=True):
        whole, single = samples_of(expected[case.request_id]), samples_of(found[alone.request_id])
        result.compared.add(alone.request_id, whole[position : position + 1], single)
    return result


def across_speculation(engine: XlaBatchEngine, *, requests: int, seed: int) -> Iterator[LevelResult]:
    """Run the same requests without speculation, and with right, half right and wrong drafts, at all lags.

    Checks the engine's own `speculative_config`, or three widths if it has none. Raises ConfigError if this machine
    cannot speculate.
    """
    cases = draw_cases(engine, requests, seed, every_field=True)
    with XlaBatchEngine(
        engine.checkpoint, engine.tokenizer, replace(engine.config, speculative_config=None)
    ) as plain:
        expected = run_together(plain, cases)
    outputs = {name: output.token_ids for name, output in expected.items()}
    for options in _configurations(engine.config.speculation):
        config = replace(engine.config, speculative_config=options)
        with XlaBatchEngine(engine.checkpoint, engine.tokenizer, config) as other:
            for at, (who, proposer) in enumerate(_proposers(outputs, options.method in ON_DEVICE)):
                other.lag = at % 3
                other.draft_with(proposer)
                before = other.stats()
                found = run_together(other, cases)
                after = other.stats()
                drafted = after.drafted_tokens - before.drafted_tokens
                right = after.accepted_tokens - before.accepted_tokens
                name = f"{options.num_speculative_tokens} drafts, {who}, lag {other.lag}: {right} of {drafted} right"
                yield _compared(name, cases, expected, found)


def _configurations(own: SpeculativeConfig | None) -> Sequence[SpeculativeConfig]:
    if own is not None:
        return [own]
    return [SpeculativeConfig(method="suffix", num_speculative_tokens=count) for count in (1, 3, 7)]


def _proposers(outputs: Mapping[str, Sequence[int]], on_device: bool) -> Iterator[tuple[str, Proposer]]:
    if on_device:
        yield "by the device", NoProposer()
    yield "looked up", SuffixProposer()
    yield "recorded", Recorded(outputs)
    yield "half right", Recorded(outputs, 0.5)
    yield "wrong", Recorded(outputs, 0.0)


def against_transformers(
    engine: XlaBatchEngine, *, requests: int, seed: int, python: str | None = None
) -> LevelResult:
    """Compare greedy tokens with transformers' in float32. python: the interpreter for transformers (default: this
    one).

    Raises ConfigError if the worker cannot run.
    """
    if engine.checkpoint.path.is_file():
        raise ConfigError(
            f"{engine.checkpoint.path}: transformers is compared on a Hugging Face directory; name the model's"
        )
    checkpoint = load_checkpoint(engine.checkpoint.path, dtype="float32")
    config = replace(engine.config, dtype="float32")
    cases = [
        replace(case, params=SamplingParams(temperature=0, max_tokens=ORACLE_TOKENS, ignore_eos=True))
        for case in draw_cases(engine, 4 * requests, seed)
        if len(case.prompt_token_ids) + ORACLE_TOKENS <= engine.max_model_len
    ][:requests]
    with XlaBatchEngine(checkpoint, None, config) as ours:
        found = run_together(ours, cases)
    theirs = _ask_oracle(
        python or sys.executable, checkpoint.path, [list(case.prompt_token_ids) for case in cases]
    )
    reference = ForwardPass(checkpoint)
    result = LevelResult(
        level="C", name="transformers, float32", compared=ComparedAnswers(differing_bits=None)
    )
    for case, expected in zip(cases, theirs, strict=True):
        tokens = found[case.request_id].token_ids
        difference = result.compared.add(
            case.request_id, list(map(TokenSample, expected)), list(map(TokenSample, tokens))
        )
        if difference is not None and len(result.notes) < _EXPLAINED:
            at = difference.position or 0
            prefix = (*case.prompt_token_ids, *tokens[:at])
            result.notes.append(
                f"transformers: request {case.request_id}, token {at}: {tokens[at]} against {expected[at]}; "
                f"logit gap {logit_gap(reference, prefix).size:.3g}"
            )
    return result


def _ask_oracle(python: str, model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy continuations by transformers, in a separate process that reads and writes JSON."""
    script = Path(__file__).parent / "oracle_worker.py"
    question = json.dumps(
        {"model": str(model.resolve()), "prompts": prompts, "max_new_tokens": ORACLE_TOKENS}
    )
    try:
        answer = subprocess.run(
            [python, str(script)], input=question, capture_output=True, text=True, check=False, cwd=Path.cwd()
        )
    except OSError as error:
        raise ConfigError(
            f"{python}: cannot run the oracle ({error.strerror}); name another --oracle-python"
        ) from error
    if answer.returncode:
        last = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(
            f"the transformers oracle failed: {last}. Install the extra ({install('oracle')}) or name an "
            "interpreter that has torch and transformers with --oracle-python"
        )
    return json.loads(answer.stdout.splitlines()[-1])


def as_json(against: str, results: Sequence[LevelResult], *, ok: bool) -> dict[str, Any]:
    """The results as a JSON object. ok: no difference breaks a promise."""
    found = [
        {"level": each.level, "name": each.name, **counts(each.compared), "notes": each.notes}
        for each in results
    ]
    return {"against": against, "ok": ok, "results": found}


def table(results: Sequence[LevelResult]) -> list[str]:
    """The results as an aligned table, followed by notes."""
    rows: list[tuple[str, ...]] = [
        ("level", "against", "requests", "tokens", "differing tokens", "differing bits")
    ]
    for each in results:
        numbers = ("-" if count is None else str(count) for count in counts(each.compared).values())
        rows.append((each.level, each.name, *numbers))
    return [*aligned(rows), *(f"  {note}" for result in results for note in result.notes)]
