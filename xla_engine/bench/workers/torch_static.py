"""transformers `generate`: a static batch, padded on the left, run until its longest request is done.

Also the judge of greedy streams, in float32.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers

Ids = list[list[int]]


class Engine:
    """transformers' side of the protocol in `worker.py`."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()

    def load(
        self, model: str, dtype: str, max_num_seqs: int, max_model_len: int, cache: str
    ) -> dict[str, Any]:
        self._directory, self._batch = model, max_num_seqs
        self._model = load_model(model, dtype)
        return {
            "versions": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "notes": "",
            "arrivals": False,
        }

    def run(self, prompts: Ids, max_tokens: list[int], arrivals: list[float]) -> dict[str, Any]:
        """Batches of `max_num_seqs` in the order given; arrivals are ignored."""
        times: list[list[float]] = []
        streams: Ids = []
        began = time.perf_counter()
        for at in range(0, len(prompts), self._batch):
            clock = Clock(began)
            counts = max_tokens[at : at + self._batch]
            ids, mask = left_padded(prompts[at : at + self._batch])
            with torch.inference_mode():
                out = self._model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=max(counts),
                    min_new_tokens=max(counts),
                    do_sample=False,
                    stopping_criteria=transformers.StoppingCriteriaList([clock]),
                )
            new = out[:, ids.shape[1] :].tolist()
            streams += [row[:count] for row, count in zip(new, counts, strict=True)]
            times += [clock.times[:count] for count in counts]
        return {"seconds": time.perf_counter() - began, "times": times, "streams": streams}

    def regrets(self, prompts: Ids, streams: Ids) -> dict[str, Any]:
        """Per token, how far its float32 logit lies below the best one, given the tokens before it.

        In standard deviations of that row of logits; 0 where float32 would have chosen the same.
        """
        model = load_model(self._directory, "float32")
        return {
            "regrets": [_regrets(model, *pair) for pair in zip(prompts, streams, strict=True)],
            "judge": f"transformers {transformers.__version__}, float32",
        }

    def limits(self, dtype: str) -> dict[str, Any]:
        """GFLOP/s of a 2048 x 2048 product in `dtype`."""
        size, seconds = 2048, []
        square = torch.ones(size, size, dtype=getattr(torch, dtype))
        for _ in range(7):
            began = time.perf_counter()
            torch.mm(square, square)
            seconds.append(time.perf_counter() - began)
        return {"gflops": 2e-9 * size**3 / min(seconds)}


class Clock(transformers.StoppingCriteria):  # type: ignore[misc]
    """Notes when each token was known; stops nothing."""

    def __init__(self, began: float) -> None:
        self._began = began
        self.times: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.times.append(time.perf_counter() - self._began)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def load_model(directory: str, dtype: str) -> Any:
    """The causal model, with no token that ends a text."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), local_files_only=True
    )
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def left_padded(prompts: Ids) -> tuple[Any, Any]:
    """Token ids and attention mask, both `[N, longest]`."""
    longest = max(map(len, prompts))
    ids = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def _regrets(model: Any, prompt: list[int], stream: list[int]) -> list[float]:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + stream])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(stream)[:, None])[:, 0]
        return ((logits.max(1).values - chosen) / logits.std(1)).tolist()
