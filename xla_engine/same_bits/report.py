"""Where two answers to one request first differ, and the likely cause; the results as text, Markdown and JSON.

A difference by rounding moves log-probabilities a little, and changes a token only where two candidates were nearly
equal. One that changes a token which was far ahead is not rounding: stale keys and values, or another request's
answer.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from xla_engine.same_bits.target import Choice
from xla_engine.utils.comparison import Difference, first_difference

NOT_REPEATABLE, SEED_IGNORED = "not repeatable", "seed ignored"
ROUNDING, NOT_ROUNDING, UNCLEAR = "rounding", "not rounding", "unclear"
WORST_FIRST = (NOT_REPEATABLE, NOT_ROUNDING, SEED_IGNORED, UNCLEAR, ROUNDING)
LARGE = 0.5  # nats: more than rounding moves a log-probability
SAME, DIFFERS, NOT_VISIBLE = "same", "differs", "not visible"
# Without one of these kinds, nothing was compared that depends on load.
_DECISIVE = ("repeat", "co-batch")


def cause_of(difference: Difference[str], largest: float) -> str:
    """The likely cause of a difference. largest: the largest `delta` of all comparisons of this kind."""
    if difference.delta is not None and difference.delta > LARGE:
        return NOT_ROUNDING
    if difference.position is None:
        return ROUNDING
    if difference.delta is None or difference.gap is None:
        return UNCLEAR
    if difference.gap <= 2 * largest:
        return ROUNDING
    return NOT_ROUNDING if difference.gap > max(10 * largest, LARGE) else UNCLEAR


def compare(left: Choice, right: Choice, *, begins: bool = False) -> Difference[str] | None:
    """The first difference of two answers, in words, or None. begins: `right` may go on where `left` ends.

    Its position is that of a character if only text is visible.
    """
    of_tokens = bool(left.tokens or right.tokens)
    one: Sequence[int | str] = left.tokens if of_tokens else left.text
    two: Sequence[int | str] = right.tokens if of_tokens else right.text
    found = first_difference(one, two[: len(one)] if begins else two)
    ended = found is None
    first = len(one) if found is None else found.position or 0
    delta = _delta(left.logprobs, right.logprobs, first) if of_tokens else None
    if ended and not delta and (begins or not of_tokens or left.text == right.text):
        return None
    if ended and not delta:  # equal tokens with other text
        left_text, right_text = repr(left.text[-20:]), repr(right.text[-20:])
        return Difference(position=None, expected=left_text, found=right_text)
    gaps = [each.gaps[first] for each in (left, right) if each.gaps and first < len(each.gaps)]
    return Difference(
        position=None if ended else first,
        expected="" if ended else _shown(one, first),
        found="" if ended else _shown(two, first),
        delta=delta,
        gap=None if ended or not gaps else max(gaps),
    )


def _delta(left: tuple[float, ...] | None, right: tuple[float, ...] | None, count: int) -> float | None:
    """The largest difference of the first `count`; infinite where only one of two is a number."""
    if left is None or right is None:
        return None
    pairs = (
        zip(left[:count], right[:count], strict=True)
        if min(len(left), len(right)) >= count
        else [(0.0, math.inf)]
    )
    return max(
        (0.0 if a == b or (a != a and b != b) else _or_infinite(abs(a - b)) for a, b in pairs), default=0.0
    )


def _or_infinite(value: float) -> float:
    return value if value == value else math.inf


def _shown(sequence: Sequence[int | str], place: int) -> str:
    return repr(sequence[place]) if place < len(sequence) else "the end"


def digits(value: float) -> int:
    """Significant decimal digits in which a number is written."""
    return len(repr(abs(value)).partition("e")[0].replace(".", "").strip("0"))


class DifferenceFound(AssertionError):
    """A target gave a request different answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Two answers that differ. label: of what. cause: a word of `WORST_FIRST`, perhaps with more after a colon.
    command: repeats the request."""

    label: str
    difference: Difference[str]
    cause: str
    command: str | None

    def __str__(self) -> str:
        found, parts = self.difference, [f"{self.label}: {self.cause}"]
        if found.position is not None:
            parts.append(f"first other token at {found.position}: {found.expected} and {found.found}")
        if found.delta is not None:
            where = "" if found.position is None else "before it "
            parts.append(f"log-probabilities {where}differ by up to {found.delta:.3g}")
        if found.gap is not None:
            parts.append(f"gap between the two most likely tokens {found.gap:.3g}")
        return "; ".join(parts)


@dataclass(slots=True, kw_only=True)
class ReportRow:
    """One check. compared: pairs of answers, of which `with_logprobs` show log-probabilities.
    failed: pairs of which one had no answer. largest: difference of log-probabilities, in nats. proven: comparisons
    with a proven overlap, and `overlap` its median and maximum. hidden: why nothing could be seen."""

    name: str
    compared: int = 0
    with_logprobs: int = 0
    failed: int = 0
    largest: float = 0.0
    proven: int | None = None
    overlap: tuple[int, int] | None = None
    findings: list[Finding] = field(default_factory=list)
    hidden: str | None = None
    note: str | None = None

    @property
    def verdict(self) -> str:
        if self.findings:
            return DIFFERS
        return (
            SAME
            if self.hidden is None and self.compared and self.failed <= self.compared // 10
            else NOT_VISIBLE
        )

    def remarks(self) -> str:
        causes = Counter(each.cause.partition(":")[0] for each in self.findings)
        parts = [f"{count} {cause}" for cause, count in causes.items()]
        if len(causes) == 1:
            parts = [self.findings[0].cause]
        if self.overlap is not None:
            parts.append(f"overlap {self.overlap[0]} (median), {self.overlap[1]} (most)")
        if self.verdict == SAME and self.proven:
            parts.append(f"at most {min(300 / self.proven, 100):.2g} % differ (95 %)")
        if self.failed:
            parts.append(f"{self.failed} without an answer")
        if self.compared and not self.with_logprobs and self.name != "n":
            parts.append("log-probabilities not visible")
        return "; ".join([*parts, *(each for each in (self.hidden, self.note) if each)])


@dataclass(slots=True, kw_only=True)
class Report:
    """All rows. digits: the most significant digits of a log-probability. errors: of requests, counted."""

    target: dict[str, Any]
    rows: list[ReportRow] = field(default_factory=list)
    digits: int = 0
    notes: list[str] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def differs(self) -> bool:
        return any(row.verdict == DIFFERS for row in self.rows)

    @property
    def exit_status(self) -> int:
        """0: the same. 1: a difference. 2: too little was visible for a verdict."""
        if self.differs:
            return 1
        decisive = [row.verdict for row in self.rows if row.name.startswith(_DECISIVE)]
        restart = [row.verdict for row in self.rows if row.name == "restart"]
        return 0 if decisive and all(each == SAME for each in decisive + restart) else 2

    @property
    def causes(self) -> set[str]:
        return {each.cause.partition(":")[0] for row in self.rows for each in row.findings}

    @property
    def conclusion(self) -> str:
        if self.differs:
            return "DIFFERENT answers to the same request: " + ", ".join(sorted(self.causes))
        return (
            "same answers"
            if self.exit_status == 0
            else "NO VERDICT: the server returned too little to compare"
        )

    def raise_if_different(self) -> None:
        """Raise `DifferenceFound`, an AssertionError with the report, unless everything decisive is the same."""
        if self.exit_status:
            raise DifferenceFound("\n" + self.text())

    def text(self) -> str:
        head = [f"{name:18s} {_value(value)}" for name, value in self._head().items()]
        table = [["check", "compared", "differ", "largest", "verdict", ""], *self._table()]
        widths = [max(len(row[column]) for row in table) for column in range(5)]
        body = ["  ".join(map(str.ljust, row, [*widths, 0])) for row in table]
        return "\n".join([*head, "", *(line.rstrip() for line in body), *self._tail(), self.conclusion])

    def markdown(self) -> str:
        """For an issue tracker. Texts of the target are formatted as code, so that none of them is markup."""
        head = [f"- {name}: `{_value(value).replace('`', chr(39))}`" for name, value in self._head().items()]
        table = ["| " + " | ".join(row).replace("`", "'") + " |" for row in self._table()]
        found = "\n".join(self._tail(every=True)).replace("```", "'''")
        lines = [
            f"**{self.conclusion}**",
            "",
            *head,
            "",
            "| check | compared | differ | largest | verdict | |",
        ]
        lines += ["|---|---|---|---|---|---|", *table, *(["", "```text", found, "```"] if found else [])]
        return "\n".join(lines)

    def json(self) -> str:
        record = dataclasses.asdict(self) | {"exit_status": self.exit_status, "causes": sorted(self.causes)}
        for row, given in zip(self.rows, record["rows"], strict=True):
            given["verdict"] = row.verdict
            for finding in given["findings"]:
                found = finding["difference"]
                found |= {"left": found.pop("expected"), "right": found.pop("found")}
        return json.dumps(_finite(record), allow_nan=False)

    def _head(self) -> dict[str, Any]:
        return self.target | {"logprob digits": self.digits or "not visible"}

    def _table(self) -> list[list[str]]:
        counts = [(str(row.compared), str(len(row.findings))) for row in self.rows]
        largest = [f"{row.largest:.3g}" if row.with_logprobs else "-" for row in self.rows]
        return [
            [row.name, *numbers, moved, row.verdict, row.remarks()]
            for row, numbers, moved in zip(self.rows, counts, largest, strict=True)
        ]

    def _tail(self, *, every: bool = False) -> list[str]:
        lines = list(self.notes)
        lines += [f"{count} requests without an answer: {error}" for error, count in self.errors.items()]
        for row in self.rows:
            lines += [f"{row.name}: {each}" for each in row.findings[: 10 if every else 3]]
            lines += [f"  {each.command}" for each in row.findings[:1] if each.command]
        return lines


def _value(value: Any) -> str:
    return ", ".join(map(str, value)) or "none seen" if isinstance(value, list) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not abs(value) < float("inf"):
        return repr(value)
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
