"""Level B for speculation: whatever is guessed, requests get the bits that they get without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from xla_engine.drafting.drafter import Drafter
from xla_engine.drafting.recorded import Recorded
from xla_engine.drafting.suffix import SuffixDrafter
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.across_configurations import LevelResult, run_together
from xla_engine.equivalence.cases import draw_cases
from xla_engine.equivalence.verify import VerifyReport, compare
from xla_engine.speculative_config import SpeculativeConfig


def across_speculation(
    engine: XlaBatchEngine, *, requests: int, seed: int, progress: Callable[[str], None] | None = None
) -> list[LevelResult]:
    """Run the same requests without speculation, and with drafts that are right, half right and wrong, at all lags.

    The engine's own `speculative_config` is checked, else three widths. progress: called with the name of each
    comparison when it is done. Raises ConfigError where this machine cannot speculate.
    """
    cases = draw_cases(engine, requests, seed, every_field=True)
    with XlaBatchEngine(
        engine.checkpoint, engine.tokenizer, replace(engine.config, speculative_config=None)
    ) as plain:
        expected = run_together(plain, cases)
    outputs = {name: output.token_ids for name, output in expected.items()}
    results = []
    for options in _configurations(engine.config.speculation):
        config = replace(engine.config, speculative_config=options)
        with XlaBatchEngine(engine.checkpoint, engine.tokenizer, config) as other:
            for at, (who, drafter) in enumerate(_drafters(outputs)):
                other.lag = at % 3
                other.draft_with(drafter)
                before = other.stats()
                found = run_together(other, cases)
                after = other.stats()
                report = VerifyReport()
                for case in cases:
                    compare(case.request_id, 0, expected[case.request_id], found[case.request_id], report)
                drafted = after.drafted_tokens - before.drafted_tokens
                right = after.accepted_tokens - before.accepted_tokens
                name = f"{options.num_speculative_tokens} drafts, {who}, lag {other.lag}: {right} of {drafted} right"
                results.append(
                    LevelResult(
                        level="B",
                        name=name,
                        requests=len(cases),
                        tokens=report.tokens,
                        differing_tokens=report.differing_tokens,
                        differing_bits=report.differing_bits,
                        notes=[f"{name}: {difference}" for difference in report.divergences[:5]],
                    )
                )
                if progress is not None:
                    progress(name)
    return results


def _configurations(own: SpeculativeConfig | None) -> Sequence[SpeculativeConfig]:
    if own is not None:
        return [own]
    return [SpeculativeConfig(method="suffix", num_speculative_tokens=count) for count in (1, 3, 7)]


def _drafters(outputs: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, Drafter]]:
    yield "looked up", SuffixDrafter()
    yield "recorded", Recorded(outputs)
    yield "half right", Recorded(outputs, 0.5)
    yield "wrong", Recorded(outputs, 0.0)
