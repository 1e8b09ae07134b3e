"""Receipts of a dataset's rows. Each travels in a column of its row, so it survives a killed actor as the result does;
`write_receipts` writes them to one file with one root."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from xla_engine.batch.receipts import choices_of, other_job, receipt_of, receipts_header, whole_line
from xla_engine.batch.record_ids import line_digest, record_id, salt_of
from xla_engine.errors import ReceiptError
from xla_engine.open_engine import EngineClient
from xla_engine.openai.chat_message import call_id
from xla_engine.openai.requests import LineRequest, line_error
from xla_engine.openai.results import asked_for, error_line, result_line
from xla_engine.outputs import RequestOutput
from xla_engine.receipts.writing import header_of, new_files
from xla_engine.utils.json_line import dump_line

RECEIPT = "receipt"  # column
_LINE = 1  # of every row, until its place in the dataset is known


class RowReceipts:
    """Makes the receipts of an actor's rows, as JSON. defaults: sampling fields of the stage."""

    def __init__(self, engine: EngineClient, defaults: Mapping[str, Any]) -> None:
        self._header = header_of(engine)
        self._shared = receipts_header(engine, self._header, defaults)

    def answered(self, record: Mapping[str, Any], request: LineRequest, output: RequestOutput) -> str:
        """The receipt of a row with a result. record: its request."""
        outputs = [asked_for(request, output)]
        answer = json.loads(result_line(request, outputs, "", self._header))
        return self._text(record, answer=answer, choices=choices_of(outputs))

    def failed(self, record: Mapping[str, Any], code: str, message: str) -> str:
        """The receipt of a row with an error."""
        return self._text(record, error={"code": code, "message": message})

    def _text(self, record: Mapping[str, Any], **found: Any) -> str:
        return dump_line({"header": self._shared, "request": record, **found}).decode().rstrip("\n")


def receipt_column(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The column of some rows' receipts, as an Arrow array."""
    import pyarrow as pa

    return {RECEIPT: pa.array([each[RECEIPT] for each in results], pa.string())}


def write_receipts(
    dataset: Any, results: Path | str, receipts: Path | str, *, sign: Path | str | None = None
) -> int:
    """Write the answers of a dataset and their receipts, as `xla-engine run --receipts` does, for `xla-engine audit`.

    Arguments:
        dataset: of a `Processor` with `ModelStage(receipts=True)`, or rows of one, such as those that it wrote to
            Parquet. Their order is that of the lines.
        results, receipts: the files to write; they must not exist.
        sign: the file of an Ed25519 private key.

    Returns the number of rows. Raises ReceiptError for a row without a receipt, rows of two models or kinds of
    machine, and two rows of one id; OutputError; and OSError.
    """
    rows = dataset.iter_rows() if hasattr(dataset, "iter_rows") else iter(dataset)
    found = _receipts(rows)
    if (first := next(found, None)) is None:
        raise ReceiptError("the dataset has no rows, so there are no receipts to write")
    header, count = first["header"], 0
    salt, names = salt_of(header["defaults"]), set[str]()
    with new_files(header, Path(results), Path(receipts), sign) as (sink, file):
        for number, row in enumerate(itertools.chain([first], found), 1):
            if (other := other_job(header, row["header"])) is not None:
                raise ReceiptError(
                    f"row {number} has another {other} than the first: audit the rows of each by themselves"
                )
            raw = dump_line(row["request"]).removesuffix(b"\n")
            custom_id = row["request"].get("custom_id", f"line-{number}")
            if custom_id in names:
                raise ReceiptError(f"two rows have the id {custom_id!r}: the values of id_column must differ")
            names.add(custom_id)
            name, error = record_id(number, line_digest(raw, len(raw), salt)), row.get("error")
            if error is None:
                answer = dump_line(numbered(row["answer"], number, name, custom_id))
            else:
                answer = error_line(line_error(number, error["code"], error["message"], custom_id), name)
            code = None if error is None else error["code"]
            file.write(receipt_of(raw, number, custom_id, whole_line(answer), row.get("choices", ()), code))
            sink.write(answer)
            count = number
    return count


def _receipts(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(rows, 1):
        if not row.get(RECEIPT):
            raise ReceiptError(
                f"row {number} has no column {RECEIPT!r} with a receipt: use ModelStage(receipts=True), and keep the "
                "column; rows with pictures have none"
            )
        yield json.loads(row[RECEIPT])


def numbered(answer: dict[str, Any], number: int, name: str, custom_id: str) -> dict[str, Any]:
    """An output line of line `_LINE` as it is of another line: the ids in it depend on the number."""
    response, body = answer["response"], answer["response"]["body"]
    old = body["id"]
    new = f"{old.removesuffix(str(_LINE))}{number}"
    for choice in body["choices"]:
        for at, call in enumerate(choice.get("message", {}).get("tool_calls", ())):
            assert call["id"] == call_id(f"{old}/{choice['index']}", at)
            call["id"] = call_id(f"{new}/{choice['index']}", at)
    whole = {**response, "request_id": f"req_{number}", "body": {**body, "id": new}}
    return {**answer, "id": name, "custom_id": custom_id, "response": whole}
