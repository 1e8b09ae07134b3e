"""Runs with receipts, audits of them, and an adversary who controls both files."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xla_engine.batch.lines import Line
from xla_engine.batch.output_file import Mode
from xla_engine.batch.receipts import (
    MerkleTree,
    ReceiptFile,
    ReceiptLines,
    footer_line,
    receipts_header,
    sha256_of,
)
from xla_engine.batch.resume import FinishedLines
from xla_engine.batch.run import BatchRun
from xla_engine.batch.signatures import Signer
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.identity import tokens_sha256
from xla_engine.openai.results import ResultHeader
from xla_engine.receipts.recompute import audit_files
from xla_engine.receipts.report import AuditReport
from xla_engine.utils.json_line import dump_line

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """The two files of a run."""

    results: Path
    receipts: Path

    def read(self) -> tuple[list[Record], list[Record]]:
        """The answers, and all lines of the receipts."""
        texts = (self.results.read_text(), self.receipts.read_text())
        answers, receipts = ([json.loads(line) for line in text.splitlines()] for text in texts)
        return answers, receipts


def run(
    engine: XlaBatchEngine,
    lines: Sequence[Record],
    folder: Path,
    defaults: Mapping[str, Any] | None = None,
    signer: Signer | None = None,
) -> Job:
    """Run lines in an engine, with receipts."""
    folder.mkdir(exist_ok=True)
    job = Job(folder / "out.jsonl", folder / "out.receipts.jsonl")
    raw = [dump_line(line).removesuffix(b"\n") for line in lines]
    header = ResultHeader(
        created=1,
        model="tiny",
        system_fingerprint=engine.identity().digest(),
        tokenizer=engine.tokenizer,
        labels=engine.validator.labels,
    )
    receipts = ReceiptFile(job.receipts, Mode.OVERWRITE, signer)
    receipts.begin(receipts_header(engine, header, defaults or {}), FinishedLines())
    with open(job.results, "wb") as sink:
        numbered = [Line(number, len(line), line) for number, line in enumerate(raw, 1)]
        BatchRun(
            engine,
            numbered,
            sink,
            receipts=ReceiptLines(receipts.write).add,
            header=header,
            defaults=defaults,
        ).run()
    receipts.finish()
    return job


def audited(engine: XlaBatchEngine, job: Job, **options: Any) -> AuditReport:
    """Audit in an engine that is open already."""

    @contextlib.contextmanager
    def load(fields: dict[str, Any]) -> Iterator[XlaBatchEngine]:
        yield engine

    return audit_files(job.results, job.receipts, load, **options)


def forge(job: Job, change: Callable[[Record, Record], None]) -> None:
    """Change answers and receipts, and compute every digest and the root again, as a cheater can.

    change: called with each answer and its receipt.
    """
    answers, (header, *receipts, _) = job.read()
    by_line = {receipt["line"]: receipt for receipt in receipts}
    for answer in answers:
        receipt = by_line[int(answer["id"].split("_")[2])]
        change(answer, receipt)
        receipt["answer_sha256"] = hashlib.sha256(dump_line(answer).removesuffix(b"\n")).hexdigest()
        receipt["request_sha256"] = sha256_of(receipt["request"])
        for choice in receipt["choices"]:
            choice["tokens_sha256"] = tokens_sha256(choice["token_ids"])
    write(job, answers, [header, *receipts])


def write(job: Job, answers: Sequence[Record], receipts: Sequence[Record]) -> None:
    """Write both files, with a root that fits. receipts: the header first."""
    job.results.write_bytes(b"".join(map(dump_line, answers)))
    tree, lines = MerkleTree(), [dump_line(each) for each in receipts]
    for line in lines:
        tree.add(line.removesuffix(b"\n"))
    job.receipts.write_bytes(b"".join((*lines, dump_line(footer_line(tree)))))
