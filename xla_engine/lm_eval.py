"""The model "xla-engine" of EleutherAI's lm-evaluation-harness (extra `lm-eval`).

Importing this module registers it; `xla-engine lm-eval` does so and passes its arguments to the harness. All requests
of a task run in one batch with prefix caching. Results are identical at any batch size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from xla_engine.environment import embedded_model_directory
from xla_engine.errors import ConfigError
from xla_engine.llm import LLM
from xla_engine.model_loader.describe import describe_decoder
from xla_engine.model_loader.model_files import open_model
from xla_engine.sampling_params import SamplingParams

NAME = "xla-engine"
_AUTO_SLOTS = 16
# Key of lm-eval's cache, context, continuation.
TokenRequest = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model(NAME)
class XlaLM(TemplateLM):  # type: ignore[misc]
    """An engine as a model of lm-eval.

    Arguments, in `--model_args`:
        pretrained, model: directory, .gguf file or Hub id; by default the embedded model.
        batch_size: slots; "auto" is 16, or `max_batch_size` if that is less; "auto:N" means the same. It changes
            speed, not results.
        max_gen_toks: the most new tokens of requests that do not set it.
        add_bos_token: whether texts begin with the begin token; None: as tokenizer.json says.
        options: further options of `xla_engine.LLM`, including vLLM's.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        model: str | None = None,
        batch_size: int | str = "auto",
        max_batch_size: int | None = None,
        device: str | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        name = pretrained or model
        if (slots := _slots(batch_size, max_batch_size)) is not None:
            options.setdefault("max_num_seqs", slots)
        self._llm = LLM(name, **options)
        self._tokenizer = self._llm.get_tokenizer()
        self._name = name or "embedded"
        self._add_bos_token = add_bos_token
        self._max_gen_toks = max_gen_toks
        files = open_model(name or embedded_model_directory())
        special = describe_decoder(files, self._llm.engine.config).special_tokens
        if not special.eos_token_ids:
            raise ConfigError(f"{self._name}: has no eos id, which lm-eval needs to begin and end texts")
        self._eot = special.eos_token_ids[0]
        self._prefix = self._eot if special.bos_token_id is None else special.bos_token_id

    @property
    def eot_token_id(self) -> int:
        return self._eot

    @property
    def prefix_token_id(self) -> int:
        """The token that stands for an empty context."""
        return self._prefix

    @property
    def max_length(self) -> int:
        """The most tokens of a text, one of which is sampled."""
        return self._llm.engine.max_model_len

    @property
    def max_gen_toks(self) -> int:
        return self._max_gen_toks

    @property
    def tokenizer_name(self) -> str:
        return self._name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the checkpoint's template, for lm-eval's records."""
        own = self._llm.engine.chat_template
        return None if not chat_template or own is None else own.source(with_tools=False)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation."""
        return self._llm.engine.render_chat(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The token ids of a text; if it begins with the begin token, none is added."""
        add = self._add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None:
            begin = self._tokenizer.decode([self._prefix], skip_special_tokens=False)
            add = False if begin and string.startswith(begin) else add
        return self._tokenizer.encode(string, add_special_tokens=True if add is None else add)

    def _loglikelihood_tokens(
        self, requests: list[TokenRequest], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        most = self.max_length - 1
        contexts, continuations = [], []
        for _key, context, continuation in requests:
            # Truncated from the left, as in the harness.
            cut = max(len(context) + len(continuation) - most, 0)
            contexts.append(context[cut:] or [self._prefix])
            continuations.append(continuation[-(most - 1) :])
        scores = self._llm.score(contexts, continuations, use_tqdm=not disable_tqdm)
        answers = [(score.logprob, score.is_greedy) for score in scores]
        for (key, _context, _continuation), answer in zip(requests, answers, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, in windows of the model's length that share one token."""
        windows: list[tuple[int, TokenRequest]] = []
        for index, request in enumerate(requests):
            found = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self._prefix,
                max_seq_len=self.max_length - 2,
                context_len=1,
            )
            windows += [(index, (None, *make_disjoint_window(window))) for window in found]
        totals = [0.0] * len(requests)
        scored = self._loglikelihood_tokens([window for _, window in windows], disable_tqdm)
        for (index, _), (logprob, _greedy) in zip(windows, scored, strict=True):
            totals[index] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts that end before one of each request's stop strings."""
        prompts, params, stops = [], [], []
        for request in requests:
            context, given = request.args
            tokens, stop, fields = self._generation(context, given)
            prompts.append(tokens)
            stops.append(stop)
            params.append(fields)
        outputs = self._llm.generate(list(prompts), params, use_tqdm=not disable_tqdm)
        texts = []
        for request, output, stop in zip(requests, outputs, stops, strict=True):
            text = postprocess_generated_text(output.outputs[0].text, stop, None)
            self.cache_hook.add_partial("generate_until", request.args, text)
            texts.append(text)
        return texts

    def _generation(
        self, context: str, given: Mapping[str, Any]
    ) -> tuple[list[int], list[str], SamplingParams]:
        """The prompt of a request, truncated from the left if it is too long, its stop strings and its parameters."""
        end = self._tokenizer.decode([self._eot], skip_special_tokens=False)
        fields = dict(normalize_gen_kwargs(dict(given), self._max_gen_toks))
        stop = [each for each in handle_stop_sequences(fields.pop("until", None), eos=end) if each]
        new = min(int(fields.pop("max_gen_toks")), self.max_length - 1)
        fields.pop("do_sample", None)
        fields.setdefault("temperature", 0.0)
        tokens = self.tok_encode(context)[-(self.max_length - new) :]
        return tokens, stop, SamplingParams.from_mapping({"max_tokens": new, "stop": stop, **fields})


def _slots(batch_size: int | str, most: int | None) -> int | None:
    """The slots for lm-eval's options; None leaves the number to the engine. Raises ConfigError."""
    kind, _, times = str(batch_size).partition(":")
    if kind == "auto" and (not times or times.isdecimal()):
        return None if most is None else min(most, _AUTO_SLOTS)
    if kind.isdecimal() and not times and int(kind):
        return int(kind)
    raise ConfigError(f"batch_size {batch_size!r}: give a number of at least 1, auto, or auto:N")
