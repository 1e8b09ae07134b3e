"""How an engine speculates: who guesses, and how many tokens a step may check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from xla_engine.errors import ConfigError

METHODS = ("ngram", "suffix")
NOT_BUILT = ("draft_model", "mtp", "eagle", "eagle3", "medusa")  # methods that vLLM has
MOST_TOKENS = 15  # drafts of a row: a verify step is to fit into a block with the token before them
AUTO: Final = "auto"
_AUTO_SHAPES = ((1, 8), (4, 8), (8, 4), (16, 2), (32, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Names follow vLLM's `speculative_config`. Raises ConfigError.

    method: "ngram" looks the end of a row up in the row itself, "suffix" in finished requests of the same
        `cache_salt` as well.
    num_speculative_tokens: drafts of a row in every step; "auto" chooses from step to step, by what steps of each
        width cost on this machine and by how many drafts were right, and none where none would gain.
    """

    method: str
    num_speculative_tokens: int | Literal["auto"] = AUTO

    def __post_init__(self) -> None:
        if self.method in NOT_BUILT:
            raise ConfigError(
                f"speculative_config method {self.method!r} is not built yet; use {' or '.join(METHODS)}"
            )
        if self.method not in METHODS:
            raise ConfigError(
                f"speculative_config method must be one of {', '.join(METHODS)}, not {self.method!r}"
            )
        count = self.num_speculative_tokens
        if count == AUTO:
            return
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_TOKENS:
            raise ConfigError(
                f"num_speculative_tokens must be 1 to {MOST_TOKENS}, or {AUTO!r}, not {count!r}"
            )

    @classmethod
    def of(cls, options: object) -> Self:
        """The configuration that a mapping, as vLLM takes one, describes. Raises ConfigError."""
        if isinstance(options, cls):
            return options
        if not isinstance(options, Mapping):
            raise ConfigError(f"speculative_config must be a mapping, not {options!r}")
        given: dict[str, Any] = dict(options)
        unknown = sorted(map(str, given.keys() - {"method", "num_speculative_tokens"}))
        if given.get("method") not in NOT_BUILT and unknown:
            raise ConfigError(
                f"speculative_config knows method and num_speculative_tokens, not {', '.join(unknown)}"
            )
        if "method" not in given:
            raise ConfigError(f"speculative_config needs a method: {' or '.join(METHODS)}")
        return cls(method=given["method"], num_speculative_tokens=given.get("num_speculative_tokens", AUTO))

    def shapes(self, rows: int) -> tuple[tuple[int, int], ...]:
        """(lanes, width) of the verify programs of an engine with so many slots; a width is drafts and one token."""
        if self.num_speculative_tokens == AUTO:
            return tuple(sorted({(min(lanes, rows), width) for lanes, width in _AUTO_SHAPES}))
        width = self.num_speculative_tokens + 1
        return tuple((lanes, width) for lanes in sorted({min(lanes, rows) for lanes in (1, 4, 16, rows)}))
