"""The fixture `audit_receipts`, in every pytest of an environment with this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xla_engine.receipts.report import AuditReport


@pytest.fixture
def audit_receipts() -> Callable[..., AuditReport]:
    """`audit_receipts("out.jsonl", "out.receipts.jsonl", "model", sample=0.1)`: as `xla_engine.receipts.audit`.

    It fails the test with the report unless everything is accepted. So a team keeps the answers of a model in its
    repository, and a change of model, quantisation or engine that changes one of them is told.
    """
    from xla_engine.receipts import audit

    def accepted(*files: object, **options: object) -> AuditReport:
        report = audit(*files, **options)  # type: ignore[arg-type]
        report.raise_if_rejected()
        return report

    return accepted
