"""Beam search on top of requests: each step submits a request for one token for each beam.

As in transformers, each step considers the `2 * width` likeliest continuations of a prompt: those that end are set
aside, and the `width` best others continue. The prefix cache holds the beams' earlier tokens if it has room.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from xla_engine import llm, outputs
from xla_engine.model_loader.peft.request import LoRARequest
from xla_engine.prompts import Prompt, content_of
from xla_engine.sampling_params import SamplingParams as FixedParams
from xla_engine.vllm.outputs import Logprob
from xla_engine.vllm.sampling_params import BeamSearchParams


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchSequence:
    """One sequence. tokens: including the prompt. logprobs: of each new token, as in `CompletionOutput.logprobs`."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    lora_request: LoRARequest | None = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def score(self, length_penalty: float) -> float:
        """The score by which beams are ordered."""
        return self.cum_logprob / max(len(self.logprobs), 1) ** length_penalty


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The best sequences of one prompt, the best first."""

    sequences: list[BeamSearchSequence]


def beam_search(
    model: llm.LLM, prompts: Sequence[Prompt], params: BeamSearchParams, lora: Sequence[LoRARequest | None]
) -> list[BeamSearchOutput]:
    """Search for each prompt; `xla_engine.vllm.LLM.beam_search`. Raises InvalidRequestError."""
    width, tokenizer = params.beam_width, model.get_tokenizer()
    eos = () if params.ignore_eos else model.engine.validator.eos_token_ids
    step = FixedParams(temperature=0.0, max_tokens=1, logprobs=2 * width, detokenize=False, ignore_eos=True)
    live: list[list[BeamSearchSequence]] = []
    for prompt, adapter in zip(prompts, lora, strict=True):
        content = content_of(prompt)
        ids = tokenizer.encode(content) if isinstance(content, str) else list(content)
        live.append([BeamSearchSequence(tokens=ids, logprobs=[], lora_request=adapter)])
    ended: list[list[BeamSearchSequence]] = [[] for _ in live]
    for _ in range(params.max_tokens):
        beams = [beam for each in live for beam in each]
        if not beams:
            break
        found = iter(
            model.generate(
                [beam.tokens for beam in beams],
                step,
                use_tqdm=False,
                lora_request=[beam.lora_request for beam in beams],
            )
        )
        for place, mine in enumerate(live):
            made = [after for beam in mine for after in _continuations(beam, next(found))]
            best = sorted(made, key=lambda each: -each.cum_logprob)[: 2 * width]
            done = [each for each in best if each.tokens[-1] in eos or each.finish_reason]
            ended[place] += [
                replace(each, finish_reason="stop", stop_reason=each.tokens[-1])
                if each.tokens[-1] in eos
                else each
                for each in done
            ]
            live[place] = [each for each in best if each not in done][:width]
    return [
        BeamSearchOutput(
            [
                replace(
                    each, text=tokenizer.decode(each.tokens, skip_special_tokens=params.skip_special_tokens)
                )
                for each in sorted(done + mine, key=lambda each: -each.score(params.length_penalty))[:width]
            ]
        )
        for done, mine in zip(ended, live, strict=True)
    ]


def _continuations(beam: BeamSearchSequence, output: outputs.RequestOutput) -> list[BeamSearchSequence]:
    """The beam extended by each of the likeliest next tokens; the ended beam itself if there is none."""
    completion = output.outputs[0]
    if not completion.token_ids or completion.top_logprobs is None:
        return [replace(beam, finish_reason=completion.finish_reason or "abort")]
    shown = {token: Logprob(*each) for token, each in completion.top_logprobs[0].items()}
    return [
        replace(
            beam,
            tokens=[*beam.tokens, token],
            logprobs=[*beam.logprobs, shown],
            cum_logprob=beam.cum_logprob + each.logprob,
        )
        for token, each in shown.items()
    ]
