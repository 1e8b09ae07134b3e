"""The configuration of speculative decoding: the proposer, and how many tokens a step may verify."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

from xla_engine.errors import ConfigError
from xla_engine.utils.shown import shown

METHODS = ("ngram", "suffix", "draft_model", "mtp", "eagle3")
ON_DEVICE = ("draft_model", "mtp", "eagle3")  # methods that draft inside the verify step
NOT_BUILT = ("eagle", "medusa")  # methods that vLLM has
MOST_TOKENS = 15  # drafts of a row, so that they and the token before them fit into one KV block
AUTO: Final = "auto"
_AUTO_SHAPES = ((1, 8), (4, 8), (8, 4), (16, 2), (32, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Names follow vLLM's `speculative_config`. Raises ConfigError.

    method: the proposer. "ngram" searches the row itself for its last tokens, "suffix" also finished requests of the
        same `cache_salt`; "draft_model" is a smaller model with the same tokenizer; "mtp" is the checkpoint's layer
        for multi-token prediction (Qwen3-Next, Qwen3.5); "eagle3" is an EAGLE-3 head trained for the model.
    model: the draft model: a directory, an id of the Hugging Face Hub or a GGUF file. None: the directory `draft` in
        the model's own, which the embedded model has. For "eagle3" the head: a directory or an id.
    num_speculative_tokens: drafts of a row in every step; "auto" chooses for each step, from the cost of each width on
        this machine and the acceptance rate, and drafts nothing if that would not be faster.
    """

    method: str
    num_speculative_tokens: int | Literal["auto"] = AUTO
    model: str | None = None

    def __post_init__(self) -> None:
        if self.method in NOT_BUILT:
            raise ConfigError(
                f"speculative_config method {self.method!r} is not supported; use {' or '.join(METHODS)}"
            )
        if self.method not in METHODS:
            raise ConfigError(
                f"speculative_config method must be one of {', '.join(METHODS)}, not {self.method!r}"
            )
        if self.method not in ("draft_model", "eagle3") and self.model is not None:
            raise ConfigError(
                'speculative_config: "model" names the draft model of method "draft_model" or the head of "eagle3"; '
                "other methods have no model"
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
        """Build from a mapping, as in vLLM. Raises ConfigError."""
        if isinstance(options, cls):
            return options
        if not isinstance(options, Mapping):
            raise ConfigError(f"speculative_config must be a mapping, not {shown(options)}")
        given: dict[str, Any] = dict(options)
        unknown = sorted(map(str, given.keys() - {"method", "num_speculative_tokens", "model"}))
        if given.get("method") not in NOT_BUILT and unknown:
            raise ConfigError(
                f"speculative_config has the fields method, num_speculative_tokens and model, not {', '.join(unknown)}"
            )
        if "model" in given:  # as in vLLM
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
        """The fields that are set; the inverse of `of`."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def shapes(self, rows: int) -> tuple[tuple[int, int], ...]:
        """(lanes, width) of the verify programs of an engine with `rows` slots; width = drafts + 1."""
        if self.num_speculative_tokens == AUTO:
            return tuple(sorted({(min(lanes, rows), width) for lanes, width in _AUTO_SHAPES}))
        width = self.num_speculative_tokens + 1
        return tuple((lanes, width) for lanes in sorted({min(lanes, rows) for lanes in (1, 4, 16, rows)}))
