"""The figures of llama-perplexity, from one number for each scored token, and the report of them.

Float64, summed in the order of the text.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from xla_engine.utils.tables import aligned

# log-probabilities of the base below this are left out of a divergence, as in llama-perplexity
_LEAST = -16.0
KLD_SHARES = (0.001, 0.01, 0.05, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999)
DELTA_SHARES = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)


class Estimate(NamedTuple):
    """A mean and its standard error."""

    value: float
    error: float


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities f64 `[V]` of logits `[V]`; not finite where these are not."""
    wide = logits.astype(np.float64)
    peak = wide.max()
    return wide - (peak + np.log(np.exp(wide - peak).sum()))


def divergence(base: np.ndarray, log_probs: np.ndarray) -> float:
    """Kullback-Leibler divergence, in nats, of `log_probs` from `base`; both `[V]`."""
    terms = np.where(base > _LEAST, np.exp(base) * (base - log_probs), 0.0)
    return float(terms.sum())


def _mean(values: np.ndarray) -> Estimate:
    """values: f64 `[N]`."""
    error = math.sqrt(values.var() / (len(values) - 1)) if len(values) > 1 else 0.0
    return Estimate(float(values.mean()), error)


def _covariance(a: np.ndarray, b: np.ndarray) -> float:
    """Of the means of two samples `[N]`."""
    if (count := len(a)) < 2:
        return 0.0
    return float(((a - a.sum() / count) * (b - b.sum() / count)).sum()) / count / (count - 1)


def _quantiles(values: np.ndarray, shares: tuple[float, ...]) -> dict[str, float]:
    """With linear interpolation, by the share in percent; and the extremes."""
    found = {f"{100 * share:g}%": float(np.quantile(values, share)) for share in shares}
    return {"min": float(values.min()), **found, "max": float(values.max())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """tokens: that were scored. nll: mean negative log-likelihood of a token, in nats. ppl: its exponential."""

    tokens: int
    nll: Estimate
    ppl: Estimate

    @classmethod
    def of(cls, nll: np.ndarray) -> Perplexity:
        """nll: f64 `[N]`, of each token."""
        mean = _mean(nll)
        ppl = math.exp(mean.value)
        return cls(tokens=len(nll), nll=mean, ppl=Estimate(ppl, ppl * mean.error))

    def to_json(self) -> dict[str, Any]:
        return {"tokens": self.tokens, **_with_errors(self, "nll", "ppl")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A model's figures against a base: another precision of it, or another program.

    base: its perplexity. correlation: of the logarithms of both perplexities.
    log_ratio: ln(PPL / PPL of the base), the difference of mean losses in nats. ratio: its exponential.
    difference: of the perplexities.
    kld: mean Kullback-Leibler divergence from the base, in nats. kld_quantiles: over tokens, by percent.
    delta_p: mean change of the probability of the text's token, as a share of 1. delta_p_rms: root of its mean square.
    same_top: share of positions with the same most likely token.
    """

    base: Perplexity
    correlation: float
    log_ratio: Estimate
    ratio: Estimate
    difference: Estimate
    kld: Estimate
    kld_quantiles: dict[str, float]
    delta_p: Estimate
    delta_p_rms: Estimate
    delta_p_quantiles: dict[str, float]
    same_top: Estimate

    @classmethod
    def of(cls, nll: np.ndarray, base_nll: np.ndarray, kld: np.ndarray, same_top: np.ndarray) -> Comparison:
        """All `[N]`, by token: f64, f64, f64 and bool."""
        own, base = Perplexity.of(nll), Perplexity.of(base_nll)
        shared = _covariance(nll, base_nll)
        both = own.nll.error * base.nll.error
        log_ratio = _mean(nll - base_nll)
        ratio = math.exp(log_ratio.value)
        spread = own.ppl.error**2 + base.ppl.error**2 - 2 * own.ppl.value * base.ppl.value * shared
        change = np.exp(-nll) - np.exp(-base_nll)
        square = _mean(change**2)
        rms = math.sqrt(square.value)
        share = float(same_top.sum()) / len(same_top)
        return cls(
            base=base,
            correlation=shared / both if both else 1.0,
            log_ratio=log_ratio,
            ratio=Estimate(ratio, ratio * log_ratio.error),
            difference=Estimate(own.ppl.value - base.ppl.value, math.sqrt(max(spread, 0.0))),
            kld=_mean(kld),
            kld_quantiles=_quantiles(kld, KLD_SHARES),
            delta_p=_mean(change),
            delta_p_rms=Estimate(rms, 0.5 / rms * square.error if rms else 0.0),
            delta_p_quantiles=_quantiles(change, DELTA_SHARES),
            same_top=Estimate(share, math.sqrt(share * (1 - share) / max(len(same_top) - 1, 1))),
        )

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {f"base_{name}": value for name, value in self.base.to_json().items()}
        found["correlation"] = self.correlation
        found |= _with_errors(
            self, "log_ratio", "ratio", "difference", "kld", "delta_p", "delta_p_rms", "same_top"
        )
        return found | {"kld_quantiles": self.kld_quantiles, "delta_p_quantiles": self.delta_p_quantiles}


def _with_errors(record: Perplexity | Comparison, *names: str) -> dict[str, float]:
    """Estimates of a record as JSON has them: each value, then its error."""
    found: dict[str, float] = {}
    for name in names:
        found[name], found[f"{name}_error"] = getattr(record, name)
    return found


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
                *((f"{name} KLD", f"{value:.6f}") for name, value in _labelled(found.kld_quantiles)),
                ("Mean Δp", f"{_shown(found.delta_p, 100, 3)} %"),
                *(
                    (f"{name} Δp", f"{100 * value:.3f} %")
                    for name, value in _labelled(found.delta_p_quantiles)
                ),
                ("RMS Δp", f"{_shown(found.delta_p_rms, 100, 3)} %"),
                ("Same top p", f"{_shown(found.same_top, 100, 3)} %"),
            ]
        return aligned(rows)


def _shown(figure: Estimate, scale: float = 1, digits: int = 6) -> str:
    return f"{scale * figure.value:.{digits}f} ± {scale * figure.error:.{digits}f}"


def _labelled(quantiles: dict[str, float]) -> list[tuple[str, float]]:
    """From the largest down, each with llama-perplexity's label."""
    labels = {"max": "Maximum", "min": "Minimum", "50%": "Median"}
    return [(labels.get(name, name), value) for name, value in reversed(quantiles.items())]
