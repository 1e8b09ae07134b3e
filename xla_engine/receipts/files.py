"""Check a result file against its receipts, without a model: digests, the root, each line once and none missing."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from xla_engine.batch.lines import read_lines
from xla_engine.batch.receipts import FORMAT, VERSION, MerkleTree, request_in, sha256_of
from xla_engine.batch.record_ids import parse_record_id
from xla_engine.batch.resume import file_lines, is_packed
from xla_engine.batch.signatures import read_public_key, why_not_signed
from xla_engine.engine.identity import tokens_sha256
from xla_engine.errors import ReceiptError
from xla_engine.receipts.report import AuditReport, Objection
from xla_engine.utils.json_line import dump_line

_FIELDS = {"custom_id", "line", "request", "request_sha256", "answer_sha256", "error", "choices"}
_CHOICE = {"token_ids", "tokens_sha256", "logprob_bits_sha256"}


@dataclass(frozen=True, slots=True)
class Claim:
    """An answer as the files have it. answer: the object of its output line; None if the output has none."""

    receipt: Mapping[str, Any]
    answer: Mapping[str, Any] | None

    @property
    def line(self) -> int:
        return int(self.receipt["line"])

    @property
    def custom_id(self) -> str:
        return str(self.receipt["custom_id"])


@dataclass(slots=True)
class CheckedFiles:
    """The readable part of a result file and its receipts, and what is wrong with them.

    header: of the receipts. claims: by line of the input. root: as in the file, None if it has none. signed_by: the
        public key of a valid signature, in hex digits.
    """

    header: dict[str, Any]
    claims: dict[int, Claim] = field(default_factory=dict)
    rejected: list[Objection] = field(default_factory=list)
    root: str | None = None
    footer: dict[str, Any] = field(default_factory=dict)
    signed_by: str | None = None

    def report(self) -> AuditReport:
        """The report of what the files alone show."""
        return AuditReport(
            answers=len(self.claims),
            errors=sum(claim.receipt["error"] is not None for claim in self.claims.values()),
            rejected=list(self.rejected),
            root=self.root,
            public_key=self.signed_by,
            model=str(self.header["model"].get("name")),
        )


@dataclass(slots=True)
class _Answer:
    """A line of the result file."""

    sha256: str
    record: dict[str, Any]
    used: bool = False


def check_files(
    results: Path | str,
    receipts: Path | str,
    public_key: str | None = None,
    requests: Path | str | None = None,
) -> CheckedFiles:
    """Read both files and compare them.

    public_key: who must have signed the receipts, as 64 hex digits or the file of a key; None for anybody, or nobody.
    requests: the file of lines that was to run; None if it is not known.

    Raises ReceiptError if the receipts have no header that this version can read, or the key is none, and OSError.
    """
    signer = None if public_key is None else read_public_key(public_key)
    answers, rejected = _read_answers(results)
    lines = file_lines(receipts)
    first = next(lines, b"")
    files = CheckedFiles(_header(first, receipts), rejected=rejected)
    tree = MerkleTree()
    tree.add(first.removesuffix(b"\n"))
    names: dict[str, int] = {}
    ended = False
    for number, line in enumerate(lines, 2):
        where = f"{receipts} line {number}"
        record = _object(line)
        if ended:
            rejected.append(Objection(_id_of(record), f"{where}: a line after the root"))
        elif record is not None and "root" in record:
            ended = True
            files.footer, files.root = record, str(record["root"])
            _check_footer(files, tree, line)
        else:
            tree.add(line.removesuffix(b"\n"))
            _add(files, answers, names, record, line, where)
    if not ended:
        rejected.append(
            Objection(
                None, f"{receipts} has no root: the run did not finish, or the file was cut; resume the run"
            )
        )
    if (why := why_not_signed(files.footer, tree.root, signer)) is not None:
        rejected.append(Objection(None, why))
    else:
        files.signed_by = files.footer.get("public_key")
    rejected += [
        Objection(_id_of(each.record), "the answer has no receipt")
        for each in answers.values()
        if not each.used
    ]
    if requests is not None:
        rejected += _other_requests(files, requests)
    return files


def _other_requests(files: CheckedFiles, path: Path | str) -> Iterator[Objection]:
    """Receipts whose request is not that of their input line, and lines that have none."""
    left = dict(files.claims)
    with gzip.open(path) if is_packed(path) else open(path, "rb") as source:
        for line in read_lines(cast("BinaryIO", source)):
            claim = left.pop(line.number, None)
            if claim is None:
                yield Objection(None, f"line {line.number} of {path} has no receipt")
            elif sha256_of(request_in(line.raw)) != sha256_of(claim.receipt["request"]):
                yield Objection(claim.custom_id, f"the request is not that of line {line.number} of {path}")
    for claim in left.values():
        yield Objection(claim.custom_id, f"{path} has no line {claim.line}")


def _read_answers(path: Path | str) -> tuple[dict[int, _Answer], list[Objection]]:
    found: dict[int, _Answer] = {}
    rejected = []
    for place, line in enumerate(file_lines(path), 1):
        record = _object(line)
        identity = None if record is None else parse_record_id(record.get("id"))
        if record is None or identity is None or not isinstance(record.get("custom_id"), str):
            name = _id_of(record)
            rejected.append(Objection(name, f"{path} line {place}: not a whole line of results"))
        elif identity[0] in found:
            rejected.append(
                Objection(_id_of(record), f"{path} line {place}: a second answer of the same line")
            )
        else:
            digest = hashlib.sha256(line.removesuffix(b"\n")).hexdigest()
            found[identity[0]] = _Answer(digest, record)
    return found, rejected


def _object(line: bytes) -> dict[str, Any] | None:
    """The object of a whole line; None if it is none."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _id_of(record: Mapping[str, Any] | None) -> str | None:
    name = None if record is None else record.get("custom_id")
    return name if isinstance(name, str) else None


def _header(line: bytes, path: Path | str) -> dict[str, Any]:
    record = _object(line)
    if record is None or record.get("format") != FORMAT:
        raise ReceiptError(f"{path} is not a file of receipts: its first line is no header of {FORMAT}")
    if record.get("version") != VERSION:
        raise ReceiptError(
            f"{path} has receipts of version {record.get('version')}, and this program reads version {VERSION}; "
            "use the xla-engine that wrote them"
        )
    for name in ("model", "arithmetic", "config", "defaults"):
        if not isinstance(record.get(name), dict):
            raise ReceiptError(f"{path}: its header has no valid {name!r}")
    if not isinstance(record["arithmetic"].get("platform"), dict) or not isinstance(
        record.get("created"), int
    ):
        raise ReceiptError(f"{path}: its header has no valid platform or time")
    if not isinstance(record.get("system_fingerprint", 0), str | None):
        raise ReceiptError(f"{path}: its header has no valid system_fingerprint")
    return record


def _check_footer(files: CheckedFiles, tree: MerkleTree, line: bytes) -> None:
    names = ("public_key", "signature")
    signature = {name: files.footer[name] for name in names if name in files.footer}
    if line != dump_line({"root": files.root, "lines": tree.count - 1, **signature}):
        files.rejected.append(Objection(None, f"the footer is not that of {tree.count - 1} receipts"))
    if files.root != tree.root:
        files.rejected.append(
            Objection(None, f"the root of the receipts is {tree.root}, not {files.root}: a line was changed")
        )


def _add(
    files: CheckedFiles,
    answers: Mapping[int, _Answer],
    names: dict[str, int],
    record: dict[str, Any] | None,
    line: bytes,
    where: str,
) -> None:
    """Check one receipt by itself and against its answer."""
    rejected = files.rejected
    if record is None or (wrong := _malformed(record)) is not None:
        rejected.append(
            Objection(_id_of(record), f"{where}: not a receipt" + (f": {wrong}" if record else ""))
        )
        return
    name, number = record["custom_id"], record["line"]
    if number in files.claims:
        rejected.append(Objection(name, f"{where}: a second receipt of line {number} of the input"))
        return
    if line != dump_line(record):
        rejected.append(Objection(name, f"{where}: not written as receipts are"))
    answer = answers.get(number)
    files.claims[number] = Claim(record, None if answer is None else answer.record)
    if record["error"] is None and names.setdefault(name, number) != number:
        rejected.append(Objection(name, f"{where}: a second answer for this custom_id"))
    if sha256_of(record["request"]) != record["request_sha256"]:
        rejected.append(Objection(name, "request_sha256 is not that of the request"))
    for at, choice in enumerate(record["choices"]):
        if tokens_sha256(choice["token_ids"]) != choice["tokens_sha256"]:
            rejected.append(Objection(name, f"tokens_sha256 of choice {at} is not that of its token_ids"))
    if answer is None:
        if record["error"] is None:
            rejected.append(Objection(name, "the answer is missing"))
        return
    answer.used = True
    if answer.record["custom_id"] != name:
        rejected.append(Objection(name, f"the answer of line {number} has the custom_id of another"))
    if answer.sha256 != record["answer_sha256"]:
        rejected.append(Objection(name, "answer_sha256 is not that of the answer: it was changed"))


def _malformed(record: Mapping[str, Any]) -> str | None:
    """What is wrong with the form of a receipt."""
    if record.keys() != _FIELDS:
        return f"its fields are {', '.join(sorted(record))}"
    texts = (record["custom_id"], record["request_sha256"], record["answer_sha256"])
    if not all(isinstance(each, str) for each in texts) or not isinstance(record["error"], str | None):
        return "a field has another type"
    number, request, choices = record["line"], record["request"], record["choices"]
    if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < 2**32:
        return "line is no number of a line"
    if not isinstance(request, dict | None) or not isinstance(choices, list):
        return "request or choices has another type"
    for choice in choices:
        if not isinstance(choice, dict) or choice.keys() != _CHOICE:
            return "a choice has other fields"
        ids = choice["token_ids"]
        if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < 2**31 for each in ids):
            return "token_ids are no token ids"
        if not isinstance(choice["tokens_sha256"], str):
            return "tokens_sha256 is no text"
        if not isinstance(choice["logprob_bits_sha256"], str | None):
            return "logprob_bits_sha256 is no text"
    return None
