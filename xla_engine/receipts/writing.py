"""Run requests from Python with receipts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from xla_engine.batch.lines import Line
from xla_engine.batch.output_file import Mode, OutputFile
from xla_engine.batch.receipts import ReceiptFile, receipts_header
from xla_engine.batch.resume import FinishedLines
from xla_engine.batch.run import BatchRun
from xla_engine.batch.signatures import Signer
from xla_engine.open_engine import EngineClient
from xla_engine.openai.results import ResultHeader
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
            run = BatchRun(
                engine, _lines(requests), output.begin(), receipts=file, header=header, defaults=defaults
            )
            totals = run.run()
            if totals.failure is not None:
                raise totals.failure
            if totals.interrupted:
                raise KeyboardInterrupt
            file.finish()
        finally:
            file.close()


def _lines(requests: Iterable[Mapping[str, Any]]) -> Iterator[Line]:
    for number, request in enumerate(requests, 1):
        raw = dump_line(dict(request)).removesuffix(b"\n")
        yield Line(number, len(raw), raw)
