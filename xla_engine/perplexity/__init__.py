"""Perplexity of a text, and how far one precision of a model is from another: llama-perplexity's figures."""

from xla_engine.perplexity.figures import Comparison, Perplexity, PerplexityReport
from xla_engine.perplexity.logits_file import LogitsFile, LogitsWriter
from xla_engine.perplexity.measure import measure, windows_of

__all__ = [
    "Comparison",
    "LogitsFile",
    "LogitsWriter",
    "Perplexity",
    "PerplexityReport",
    "measure",
    "windows_of",
]
