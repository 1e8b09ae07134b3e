"""The golden file of `EngineConfig(bits="portable")`: the bits that every processor must give, on the embedded model.

`xla-engine verify --against golden` repeats it; `tests/golden/make/make_golden_portable.py` writes it.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.identity import logprob_bits_sha256, tokens_sha256
from xla_engine.equivalence.cases import Case, corpus_of
from xla_engine.graphs.portable import ARITHMETIC
from xla_engine.outputs import RequestOutput
from xla_engine.runner.portable import golden, kernel_hashes
from xla_engine.sampling_params import SamplingParams
from xla_engine.utils.tables import aligned

PRECISIONS = {"bfloat16": None, "int8": "int8"}
_SMALL = EngineConfig(
    bits="portable",
    max_model_len=192,
    max_num_seqs=8,
    prefill_lanes=(4,),
    key_buckets=(256,),
    preemption=False,
    enable_prefix_caching=False,
    self_check=False,
)
FORMS = {
    "slots": _SMALL,
    "blocks, cached prefixes, speculation": replace(
        _SMALL,
        max_num_seqs=4,
        num_blocks=40,
        block_size=32,
        chunk_size=16,
        prefill_lanes=(2,),
        enable_prefix_caching=True,
        self_check=True,  # speculation needs it
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    ),
}
_LENGTHS = (1, 3, 17, 40, 33, 64, 90, 7)
_PREFIX = 64  # tokens that every other prompt begins with
_SETTINGS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0, "logprobs": 0},
    {"temperature": 0.7, "logprobs": 0},
    {"temperature": 0, "logprobs": 5, "ignore_eos": True},
    {"temperature": 1.0, "top_k": 40, "logprobs": 1},
    {"temperature": 1.5, "top_p": 0.9, "logprobs": 0, "ignore_eos": True},
    {"temperature": 0.3, "min_p": 0.05, "logprobs": 20},
    {"temperature": 1.0, "repetition_penalty": 1.3, "logprobs": 0},
    {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": -0.5, "logprobs": 0, "ignore_eos": True},
    {"temperature": 1.0, "logit_bias": {3: 4.5, 5: -100.0}, "logprobs": 2},
    {"temperature": 0, "logprobs": 0, "prompt_logprobs": 2},
    {"temperature": 2.0, "allowed_token_ids": list(range(5, 90)), "logprobs": 0, "min_tokens": 4},
)
COUNT = 64


def golden_cases(tokens: Sequence[int]) -> list[Case]:
    """The requests, by counting alone. tokens: of `prompts.txt`, which prompts are cut from."""
    cases = []
    for index in range(COUNT):
        length, at = _LENGTHS[index % len(_LENGTHS)], 97 * index % (len(tokens) - 200)
        prompt = (*(tokens[:_PREFIX] if index % 2 else ()), *tokens[at : at + length])
        params = SamplingParams(
            **_SETTINGS[index % len(_SETTINGS)], seed=index, max_tokens=(24, 5, 9)[index % 3]
        )
        cases.append(Case(request_id=f"{index:02}", prompt_token_ids=prompt, params=params))
    return cases


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenResult:
    """What one engine, or the kernels, gave, against the golden file.

    name: of the engine's form. compared: requests or kernels. differing: the names of those that differ.
    """

    name: str
    compared: int
    differing: tuple[str, ...]


def against_golden(
    isa: str = "auto",
    precisions: Sequence[str] = tuple(PRECISIONS),
    forms: Sequence[str] = tuple(FORMS),
) -> Iterator[GoldenResult]:
    """Repeat the golden file on this machine. A start whose kernels differ raises ConfigError.

    isa: as in `EngineConfig`. precisions, forms: names in PRECISIONS and FORMS.
    """
    expected = golden()
    for precision in precisions:
        for form in forms:
            config = replace(FORMS[form], isa=isa, quantization=PRECISIONS[precision])
            with XlaBatchEngine.from_pretrained(None, config) as engine:
                found = hashes_of(engine)
                used = engine.runner.isa or "none"
            if form == forms[0]:
                kernels = kernel_hashes(used, PRECISIONS[precision])
                known = {name: expected["kernels"].get(name, "") for name in kernels}
                yield _compared(f"kernels for {precision}, {used}", kernels, known)
            yield _compared(f"{precision}, {form}", found, expected["requests"][precision])


def _compared(name: str, found: Mapping[str, str], expected: Mapping[str, str]) -> GoldenResult:
    differing = tuple(each for each in expected if found.get(each) != expected[each])
    return GoldenResult(name=name, compared=len(expected), differing=differing)


def lines(results: Sequence[GoldenResult]) -> list[str]:
    """A table, and what it says."""
    rows = [(ARITHMETIC, "compared", "differing")]
    rows += [(each.name, str(each.compared), str(len(each.differing))) for each in results]
    wrong = [f"  {each.name}: {', '.join(each.differing[:8])}" for each in results if each.differing]
    last = f"NOT the bits of {ARITHMETIC}" if wrong else f"the bits of {ARITHMETIC}"
    return [*aligned(rows), *wrong, last]


def as_json(results: Sequence[GoldenResult]) -> dict[str, Any]:
    """The results as a JSON object."""
    ok = not any(each.differing for each in results)
    return {
        "against": "golden",
        "ok": ok,
        "arithmetic": ARITHMETIC,
        "results": [asdict(each) for each in results],
    }


def hashes_of(engine: XlaBatchEngine) -> dict[str, str]:
    """Hashes of tokens and of log-probabilities of each request."""
    for case in golden_cases(corpus_of(engine)):
        engine.submit(case.prompt_token_ids, case.params, request_id=case.request_id)
    outputs = list(engine.drain())
    if engine.config.speculation is not None:  # what is to be compared must have happened
        hits, accepted = (
            sum(getattr(output, name) for output in outputs)
            for name in ("num_cached_tokens", "num_accepted_tokens")
        )
        if not hits or not accepted:
            raise RuntimeError(
                f"{hits} tokens from cached prefixes and {accepted} accepted drafts: none to compare"
            )
    return {output.request_id: _hash(output) for output in sorted(outputs, key=lambda each: each.request_id)}


def _hash(output: RequestOutput) -> str:
    """Of the tokens, and of the bits of all log-probabilities."""
    answer = output.outputs[0]
    tables = [*(answer.top_logprobs or ()), *(output.prompt_logprobs or ())]
    more = [each for table in tables if table is not None for each in sorted(table.items())]
    bits = logprob_bits_sha256([*(answer.logprobs or ()), *(each.logprob for _, each in more)])
    ranks = tokens_sha256([number for token, each in more for number in (token, each.rank)])
    last = hashlib.sha256(f"{bits} {ranks} {answer.finish_reason}".encode()).hexdigest()
    return f"{tokens_sha256(answer.token_ids)[:12]} {last[:12]}"
