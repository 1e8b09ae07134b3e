"""Level C of the equivalence promise: Hugging Face transformers chooses the same greedy tokens."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.across_configurations import _EXPLAINED, LevelResult, run_together
from xla_engine.equivalence.cases import draw_cases
from xla_engine.equivalence.reference import Reference, logit_gap
from xla_engine.errors import ConfigError
from xla_engine.model_loader.checkpoint import load_checkpoint
from xla_engine.sampling_params import SamplingParams
from xla_engine.utils.extras import install

ORACLE_TOKENS = 48  # greedy tokens compared per prompt


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
    reference = Reference(checkpoint)
    result = LevelResult(level="C", name="transformers, float32", requests=len(cases), differing_bits=None)
    for case, expected in zip(cases, theirs, strict=True):
        tokens = found[case.request_id].token_ids
        result.tokens += len(expected)
        different = [at for at, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b]
        result.differing_tokens += len(different)
        if different and len(result.notes) < _EXPLAINED:
            prefix = (*case.prompt_token_ids, *tokens[: different[0]])
            result.notes.append(
                f"transformers: request {case.request_id}, token {different[0]}: {tokens[different[0]]} against "
                f"{expected[different[0]]}; logit gap {logit_gap(reference, prefix).size:.3g}"
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
