"""The report of one measurement, as a table and as JSON."""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from xla_engine.perplexity.figures import Comparison, Estimate, Perplexity
from xla_engine.utils.tables import aligned


@dataclass(frozen=True, slots=True, kw_only=True)
class PerplexityReport:
    """tokens: of the text, i32 `[C, T]`. comparison: None if there was no base."""

    tokens: np.ndarray
    perplexity: Perplexity
    comparison: Comparison | None

    @property
    def text_sha256(self) -> str:
        """Of the windows' tokens, as little-endian i32: the fingerprint of what was measured."""
        return hashlib.sha256(self.tokens.astype("<i4").tobytes()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Only values that depend on text, model and precision; not, for example, the number of concurrent
        requests."""
        windows, window = self.tokens.shape
        return {
            "ctx_size": window,
            "chunks": windows,
            "text_sha256": self.text_sha256,
            **self.perplexity.to_json(),
            **({} if self.comparison is None else {"against": self.comparison.to_json()}),
        }

    def lines(self) -> list[str]:
        """A table, with llama-perplexity's labels."""
        windows, window = self.tokens.shape
        scored = self.perplexity.tokens
        rows = [
            ("text", f"{windows} windows of {window} tokens, {scored} tokens scored"),
            ("mean loss", f"{_shown(self.perplexity.nll)} nats"),
            ("PPL", _shown(self.perplexity.ppl)),
        ]
        if (found := self.comparison) is not None:
            rows += [
                ("PPL(base)", _shown(found.base.ppl)),
                ("Cor(ln(PPL), ln(PPL(base)))", f"{100 * found.correlation:.2f} %"),
                ("Mean ln(PPL/PPL(base))", _shown(found.log_ratio)),
                ("Mean PPL/PPL(base)", _shown(found.ratio)),
                ("Mean PPL-PPL(base)", _shown(found.difference)),
                ("Mean KLD", _shown(found.kld)),
                *((f"{_label(name)} KLD", f"{value:.6f}") for name, value in _falling(found.kld_quantiles)),
                ("Mean Δp", f"{_shown(found.delta_p, 100, 3)} %"),
                *(
                    (f"{_label(name)} Δp", f"{100 * value:.3f} %")
                    for name, value in _falling(found.delta_p_quantiles)
                ),
                ("RMS Δp", f"{_shown(found.delta_p_rms, 100, 3)} %"),
                ("Same top p", f"{_shown(found.same_top, 100, 3)} %"),
            ]
        return aligned(rows)


def _shown(figure: Estimate, scale: float = 1, digits: int = 6) -> str:
    return f"{scale * figure.value:.{digits}f} ± {scale * figure.error:.{digits}f}"


def _falling(quantiles: dict[str, float]) -> list[tuple[str, float]]:
    return list(reversed(quantiles.items()))


def _label(name: str) -> str:
    return {"max": "Maximum", "min": "Minimum", "50%": "Median"}.get(name, name)
