"""Run requests from Python with receipts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xla_engine.batch.lines import Line
from xla_engine.batch.output_file import Mode, OutputFile
from xla_engine.batch.receipts import (
    Answered,
    ReceiptFile,
    ReceiptLines,
    receipt_line,
    receipts_header,
    whole_line,
)
from xla_engine.batch.record_ids import line_digest, record_id, salt_of
from xla_engine.batch.resume import FinishedLines
from xla_engine.batch.run import BatchRun, Writer
from xla_engine.batch.signatures import Signer
from xla_engine.errors import ReceiptError
from xla_engine.open_engine import EngineClient
from xla_engine.openai.requests import LineError, parse_line
from xla_engine.openai.results import ResultHeader, error_line, output_error, result_line
from xla_engine.outputs import RequestOutput
from xla_engine.utils.json_line import dump_line


def write_answers(
    engine: EngineClient,
    requests: Iterable[Mapping[str, Any]],
    results: Path,
    receipts: Path,
    *,
    sign: Path | str | None,
    defaults: Mapping[str, Any],
) -> None:
    """As `xla_engine.receipts.write`."""
    header = header_of(engine)
    with new_files(receipts_header(engine, header, defaults), results, receipts, sign) as (sink, file):
        run = BatchRun(
            engine,
            _lines(requests),
            sink,
            receipts=ReceiptLines(file.write).add,
            header=header,
            defaults=defaults,
        )
        totals = run.run()
        if totals.failure is not None:
            raise totals.failure
        if totals.interrupted:
            raise KeyboardInterrupt


def save_outputs(
    engine: EngineClient,
    outputs: Iterable[RequestOutput],
    results: Path,
    receipts: Path,
    *,
    sign: Path | str | None,
) -> None:
    """As `xla_engine.receipts.save`."""
    header = header_of(engine)
    with new_files(receipts_header(engine, header, {}), results, receipts, sign) as (sink, file):
        for receipt, answer in answered(outputs, header):
            file.write(receipt)
            sink.write(answer)


def answered(outputs: Iterable[RequestOutput], header: ResultHeader) -> Iterator[tuple[bytes, bytes]]:
    """The receipt and the output line of each output, as a run of their requests writes them.

    Raises ReceiptError for an output without its request, and one whose request is not that of a line.
    """
    salt = salt_of({})
    for number, output in enumerate(outputs, 1):
        if output.request is None:
            raise ReceiptError(
                f"the output {output.request_id} does not have its request: generate it with receipts=True"
            )
        raw = dump_line(dict(output.request)).removesuffix(b"\n")
        name = record_id(number, line_digest(raw, len(raw), salt))
        request = parse_line(raw, number)
        if isinstance(request, LineError):
            raise ReceiptError(f"the request of the output {output.request_id}: {request.message}")
        if (error := output_error(request, output)) is None:
            given, answer, code = [output], result_line(request, [output], name, header), None
        else:
            given, answer, code = [], error_line(error, name), error.code
        answered = Answered(raw, number, request.custom_id, answer, given, code)
        yield receipt_line(answered, whole_line(answer)), answer


@contextmanager
def new_files(
    header: Mapping[str, Any], results: Path, receipts: Path, sign: Path | str | None
) -> Iterator[tuple[Writer, ReceiptFile]]:
    """Both files, begun; at the end the root is written. header: of the receipts."""
    done = FinishedLines()
    file = ReceiptFile(receipts, Mode.NEW, None if sign is None else Signer.read(sign))
    file.check((str(results),))
    with OutputFile(str(results), Mode.NEW) as output:
        output.claim(done)
        file.begin(header, done)
        try:
            yield output.begin(), file
            file.finish()
        finally:
            file.close()


def header_of(engine: EngineClient) -> ResultHeader:
    """What results of now have in common."""
    return ResultHeader(
        created=int(time.time()),
        model=str(engine.limits()["model"]),
        system_fingerprint=engine.identity().digest(),
        tokenizer=engine.tokenizer,
        labels=engine.validator.labels,
    )


def _lines(requests: Iterable[Mapping[str, Any]]) -> Iterator[Line]:
    for number, request in enumerate(requests, 1):
        raw = dump_line(dict(request)).removesuffix(b"\n")
        yield Line(number, len(raw), raw)
