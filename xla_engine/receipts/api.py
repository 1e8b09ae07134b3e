"""The functions of `xla_engine.receipts`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from xla_engine.batch.receipts import receipts_header
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.open_engine import EngineClient, engine_config
from xla_engine.outputs import RequestOutput
from xla_engine.receipts import recompute
from xla_engine.receipts.files import Claim, check_files
from xla_engine.receipts.report import AuditReport
from xla_engine.receipts.requests import Asked
from xla_engine.receipts.writing import answered, header_of, save_outputs, write_answers


def write(
    engine: EngineClient,
    requests: Iterable[Mapping[str, Any]],
    results: Path | str,
    receipts: Path | str,
    *,
    sign: Path | str | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Run requests, and write their answers and receipts as `xla-engine run --receipts` does.

    Arguments:
        engine: an engine, such as `LLM(...).engine`.
        requests: objects as in the lines of an input file.
        results, receipts: the files to write; they must not exist.
        sign: the file of an Ed25519 private key.
        defaults: sampling fields for requests that do not set them.

    Raises OutputError, ReceiptError and OSError. A request that fails has an error in `results`.
    """
    write_answers(engine, requests, Path(results), Path(receipts), sign=sign, defaults=defaults or {})


def save(
    engine: EngineClient,
    outputs: Sequence[RequestOutput],
    results: Path | str,
    receipts: Path | str,
    *,
    sign: Path | str | None = None,
) -> None:
    """Write outputs of `LLM.generate(..., receipts=True)`, and their receipts, as `xla-engine run --receipts` does.

    Arguments:
        engine: that of the `LLM`, with the weights that it had then.
        outputs: of one call or of several, in the order of the lines. The text of a prompt is not in the files: their
            requests have its token ids.
        results, receipts: the files to write; they must not exist.
        sign: the file of an Ed25519 private key.

    Raises OutputError, ReceiptError and OSError. An output without an answer, such as an aborted one, is an error in
    `results`.
    """
    save_outputs(engine, outputs, Path(results), Path(receipts), sign=sign)


def audit_outputs(engine: XlaBatchEngine, outputs: Sequence[RequestOutput]) -> AuditReport:
    """Compute outputs of somebody else's `LLM.generate(..., receipts=True)` again in an engine of one's own.

    A trainer accepts rollouts of foreign workers so: each token and log-probability is compared with what the weights
    give that its engine has now. With `speculative_config`, for example {"method": "ngram", "num_speculative_tokens":
    15}, answers are verified many tokens at a time; else they are generated again.

    Returns the report, in which `custom_id` is an output's `request_id`. Raises ReceiptError for an output without its
    request, and EngineClosedError.
    """
    header = header_of(engine)
    claims = [Claim(json.loads(receipt), json.loads(answer)) for receipt, answer in answered(outputs, header)]
    errors = sum(claim.receipt["error"] is not None for claim in claims)
    report = AuditReport(answers=len(claims), errors=errors, model=header.model)
    recompute.audit(engine, receipts_header(engine, header, {}), claims, report)
    return report


def verify(
    results: Path | str,
    receipts: Path | str,
    *,
    public_key: str | None = None,
    requests: Path | str | None = None,
    columns: Mapping[str, Any] | None = None,
    shard: str | None = None,
) -> AuditReport:
    """Check two files against each other without a model: digests, root, signature, each answer once and none missing.

    Arguments:
        results, receipts: as `xla-engine run` or `write` wrote them.
        public_key: who must have signed the receipts: 64 hex digits, or the file of a key.
        requests: the file of lines, or the table, that was to run; None accepts the requests in the receipts.
        columns: those of a table, as in `run`: any of prompt, template, id, image, sampling.
        shard: I/N, of the input; None for the whole input.

    Raises ReceiptError for a file that cannot be read as receipts, ConfigError, and OSError.
    """
    asked = None if requests is None else Asked.of(requests, columns, shard)
    return check_files(results, receipts, public_key, asked).report()


def audit(
    results: Path | str,
    receipts: Path | str,
    model: str | Path | None = None,
    *,
    sample: float | None = None,
    sample_seed: int | None = None,
    public_key: str | None = None,
    requests: Path | str | None = None,
    columns: Mapping[str, Any] | None = None,
    shard: str | None = None,
    **engine_options: Any,
) -> AuditReport:
    """Check two files against each other, and compute the answers, or a sample of them, again.

    Arguments:
        results, receipts: as `xla-engine run` or `write` wrote them.
        model: as in `LLM`; None is the embedded model.
        sample: the share of the answers to compute again, such as 0.05; None for all.
        sample_seed: of the sample; None for a random one.
        public_key, requests, columns, shard: as in `verify`.
        engine_options: fields of `EngineConfig`. Those that change answers are taken from the receipts if left out.

    Returns the report; `raise_if_rejected` fails a test with it. Raises ReceiptError, ConfigError, CheckpointError and
    OSError.
    """
    demanded = {*engine_options} | (set() if model is None else {"model"})

    def load(fields: dict[str, Any]) -> closing[XlaBatchEngine]:
        config: EngineConfig = engine_config({**engine_options, **fields})
        return closing(XlaBatchEngine.from_pretrained(model, config))

    return recompute.audit_files(
        results,
        receipts,
        load,
        demanded=demanded,
        public_key=public_key,
        requests=None if requests is None else Asked.of(requests, columns, shard),
        sample=sample,
        sample_seed=sample_seed,
    )
