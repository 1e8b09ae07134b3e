"""Level B of the equivalence promise: different configurations of the engine give the same bits.

The levels are: A, alone equals batched (`xla_engine.equivalence.verify`); B, this one; C, an external implementation
chooses the same greedy tokens (`xla_engine.equivalence.transformers_oracle`).

It compares different batch widths, lane counts, chunk sizes and key buckets, and prefill instead of decode. On CPUs
in bfloat16 no bit differs (findings/same_bits.md). The level is reported, not promised; each request's first
difference is reported with the gap between the two largest logits at that token.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.cases import Case, draw_cases
from xla_engine.equivalence.reference import Reference, logit_gap
from xla_engine.equivalence.verify import VerifyReport, compare
from xla_engine.outputs import CompletionOutput
from xla_engine.utils.tables import aligned

_EXPLAINED = 5  # first differences explained per comparison


@dataclass(slots=True, kw_only=True)
class LevelResult:
    """How often the results of one configuration, or of another engine, differ from this engine's.

    level: "B" or "C". name: what this engine was compared with.
    requests, tokens: compared ones.
    differing_tokens: tokens whose ids differ.
    differing_bits: equal tokens whose logprob bits differ; None if bits are not compared.
    notes: first differences, explained.
    """

    level: str
    name: str
    requests: int
    tokens: int = 0
    differing_tokens: int = 0
    differing_bits: int | None = 0
    notes: list[str] = field(default_factory=list)


def across_configurations(
    engine: XlaBatchEngine, *, requests: int, seed: int, progress: Callable[[str], None] | None = None
) -> list[LevelResult]:
    """Run the same requests in engines of other configurations, and each decoded token also as a prefill.

    progress: called with the name of each finished configuration.
    """
    configs = (engine.config, *(other for _, other in _variants(engine.config)))
    longest = min(_context(config, engine) for config in configs)
    cases = [case for case in draw_cases(engine, requests, seed) if _length(case) <= longest]
    expected = run_together(engine, cases)
    reference = Reference(engine.checkpoint)
    results = []
    for name, config in _variants(engine.config):
        with XlaBatchEngine(engine.checkpoint, None, config) as other:
            found = run_together(other, cases)
        results.append(_compare_all(name, cases, expected, found, reference))
        if progress is not None:
            progress(name)
    results.append(_decode_against_prefill(engine, cases, expected))
    return results


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


def _context(config: EngineConfig, engine: XlaBatchEngine) -> int:
    return config.context_length(engine.checkpoint.config.max_position_embeddings)


def _length(case: Case) -> int:
    return len(case.prompt_token_ids) + case.params.token_limit


def compared(
    name: str,
    cases: Sequence[Case],
    expected: dict[str, CompletionOutput],
    found: dict[str, CompletionOutput],
) -> tuple[LevelResult, VerifyReport]:
    """Compare two runs of the same requests: counts, and each request's first difference."""
    report = VerifyReport()
    for case in cases:
        compare(case.request_id, 0, expected[case.request_id], found[case.request_id], report)
    result = LevelResult(
        level="B",
        name=name,
        requests=len(cases),
        tokens=report.tokens,
        differing_tokens=report.differing_tokens,
        differing_bits=report.differing_bits,
    )
    return result, report


def _compare_all(
    name: str,
    cases: Sequence[Case],
    expected: dict[str, CompletionOutput],
    found: dict[str, CompletionOutput],
    reference: Reference,
) -> LevelResult:
    result, report = compared(name, cases, expected, found)
    by_id = {case.request_id: case for case in cases}
    for difference in report.divergences[:_EXPLAINED]:
        case = by_id[difference.request_id]
        prefix = (*case.prompt_token_ids, *expected[case.request_id].token_ids[: difference.position])
        result.notes.append(f"{name}: {difference}; logit gap {logit_gap(reference, prefix).size:.3g}")
    return result


def _decode_against_prefill(
    engine: XlaBatchEngine, cases: Sequence[Case], expected: dict[str, CompletionOutput]
) -> LevelResult:
    """Compare each generated token with the first token after a prompt of all tokens before it."""
    forced: list[Case] = []
    for case in cases:
        tokens = expected[case.request_id].token_ids
        for position in range(1, len(tokens)):
            forced.append(
                Case(
                    request_id=f"{case.request_id}/{position}",
                    prompt_token_ids=(*case.prompt_token_ids, *tokens[:position]),
                    params=replace(
                        case.params, max_tokens=1, seed=engine.seed_of(case.request_id, case.params)
                    ),
                )
            )
    found = run_together(engine, forced)
    result = LevelResult(level="B", name="prefill for decode", requests=len(forced))
    for case in cases:
        whole = expected[case.request_id]
        for position in range(1, len(whole.token_ids)):
            single = found[f"{case.request_id}/{position}"]
            result.tokens += 1
            if single.token_ids[0] != whole.token_ids[position]:
                result.differing_tokens += 1
            elif single.logprobs != (whole.logprobs or ())[position : position + 1]:
                result.differing_bits = (result.differing_bits or 0) + 1
    return result


def table(results: Sequence[LevelResult]) -> list[str]:
    """The results as an aligned table, followed by notes."""
    rows = [("level", "against", "requests", "tokens", "differing tokens", "differing bits")]
    for result in results:
        bits = "-" if result.differing_bits is None else str(result.differing_bits)
        rows.append(
            (
                result.level,
                result.name,
                str(result.requests),
                str(result.tokens),
                str(result.differing_tokens),
                bits,
            )
        )
    return [*aligned(rows), *(f"  {note}" for result in results for note in result.notes)]
