"""How an engine speculates: what proposes drafts, and how many tokens a step may check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

from xla_engine.errors import ConfigError
from xla_engine.utils.shown import shown

METHODS = ("ngram", "suffix", "draft_model", "mtp", "eagle3")
ON_DEVICE = ("draft_model", "mtp", "eagle3")  # methods that draft inside the verify step
NOT_BUILT = ("eagle", "medusa")  # methods that vLLM has
MOST_TOKENS = 15  # drafts of a row: a verify step is to fit into a block with the token before them
AUTO: Final = "auto"
_AUTO_SHAPES = ((1, 8), (4, 8), (8, 4), (16, 2), (32, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Names follow vLLM's `speculative_config`. Raises ConfigError.

    method: "ngram" looks the end of a row up in the row itself, "suffix" in finished requests of the same
        `cache_salt` as well, "draft_model" lets a smaller model of the same tokenizer guess, "mtp" the layer that a
        checkpoint brings for it (Qwen3-Next, Qwen3.5), "eagle3" an EAGLE-3 head that was trained for the model.
    model: the draft model: a directory, an id of the Hugging Face hub or a GGUF file. None: the directory `draft` of
        the model itself, as the embedded model has one. Of "eagle3" the head: a directory or an id.
    num_speculative_tokens: drafts of a row in every step; "auto" chooses from step to step, by what steps of each
        width cost on this machine and by how many drafts were right, and none where none would gain.
    """

    method: str
    num_speculative_tokens: int | Literal["auto"] = AUTO
    model: str | None = None

    def __post_init__(self) -> None:
        if self.method in NOT_BUILT:
            raise ConfigError(
                f"speculative_config method {self.method!r} is not built yet; use {' or '.join(METHODS)}"
            )
        if self.method not in METHODS:
            raise ConfigError(
                f"speculative_config method must be one of {', '.join(METHODS)}, not {self.method!r}"
            )
        if self.method not in ("draft_model", "eagle3") and self.model is not None:
            raise ConfigError(
                'speculative_config: "model" names the draft model of method "draft_model" or the head of "eagle3"; '
                "no other method has one"
            )
        if self.method == "eagle3" and self.model is None:
            raise ConfigError(
                'speculative_config: method "eagle3" needs "model", the directory or name of a head for this model'
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
            raise ConfigError(f"speculative_config must be a mapping, not {shown(options)}")
        given: dict[str, Any] = dict(options)
        unknown = sorted(map(str, given.keys() - {"method", "num_speculative_tokens", "model"}))
        if given.get("method") not in NOT_BUILT and unknown:
            raise ConfigError(
                f"speculative_config knows method, num_speculative_tokens and model, not {', '.join(unknown)}"
            )
        if "model" in given:  # as vLLM takes it
            given.setdefault("method", "draft_model")
        if "method" not in given:
            raise ConfigError(f"speculative_config needs a method: {' or '.join(METHODS)}")
        model = given.get("model")
        if model is not None and not isinstance(model, (str, Path)):
            raise ConfigError(f"speculative_config model must be a path or a name, not {model!r}")
        return cls(
            method=given["method"],
            num_speculative_tokens=given.get("num_speculative_tokens", AUTO),
            model=None if model is None else str(model),
        )

    def given(self) -> dict[str, Any]:
        """The fields that were asked for; `of` makes the same of them."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def shapes(self, rows: int) -> tuple[tuple[int, int], ...]:
        """(lanes, width) of the verify programs of an engine with so many slots; a width is drafts and one token."""
        if self.num_speculative_tokens == AUTO:
            return tuple(sorted({(min(lanes, rows), width) for lanes, width in _AUTO_SHAPES}))
        width = self.num_speculative_tokens + 1
        return tuple((lanes, width) for lanes in sorted({min(lanes, rows) for lanes in (1, 4, 16, rows)}))
