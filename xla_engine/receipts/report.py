"""The outcome of an audit, as lines, as JSON and as an exit status."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

ACCEPTED, REJECTED, UNCHECKED = 0, 1, 2  # exit statuses
SHOWN = 10  # rejected answers in a report
_RATES = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25)  # of false answers
_SURE = 0.99


@dataclass(frozen=True, slots=True)
class Objection:
    """An answer that was rejected, or could not be checked, and why. custom_id: None for the file as a whole."""

    custom_id: str | None
    why: str


@dataclass(slots=True, kw_only=True)
class AuditReport:
    """What an audit found.

    answers: receipts in the file. errors: those of them whose answer is an error.
    checked: answers that were computed again. tokens: theirs, without prompts.
    rejected: answers that are not what the engine gives, or whose receipt does not fit, in the order of the file.
    unchecked: answers that this machine could not compute again; and why the file as a whole could not be checked.
    root: of the Merkle tree; None if the file has none. public_key: of a valid signature.
    model, config: what the receipts say that the answers were made with.
    method: "prefill" or "regeneration"; None if nothing was computed. sample_seed: None without a sample.
    notes: for people.
    """

    answers: int = 0
    errors: int = 0
    checked: int = 0
    tokens: int = 0
    rejected: list[Objection] = field(default_factory=list)
    unchecked: list[Objection] = field(default_factory=list)
    root: str | None = None
    public_key: str | None = None
    model: str | None = None
    config: str | None = None
    method: str | None = None
    sample_seed: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether everything was checked that was to be checked, and nothing was rejected."""
        return self.exit_status == ACCEPTED

    @property
    def exit_status(self) -> int:
        """0 accepted, 1 rejected, 2 not checked."""
        return REJECTED if self.rejected else UNCHECKED if self.unchecked else ACCEPTED

    @property
    def verdict(self) -> str:
        return ("accepted", "REJECTED", "NOT CHECKED")[self.exit_status]

    def raise_if_rejected(self) -> None:
        """Raise AssertionError with the report unless everything was accepted."""
        if not self.ok:
            raise AssertionError("\n".join(self.lines()))

    def detection(self) -> list[tuple[float, float]]:
        """Shares of false answers, and the probability that a sample of this size has at least one of them."""
        return [(rate, detection(self.answers, self.checked, rate)) for rate in _RATES]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "verdict": self.verdict.lower(),
            "answers": self.answers,
            "errors": self.errors,
            "checked": self.checked,
            "tokens": self.tokens,
            "rejected": [{"custom_id": each.custom_id, "why": each.why} for each in self.rejected],
            "unchecked": [{"custom_id": each.custom_id, "why": each.why} for each in self.unchecked],
            "root": self.root,
            "public_key": self.public_key,
            "model": self.model,
            "method": self.method,
            "sample_seed": self.sample_seed,
            "detection": [{"false": rate, "probability": chance} for rate, chance in self.detection()]
            if self.sample_seed is not None
            else None,
            "notes": self.notes,
        }

    def lines(self) -> list[str]:
        """The report as text."""
        found = [
            f"answers              {self.answers}, of them {self.errors} errors",
            f"computed again       {self.checked}  ({self.tokens} tokens, by {self.method or 'nothing'})",
            f"made with            {self.model or 'unknown'}" + (f", {self.config}" if self.config else ""),
            f"root                 {self.root or 'none'}",
        ]
        if self.public_key is not None:
            found.append(f"signed by            {self.public_key}")
        if self.sample_seed is not None and self.checked < self.answers:
            found.append(f"sample               {self.checked} of {self.answers}, seed {self.sample_seed}")
            found += [
                f"  if {rate:.1%} of the answers were false, the sample has one of them with {chance:.1%}"
                for rate, chance in self.detection()
            ]
        for title, findings in (("rejected", self.rejected), ("not checked", self.unchecked)):
            found += [f"{title}: {_named(each)}{each.why}" for each in findings[:SHOWN]]
            if (more := len(findings) - SHOWN) > 0:
                found.append(f"... and {more} more {title}")
        return [*found, *self.notes, self.verdict]


def _named(finding: Objection) -> str:
    return "" if finding.custom_id is None else f"{finding.custom_id!r}: "


def detection(answers: int, checked: int, rate: float) -> float:
    """The probability that a random sample of `checked` answers has a false one, if a share `rate` of all are."""
    false = min(math.ceil(rate * answers), answers)
    if not false or not checked:
        return 0.0
    return 1.0 - math.comb(answers - false, checked) / math.comb(answers, checked)
