"""Measure a text with an engine: run windows of it as requests, and reduce their logits to a few numbers a token.

As in llama-perplexity, the text is cut into disjoint windows of T tokens, and the rest at its end is ignored. Only
the tokens in the second half of each window are scored, so that each has at least T / 2 tokens of context. If the
tokenizer adds a begin token, it replaces each window's first token.
"""

import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.errors import InvalidRequestError, XlaEngineError
from xla_engine.perplexity.figures import Comparison, Perplexity, PerplexityReport, divergence, log_softmax
from xla_engine.perplexity.logits_file import LogitsFile, LogitsWriter, scored_per_window
from xla_engine.runner.runner import Runner
from xla_engine.sampling_params import SamplingParams

SMALLEST_WINDOW = 4


def windows_of(
    engine: XlaBatchEngine, text: str | Sequence[int], ctx_size: int, chunks: int | None = None
) -> tuple[np.ndarray, int | None]:
    """The windows of a text or of its token ids, i32 `[C, T]`, at most `chunks`; and the begin token, if there is one.

    Raises InvalidRequestError if the text is shorter than a window.
    """
    if ctx_size < SMALLEST_WINDOW:
        raise InvalidRequestError(
            f"ctx_size {ctx_size} leaves nothing to score; give {SMALLEST_WINDOW} or more"
        )
    begin: int | None = None
    if isinstance(text, str):
        if engine.tokenizer is None:
            raise InvalidRequestError("the model has no tokenizer; give token ids")
        ids = engine.tokenizer.encode(text, add_special_tokens=False)
        around = engine.tokenizer.encode("")
        if around and engine.tokenizer.encode("a")[0] == around[0]:
            begin = around[0]
            ids = [begin, *ids]
    else:
        ids = list(text)
    count = len(ids) // ctx_size if chunks is None else min(len(ids) // ctx_size, chunks)
    if count < 1:
        raise InvalidRequestError(
            f"the text has {len(ids)} tokens, fewer than one window of {ctx_size}; give a longer text or a smaller "
            "--ctx-size"
        )
    return np.array(ids[: count * ctx_size], np.int32).reshape(count, ctx_size), begin


class _Scores:
    """Takes the logits of windows as steps give them, in any order. All arrays `[C, S]`."""

    def __init__(
        self, names: dict[str, int], tokens: np.ndarray, writer: LogitsWriter | None, base: LogitsFile | None
    ) -> None:
        """names: the window of each request."""
        shape = len(tokens), scored_per_window(tokens.shape[1])
        self.nll, self.base_nll, self.kld = (np.full(shape, np.nan) for _ in range(3))
        self.top, self.same_top = np.zeros(shape, np.int32), np.zeros(shape, np.bool_)
        self.error: Exception | None = None
        self._names, self._tokens, self._writer, self._base = names, tokens, writer, base
        self._first = tokens.shape[1] // 2

    def take(self, name: str, start: int, logits: np.ndarray) -> None:
        """Add logits. Keeps an exception for later, because the engine would take it for a device fault."""
        window = self._names.get(name)
        if window is None or self.error is not None:
            return
        try:
            for position, row in enumerate(logits, start):
                if position >= self._first:
                    self._score(window, position - self._first, row)
        except (OSError, XlaEngineError) as error:
            self.error = error

    def _score(self, window: int, place: int, logits: np.ndarray) -> None:
        if not np.isfinite(logits).all():
            raise InvalidRequestError(
                f"window {window}, position {self._first + place}: a logit is not a number. The weights may be "
                "damaged, or too large for this dtype; try --dtype float32"
            )
        token = int(self._tokens[window, self._first + place + 1])
        log_probs = log_softmax(logits)
        self.nll[window, place] = -log_probs[token]
        self.top[window, place] = top = int(logits.argmax())
        if self._writer is not None:
            self._writer.put(window, place, logits)
        if self._base is not None:
            base = self._base.row(window, place, token)
            self.base_nll[window, place] = base.nll
            self.kld[window, place] = divergence(base.log_probs, log_probs)
            self.same_top[window, place] = top == base.top

    def run(
        self, engine: XlaBatchEngine, begin: int | None, progress: Callable[[str], object] | None
    ) -> None:
        """Run all windows as requests, and abort those that are left if one fails."""
        params = SamplingParams(
            temperature=0,
            max_tokens=1,
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=0,
            logprobs_start=self._first + 1,
        )
        collector = OutputCollector(every_token=False)
        left = set[str]()
        try:
            for name, window in self._names.items():
                ids = self._tokens[window].tolist()
                if begin is not None:
                    ids[0] = begin
                engine.submit(ids, params, request_id=name, collector=collector)
                left.add(name)
            while left:
                if not collector:
                    engine.advance()
                if self.error is not None:
                    raise self.error
                with engine.lock:
                    ended = [request.output() for request in collector.take() if request.finished]
                for output in ended:
                    left.remove(output.request_id)
                    if output.error is not None:
                        raise InvalidRequestError(f"window {self._names[output.request_id]}: {output.error}")
                    if progress is not None:
                        progress(output.request_id)
        finally:
            for name in left:
                engine.abort(name)
            if left:
                engine.drain()


def measure(
    engine: XlaBatchEngine,
    text: str | Sequence[int],
    *,
    ctx_size: int = 512,
    chunks: int | None = None,
    save_logits: str | Path | None = None,
    against: str | Path | None = None,
    progress: Callable[[str], object] | None = None,
) -> PerplexityReport:
    """Measure a text, or its token ids, with an engine that runs nothing else.

    Arguments:
        ctx_size: tokens of a window; the engine needs a `max_model_len` of one more.
        chunks: windows at most; None takes all that the text has.
        save_logits: a file to write the logits into. against: such a file, of another precision or program.
        progress: called with the request id of each window as it ends.

    The report is the same to the last digit whatever `max_num_seqs`, `prefill_lanes` or the prefix cache: it is
    made of one number for each token, which depends on its window alone.

    Raises InvalidRequestError for a text shorter than a window or logits that are not numbers, LogitsFileError for a
    file of something else, and OSError.
    """
    tokens, begin = windows_of(engine, text, ctx_size, chunks)
    vocab_size = engine.checkpoint.config.vocab_size
    run = uuid.uuid4().hex
    names = {f"perplexity-{run}-{window}": window for window in range(len(tokens))}
    with ExitStack() as stack:
        base = None
        if against is not None:
            base = stack.enter_context(LogitsFile(against))
            base.check(tokens, vocab_size)
        writer = None
        if save_logits is not None:
            writer = stack.enter_context(LogitsWriter(save_logits, tokens, vocab_size))
        scores = _Scores(names, tokens, writer, base)
        runner = engine.runner
        assert isinstance(runner, Runner), "an encoder is not opened to generate"
        with runner.giving_logits(scores.take):
            scores.run(engine, begin, progress)
        if writer is not None:
            writer.finish(scores.nll, scores.top)
    nll, *rest = (each.reshape(-1) for each in (scores.nll, scores.base_nll, scores.kld, scores.same_top))
    comparison = None if base is None else Comparison.of(nll, *rest)
    return PerplexityReport(tokens=tokens, perplexity=Perplexity.of(nll), comparison=comparison)
