"""A peer: transformers' `generate` on a model directory, driven by JSON lines. Runs in its own interpreter.

One request per line on standard input, one answer per line on standard output; everything else goes to
standard error.

    {"do": "load", "directory": PATH, "threads": 2}               -> {"torch": ..., "transformers": ...}
    {"do": "generate", "prompts": [[id, ...], ...], "count": n}   -> {"seconds": s, "streams": [[id, ...], ...]}
    {"do": "regrets", "prompts": [...], "streams": [...]}         -> {"regrets": [[r, ...], ...]}

`generate` runs greedily in bfloat16. `regrets` judges any greedy streams over the same weights in float32: per
token, how far its logit lies below the best one, given the tokens before it, in deviations of that row of logits.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

Ids = list[list[int]]


class Peer:
    """The model, loaded once per precision."""

    def load(self, directory: str, threads: int) -> dict[str, Any]:
        torch.set_num_threads(threads)
        self.directory = directory
        self.model = self._load(torch.bfloat16)
        return {"torch": torch.__version__, "transformers": transformers.__version__}

    def generate(self, prompts: Ids, count: int) -> dict[str, Any]:
        ids = torch.tensor(prompts)
        began = time.perf_counter()
        with torch.inference_mode():
            streams = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
            )
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "streams": streams[:, ids.shape[1] :].tolist()}

    def regrets(self, prompts: Ids, streams: Ids) -> dict[str, Any]:
        model = self._load(torch.float32)
        return {"regrets": [_regrets(model, *pair) for pair in zip(prompts, streams, strict=True)]}

    def _load(self, dtype: torch.dtype) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(self.directory, dtype=dtype)
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        return model.eval()


def _regrets(model: Any, prompt: list[int], stream: list[int]) -> list[float]:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + stream])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(stream)[:, None])[:, 0]
        return ((logits.max(1).values - chosen) / logits.std(1)).tolist()


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr
    transformers.utils.logging.disable_progress_bar()
    peer = Peer()
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(getattr(peer, request.pop("do"))(**request)), file=answers, flush=True)


if __name__ == "__main__":
    main()
