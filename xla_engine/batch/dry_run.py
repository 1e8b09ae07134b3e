"""Check every line of a batch file as the engine would, without loading weights or using a device.

jax is imported only where the memory of a device decides (`max_model_len`), and for models that read pictures.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from xla_engine import prompts
from xla_engine.batch.earlier_runs import ENOUGH, LastRun
from xla_engine.batch.lines import Line, LineReader
from xla_engine.config import DEFAULT_MAX_MODEL_LEN, EngineConfig
from xla_engine.engine.requests.validation import RequestValidator
from xla_engine.errors import TokenLimitError
from xla_engine.images import NO_PICTURES
from xla_engine.model_loader.describe import ModelDescription, describe
from xla_engine.model_loader.model_files import ModelFiles, open_model
from xla_engine.model_loader.quantised.methods import quantisation_fields
from xla_engine.openai.requests import LineError, LineRequest, Prompt, explain, line_error
from xla_engine.prompts import PicturedPrompt, chat_prompt, prompt_parts
from xla_engine.sampling_params import SamplingParams
from xla_engine.text.chat_template import chosen_template, render_chat
from xla_engine.text.parsers.chats import Chat
from xla_engine.text.tokenizer import Tokenizer

_SHORT = DEFAULT_MAX_MODEL_LEN // 2  # tokens: two such parts of a request fit whatever the memory


@dataclass(slots=True, kw_only=True)
class DryReport:
    """Statistics of the lines of a file.

    quantised: the method that quantised the model's weights in safetensors, if one did.
    ok: lines that can run. failed: lines that cannot, by error code.
    prompt_tokens: of the lines that can run, after tokenization.
    tiles: of the pictures of these lines.
    new_tokens: the most that these lines can generate.
    longest: prompt tokens plus new tokens of the longest request.
    last_run: the last run of this model on this machine, the basis of estimates; None if there is none.
    expected_tokens: new tokens if each answer has the mean length of the last run, or its limit if that is lower.
    """

    quantised: str | None = None
    ok: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    tiles: int = 0
    new_tokens: int = 0
    longest: int = 0
    last_run: LastRun | None = None
    expected_tokens: float = 0.0

    def lines(self) -> list[str]:
        """The report as text."""
        codes = ", ".join(f"{code} {count}" for code, count in sorted(self.failed.items()))
        rows = [
            ("lines", f"{self.ok + self.failed.total()}: {self.ok} ok, {self.failed.total()} would fail"),
            ("codes", codes or "none"),
            ("prompt tokens", f"{self.prompt_tokens}"),
            *([("tiles of pictures", f"{self.tiles}")] if self.tiles else []),
            ("new tokens", f"{self.new_tokens} at most{self._expected()}"),
            ("longest request", f"{self.longest} tokens, prompt and new"),
            ("time", self._time()),
            *([] if self.quantised is None else [("weights", f"quantised by {self.quantised}")]),
        ]
        return [f"{name:<20} {text}" for name, text in rows]

    def _expected(self) -> str:
        last = self.last_run
        if last is None:
            return ""
        return f"; about {self.expected_tokens:.0f} if answers are as long as in the last run ({last.mean_tokens:.0f})"

    def _time(self) -> str:
        last = self.last_run
        if last is None:
            return f"unknown until this model has run at least {ENOUGH} requests on this machine"
        return f"{last.time_of(self.expected_tokens)}, plus the start"


class DryRun:
    """Checks lines against one model and configuration. Raises CheckpointError and ConfigError."""

    def __init__(self, model_name: Path | str, config: EngineConfig, files: ModelFiles | None = None) -> None:
        """files: the model's, if they are open."""
        self._last_run = LastRun.of(model_name)
        files = open_model(model_name) if files is None else files
        tokenizer = Tokenizer.of_model(files)
        described = describe(files, config, None if tokenizer is None else tokenizer.plain_ids)
        config, model = described.options, described.config
        length = config.context_length(model.max_position_embeddings)
        self._resolve: Callable[[], int] | None = None
        if config.max_model_len is None and model.max_position_embeddings > DEFAULT_MAX_MODEL_LEN:
            length, self._resolve = DEFAULT_MAX_MODEL_LEN, partial(_resolved_length, described)
        quantised = quantisation_fields(described.fields)
        self._quantised = None if quantised is None else str(quantised.values["quant_method"])
        self._template = described.chat_template
        pictures, why_none = None, NO_PICTURES
        if described.family.vision:
            from xla_engine.images.tower import load_reader, why_no_pictures

            pictures, why_none = load_reader(described), why_no_pictures(described) or NO_PICTURES
        self._validator = RequestValidator(
            vocab_size=model.vocab_size,
            eos_token_ids=described.special_tokens.eos_token_ids,
            max_model_len=length,
            tokenizer=tokenizer,
            takes_turns=config.scheduling_policy == "round_robin",
            has_dry=config.enable_dry,
            pooler=described.pooling,
            hidden_size=model.hidden_size,
            pictures=pictures,
            images=why_none,
        )

    def run(
        self,
        lines: Iterable[Line],
        *,
        defaults: Mapping[str, Any] | None = None,
        on_error: Callable[[LineError], None],
    ) -> DryReport:
        """Check all lines; `on_error` is called for each line that would fail, in order."""
        report = DryReport(quantised=self._quantised, last_run=self._last_run)
        reader = LineReader(defaults)
        for line in lines:
            request = reader.read(line)
            error = request if isinstance(request, LineError) else self._check(request, report)
            if error is not None:
                report.failed[error.code] += 1
                on_error(error)
        return report

    def _check(self, request: LineRequest, report: DryReport) -> LineError | None:
        params = request.params
        needs_limit = params.max_tokens is None or params.truncate_prompt_tokens == -1
        if self._resolve is not None and (needs_limit or (params.max_tokens or 0) > _SHORT):
            self._settle(self._resolve)
        try:
            placed = [self._placed(prompt) for prompt in request.prompts]
            lengths = [
                len(
                    self._validator.token_ids(
                        prompt_parts(prompt).content,
                        params,
                        add_special_tokens=special,
                        pictured=isinstance(prompt, PicturedPrompt),
                    )
                )
                for prompt, special in placed
            ]
            if self._resolve is not None and max(lengths, default=0) > _SHORT:
                self._settle(self._resolve)
            self._check_mask(params)
            self._validator.check_options("submit", dict(request.options))  # type: ignore[arg-type]
            self._validator.dry_breakers(params)
            limits = [self._validator.with_limit(params, length).token_limit for length in lengths]
        except TokenLimitError as error:
            if self._resolve is None:
                return line_error(request.line, *explain(error), request.custom_id)
            self._settle(self._resolve)
            return self._check(request, report)
        except Exception as error:  # as in a run, a bad request fails alone
            return line_error(request.line, *explain(error), request.custom_id)
        report.ok += 1
        report.prompt_tokens += sum(lengths)
        report.tiles += sum(each.tiles for each, _ in placed if isinstance(each, PicturedPrompt))
        report.new_tokens += params.n * sum(limits)
        if self._last_run is not None:
            mean = self._last_run.mean_tokens
            report.expected_tokens += params.n * sum(min(limit, mean) for limit in limits)
        report.longest = max(report.longest, *map(sum, zip(lengths, limits, strict=True)))
        return None

    def _check_mask(self, params: SamplingParams) -> None:
        """Raise InvalidRequestError if the request would have no mask. If a constraint is all that limits its tokens,
        none is made: its trial is enough."""
        constraint, stop_ids = params.structured_outputs, self._validator.stop_token_ids(params)
        limited = params.allowed_token_ids is not None or params.bad_words or params.min_tokens
        if limited or constraint is None:
            self._validator.token_mask(params, stop_ids)
        else:
            self._validator.token_mask(replace(params, structured_outputs=None), stop_ids)
            self._validator.grammars.check(constraint)

    def _settle(self, resolve: Callable[[], int]) -> None:
        """Find out `max_model_len`, which takes seconds, for a request that may need more than its least."""
        self._resolve = None
        self._validator = replace(self._validator, max_model_len=resolve())

    def _placed(self, prompt: Prompt) -> tuple[prompts.Prompt, bool]:
        """A prompt with its pictures read, and whether special tokens are added to it."""
        is_chat = isinstance(prompt, Chat)
        if isinstance(prompt, Chat):
            options = dict(prompt.options)
            template = chosen_template(self._template, options.pop("chat_template", None))
            prompt = chat_prompt(partial(render_chat, template=template), prompt.messages, **options)
        return self._validator.placed(prompt, add_special_tokens=not is_chat), not is_chat


def _resolved_length(model: ModelDescription) -> int:
    """`max_model_len` as an engine resolves it: from the memory of the device."""
    from xla_engine.model_loader.checkpoint import load_weights
    from xla_engine.model_loader.weights import stored_kinds
    from xla_engine.runner import backends, sizing, weight_form
    from xla_engine.runner.native_library.build import building_nothing

    config = model.options
    dtype = "float32" if config.dtype == "float32" else "bfloat16"
    stored = stored_kinds(load_weights(model).weights)
    with contextlib.nullcontext() if config.is_portable else building_nothing():
        form = weight_form.resolve_form(config, model.config, dtype, stored)
        device = backends.serving_device()
        resolved = sizing.resolve_length(form.config, model.config, form.spec_of, device)
    return resolved.context_length(model.config.max_position_embeddings)
