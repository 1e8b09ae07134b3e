"""Run requests from Python with receipts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xla_engine.batch.lines import Line
from xla_engine.batch.output_file import Mode, OutputFile
from xla_engine.batch.receipts import ReceiptFile, receipt_line, receipts_header
from xla_engine.batch.record_ids import line_digest, record_id, salt_of
from xla_engine.batch.resume import FinishedLines
from xla_engine.batch.run import BatchRun, Writer
from xla_engine.batch.signatures import Signer
from xla_engine.errors import ReceiptError
from xla_engine.open_engine import EngineClient
from xla_engine.openai.requests import LineRequest, parse_line
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
    with _new_files(engine, results, receipts, sign, defaults) as (header, sink, file):
        run = BatchRun(engine, _lines(requests), sink, receipts=file, header=header, defaults=defaults)
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
    with _new_files(engine, results, receipts, sign, {}) as (header, sink, file):
        salt = salt_of({})
        for line, output in zip(_lines(_request_of(each) for each in outputs), outputs, strict=True):
            assert line.raw is not None
            name = record_id(line.number, line_digest(line.raw, line.size, salt))
            request = parse_line(line.raw, line.number)
            assert isinstance(request, LineRequest), request
            if (error := output_error(request, output)) is None:
                given, answer, code = [output], result_line(request, [output], name, header), None
            else:
                given, answer, code = [], error_line(error, name), error.code
            file.write(receipt_line(line.raw, line.number, request.custom_id, answer, given, code))
            sink.write(answer)


def _request_of(output: RequestOutput) -> Mapping[str, Any]:
    if output.request is None:
        raise ReceiptError(
            f"the output {output.request_id} does not have its request: generate it with receipts=True"
        )
    return output.request


@contextmanager
def _new_files(
    engine: EngineClient, results: Path, receipts: Path, sign: Path | str | None, defaults: Mapping[str, Any]
) -> Iterator[tuple[ResultHeader, Writer, ReceiptFile]]:
    """Both files, begun; at the end the root is written."""
    done = FinishedLines()
    file = ReceiptFile(receipts, Mode.NEW, None if sign is None else Signer.read(sign))
    file.check((str(results),))
    header = ResultHeader(
        created=int(time.time()),
        model=str(engine.limits()["model"]),
        system_fingerprint=engine.identity().digest(),
        tokenizer=engine.tokenizer,
        labels=engine.validator.labels,
    )
    with OutputFile(str(results), Mode.NEW) as output:
        output.claim(done)
        file.begin(receipts_header(engine, header, defaults), done)
        try:
            yield header, output.begin(), file
            file.finish()
        finally:
            file.close()


def _lines(requests: Iterable[Mapping[str, Any]]) -> Iterator[Line]:
    for number, request in enumerate(requests, 1):
        raw = dump_line(dict(request)).removesuffix(b"\n")
        yield Line(number, len(raw), raw)
