"""Host side of one running request: its tokens, text and times."""

from __future__ import annotations

from scheduler import FinishReason, Sample
from xla_engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from xla_engine.sampling_params import SamplingParams
from xla_engine.tokenizer import IncrementalDetokenizer


class LiveRequest:
    """Accumulates what the device sampled for one request until it ends."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        detokenizer: IncrementalDetokenizer | None,
        *,
        hidden_stop_ids: frozenset[int],
        eos_ids: frozenset[int],
        now: float,
    ) -> None:
        self.request_id = request_id
        self.admitted_time: float | None = None
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._params = params
        self._detokenizer = detokenizer
        self._hidden_stop_ids = hidden_stop_ids
        self._eos_ids = eos_ids
        self._arrival_time = now
        self._finished_time: float | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._token_times: list[float] = []
        self._text: list[str] = []
        self._finish_reason: FinishReason | None = None
        self._error: str | None = None

    @property
    def finished(self) -> bool:
        return self._finish_reason is not None

    def add(self, sample: Sample, now: float) -> None:
        """Take one sampled token; a stop token counts but shows no text."""
        self._token_ids.append(sample.token_id)
        self._token_times.append(now)
        if self._params.logprobs is not None and sample.logprob is not None:
            self._logprobs.append(sample.logprob)
        if self._detokenizer is not None and sample.token_id not in self._hidden_stop_ids:
            self._text.append(self._detokenizer.push(sample.token_id))

    def finish(self, reason: FinishReason, now: float, error: str | None = None) -> None:
        """End the request; text held back for an incomplete character is flushed."""
        self._finish_reason = reason
        self._finished_time = now
        self._error = error
        if self._detokenizer is not None:
            self._text.append(self._detokenizer.flush())

    def output(self) -> RequestOutput:
        """The request as it stands, cumulative."""
        wants_logprobs = self._params.logprobs is not None
        last = self._token_ids[-1] if self._token_ids else None
        own_stop = self._finish_reason == FinishReason.STOP and last not in self._eos_ids
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=(
                CompletionOutput(
                    index=0,
                    text="".join(self._text),
                    token_ids=tuple(self._token_ids),
                    cumulative_logprob=sum(self._logprobs) if wants_logprobs else None,
                    logprobs=tuple(self._logprobs) if wants_logprobs else None,
                    finish_reason=None if self._finish_reason is None else str(self._finish_reason),
                    stop_reason=last if own_stop else None,
                ),
            ),
            finished=self.finished,
            metrics=RequestMetrics(
                arrival_time=self._arrival_time,
                admitted_time=self.admitted_time,
                first_token_time=self._token_times[0] if self._token_times else None,
                finished_time=self._finished_time,
                token_times=tuple(self._token_times),
            ),
            error=self._error,
        )
