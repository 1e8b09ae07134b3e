"""Check a result file against its receipts, without a model: digests, the root, each line once and none missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xla_engine.batch.datasets.output import digest_of
from xla_engine.batch.receipts import FORMAT, TABLE, TABLE_SHA256, VERSION, MerkleTree, sha256_of
from xla_engine.batch.resume import file_lines
from xla_engine.batch.signatures import read_public_key, why_not_signed
from xla_engine.engine.identity import tokens_sha256
from xla_engine.errors import ReceiptError
from xla_engine.receipts.answers import FileAnswer, id_of, line_answers, object_of, table_answers
from xla_engine.receipts.report import AuditReport, Objection
from xla_engine.receipts.requests import Asked
from xla_engine.utils.json_line import dump_line
from xla_engine.utils.shown import shown

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


def check_files(
    results: Path | str,
    receipts: Path | str,
    public_key: str | None = None,
    requests: Asked | None = None,
) -> CheckedFiles:
    """Read both files and compare them.

    public_key: who must have signed the receipts, as 64 hex digits or the file of a key; None for anybody, or nobody.
    requests: what was to run; None if it is not known.

    Raises ReceiptError if the receipts have no header that this version can read, or the key is none, and OSError.
    """
    signer = None if public_key is None else read_public_key(public_key)
    lines = file_lines(receipts)
    first = next(lines, b"")
    header = _header(first, receipts)
    is_table = header.get("results") == TABLE
    answers, rejected = table_answers(results, receipts) if is_table else line_answers(results)
    files, readable = CheckedFiles(header, rejected=rejected), not rejected
    tree = MerkleTree()
    tree.add(first.removesuffix(b"\n"))
    names: dict[str, int] = {}
    written: list[Any] = []  # digests of the table
    ended = False
    for number, line in enumerate(lines, 2):
        where = f"{receipts} line {number}"
        record = object_of(line)
        if ended:
            rejected.append(Objection(id_of(record), f"{where}: a line after the root"))
        elif record is not None and "root" in record:
            ended = True
            files.footer, files.root = record, str(record["root"])
            _check_footer(files, tree, line)
        elif is_table and record is not None and record.keys() == {TABLE_SHA256}:
            tree.add(line.removesuffix(b"\n"))
            written.append(record[TABLE_SHA256])
            if line != dump_line(record):
                rejected.append(Objection(None, f"{where}: not written as receipts are"))
        else:
            tree.add(line.removesuffix(b"\n"))
            _add(files, answers, names, record, line, where)
    if not ended:
        rejected.append(
            Objection(
                None, f"{receipts} has no root: the run did not finish, or the file was cut; resume the run"
            )
        )
    if is_table and written != [digest := digest_of(str(results), "sha256")]:
        rejected.append(
            Objection(
                None,
                f"the SHA-256 of {results} is {digest}, in the receipts {shown(written[0] if written else None)}: the "
                "table was changed",
            )
        )
    if (why := why_not_signed(files.footer, tree.root, signer)) is not None:
        rejected.append(Objection(None, why))
    else:
        files.signed_by = files.footer.get("public_key")
    rejected += [
        Objection(id_of(each.record), "the answer has no receipt")
        for each in answers.values()
        if not each.used
    ]
    if requests is not None:
        claims = {number: claim.receipt for number, claim in files.claims.items()}
        rejected += requests.other_requests(claims)
        if is_table and readable:
            rejected += requests.other_cells(results, [*answers])
    return files


def _header(line: bytes, path: Path | str) -> dict[str, Any]:
    record = object_of(line)
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
    if record.get("results") not in (None, TABLE):
        raise ReceiptError(f"{path}: its header has no valid kind of results")
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
    answers: Mapping[int, FileAnswer],
    names: dict[str, int],
    record: dict[str, Any] | None,
    line: bytes,
    where: str,
) -> None:
    """Check one receipt by itself and against its answer."""
    rejected = files.rejected
    if record is None or (wrong := _malformed(record)) is not None:
        rejected.append(
            Objection(id_of(record), f"{where}: not a receipt" + (f": {wrong}" if record else ""))
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
    elif answer.why is not None:
        rejected.append(Objection(name, answer.why))


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
