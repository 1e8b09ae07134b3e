"""The sampling parameters of a request. Names and meaning are vLLM's."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, replace
from typing import Any

from xla_engine.errors import InvalidRequestError
from xla_engine.graphs.row_state.limits import MAX_DRY_BREAKERS, MAX_LOGIT_BIAS, MAX_LOGPROBS
from xla_engine.structured_outputs import StructuredOutputsParams
from xla_engine.utils.did_you_mean import did_you_mean, naming_fields
from xla_engine.utils.plain import integer_of, plain
from xla_engine.utils.shown import shown

DEFAULT_MAX_TOKENS = 16
MOST = 2**31 - 1  # of most integers
LEAST_TEMPERATURE = 0.01  # above 0
# If a person reads the answer and the model recommends no sampling: llama.cpp's defaults. Small models ramble at 1.
FOR_READERS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
MAX_N = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
MAX_STOP_STRINGS = 256
MAX_STOP_CHARACTERS = 1 << 14  # of all stop strings of a request together
MAX_ALLOWED_TOKEN_IDS = 1 << 19  # twice the largest vocabularies
MAX_STOP_TOKEN_IDS = 8  # per row on the device, including eos ids; the host checks the others

_TOKEN_ID = re.compile(r"[0-9]{1,19}", re.ASCII)  # a token id as a JSON key

# Fields of other engines that are not supported here. They are refused by name, so that none is silently ignored.
UNSUPPORTED = frozenset(
    {
        "best_of",
        "echo",
        "extra_args",
        "flat_logprobs",
        "guided_decoding",
        "length_penalty",
        "logits_processors",
        "logprob_token_ids",
        "output_kind",
        "repetition_detection",
        "spaces_between_special_tokens",
        "stream",
        "suffix",
        "thinking_token_budget",
        "tool_choice",
        "tools",
        "use_beam_search",
    }
)


@naming_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are sampled and when a request ends.

    n: sequences to generate, at most MAX_N, each with a seed derived from the request's seed and its index; the first
        is the same as with n = 1. More than one needs a temperature above 0.
    temperature: 0 is greedy (lowest id on ties); otherwise logits are divided by it.
    top_k: keep the k most likely tokens; 0 or -1 keeps all. Ties at the threshold are all kept.
    top_p: keep the smallest set of most likely tokens whose probability reaches top_p, after top_k and min_p.
    min_p: drop tokens less likely than min_p times the most likely one.
    seed: noise is a pure function of (seed, position). None derives one from the engine's seed and the request id, so
        that a request does not depend on others.
    max_tokens: the most new tokens, including the stop token; None: as many as fit after the prompt.
    min_tokens: new tokens before stop ids may be sampled and stop strings are checked.
    repetition_penalty: divides positive logits of tokens in prompt or output, and multiplies negative ones.
    frequency_penalty: subtracted from the logits of tokens in the output, once for each occurrence.
    presence_penalty: subtracted from the logits of tokens in the output, once.
    penalty_last_n: how many of the last tokens of prompt and output these three penalties consider; -1: all.
    dry_multiplier, dry_base, dry_allowed_length: DRY (`dry_penalties` in `graphs`). If a token followed an earlier
        occurrence of the last L tokens, its logit is reduced by dry_multiplier * dry_base ** (L - dry_allowed_length).
        Multiplier 0 is off. DRY and penalty_last_n need an engine with `enable_dry`.
    dry_sequence_breakers: tokens that matches must not contain: token ids, or texts, of which the last token counts,
        tokenised after a letter.
    logit_bias: added to the logits of these ids, -100 to 100, at most MAX_LOGIT_BIAS ids.
    allowed_token_ids: sample only these; must include stop ids that should be possible.
    bad_words: strings that must not occur in the output: their last token is not sampled if it would complete them.
        They are tokenised with and without a space before.
    structured_outputs: what the whole text must match; see `StructuredOutputsParams`. A complete text ends with an eos
        id; one that reaches max_tokens is incomplete.
    stop: end when the text contains one of these strings (one string, or a list). The text is cut before it.
    include_stop_str_in_output: cut the text after the stop string instead, and show stop tokens.
    stop_token_ids: end after any of these, in addition to the model's eos ids. The device checks the first
        MAX_STOP_TOKEN_IDS, eos ids included, and the host the others; if there are others, min_tokens must be 0.
    ignore_eos: the model's eos ids do not end the request.
    logprobs: 0 returns the log-probability of each sampled token, n > 0 also those of the n most likely tokens, at
        most MAX_LOGPROBS. `EngineConfig.logprobs_mode` chooses raw or processed ones.
    prompt_logprobs: the same for the tokens of the prompt, always raw.
    logprobs_start: position of the first prompt token that needs `prompt_logprobs`. Earlier ones may come from the
        prefix cache.
    skip_special_tokens: omit special tokens from the text. detokenize: whether to decode text.
    truncate_prompt_tokens: keep only the last tokens of a longer prompt, at most this many; -1: as many as fit beside
        max_tokens. All else, such as `logprobs_start`, is about what was kept.

    Logits are changed in this order: logit_bias, repetition, frequency and presence penalty, DRY, masks (min_tokens,
    allowed_token_ids, bad_words, structured_outputs), temperature, min_p, top_k, top_p.
    """

    # Metadata: the least and the most of "integers" or "numbers", and a "note" for errors. "none" permits None, as a
    # default of None does.
    n: int = field(default=1, metadata={"integers": (1, MAX_N)})
    temperature: float = 1.0
    top_k: int = field(default=0, metadata={"integers": (-1, MOST)})
    top_p: float = 1.0
    min_p: float = field(default=0.0, metadata={"numbers": (0, 1)})
    seed: int | None = field(default=None, metadata={"integers": (-(2**63), 2**64 - 1)})
    max_tokens: int | None = field(default=DEFAULT_MAX_TOKENS, metadata={"integers": (1, MOST), "none": True})
    min_tokens: int = field(default=0, metadata={"integers": (0, MOST)})
    repetition_penalty: float = field(
        default=1.0, metadata={"numbers": (0.01, 100), "note": " (1 changes nothing)"}
    )
    frequency_penalty: float = field(default=0.0, metadata={"numbers": (-2, 2)})
    presence_penalty: float = field(default=0.0, metadata={"numbers": (-2, 2)})
    penalty_last_n: int = field(default=-1, metadata={"integers": (-1, MOST)})
    dry_multiplier: float = field(default=0.0, metadata={"numbers": (0, 100), "note": " (0 is off)"})
    dry_base: float = field(default=1.75, metadata={"numbers": (1, 100)})
    dry_allowed_length: int = field(default=2, metadata={"integers": (1, 64)})
    dry_sequence_breakers: Sequence[str | int] = ("\n", ":", '"', "*")
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    structured_outputs: StructuredOutputsParams | None = field(default=None, hash=False)
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = field(default=None, metadata={"integers": (0, MAX_LOGPROBS)})
    prompt_logprobs: int | None = field(default=None, metadata={"integers": (0, MAX_LOGPROBS)})
    skip_special_tokens: bool = True
    detokenize: bool = True
    logprobs_start: int = field(default=0, metadata={"integers": (0, MOST)})
    truncate_prompt_tokens: int | None = field(default=None, metadata={"integers": (-1, MOST)})

    def __post_init__(self) -> None:
        for each in fields(self):
            if (value := getattr(self, each.name)) is each.default:
                continue
            if (own := _checked(each, plain(value))) is not value:
                object.__setattr__(self, each.name, own)
        check_finite("temperature", self.temperature)
        if self.n > 1 and self.temperature == 0:
            raise InvalidRequestError(
                f"{self.n} greedy sequences are all the same; use n 1 or a temperature above 0"
            )
        if self.temperature < 0:
            raise InvalidRequestError(f"temperature must be >= 0 (0 is greedy), not {self.temperature}")
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise InvalidRequestError(
                f"temperature {self.temperature} is too small to divide by; use 0 for greedy or at least "
                f"{LEAST_TEMPERATURE}"
            )
        check_finite("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise InvalidRequestError(
                f"top_p must be in (0, 1], not {self.top_p}; use temperature 0 for greedy"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens}); lower one or raise the "
                "other"
            )
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError("truncate_prompt_tokens must be -1 or at least 1, not 0")
        if self.logprobs_start and self.prompt_logprobs is None:
            raise InvalidRequestError("logprobs_start needs prompt_logprobs; set both")
        if isinstance(self.structured_outputs, Mapping):
            params = StructuredOutputsParams.from_mapping(self.structured_outputs)
            object.__setattr__(self, "structured_outputs", params)
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise InvalidRequestError(
                f"structured_outputs must be an object, not {shown(self.structured_outputs)}"
            )
        if self.structured_outputs is not None and self.ignore_eos:
            raise InvalidRequestError(
                "structured_outputs needs an eos id to end a text; leave ignore_eos false"
            )
        for name, checked in (
            ("stop", check_stop_strings(self.stop)),
            ("stop_token_ids", check_token_ids("stop_token_ids", self.stop_token_ids)),
            ("bad_words", check_bad_words(self.bad_words)),
            ("logit_bias", check_logit_bias(self.logit_bias)),
            ("dry_sequence_breakers", check_breakers(self.dry_sequence_breakers)),
        ):
            object.__setattr__(self, name, checked)
        if self.stop and not self.detokenize:
            raise InvalidRequestError(
                "stop strings need the text; leave detokenize true or use stop_token_ids"
            )
        if self.allowed_token_ids is not None:
            allowed = check_token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise InvalidRequestError("allowed_token_ids is empty; name at least one id, or leave it out")
            object.__setattr__(self, "allowed_token_ids", allowed)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, also_known: Iterable[str] = ()) -> SamplingParams:
        """Build from JSON-like fields; OpenAI's `response_format` may replace `structured_outputs`.

        also_known: further names to suggest if an unknown field looks misspelt.

        Raises InvalidRequestError naming the first unknown or unsupported field.
        """
        if "response_format" in values:
            values = dict(values)
            constraint = StructuredOutputsParams.from_response_format(values.pop("response_format"))
            if (
                constraint is not None
                and values.setdefault("structured_outputs", constraint) is not constraint
            ):
                raise InvalidRequestError("response_format and structured_outputs both given; keep one")
        known = {field.name for field in fields(cls)}
        for name in values:
            if name in UNSUPPORTED:
                raise InvalidRequestError(f"field {shown(name)} is not supported by this version; remove it")
            if name not in known:
                hint = did_you_mean(name, sorted(known.union(also_known)))
                hint = hint or f"; known sampling fields: {', '.join(sorted(known))}"
                raise InvalidRequestError(f"unknown field {shown(name)}{hint}")
        return cls(**values)

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Build from fields; those that are None take their defaults, except max_tokens, which stays None."""
        given = {name: value for name, value in values.items() if value is not None or name == "max_tokens"}
        return cls.from_mapping(given)

    def to_mapping(self) -> dict[str, Any]:
        """The fields that differ from their defaults, for `from_mapping`."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        default = SamplingParams()
        given = {name: value for name, value in given.items() if value != getattr(default, name)}
        if (constraint := self.structured_outputs) is not None:
            given["structured_outputs"] = {k: v for k, v in asdict(constraint).items() if v is not None}
        return given

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def for_chat(self) -> SamplingParams:
        """The parameters for a chat: without `max_tokens` if it is the default, so that the model ends its turn."""
        return replace(self, max_tokens=None) if self.max_tokens == DEFAULT_MAX_TOKENS else self

    @property
    def token_limit(self) -> int:
        """`max_tokens` as a number. Raises InvalidRequestError if it is None, which only an engine can resolve."""
        if self.max_tokens is None:
            raise InvalidRequestError(
                "max_tokens None is resolved when a request is submitted; give a number"
            )
        return self.max_tokens

    @property
    def max_cached_tokens(self) -> int | None:
        """How many prompt tokens may come from the prefix cache; None: no limit."""
        return None if self.prompt_logprobs is None else max(self.logprobs_start - 1, 0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def _checked(entry: Field[Any], value: Any) -> Any:
    """A field's value. Raises InvalidRequestError unless it fits the field's default and metadata."""
    limits = entry.metadata
    if value is None and (entry.default is None or "none" in limits):
        return None
    if "integers" in limits:
        low, high = limits["integers"]
        return check_integer(entry.name, value, low=low, high=high)
    if "numbers" in limits:
        check_finite(entry.name, value)
        low, high = limits["numbers"]
        if not low <= value <= high:
            note = limits.get("note", "")
            raise InvalidRequestError(f"{entry.name} must be in [{low}, {high}]{note}, not {value}")
    elif isinstance(entry.default, bool) and not isinstance(value, bool):
        raise InvalidRequestError(f"{entry.name} must be true or false, not {shown(value)}")
    return value


def check_stop_strings(stop: object) -> tuple[str, ...]:
    """Convert one string, several or None to a tuple without duplicates. Raises InvalidRequestError."""
    strings = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(strings, Sequence) or not all(
        isinstance(string, str) for string in strings[:MAX_STOP_STRINGS]
    ):
        raise InvalidRequestError(f"stop must be text or a list of texts, not {type(stop).__name__}")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"{len(strings)} stop strings given; at most {MAX_STOP_STRINGS}")
    if "" in strings:
        raise InvalidRequestError("a stop string is empty, which would end every request; remove it")
    if (total := sum(map(len, strings))) > MAX_STOP_CHARACTERS:
        raise InvalidRequestError(
            f"the stop strings have {total} characters together; at most {MAX_STOP_CHARACTERS}"
        )
    return tuple(dict.fromkeys(strings))


def check_token_ids(name: str, ids: object) -> tuple[int, ...]:
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
        raise InvalidRequestError(f"{name} must be a list of token ids, not {shown(ids)}")
    if len(ids) > MAX_ALLOWED_TOKEN_IDS:
        raise InvalidRequestError(f"{len(ids)} {name} given; at most {MAX_ALLOWED_TOKEN_IDS}")
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= MOST:  # without a call for each
        return tuple(ids)
    return tuple(check_integer(f"{name} entry", token_id, low=0) for token_id in ids)


def check_breakers(given: object) -> tuple[str | int, ...]:
    what = f"dry_sequence_breakers must be a list of at most {MAX_DRY_BREAKERS} texts and token ids"
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence) or len(given) > MAX_DRY_BREAKERS:
        raise InvalidRequestError(f"{what}, not {shown(given)}")
    found: list[str | int] = []
    for each in given:
        if isinstance(each, str) and not 0 < len(each) <= MAX_BAD_WORD_CHARACTERS:
            raise InvalidRequestError(f"{what}: a breaker is a short text, not {shown(each)}")
        found.append(
            each if isinstance(each, str) else check_integer("dry_sequence_breakers entry", each, low=0)
        )
    return tuple(found)


def check_bad_words(words: object) -> tuple[str, ...]:
    if words is None:
        return ()
    if isinstance(words, (str, bytes)) or not isinstance(words, Sequence):
        raise InvalidRequestError(f"bad_words must be a list of strings, not {shown(words)}")
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequestError(f"{len(words)} bad_words given; at most {MAX_BAD_WORDS}")
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise InvalidRequestError(f"a bad word must be a string that is not blank, not {shown(word)}")
        if len(word) > MAX_BAD_WORD_CHARACTERS:
            raise InvalidRequestError(
                f"a bad word has {len(word)} characters; at most {MAX_BAD_WORD_CHARACTERS}"
            )
    return tuple(dict.fromkeys(words))


def check_logit_bias(bias: object) -> Mapping[int, float] | None:
    """Check and convert a logit bias; ids may be strings, as in JSON. Raises InvalidRequestError."""
    if not bias:
        return None
    if not isinstance(bias, Mapping):
        raise InvalidRequestError(f"logit_bias must map token ids to numbers, not {shown(bias)}")
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(
            f"logit_bias has {len(bias)} ids; at most {MAX_LOGIT_BIAS}: allowed_token_ids has no such limit"
        )
    found: dict[int, float] = {}
    for key, value in bias.items():
        key = int(key) if isinstance(key, str) and _TOKEN_ID.fullmatch(key) else key
        token_id = check_integer("logit_bias id", key, low=0)
        value = plain(value)
        check_finite(f"logit_bias of {token_id}", value)
        if not -100 <= value <= 100:
            raise InvalidRequestError(f"logit_bias of {token_id} must be in [-100, 100], not {value}")
        if token_id in found:
            raise InvalidRequestError(f"logit_bias names id {token_id} twice; keep one")
        found[token_id] = float(value)
    return found


def check_finite(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise InvalidRequestError(f"{name} must be a finite number, not {shown(value)}")


def check_integer(name: str, value: object, *, low: int, high: int = MOST) -> int:
    """The integer that a value is (`integer_of`). Raises InvalidRequestError if it is none, or outside [low, high]."""
    number = integer_of(value)
    if number is None:
        raise InvalidRequestError(f"{name} must be an integer, not {shown(value)}")
    if not low <= number <= high:
        raise InvalidRequestError(f"{name} must be between {low} and {high}, not {shown(value)}")
    return number
