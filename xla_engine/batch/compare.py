"""Compare two result files."""

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xla_engine.batch.earlier_runs import recall
from xla_engine.batch.resume import result_lines
from xla_engine.engine.identity import logprob_bits_sha256, tokens_sha256
from xla_engine.errors import CompareError

SHOWN_IDS = 5  # first differing ids in a report, per kind


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """The parts of a result line that are compared; None if the line lacks them.

    text: hash of the texts and finish reasons of all choices. tokens, bits: hashes of their token ids and logprobs.
    fingerprint: the engine's.
    """

    text: str
    tokens: str | None
    bits: str | None
    fingerprint: str | None


@dataclass(slots=True, kw_only=True)
class FileComparison:
    """Two result files, A and B, matched by custom_id.

    same: requests whose tokens agree, whether or not their logprobs do.
    by_text: requests compared by text because at least one file has no token ids for them.
    bits_unknown: requests with equal tokens but no logprobs to compare.
    errors: number of ids with an error and no result, in A and in B.
    differing: ids by kind of difference, in the order of the files.
    fingerprints: of the engines that wrote A and B.
    """

    same: int = 0
    by_text: int = 0
    bits_unknown: int = 0
    errors: tuple[int, int] = (0, 0)
    differing: dict[str, list[str]] = field(
        default_factory=lambda: {kind: [] for kind in ("tokens", "logprob bits", "only in A", "only in B")}
    )
    fingerprints: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())

    @property
    def ok(self) -> bool:
        return not any(self.differing.values())

    def lines(self) -> list[str]:
        """The comparison as text."""
        by_text = f"  ({self.by_text} of the requests compared by text: no token ids)" if self.by_text else ""
        unknown = f"  (not known for {self.bits_unknown}: no logprobs)" if self.bits_unknown else ""
        rows = [
            f"same tokens              {self.same}{by_text}",
            f"differing tokens         {len(self.differing['tokens'])}",
            f"differing logprob bits   {len(self.differing['logprob bits'])}{unknown}",
            f"only in A                {len(self.differing['only in A'])}",
            f"only in B                {len(self.differing['only in B'])}",
            f"errors in A, in B        {self.errors[0]}, {self.errors[1]}",
            f"fingerprints             {self._fingerprint_words()}",
        ]
        for kind, ids in self.differing.items():
            if ids:
                more = f" and {len(ids) - SHOWN_IDS} more" if len(ids) > SHOWN_IDS else ""
                rows.append(f"  {kind}: {', '.join(map(_shown, ids[:SHOWN_IDS]))}{more}")
        rows.append("same" if self.ok else "NOT the same")
        return rows

    def _fingerprint_words(self) -> str:
        a, b = self.fingerprints
        if not a or not b:
            where = "either file" if not a and not b else "A" if not a else "B"
            return f"none in {where} (run with --fingerprint)"
        if a == b and len(a) == 1:
            known = recall(digest := next(iter(a)))
            arithmetic = None if known is None else known.platform.get("arithmetic")
            same = (
                ""
                if arithmetic is None
                else f"  ({arithmetic}: a difference is a bug, whatever the machines)"
            )
            return f"agree: {digest}{same}"
        return f"differ: {', '.join(sorted(a))} and {', '.join(sorted(b))}"


def _shown(custom_id: str) -> str:
    return custom_id if custom_id.isprintable() else ascii(custom_id)


def compare_files(a: Path | str, b: Path | str) -> FileComparison:
    """Match the lines of two result files by custom_id and compare tokens and logprob bits.

    Uses the hashes in a line if it has them, and otherwise hashes its token ids and logprobs. If either line has no
    token ids, compares texts and finish reasons instead. Raises CompareError for a broken file, and OSError.
    """
    results_a, errors_a = _read_results(a)
    results_b, errors_b = _read_results(b)
    report = FileComparison(
        errors=(len(errors_a), len(errors_b)),
        fingerprints=(_fingerprints(results_a), _fingerprints(results_b)),
    )
    for custom_id, left in results_a.items():
        right = results_b.get(custom_id)
        if right is None:
            report.differing["only in A"].append(custom_id)
            continue
        by_text = left.tokens is None or right.tokens is None
        report.by_text += by_text
        if left.text != right.text if by_text else left.tokens != right.tokens:
            report.differing["tokens"].append(custom_id)
            continue
        report.same += 1
        if left.bits is None or right.bits is None:
            report.bits_unknown += 1
        elif left.bits != right.bits:
            report.differing["logprob bits"].append(custom_id)
    report.differing["only in B"] += [custom_id for custom_id in results_b if custom_id not in results_a]
    for kind, mine, other in (("only in A", errors_a, errors_b), ("only in B", errors_b, errors_a)):
        known = results_b if kind == "only in A" else results_a
        # An id with an error here and a result there was already listed with that result.
        report.differing[kind] += [name for name in mine if name not in other and name not in known]
    return report


def _fingerprints(results: Mapping[str, _Result]) -> frozenset[str]:
    return frozenset(result.fingerprint for result in results.values() if result.fingerprint is not None)


def _read_results(path: Path | str) -> tuple[dict[str, _Result], dict[str, None]]:
    """Results by custom_id, and the ids that have only an error, in the order of the file."""
    results: dict[str, _Result] = {}
    errors: dict[str, None] = {}
    number = 0
    for number, record in _records(path):
        custom_id: str = record["custom_id"]
        if record.get("error") is not None:
            errors[custom_id] = None
            continue
        if custom_id in results:
            raise CompareError(f"{path} line {number}: a second result for custom_id {custom_id!r}")
        try:
            results[custom_id] = _result(record)
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError, struct.error) as error:
            message = f"neither a result nor an error of xla-engine run ({type(error).__name__}: {error})"
            raise CompareError(f"{path} line {number}: {message}") from error
    if not number:
        raise CompareError(f"{path}: the file holds no result line")
    return results, {name: None for name in errors if name not in results}


def _records(path: Path | str) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        yield from result_lines(path)
    except ValueError as error:
        raise CompareError(f"{path} {error}") from error


def _as_choices(body: Mapping[str, Any]) -> list[Any]:
    """The choices of an answer. A response becomes one choice whose text is its items without their ids."""
    if "output" not in body:
        return list(body["choices"])
    items = [{**item, "id": None, "call_id": None} for item in body["output"]]
    return [{"text": json.dumps(items), "finish_reason": body["status"]}]


def _result(record: Mapping[str, Any]) -> _Result:
    body = record["response"]["body"]
    choices = _as_choices(body)
    if not choices:
        raise ValueError("no choices")
    hashes: Mapping[str, Any] = body.get("xla_engine") or {}
    text = json.dumps([[_content(choice), choice["finish_reason"]] for choice in choices])
    tokens, bits, engine = map(hashes.get, ("tokens_sha256", "logprob_bits_sha256", "fingerprint"))
    if not all(value is None or isinstance(value, str) for value in (tokens, bits, engine)):
        raise TypeError("a hash must be a string")
    token_ids, logprobs = _listed(choices)
    if tokens is None and token_ids is not None:
        tokens = tokens_sha256(token_ids)
    if bits is None and logprobs is not None and None not in logprobs:  # null: the bits are not in the file
        bits = logprob_bits_sha256(logprobs)
    return _Result(
        text=hashlib.sha256(text.encode()).hexdigest(), tokens=tokens, bits=bits, fingerprint=engine
    )


def _content(choice: Mapping[str, Any]) -> str:
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def _listed(choices: Sequence[Mapping[str, Any]]) -> tuple[list[int] | None, list[float] | None]:
    """Token ids and logprobs of all choices, concatenated; None if any choice lacks them."""
    token_ids: list[int] = []
    logprobs: list[float] = []
    for choice in choices:
        block = choice.get("logprobs") or {}
        values = block.get("token_logprobs")
        if values is None and block.get("content") is not None:
            values = [token["logprob"] for token in block["content"]]
        if values is None or block.get("token_ids") is None:
            return None, None
        token_ids += block["token_ids"]
        logprobs += values
    return token_ids, logprobs
